"""Inputs on which `to_fp16` measures a model: the caller's, or built-in ones."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

TOKENS = 256
"""Length of the built-in sequence of token ids."""
TEXT = """The lighthouse stands on a rock two miles from the shore. It was built in 1847, after three ships were lost in
one winter, and its lamp could be seen for 18 nautical miles. Who kept it? "My grandfather," she said, "and his father
before him." The keeper climbed 196 steps each evening, trimmed the wick, wound the clockwork, and wrote down the wind.

def area(radius: float) -> float:
    return 3.14159 * radius ** 2

Ingredients: 200 g of flour, 3 eggs, 1/2 litre of milk; a pinch of salt. Les mouettes crient; das Meer ist kalt.
"""
"""The built-in text: prose, numbers, code and other languages, because peaks come with rare tokens too."""
STEPS = 2
"""Denoising steps of the built-in run of a pipeline."""


def runner(model_or_pipeline: Any, sample: Any) -> Callable[[], object]:
    """Return a function without arguments that runs the model once on a sample.

    Raises
    ------
    TypeError
        The sample is none of the kinds that are known.
    ValueError
        There is no sample, and no built-in one for this model; from the returned function: the sample does not fit.
    """
    if sample is None:
        return _checked(_built_in(model_or_pipeline), model_or_pipeline)
    if isinstance(sample, Tensor):
        cast, asked = _caster(model_or_pipeline), _all_hidden_states(model_or_pipeline)
        return _checked(lambda: model_or_pipeline(cast(sample), **asked), model_or_pipeline)
    if isinstance(sample, Mapping):
        return _checked(_repeated(model_or_pipeline, sample), model_or_pipeline)
    if callable(sample):
        return lambda: sample(model_or_pipeline)
    raise TypeError(
        "to_fp16: sample must be a tensor, a dict of arguments, or a function of the model, got "
        f"{type(sample).__name__}"
    )


def _checked(run: Callable[[], object], model_or_pipeline: Any) -> Callable[[], object]:
    """Return a run whose errors say that the sample does not fit."""

    def checked() -> object:
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if str(error).startswith("to_fp16"):
                raise
            text = (str(error).splitlines() or [""])[0]
            raise ValueError(
                f"to_fp16: {type(model_or_pipeline).__name__} does not run on the sample ({type(error).__name__}: "
                f"{text}): pass sample=, a dict of the arguments that you call it with"
            ) from error

    return checked


def _repeated(model_or_pipeline: Any, arguments: Mapping[str, Any]) -> Callable[[], object]:
    """Return a run that gives the same result each time: random generators among the arguments begin anew."""
    generators = [value for value in arguments.values() if isinstance(value, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    cast = _caster(model_or_pipeline)
    if arguments.get("return_dict", True):  # a tuple has another order with hidden states
        arguments = {**_all_hidden_states(model_or_pipeline), **arguments}

    def run() -> object:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        now = cast(dict(arguments))
        if isinstance(model_or_pipeline, torch.nn.Module):
            _run_encoder(model_or_pipeline, now)
        return model_or_pipeline(**now)

    return run


def _all_hidden_states(model: Any) -> dict[str, Any]:
    """Return the argument that asks a model of transformers for all hidden states, so that their powers are known."""
    if not hasattr(getattr(model, "config", None), "output_hidden_states"):
        return {}
    parameters = inspect.signature(model.forward).parameters
    accepts = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    return {"output_hidden_states": True} if accepts or "output_hidden_states" in parameters else {}


def _caster(model_or_pipeline: Any) -> Callable[[Any], Any]:
    """Return a function that casts a sample to the model's dtype of then; a pipeline casts its inputs itself.

    Tensors are cast if they have the model's dtype of now, or 16 bits. Those with fewer than two dimensions, such as
    time steps, stay.
    """
    if not isinstance(model_or_pipeline, torch.nn.Module):
        return lambda value: value
    parameters = [each for each in model_or_pipeline.parameters() if each.is_floating_point()]
    if not parameters:
        return lambda value: value
    kinds = {parameters[0].dtype, torch.float16, torch.bfloat16}
    devices = {each.device for each in parameters}

    def cast(tensor: Tensor) -> Tensor:
        if len(devices) == 1 and tensor.device not in devices:
            raise ValueError(f"to_fp16: the sample is on {tensor.device}, the model on {next(iter(devices))}: move it")
        if not tensor.is_floating_point():
            return tensor
        dtype = parameters[0].dtype if tensor.dtype in kinds and tensor.ndim > 1 else tensor.dtype
        return tensor.to(dtype, copy=True)  # a model may write to its inputs

    return lambda value: tree_map_only(Tensor, cast, value)


def _run_encoder(model: Any, arguments: Mapping[str, Any]) -> None:
    """Run an encoder by itself, and the model on its result, as `generate` does."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False) or "encoder_outputs" in arguments:
        return
    whole = getattr(model, "get_base_model", lambda: model)()  # of a model with adapters
    if "encoder_outputs" not in inspect.signature(whole.forward).parameters:  # UMT5EncoderModel is an encoder alone
        return
    encoder = model.get_encoder()
    names = inspect.signature(encoder.forward).parameters
    inputs = {name: value for name, value in arguments.items() if name in names and isinstance(value, Tensor)}
    if inputs:
        rest = {name: value for name, value in arguments.items() if name not in ("input_ids", "inputs_embeds")}
        model(**rest, encoder_outputs=encoder(**inputs, **_all_hidden_states(encoder), return_dict=True))


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
    if other := next((name for name in names if name.startswith(("pixel_values", "input_features"))), None):
        raise ValueError(
            f"to_fp16: {type(model).__name__} takes {other} beside text: pass sample=, a dict with both, as its "
            "processor returns them"
        )
    arguments: dict[str, Any] = {"input_ids": _ids(model).to(model.device)}
    if "decoder_input_ids" in names:
        arguments["decoder_input_ids"] = arguments["input_ids"][:, :16]
    return _repeated(model, arguments)


def _ids(model: Any) -> Tensor:
    """Return the token ids of the built-in text if the model's folder holds a tokenizer, else random ones."""
    config = model.config.get_text_config()
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    folder = str(getattr(model, "name_or_path", ""))
    if os.path.isdir(folder):
        from transformers import AutoTokenizer

        try:
            text = AutoTokenizer.from_pretrained(folder, local_files_only=True)(TEXT, return_tensors="pt")["input_ids"]
        except (OSError, ValueError, ImportError):  # the folder holds weights alone
            text = torch.zeros(1, 0, dtype=torch.int64)
        if text.numel() > 0 and int(text.max()) < config.vocab_size:
            return text[:, :length]  # type: ignore[no-any-return]
    ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    if isinstance(first := getattr(config, "bos_token_id", None), int) and first < config.vocab_size:
        ids[:, 0] = first
    return ids


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
