"""Pipelines of diffusers: built from the models that their constructors are annotated with, and run for two steps."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import torch

from pasa.eval.zoo.diffusion import small_model
from pasa.eval.zoo.inputs import parameters
from pasa.eval.zoo.judging import Case, line
from pasa.eval.zoo.language import spread

PIPELINES = "diffusers pipeline"
WIDTH, PIXELS, STEPS, TEXT = 32, 64, 2, 77
LEFT_OUT = ("safety_checker", "feature_extractor", "image_encoder", "watermarker", "image_processor")
"""Components that a pipeline can do without."""

UNET: dict[str, Any] = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 32, "norm_num_groups": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": (2, 4),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": WIDTH,
}  # fmt: skip
XL: dict[str, Any] = {
    "cross_attention_dim": 2 * WIDTH, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 2), "projection_class_embeddings_input_dim": 6 * 8 + WIDTH,
    "use_linear_projection": True,
}  # fmt: skip
CHANNELS = {"InstructPix2Pix": 8, "UpscalePipeline": 7, "Depth2Img": 5}
"""Input channels of the UNet of pipelines that add a picture to the latents."""


def pipelines() -> list[str]:
    """Names of diffusers' pipeline classes."""
    import diffusers

    found = dict.fromkeys(diffusers._import_structure["pipelines"])
    classes = {name: getattr(diffusers, name, None) for name in found}
    base = diffusers.DiffusionPipeline
    return [
        name for name, cls in classes.items() if isinstance(cls, type) and issubclass(cls, base) and cls is not base
    ]


def build(name: str) -> tuple[Any, dict[str, Any]] | str:
    """A small pipeline, and what it is called with; why not, if it cannot be built or run."""
    import diffusers

    cls = getattr(diffusers, name)
    torch.manual_seed(0)
    components: dict[str, Any] = {}
    for part, each in parameters(cls.__init__).items():
        if part in LEFT_OUT:
            components[part] = None
        elif each.default is inspect.Parameter.empty:
            try:
                components[part] = component(part, each.annotation, name)
            except Exception as error:
                return f"{part}: {type(error).__name__}: {line(error)[:150]}"
    if "requires_safety_checker" in parameters(cls.__init__):
        components["requires_safety_checker"] = False
    try:
        pipeline = cls(**components)
        pipeline.set_progress_bar_config(disable=True)
        given = arguments(cls)
        pipeline(**given)
    except Exception as error:
        return f"{type(error).__name__}: {line(error)[:200]}"
    return pipeline, given


def component(part: str, annotation: Any, pipeline: str) -> Any:
    """A small part of this kind; the first kind that can be made, where there is a choice."""
    kinds = [each for each in typing.get_args(annotation) or (annotation,) if each is not type(None)]
    for kind in kinds:
        name = getattr(kind, "__name__", str(kind))
        if name in MAKERS:
            return MAKERS[name](pipeline)
        if "Scheduler" in name and isinstance(kind, type):
            return scheduler(kind)
    import diffusers

    kind = kinds[0]
    if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin):
        return small_model(kind)
    raise NotImplementedError(f"no small {getattr(kind, '__name__', kind)} is known")


def scheduler(kind: type) -> Any:
    """Of this class; where any of the usual ones will do, DDIM's."""
    import diffusers

    usual = kind.__name__ in ("KarrasDiffusionSchedulers", "SchedulerMixin")
    return diffusers.DDIMScheduler() if usual else kind()


def unet(pipeline: str) -> Any:
    """The UNet of Stable Diffusion, or of its larger version."""
    import diffusers

    channels = next((value for name, value in CHANNELS.items() if name in pipeline), 4)
    return small_model(
        diffusers.UNet2DConditionModel, in_channels=channels, **{**UNET, **(XL if _xl(pipeline) else {})}
    )


