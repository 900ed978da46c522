"""One clip of a video pipeline: what it depends on, and how it is made; the paper's settings are the defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pasa.eval.kit.device import pick_device
from pasa.eval.kit.model_folder import check_folder, readable
from pasa.eval.kit.options import at_least
from pasa.eval.models.video.tiny import sample_image
from pasa.first_nonfinite import models_of

TINY = "tiny"
SIZES = {"height": (128, 576), "width": (128, 1024), "frames": (4, 25), "steps": (3, 25)}
"""Sizes of the tiny model's clip, and the paper's of the real one."""
SEED = 42  # the paper's
SUPPORTED = "StableVideoDiffusionPipeline"


@dataclass(frozen=True)
class Settings:
    """The settings that all runs of an experiment share; `dtype` is that of the models in the FP16 runs."""

    image: Any
    height: int
    width: int
    frames: int
    steps: int
    seed: int
    dtype: torch.dtype
    device: torch.device


def make_settings(
    sizes: Mapping[str, int | None], *, tiny: bool, image: str | None = None, seed: int = SEED, dtype: str | None = None
) -> Settings:
    """Return settings for the device at hand; sizes that are None take the defaults of `SIZES`."""
    used = {name: SIZES[name][not tiny] if value is None else value for name, value in sizes.items()}
    # With one frame the pipeline's guidance scale is 1, which it cannot run.
    at_least(2, frames=used["frames"])
    at_least(1, **used)
    for name in ("height", "width"):
        if used[name] % 8:
            raise ValueError(f"{name}={used[name]} is not a multiple of 8")
    device, picture = pick_device(), sample_image(used["height"], used["width"])
    if image is not None:
        from PIL import Image

        picture = Image.open(image).convert("RGB").resize(picture.size)
    return Settings(image=picture, seed=seed, dtype=pick_dtype(dtype, device), device=device, **used)


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Return the dtype of that name; by default FP32 on a CPU, where FP16 is slow, and FP16 elsewhere."""
    known = {"float16": torch.float16, "float32": torch.float32}
    if name is not None and name not in known:
        raise ValueError(f"dtype={name!r} is not one of {tuple(known)}")
    return known[name or ("float32" if device.type == "cpu" else "float16")]


def load_pipeline(path: str) -> Any:
    """Return the Stable Video Diffusion pipeline of a folder, FP32; raises as :func:`check_pipeline`."""
    check_pipeline(Path(path))  # before diffusers is imported, which prints warnings
    from diffusers import StableVideoDiffusionPipeline

    with readable(path):
        pipeline = StableVideoDiffusionPipeline.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def check_pipeline(path: Path) -> None:
    """Refuse a folder without a pipeline, or with one of another class."""
    index = check_folder(path, "model_index.json") / "model_index.json"
    try:
        name = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{str(index)!r} cannot be read: {error!r}") from error
    if name != SUPPORTED:
        raise ValueError(f"{str(path)!r} holds a {name}; of pipelines, only {SUPPORTED} is supported")


def place(pipeline: Any, device: torch.device, offload: bool) -> None:
    """Move a pipeline to its device, or let its models take turns there, as the paper's script does."""
    if offload:
        pipeline.enable_model_cpu_offload(device=device)
        pipeline.unet.enable_forward_chunking()
    else:
        pipeline.to(device)


def whole_fp32() -> AbstractContextManager[None]:
    """Keep TF32, whose numbers have FP16's precision, out of convolutions; products have none by default."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


def halve(pipeline: Any) -> None:
    """Put the models of a pipeline into FP16; where they are offloaded, the hooks that move them stay."""
    for part in models_of(pipeline).values():
        part.half()


@torch.no_grad()
def make_frames(pipeline: Any, settings: Settings) -> torch.Tensor:
    """Return frames (F, 3, H, W), 0 to 1.

    The first noise is drawn in FP32 here, the same for models of any dtype, because nothing promises that numbers
    drawn in FP16 are those of FP32, rounded.
    """
    generator = torch.Generator("cpu").manual_seed(settings.seed)
    grid = (settings.height // pipeline.vae_scale_factor, settings.width // pipeline.vae_scale_factor)
    noise = torch.randn(1, settings.frames, pipeline.vae.config.latent_channels, *grid, generator=generator)
    sizes = {"height": settings.height, "width": settings.width, "num_frames": settings.frames}
    frames: torch.Tensor = pipeline(
        settings.image, **sizes, num_inference_steps=settings.steps, decode_chunk_size=min(settings.frames, 8),
        generator=generator, latents=noise.to(pipeline.unet.dtype), output_type="pt",
    ).frames[0]  # fmt: skip
    return frames
