"""Convert a whole model to FP16 so that no tensor overflows: exact powers of two through everything homogeneous."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pasa.fp16 import offloading, running, sampling
from pasa.fp16.conversion import MARK, Conversion
from pasa.fp16.handle import Fp16Handle, Fp16Report, ScaledModule
from pasa.fp16.offloading import Weights
from pasa.fp16.paths import inside
from pasa.fp16.planning import LARGEST
from pasa.keywords import hint_at_arguments
from pasa.patching import PatchHandle, Policy, components_of, patch_pipeline
from pasa.patching.callbacks import patched_modules

__all__ = ["Fp16Handle", "Fp16Report", "ScaledModule", "to_fp16"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of parameters that can be scaled; others are quantised."""


@hint_at_arguments
def to_fp16(
    model_or_pipeline: Any, sample: Any = None, margin: float = 4.0, *, keep_original: str | None = None
) -> Fp16Handle:
    """Convert a model to FP16 in place, scaled by powers of two so that no tensor passes 65504.

    A residual stream that grows beyond 65504 is scaled by ``2**-s``: everything that writes to it, and the epsilon of
    every norm that reads it. The result is the same, because norms are homogeneous. Which tensors can be scaled follows
    from a trace of the model's own forward pass, operation by operation. Then attention is patched by
    :func:`pasa.patch_pipeline`.

    Parameters
    ----------
    model_or_pipeline : torch.nn.Module or diffusers.DiffusionPipeline
        A model in FP32, BF16 or FP16, or a pipeline whose models are converted together.
    sample : dict, Tensor or callable, optional
        Arguments to call the model with, or a function of the model that runs it. Peaks are measured on it, so it
        should be like what the model will see. None takes up to 256 tokens of a built-in text, random ones where the
        model's folder holds no tokenizer, or two steps of a pipeline with a built-in prompt.
    margin : float, default 4.0
        Factor between the largest magnitude on the sample, after scaling, and 65504.
    keep_original : "cpu", optional
        Keep the original parameters in host memory, so that ``undo`` can restore them bit for bit.

    Returns
    -------
    Fp16Handle
        ``handle.report()`` lists what was scaled; ``handle.undo()`` restores the model if the original was kept.

    Raises
    ------
    NotImplementedError
        A tensor overflows and cannot be scaled, nor kept in FP32 within one module; weights are quantised or
        offloaded to disk. The message names the module.
    OverflowError
        The model is infinite on the sample already in BF16.
    RuntimeError
        The model is converted already, its results changed under scaling, or it does not run in FP16.
    TypeError, ValueError
        The object is no model; the sample does not fit; the margin is below 1.

    Examples
    --------
    >>> with pasa.to_fp16(model, {"input_ids": ids}, keep_original="cpu") as handle:
    ...     handle.report().basis, model(ids).logits.dtype, model.dtype
    ('measured', torch.float32, torch.float16)

    Notes
    -----
    The model is unchanged after an error. It is for inference: gradients of scaled parameters are scaled. A copy of the
    model, or a saved one, is scaled too, and neither counts values nor has its attention patched.

    The converted model is called as the sample called it. A module within it, down to its layers, raises an error if it
    is called on its own, because its results are scaled; modules inside of a layer do not. An input or a module that
    the sample did not use raises an error too. A sample that is a function can make several calls, for example one with
    ``input_ids`` and one with ``inputs_embeds``.
    """
    models = components_of(model_or_pipeline, "to_fp16")
    with running.plain(models):
        _check(models, margin, keep_original)
    with running.plain(models), Weights(models) as weights:
        _check_finite(models, weights)
        run = sampling.runner(model_or_pipeline, sample)
        conversion = Conversion(models, run, margin, weights)
        try:
            conversion.plan_and_convert()
            conversion.patch = _patched(model_or_pipeline, models, conversion)
            conversion.widen_scores([name for name, *_ in patched_modules(models)])
            conversion.run_in_fp16()
            conversion.mark(type(model_or_pipeline).__name__, keep=keep_original is not None)
        except BaseException:
            conversion.restore()
            raise
    return Fp16Handle(conversion.report, conversion.undo, kept=keep_original is not None)


