"""The models that are diagnosed: a causal language model or a video pipeline, built in or of a folder, ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pasa.eval.kit.device import pick_device
from pasa.eval.kit.embedded_model import load_model, require_built_in
from pasa.eval.kit.model_folder import check_language_model, load_folder
from pasa.eval.kit.overflow_fixture import check_offset, inject_overflow
from pasa.eval.models.rescue.run import DEFAULT_OFFSET, build_prompt, check_text
from pasa.eval.models.video import clip
from pasa.eval.models.video.overflow import OFFSET, bias_scores
from pasa.eval.models.video.tiny import tiny_pipeline

EMBEDDED, TINY = "embedded", clip.TINY
BIASED = ", biased to overflow"  # in a title


@dataclass(frozen=True)
class Subject:
    """A model to patch, what runs it once (the same every time), and what was done to it to make it overflow."""

    name: str
    model: Any
    run: Callable[[], Any]
    settings: dict[str, Any]
    fixture: dict[str, Any] | None


def load(
    model: str, *, prompt: str | None = None, offset: float | None = None, dtype: str | None = None, **video: Any
) -> Subject:
    """Load "embedded", "tiny" or a folder, which is a pipeline if it holds ``model_index.json``.

    `video` has the options of a pipeline: image, sizes, offload. An option that is set and is not for this kind of
    model is refused with a ValueError.
    """
    check_offset(offset)
    pipeline = model == TINY or (Path(model) / "model_index.json").is_file()
    foreign, kind = ({"prompt": prompt}, "a video pipeline") if pipeline else (video, "a language model")
    if model not in (EMBEDDED, TINY):
        foreign, kind = {**foreign, "offset": offset}, f"{kind} of a folder"
    for name, value in foreign.items():
        if value not in (None, False):
            raise ValueError(f"{name}={value!r} does not apply: {model!r} is {kind}")
    if pipeline:
        return _video(model, OFFSET if offset is None else offset, dtype, **video)
    return _language_model(model, prompt, DEFAULT_OFFSET if offset is None else offset, dtype)


def _language_model(model: str, prompt: str | None, offset: float, dtype_name: str | None) -> Subject:
    """Return the prefill of one prompt: it forms all scores that decoding forms, and those of every earlier token."""
    check_text(prompt or "")
    if model != EMBEDDED:
        check_language_model(model)
    require_built_in(model=model == EMBEDDED, text=prompt is None)
    device, fixture = pick_device(), None
    dtype = clip.pick_dtype(dtype_name, device)
    network, tokenizer = load_model() if model == EMBEDDED else load_folder(model, dtype)
    if model == EMBEDDED and offset:
        network, info = inject_overflow(network, offset)
        fixture = info.as_dict()
    ids = build_prompt(tokenizer, prompt).to(device)
    run = torch.no_grad()(partial(network.to(device, dtype), input_ids=ids, use_cache=False))
    settings = {"tokens": ids.shape[1], "dtype": str(dtype).removeprefix("torch.")}
    name = model if model != EMBEDDED else "SmolLM2-135M-Instruct" + BIASED * bool(fixture)
    return Subject(name, network, run, settings, fixture)


def _video(
    model: str, offset: float, dtype: str | None, image: str | None = None, offload: bool = False, **sizes: Any
) -> Subject:
    """Return one clip, as `pasa eval video` makes it."""
    sizes = dict.fromkeys(clip.SIZES) | sizes
    settings = clip.make_settings(sizes, tiny=model == TINY, image=image, dtype=dtype)
    pipeline = tiny_pipeline() if model == TINY else clip.load_pipeline(model)
    fixture = bias_scores(pipeline.unet, offset) if model == TINY and offset else None
    if settings.dtype == torch.float16:
        clip.halve(pipeline)
    clip.place(pipeline, settings.device, offload)
    shown = {name: getattr(settings, name) for name in (*clip.SIZES, "seed")}
    shown |= {"dtype": str(settings.dtype).removeprefix("torch."), "offload": offload}
    name = model if model != TINY else "Stable Video Diffusion in small, random weights" + BIASED * bool(fixture)
    return Subject(name, pipeline, partial(clip.make_frames, pipeline, settings), shown, fixture)
