"""Models of published sizes with random weights whose residual streams pass FP16's range, and how they are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pasa.eval.kit.cache import cache_name
from pasa.eval.kit.random_model import CONFIGS
from pasa.eval.models.video.step import FULL
from pasa.eval.models.whole_model.measuring import FP16_MAX, residual_peaks

Record = dict[str, Any]
Phases: TypeAlias = Iterator[tuple[str, Tensor]]

SEED, SAMPLE_SEED = 0, 1  # of the inputs that are timed, and of those that the conversion measures peaks on
TOKENS, STEPS, KEPT = 2048, 8, 256  # of a prompt; of decoding; positions whose logits are compared
NEEDED = 4 * FP16_MAX  # magnitude that the residual stream reaches in a third of the blocks
RESIDUAL = "SpatioTemporalResBlock"  # of the VAE
GEMMA_3_4B: Record = {  # text_config of google/gemma-3-4b-it
    "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 1024,
    "vocab_size": 262208, "max_position_embeddings": 131072,
}  # fmt: skip
T5_XXL: Record = {  # config.json of google/t5-v1_1-xxl
    "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24, "num_heads": 64, "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A model with random weights, and a call of it.

    Attributes
    ----------
    title : str
    dtype : torch.dtype
        Precision in which the weights are published, and drawn here.
    build : callable
        Returns the model on torch's default device, in `dtype`.
    inputs : callable
        Takes the model and a seed; returns the tensor that it is called with, on the model's device.
    run : callable
        Takes model, input and how many positions of logits to keep; yields the name and the result of each phase;
        a phase may be repeated.
    sample : callable
        Takes an input; returns it as the sample for `pasa.to_fp16`.
    blocks : callable
        Returns the modules that return the residual stream.
    writers : tuple of str
        Ends of the names of weights that write to the stream, and are multiplied until it passes FP16's range.
    offset : float
        Number that the model adds to those weights.
    compare : callable
        Takes a result and FP32's; returns measures of this kind of model.
    extra : tuple of str
        Ways to run it besides the common ones.
    """

    title: str
    dtype: torch.dtype
    build: Callable[[], Any]
    inputs: Callable[[Any, int], Tensor]
    run: Callable[[Any, Tensor, int], Phases]
    sample: Callable[[Tensor], Any]
    blocks: Callable[[Any], Sequence[Any]]
    writers: tuple[str, ...]
    compare: Callable[[Tensor, Tensor], Record]
    offset: float = 0.0
    extra: tuple[str, ...] = ()


@torch.no_grad()
def overflow(subject: Subject, model: Any, inputs: Tensor) -> Record:
    """Multiply the weights that write to the residual stream until it reaches `NEEDED` in a third of the blocks.

    Return the power of two by which they were multiplied, and the peaks of the blocks.
    """
    power = 0
    while True:
        with residual_peaks(subject.blocks(model)) as peaks:
            list(subject.run(model, inputs, 1))
        third = sorted(peaks, reverse=True)[math.ceil(len(peaks) / 3) - 1]
        if third >= NEEDED:
            return {"power": power, "peaks": peaks, "blocks_beyond": sum(peak >= NEEDED for peak in peaks)}
        missing = math.ceil(math.log2(NEEDED / third))
        power += missing
        for name, parameter in model.named_parameters():
            if name.endswith(subject.writers):
                parameter.copy_((parameter + subject.offset) * 2.0**missing - subject.offset)


def agreement(logits: Tensor, golden: Tensor) -> Record:
    """Return the share of positions whose most probable token is FP32's."""
    return {"top1": float((logits.argmax(-1) == golden.argmax(-1)).double().mean())}


def psnr(frames: Tensor, golden: Tensor) -> Record:
    """Return the PSNR in dB of the worst frame (N, C, H, W), None if equal; the peak is the range of FP32's frames."""
    spread = float(golden.max() - golden.min())
    worst = float((frames.double() - golden.double()).square().mean((1, 2, 3)).max())
    return {"psnr": 20 * math.log10(spread) - 10 * math.log10(worst) if worst else None}


