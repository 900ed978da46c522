"""Patch models of transformers and diffusers so that their attention runs PASA, and undo it; a file per library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING

import torch

from pasa.checks import check_switches, checked_config
from pasa.keywords import hint_at_arguments
from pasa.ops import registry
from pasa.patching.callbacks import patched_modules
from pasa.patching.handle import PatchHandle, PatchReport, no_model
from pasa.patching.serving_backends import backends_by_device
from pasa.patching.versions import check_transformers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pasa import PasaConfig

__all__ = ["PatchHandle", "PatchReport", "Policy", "patch_pipeline"]

Policy = str | Callable[[str, torch.nn.Module], bool]


@hint_at_arguments
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
        ``"all"`` patches every attention module that goes through the transformers attention interface, writes its
        attention out in a way that PASA can follow or, in diffusers, has a processor that PASA can replace.
        A callable ``policy(module_name, module) -> bool`` decides for each of these modules. A module that it declines
        keeps its original attention.
        ``"auto"`` patches the modules that :func:`pasa.predict_overflow` finds at risk or cannot judge. The other
        modules keep their attention, and a guard watches them. When their queries and keys grow long enough for a
        score beyond FP16, the guard warns one call later, and the report lists an alarm. A model without any risk stays
        unpatched.
    config : PasaConfig, optional
        Numerics, passed unchanged to :func:`pasa.attention`.
    backend : str, optional
        Name of a backend, passed unchanged to :func:`pasa.attention`.
    context_parallel : ProcessGroup, optional
        For transformers models only: the ranks of this group share one sequence. Each rank calls the model with its
        shard of the tokens and of the position ids (:func:`pasa.shard_sequence`), and attention is
        :func:`pasa.ring_attention`. Only prefill is supported, not decoding after it. Padding and sliding windows are
        refused.

    Returns
    -------
    PatchHandle
        ``handle.unpatch()`` undoes the patch at once, and a ``with`` block undoes it at its end. ``handle.report()``
        says what was patched. Patching twice with the same settings returns the handle that is already in force. If
        ``with`` blocks of one handle are nested, the outermost block undoes the patch. After
        ``set_attn_implementation`` has removed PASA, patching again returns a new handle, which restores the attention
        that was set last.

    Notes
    -----
    A copy of a patched model (``copy.deepcopy``) is unpatched. So is a model that was saved while patched and then
    loaded (``torch.save`` and ``torch.load``, another process). Patch the copy too.

    A diffusers model is patched through its processor objects. Call ``unpatch()`` before any method that replaces
    processors itself (``set_attn_processor``, ``set_attention_backend``, ``enable_attention_slicing``,
    ``fuse_qkv_projections``), and patch again afterwards.

    Raises
    ------
    NotImplementedError
        ``policy="auto"`` does not know the architecture's weights; ``context_parallel`` is set for a diffusers model;
        PASA can replace none of a diffusers model's processors; no attention of the model can be reached; `backend`
        cannot run on this machine. The message names the architecture, module, processor or backend.
    ValueError
        Some of the modules are already patched with other settings, or are patched and ``"auto"`` would patch none; the
        policy's name is unknown; ``context_parallel`` is set and the policy is not ``"all"``; the backend is unknown.
    TypeError
        The object holds no model of transformers or diffusers; `config` is not a PasaConfig.
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
      serves   cpu: sdpa
    """
    _check_policy(policy)
    check_switches(backend)
    _check_backend(backend)
    checked_config(config)
    if context_parallel is not None and policy != "all":  # an unpatched module would see only its own shard
        raise ValueError(f'context_parallel shares the prompt of every module: policy must be "all", got {policy!r}')
    host = partial(_patch, model_or_pipeline, config, backend, context_parallel)
    if policy == "auto":
        components_of(model_or_pipeline)  # a name is no model, though a prediction would take it for a folder
        from pasa.patching import auto

        handle = auto.patch(model_or_pipeline, host)
    else:
        handle = host(policy)
    patched = [module for _, module, _ in patched_modules(components_of(model_or_pipeline))]
    handle.record_backends(backends_by_device(patched, config, backend))
    return handle


