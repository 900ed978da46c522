"""Puts PASA into a model somebody else wrote, and takes it out again; one file per host library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from pasa.checks import check_switches, checked_config
from pasa.ops import registry
from pasa.patching.handle import PatchHandle, PatchReport
from pasa.patching.onlookers import patched_modules
from pasa.patching.servers import servers_of
from pasa.patching.versions import check_transformers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pasa import PasaConfig

__all__ = ["PatchHandle", "PatchReport", "Policy", "patch_pipeline"]

Policy = str | Callable[[str, torch.nn.Module], bool]


def patch_pipeline(
    model_or_pipeline: object,
    *,
    policy: Policy = "all",
    config: PasaConfig | None = None,
    backend: str | None = None,
    context_parallel: ProcessGroup | None = None,
) -> PatchHandle:
    """Make a model's attention run on :func:`pasa.attention`.

    Parameters
    ----------
    model_or_pipeline : torch.nn.Module, transformers.Pipeline or diffusers.DiffusionPipeline
        A transformers or diffusers model, a module that contains one (a PEFT wrapper, a compiled model), or a pipeline
        of either library. Of a diffusers pipeline all models are patched: UNet or transformer, VAE, and the text and
        image encoders, which are transformers models.
    policy : "all", "auto" or callable, default "all"
        ``"all"`` patches every attention module that goes through the transformers attention interface or, in
        diffusers, has a processor that PASA can take the place of.
        A callable ``policy(module_name, module) -> bool`` decides for each of them; those it declines keep the
        attention the model had.
        ``"auto"`` patches those that :func:`pasa.predict_overflow` finds to be at risk or cannot judge, and leaves the
        others on the attention they have. A guard watches these: where queries and keys grow long enough for a score
        beyond FP16 it warns, a call late, and the report says so. A model without any risk is left as it is.
    config : PasaConfig, optional
        Numerics, handed to :func:`pasa.attention` as is.
    backend : str, optional
        Name of a backend, handed to :func:`pasa.attention` as is.
    context_parallel : ProcessGroup, optional
        For a transformers model: its ranks share one prompt. Each calls the model with its part of the tokens and of
        the positions (:func:`pasa.shard_sequence`), and attention is :func:`pasa.ring_attention`. Prompts are read, not
        continued; padding and sliding windows are refused.

    Returns
    -------
    PatchHandle
        Undo with ``handle.unpatch()``, at once, or with a ``with`` block; ``handle.report()`` tells what was patched.
        Patching twice with the same settings returns the handle that is already in force. Of nested ``with`` blocks of
        one handle, the outermost undoes the patch. Where ``set_attn_implementation`` has taken PASA out, patching again
        gives a new handle, which restores the attention that was set last.

    Notes
    -----
    A copy of a patched model is an unpatched model, and so is one that was saved while patched and loaded elsewhere
    (``copy.deepcopy``, ``torch.save`` and ``torch.load``, another process): patch the copy too.

    In a diffusers model the patch is the processor objects: call ``unpatch()`` before anything that replaces them
    itself (``set_attn_processor``, ``set_attention_backend``, ``enable_attention_slicing``, ``fuse_qkv_projections``),
    and patch again after it.

    Raises
    ------
    NotImplementedError
        ``policy="auto"`` for an architecture whose weights are not understood, named; ``context_parallel`` for a
        diffusers model; a transformers module that needs what PASA has not (soft-capped scores, attention sinks, a
        position bias), named; a diffusers model none of whose processors PASA can stand in for, named with the
        processor; a model none of whose attention can be reached; a `backend` that cannot run on this machine.
    ValueError
        Some of the modules are already patched with other settings, or ``"auto"`` would patch none of them; an unknown
        policy name; another policy than ``"all"`` with ``context_parallel``; an unknown backend.
    TypeError
        The object holds no model of a known host library; `config` is no PasaConfig.
    ImportError
        The installed transformers is older than 4.54.1.

    Examples
    --------
    >>> with pasa.patch_pipeline(model) as handle:
    ...     logits = model(ids).logits
    ...     print(handle.report())
    transformers: Qwen2ForCausalLM: 2 of 2 attention modules run PASA
      patched  model.layers.0.self_attn
      patched  model.layers.1.self_attn
      serves   cpu: reference
    """
    _check_policy(policy)
    check_switches(False, False, backend)
    _check_backend(backend)
    checked_config(config)
    if context_parallel is not None and policy != "all":  # a module left as it is would see its own shard alone
        raise ValueError(f'context_parallel shares the prompt of every module: policy must be "all", got {policy!r}')
    host = partial(_patch, model_or_pipeline, config, backend, context_parallel)
    if policy == "auto":
        from pasa.patching import auto

        handle = auto.patch(model_or_pipeline, host)
    else:
        handle = host(policy)
    patched = [module for _, module, _ in patched_modules(components_of(model_or_pipeline))]
    handle.serve(servers_of(patched, config, backend))
    return handle


def _patch(
    model_or_pipeline: object,
    config: PasaConfig | None,
    backend: str | None,
    context_parallel: ProcessGroup | None,
    policy: Policy,
) -> PatchHandle:
    """Patch with the host library of the model."""
    if _is_diffusers(model_or_pipeline):
        if context_parallel is not None:
            raise NotImplementedError("patch_pipeline: context_parallel is not supported for diffusers models")
        from pasa.patching import diffusers

        return diffusers.patch(model_or_pipeline, policy=policy, config=config, backend=backend)
    root = getattr(model_or_pipeline, "model", None) if _is_pipeline(model_or_pipeline) else model_or_pipeline
    if not isinstance(root, torch.nn.Module):
        raise TypeError(
            "patch_pipeline: expected a model or pipeline of transformers or diffusers, "
            f"got {type(model_or_pipeline).__name__}"
        )
    check_transformers()
    from pasa.patching import transformers  # imports the library: only when there is a model to patch

    if context_parallel is not None:
        _check_ring(context_parallel, config)
    return transformers.patch(root, policy=policy, config=config, backend=backend, context_parallel=context_parallel)


def components_of(model_or_pipeline: object) -> Mapping[str, torch.nn.Module]:
    """The models of a pipeline by name; the one of a transformers pipeline, and a model alone, have none.

    Raises
    ------
    TypeError
        It holds no model.
    """
    if not isinstance(model_or_pipeline, torch.nn.Module) and _is_diffusers(model_or_pipeline):
        from pasa.patching import diffusers_selection

        return diffusers_selection.components_of(model_or_pipeline)
    root = getattr(model_or_pipeline, "model", None) if _is_pipeline(model_or_pipeline) else model_or_pipeline
    if not isinstance(root, torch.nn.Module):
        raise TypeError(
            f"expected a model or pipeline of transformers or diffusers, got {type(model_or_pipeline).__name__}"
        )
    return {"": root}


def _check_backend(backend: str | None) -> None:
    """Now, and not in the middle of a generation; by the machine's devices, as the model may be moved later."""
    if backend is None:
        return
    if backend not in registry.BACKENDS:
        raise ValueError(f"backend={backend!r} is not registered; registered: {sorted(registry.BACKENDS)}")
    found = registry.BACKENDS[backend]
    why = found.missing() or found.replaced()
    if why is not None:
        raise NotImplementedError(
            f"patch_pipeline: backend={backend!r} cannot run on this machine: {why}; leave backend out, and each call "
            "chooses one that can"
        )