def random_ids(rows: int, tokens: int) -> Callable[[Any, int], Tensor]:
    """Return a function of a model and a seed that draws token ids (rows, tokens)."""

    def draw(model: Any, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(model.config.vocab_size, (rows, tokens), generator=generator).to(model.device)

    return draw


def generate(model: Any, ids: Tensor, kept: int) -> Phases:
    """Read a prompt, then decode greedily without waiting for the device."""
    out = model(input_ids=ids, use_cache=True, logits_to_keep=kept)
    yield "prompt", out.logits
    cache = cache_name(model)
    for _ in range(STEPS):
        ids = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=ids, use_cache=True, **{cache: out[cache]})
        yield "step", out.logits


def encode(model: Any, ids: Tensor, _: int) -> Phases:
    """Encode token ids."""
    yield "encode", model(input_ids=ids).last_hidden_state


def decode(model: Any, latents: Tensor, _: int) -> Phases:
    """Decode the latents of a clip."""
    yield "decode", decoded(model, latents)


def decoded(model: Any, latents: Tensor) -> Tensor:
    """Return the frames of latents (N, C, H, W), in the precision of the model."""
    frames: Tensor = model.decode(latents.to(model.dtype), num_frames=len(latents), return_dict=False)[0]
    return frames


def gemma(title: str, sizes: Record, tokens: int = TOKENS) -> Subject:
    """Return a Gemma 3; as in the trained model, the weights of the norms behind a block make the stream large."""

    def build() -> Any:
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        return Gemma3ForCausalLM._from_config(Gemma3TextConfig(**sizes), dtype=torch.bfloat16)

    writers = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    return _language(title, build, writers, tokens, offset=1.0)


def qwen2(title: str, sizes: Record, tokens: int = TOKENS) -> Subject:
    """Return a Qwen2."""

    def build() -> Any:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        return Qwen2ForCausalLM._from_config(Qwen2Config(**sizes), dtype=torch.bfloat16)

    return _language(title, build, ("o_proj.weight", "down_proj.weight"), tokens)


def _language(
    title: str, build: Callable[[], Any], writers: tuple[str, ...], tokens: int, offset: float = 0.0
) -> Subject:
    return Subject(
        title, torch.bfloat16, build, random_ids(1, tokens), generate,
        sample=lambda ids: {"input_ids": ids},
        blocks=lambda model: model.get_decoder().layers,
        writers=writers, compare=agreement, offset=offset,
    )  # fmt: skip


def t5(title: str, sizes: Record, rows: int = 4, tokens: int = 512) -> Subject:
    """Return an encoder of T5."""

    def build() -> Any:
        from transformers import T5Config, T5EncoderModel

        return T5EncoderModel._from_config(T5Config(**sizes), dtype=torch.float32)

    return Subject(
        title, torch.float32, build, random_ids(rows, tokens), encode,
        sample=lambda ids: {"input_ids": ids},
        blocks=lambda model: model.encoder.block,
        writers=("DenseReluDense.wo.weight",),  # as in trained models, of which transformers keeps these in FP32
        compare=lambda states, golden: {}, extra=("fp16-wo",),
    )  # fmt: skip


def video_vae(title: str, sizes: Record, shape: tuple[int, int, int]) -> Subject:
    """Return the VAE of Stable Video Diffusion; `shape` is (frames, height, width) of the latents."""

    def build() -> Any:
        from diffusers import AutoencoderKLTemporalDecoder

        device = torch.get_default_device()
        return AutoencoderKLTemporalDecoder(**sizes).to(device)  # torch.Tensor() ignores the default device

    def draw(model: Any, seed: int) -> Tensor:
        frames, height, width = shape
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(frames, model.config.latent_channels, height, width, generator=generator).to(model.device)

    return Subject(
        title, torch.float32, build, draw, decode,
        sample=lambda latents: lambda model: decoded(model, latents),
        blocks=lambda model: [each for each in model.decoder.modules() if type(each).__name__ == RESIDUAL],
        writers=("conv2.weight", "to_out.0.weight"), compare=psnr, extra=("upcast",),
    )  # fmt: skip


SUBJECTS = {
    "gemma-3-4b": gemma("Gemma-3-4B", GEMMA_3_4B),
    "qwen2-7b": qwen2("Qwen2-7B", CONFIGS["qwen2-7b"]),
    "t5-xxl": t5("T5-XXL encoder, 4 x 512 tokens", T5_XXL),
    "svd-vae": video_vae("SVD VAE, 4 frames of 1024 x 576", FULL["vae"], (4, 72, 128)),
}
