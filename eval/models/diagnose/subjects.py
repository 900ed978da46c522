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
from pasa.eval.kit.overflow_fixture import check_offset, inject_overflow
from pasa.eval.models.rescue.run import DEFAULT_OFFSET, build_prompt, load_folder
from pasa.eval.models.video import clip
from pasa.eval.models.video.overflow import OFFSET, bias_scores
from pasa.eval.models.video.tiny import tiny_pipeline

EMBEDDED, TINY = "embedded", clip.TINY
BIASED = ", biased to overflow"  # in a title
TEXT_OPTIONS = ("prompt", "max_prompt_tokens")
VIDEO_OPTIONS = ("image", *clip.SIZES, "seed", "offload")
BUILT_IN_OPTIONS = ("offset",)
OPTIONS = (*TEXT_OPTIONS, *VIDEO_OPTIONS, *BUILT_IN_OPTIONS, "dtype")


@dataclass(frozen=True)
class Subject:
    """A model to patch, what runs it once (the same every time), and what was done to it to make it overflow."""

    name: str
    kind: str
    model: Any
    run: Callable[[], Any]
    settings: dict[str, Any]
    fixture: dict[str, Any] | None
    device: torch.device


def load(model: str, **options: Any) -> Subject:
    """Load "embedded", "tiny" or a folder, which is a pipeline if it holds ``model_index.json``, with some `OPTIONS`.

    Raises
    ------
    FileNotFoundError
        There is no such folder, or no model in it; a distribution of a built-in model is missing.
    ValueError
        An option of another kind of model, or a value that cannot be used; a pipeline that is not supported.
    """
    options = dict.fromkeys(OPTIONS) | options
    check_offset(options["offset"])
    if model not in (EMBEDDED, TINY):
        _refuse(model, "a folder", BUILT_IN_OPTIONS, options)
        _check_folder(Path(model))
    if model == TINY or (Path(model) / "model_index.json").is_file():
        _refuse(model, "a video pipeline", TEXT_OPTIONS, options)
        return _video(model, options)
    _refuse(model, "a language model", VIDEO_OPTIONS, options)
    return _language_model(model, options)


def _refuse(model: str, kind: str, foreign: tuple[str, ...], options: dict[str, Any]) -> None:
    for name in foreign:
        if options[name] not in (None, False):
            raise ValueError(f"{name}={options[name]!r} does not apply: {model!r} is {kind}")


def _check_folder(path: Path) -> None:
    """Name what a folder lacks, before a library words it at length."""
    if not path.is_dir():
        raise FileNotFoundError(f"model {str(path)!r} is neither {EMBEDDED!r}, {TINY!r} nor a folder")
    if (path / "model_index.json").is_file():
        clip.check_pipeline(path)
    elif not (path / "config.json").is_file():
        raise FileNotFoundError(f"{str(path)!r} holds neither model_index.json nor config.json")


def _language_model(model: str, options: dict[str, Any]) -> Subject:
    """Return the prefill of one prompt: it forms all scores that decoding forms, and those of every earlier token."""
    require_built_in(model=model == EMBEDDED, text=options["prompt"] is None)
    device, fixture = pick_device(), None
    dtype = clip.pick_dtype(options["dtype"], device)
    network, tokenizer = load_model() if model == EMBEDDED else load_folder(model, dtype)
    offset = DEFAULT_OFFSET if options["offset"] is None else options["offset"]
    if model == EMBEDDED and offset:
        network, info = inject_overflow(network, offset)
        fixture = info.as_dict()
    network = network.to(device, dtype)
    ids = build_prompt(tokenizer, options["prompt"], options["max_prompt_tokens"]).to(device)

    @torch.no_grad()
    def run() -> None:
        network(input_ids=ids, use_cache=False)

    settings = {"tokens": ids.shape[1], "dtype": str(dtype).removeprefix("torch.")}
    name = model if model != EMBEDDED else "SmolLM2-135M-Instruct" + BIASED * bool(fixture)
    return Subject(name, "causal language model", network, run, settings, fixture, device)


def _video(model: str, options: dict[str, Any]) -> Subject:
    """Return one clip, as `pasa eval video` makes it."""
    seed = clip.SEED if options["seed"] is None else options["seed"]
    sizes = {name: options[name] for name in clip.SIZES}
    settings = clip.make_settings(sizes, tiny=model == TINY, image=options["image"], seed=seed, dtype=options["dtype"])
    pipeline = tiny_pipeline() if model == TINY else clip.load_pipeline(model)
    offset = OFFSET if options["offset"] is None else options["offset"]
    fixture = bias_scores(pipeline.unet, offset) if model == TINY and offset else None
    if settings.dtype == torch.float16:
        clip.halve(pipeline)
    offload = bool(options["offload"])
    clip.place(pipeline, settings.device, offload)
    shown = {name: getattr(settings, name) for name in (*clip.SIZES, "seed")}
    shown |= {"dtype": str(settings.dtype).removeprefix("torch."), "offload": offload}
    name = model if model != TINY else "Stable Video Diffusion in small, random weights" + BIASED * bool(fixture)
    return Subject(
        name, "video pipeline", pipeline, partial(clip.make_frames, pipeline, settings), shown, fixture, settings.device
    )