def _check_ring(group: object, config: PasaConfig | None) -> None:
    """Before the first call, which ranks would enter one by one."""
    from pasa.context_parallel import ring_config

    if not isinstance(group, getattr(torch.distributed, "ProcessGroup", ())):  # torch may be built without
        advice = "torch.distributed.group.WORLD is that of all ranks"
        raise TypeError(f"context_parallel={group!r} is a {type(group).__name__}, not a ProcessGroup; {advice}")
    ring_config(config)


def _check_policy(policy: Policy) -> None:
    if not callable(policy) and policy not in ("all", "auto"):
        raise ValueError(
            f'policy must be "all", "auto" or a callable policy(module_name, module) -> bool, got {policy!r}'
        )


def _is_pipeline(candidate: object) -> bool:
    """Tell a transformers pipeline without importing transformers: its classes are already loaded if it is one."""
    return any(base.__module__ == "transformers.pipelines.base" for base in type(candidate).__mro__)


def _is_diffusers(candidate: object) -> bool:
    """Tell a pipeline or model of diffusers, or a module that contains one, without importing diffusers."""
    parts = candidate.modules() if isinstance(candidate, torch.nn.Module) else (candidate,)
    return any(base.__module__.startswith("diffusers.") for part in parts for base in type(part).__mro__)