def controlnet(pipeline: str) -> Any:
    """The ControlNet that belongs to `unet`."""
    import diffusers

    fields: dict[str, Any] = {**UNET, **(XL if _xl(pipeline) else {}), "conditioning_embedding_out_channels": (16, 32)}
    known = parameters(diffusers.ControlNetModel.__init__)
    return small_model(diffusers.ControlNetModel, **{name: value for name, value in fields.items() if name in known})


def _made(name: str, **fields: Any) -> Any:
    """A small model of this class."""
    import diffusers

    return small_model(getattr(diffusers, name), **fields)


def _xl(pipeline: str) -> bool:
    return "XL" in pipeline


def text_encoder(name: str) -> Callable[[str], Any]:
    """A CLIP text model of this class."""

    def make(pipeline: str) -> Any:
        import transformers

        config = transformers.CLIPTextConfig(
            hidden_size=WIDTH, intermediate_size=WIDTH, projection_dim=WIDTH, num_hidden_layers=3,
            num_attention_heads=4, vocab_size=len(vocabulary()), max_position_embeddings=TEXT, bos_token_id=0,
            eos_token_id=1, pad_token_id=1,
        )  # fmt: skip
        return spread(getattr(transformers, name)(config).eval())

    return make


def vocabulary() -> dict[str, int]:
    """Letters, within words and at their ends."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *map("{}</w>".format, letters)]
    return {each: place for place, each in enumerate(words)}


def tokenizer(pipeline: str) -> Any:
    """One for letters."""
    import transformers

    return transformers.CLIPTokenizer(vocab=vocabulary(), merges=[], model_max_length=TEXT)


def autoencoder(pipeline: str) -> Any:
    """That halves a picture once."""
    import diffusers

    blocks: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    return small_model(
        diffusers.AutoencoderKL, block_out_channels=(32, 32), norm_num_groups=8, sample_size=32, **blocks
    )


def motion(pipeline: str) -> Any:
    """The temporal layers of an animated UNet."""
    import diffusers

    return small_model(
        diffusers.MotionAdapter, block_out_channels=(32, 64), motion_layers_per_block=1, motion_norm_num_groups=2,
        motion_num_attention_heads=4,
    )  # fmt: skip


MAKERS: dict[str, Callable[[str], Any]] = {
    "AutoencoderKL": autoencoder,
    "AsymmetricAutoencoderKL": autoencoder,
    "CLIPTextModel": text_encoder("CLIPTextModel"),
    "CLIPTextModelWithProjection": text_encoder("CLIPTextModelWithProjection"),
    "CLIPTokenizer": tokenizer,
    "ControlNetModel": controlnet,
    "MotionAdapter": motion,
    "UNet2DConditionModel": unet,
    "UNet2DModel": lambda pipeline: _made("UNet2DModel", sample_size=16),
}
"""What makes a component, by the name of its class."""


def arguments(cls: Any) -> dict[str, Any]:
    """What a pipeline is called with, of what it takes."""
    picture = torch.rand(1, 3, PIXELS, PIXELS)
    known = parameters(cls.__call__)
    given: dict[str, Any] = {
        "prompt": "a cat on a mat", "num_inference_steps": STEPS, "output_type": "np", "height": PIXELS,
        "width": PIXELS, "image": picture, "control_image": picture, "num_frames": 2,
        "mask_image": torch.ones(1, 1, PIXELS, PIXELS),
        "conditioning_frames": [picture[0]] * 2, "strength": 0.8, "batch_size": 1,
    }  # fmt: skip
    return {name: value for name, value in given.items() if name in known}


def cases(pipeline: Any, given: dict[str, Any]) -> list[Case]:
    """One call."""

    def call() -> Any:
        own = dict(given)
        if "generator" in parameters(type(pipeline).__call__):
            own["generator"] = torch.Generator().manual_seed(0)
        done = pipeline(**own)
        found = [getattr(done, name, None) for name in ("images", "frames", "audios", "image_embeds", "depth")]
        return [torch.as_tensor(each) for each in found if each is not None]

    return [Case("two steps", call)]