def _patched(
    model_or_pipeline: Any, models: Mapping[str, torch.nn.Module], conversion: Conversion
) -> PatchHandle | None:
    """Patch attention, unless it is patched already, stores no scores, or runs in FP32."""
    if any(patched_modules(models)):
        return None
    islands = conversion.plan.islands
    policy: Policy = (lambda name, _: not inside(name, islands)) if islands else "all"
    try:
        return patch_pipeline(model_or_pipeline, policy=policy)
    except (TypeError, NotImplementedError) as error:
        module = conversion.stores_scores()
        if module is None:
            return None
        raise NotImplementedError(
            f"to_fp16: {module} stores attention scores, which may pass 65504, and its attention cannot be patched: "
            "call scaled_dot_product_attention there"
        ) from error


def _check(models: Mapping[str, torch.nn.Module], margin: float, keep_original: str | None) -> None:
    """Check all that can be checked before the model is touched."""
    if isinstance(margin, bool) or not (isinstance(margin, (int, float)) and 1 <= margin < LARGEST):
        raise ValueError(f"to_fp16: margin must be a number from 1 to below 65504, got {margin!r}: 4.0 is the default")
    if keep_original not in (None, "cpu"):
        raise ValueError(f'to_fp16: keep_original must be "cpu" or None, got {keep_original!r}')
    for model in models.values():
        kind = type(model).__name__
        if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
            raise TypeError(f"to_fp16: {kind} is compiled: pass the original module, and compile it afterwards")
        if any(hasattr(module, MARK) for module in model.modules()):
            raise RuntimeError(
                f"to_fp16: {kind} is converted already: call undo() on its handle, or load the model again"
            )
        if getattr(model, "quantization_method", None) or getattr(model, "is_quantized", False):
            raise NotImplementedError(
                f"to_fp16: {kind} has quantised weights, which cannot be scaled: load it without quantization"
            )
        if any(running.has_adapters(module) for module in model.modules()):
            raise NotImplementedError(f"to_fp16: {kind} has an adapter: merge it first (merge_and_unload, fuse_lora)")
        if offloading.in_groups(model):
            raise NotImplementedError(
                f"to_fp16: {kind} is offloaded in groups, which keep copies of its weights: call to_fp16 first, and "
                "enable_group_offload afterwards"
            )
        offloaded = offloading.offloaded({"": model})
        if name := next((name for name, on_disk in offloaded.items() if on_disk), None):
            raise NotImplementedError(
                f"to_fp16: {kind}'s {name} is offloaded to disk, where it cannot be scaled: convert the folder by pasa "
                "to-fp16 FOLDER OUT, and load OUT in its place"
            )
        for name, parameter in model.named_parameters():
            _check_parameter(kind, name, parameter, has_data=not parameter.is_meta or name in offloaded)


def _check_parameter(kind: str, name: str, parameter: torch.nn.Parameter, *, has_data: bool) -> None:
    if not has_data:
        raise NotImplementedError(
            f"to_fp16: {kind}'s {name} is on the meta device and has no data: load the model's weights first"
        )
    if parameter.is_inference():
        raise NotImplementedError(
            f"to_fp16: {kind}'s {name} was made in inference mode: load the model outside of torch.inference_mode()"
        )
    if type(parameter) not in (torch.nn.Parameter, torch.Tensor):
        raise NotImplementedError(
            f"to_fp16: {kind}'s {name} is a {type(parameter).__name__}, which cannot be scaled: load the model "
            "unquantised, and shard it afterwards"
        )
    if parameter.dtype not in DTYPES:
        raise NotImplementedError(f"to_fp16: {kind}'s {name} is {parameter.dtype}: load the model unquantised")


def _check_finite(models: Mapping[str, torch.nn.Module], weights: Weights) -> None:
    for model in models.values():
        for name, parameter in model.named_parameters():
            if not bool(weights.load(parameter).isfinite().all()):
                raise ValueError(
                    f"to_fp16: {type(model).__name__}'s {name} holds infinities or NaN: load the weights in FP32 or "
                    "BF16"
                )
