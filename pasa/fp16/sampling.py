"""Inputs on which `to_fp16` measures a model: the caller's, or built-in ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

TOKENS = 256
"""Length of the built-in sequence of token ids."""
STEPS = 2
"""Denoising steps of the built-in run of a pipeline."""


def runner(model_or_pipeline: Any, sample: Any) -> Callable[[], object]:
    """Return a function without arguments that runs the model once on a sample.

    Raises
    ------
    TypeError
        The sample is none of the kinds that are known.
    ValueError
        There is no sample, and no built-in one for this model.
    """
    if sample is None:
        return _built_in(model_or_pipeline)
    if isinstance(sample, Tensor):
        following = _following(model_or_pipeline)
        return lambda: model_or_pipeline(following(sample))
    if isinstance(sample, Mapping):
        return _repeated(model_or_pipeline, sample)
    if callable(sample):
        return lambda: sample(model_or_pipeline)
    raise TypeError(
        "to_fp16: sample must be a tensor, a dict of arguments, or a function of the model, got "
        f"{type(sample).__name__}"
    )


def _precision(model: torch.nn.Module) -> torch.dtype | None:
    """Return the precision of a model's first floating-point parameter."""
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), None)


def _following(model_or_pipeline: Any) -> Callable[[Any], Any]:
    """Return a function that converts tensors in the precision that a model has now to the one it has then."""
    if not isinstance(model_or_pipeline, torch.nn.Module):
        return lambda arguments: arguments
    model, original = model_or_pipeline, _precision(model_or_pipeline)

    def convert(arguments: Any) -> Any:
        dtype = _precision(model)
        return tree_map_only(Tensor, lambda each: each.to(dtype) if each.dtype == original else each, arguments)

    return convert


def _repeated(model_or_pipeline: Any, arguments: Mapping[str, Any]) -> Callable[[], object]:
    """Return a run that gives the same result each time: random generators among the arguments begin anew."""
    generators = [value for value in arguments.values() if isinstance(value, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    following = _following(model_or_pipeline)

    def run() -> object:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return model_or_pipeline(**following(dict(arguments)))

    return run


def _built_in(model_or_pipeline: Any) -> Callable[[], object]:
    """Return a run on random token ids, or a pipeline's run on a short prompt and random latents."""
    call = model_or_pipeline.forward if isinstance(model_or_pipeline, torch.nn.Module) else model_or_pipeline.__call__
    names = inspect.signature(call).parameters
    if not isinstance(model_or_pipeline, torch.nn.Module):
        return _run_of_pipeline(model_or_pipeline, names)
    if "input_ids" not in names:
        raise ValueError(
            f"to_fp16: there is no built-in sample for {type(model_or_pipeline).__name__}: pass sample=, a dict of the "
            "arguments that you call it with"
        )
    model: Any = model_or_pipeline
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    ids = torch.randint(config.vocab_size, (1, length), generator=generator)
    if isinstance(first := getattr(config, "bos_token_id", None), int) and first < config.vocab_size:
        ids[:, 0] = first
    arguments: dict[str, Any] = {"input_ids": ids.to(model.device)}
    if "decoder_input_ids" in names:
        arguments["decoder_input_ids"] = arguments["input_ids"][:, :16]
    return lambda: model(**arguments)


def _run_of_pipeline(pipeline: Any, names: Mapping[str, object]) -> Callable[[], object]:
    """Return a run of a diffusers pipeline with few steps."""
    arguments: dict[str, Any] = {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(0)}
    if "prompt" in names:
        arguments["prompt"] = "a photograph of a lighthouse on a rock at night"
    if "image" in names:
        raise ValueError(
            f"to_fp16: {type(pipeline).__name__} takes an image: pass sample=, a dict of the arguments of its call"
        )
    return _repeated(pipeline, {name: value for name, value in arguments.items() if name in names})