def _patch(
    model_or_pipeline: object,
    config: PasaConfig | None,
    backend: str | None,
    context_parallel: ProcessGroup | None,
    policy: Policy,
) -> PatchHandle:
    """Patch by the module of the library that the model comes from, and return its handle."""
    if _is_diffusers(model_or_pipeline):
        if context_parallel is not None:
            raise NotImplementedError(
                "patch_pipeline: context_parallel is not supported for diffusers models: leave it out"
            )
        from pasa.patching import diffusers

        return diffusers.patch(model_or_pipeline, policy=policy, config=config, backend=backend)
    root = getattr(model_or_pipeline, "model", None) if _is_pipeline(model_or_pipeline) else model_or_pipeline
    if not isinstance(root, torch.nn.Module):
        raise _not_a_model("patch_pipeline", model_or_pipeline)
    if not _holds(root, "transformers."):  # transformers need not be installed for this answer
        raise no_model(root)
    check_transformers()
    from pasa.patching import transformers  # imports the library, so only when there is a model to patch

    if context_parallel is not None:
        _check_ring(context_parallel, config)
    return transformers.patch(root, policy=policy, config=config, backend=backend, context_parallel=context_parallel)


def components_of(model_or_pipeline: object, function: str = "patch_pipeline") -> Mapping[str, torch.nn.Module]:
    """Return the models of a pipeline by name; a single model, or that of a transformers pipeline, has the name "".

    An error message begins with the name of `function`.

    Raises
    ------
    TypeError
        The object holds no model.
    """
    if not isinstance(model_or_pipeline, torch.nn.Module) and _is_diffusers(model_or_pipeline):
        from pasa.patching import diffusers_selection

        return diffusers_selection.components_of(model_or_pipeline)
    root = getattr(model_or_pipeline, "model", None) if _is_pipeline(model_or_pipeline) else model_or_pipeline
    if not isinstance(root, torch.nn.Module):
        raise _not_a_model(function, model_or_pipeline)
    return {"": root}


def _not_a_model(function: str, candidate: object) -> TypeError:
    """Return the error for an argument that is no model and no pipeline."""
    got, hint = f"a {type(candidate).__name__}", "pass what from_pretrained returns"
    if isinstance(candidate, (str, PathLike)):
        name = str(candidate)
        got, hint = repr(name), f"load it first, as with transformers.AutoModelForCausalLM.from_pretrained({name!r})"
    elif isinstance(candidate, type):
        got, hint = f"the class {candidate.__name__}", f"pass an instance, as from {candidate.__name__}.from_pretrained"
    return TypeError(f"{function}: expected a model or pipeline of transformers or diffusers, got {got}: {hint}")


def _check_backend(backend: str | None) -> None:
    """Check that the backend can run on this machine, so that no call fails in the middle of a generation.

    The check is by the machine's devices, not the model's, because the model may be moved later.
    """
    if backend is None:
        return
    if backend not in registry.BACKENDS:
        raise ValueError(f"backend={backend!r} is not registered; registered: {sorted(registry.BACKENDS)}")
    why = registry.BACKENDS[backend].missing()
    if why is not None:
        raise NotImplementedError(
            f"patch_pipeline: backend={backend!r} cannot run on this machine: {why}; leave backend out, and each call "
            "chooses one that can"
        )


def _check_ring(group: object, config: PasaConfig | None) -> None:
    """Check group and config before the first attention call, which ranks would enter one by one."""
    from pasa.context_parallel import check_group, ring_config

    check_group("context_parallel", group)
    ring_config(config)


def _check_policy(policy: Policy) -> None:
    if not callable(policy) and policy not in ("all", "auto"):
        raise ValueError(
            f'policy must be "all", "auto" or a callable policy(module_name, module) -> bool, got {policy!r}'
        )


def _is_pipeline(candidate: object) -> bool:
    """Return whether this is a transformers pipeline, by its classes' names; transformers is not imported."""
    return any(base.__module__ == "transformers.pipelines.base" for base in type(candidate).__mro__)


def _is_diffusers(candidate: object) -> bool:
    """Return whether this is, or contains, a pipeline or model of diffusers; diffusers is not imported."""
    return _holds(candidate, "diffusers.")


def _holds(candidate: object, package: str) -> bool:
    """Return whether an object, or a module inside it, has a class of a package, by the class's module name."""
    parts = candidate.modules() if isinstance(candidate, torch.nn.Module) else (candidate,)
    return any(base.__module__.startswith(package) for part in parts for base in type(part).__mro__)
