"""One denoising step of Stable Video Diffusion at its full size, on a GPU: time, memory and error by attention.

The models are built from configuration with random weights: shapes, kernels, time and memory are the real ones, the
picture is not. First as drawn; then with a bias in q and k that adds a constant to every score of the spatial
attention, so that FP16 scores overflow even after they have been scaled, as a GPU's eager attention stores them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pasa
from pasa.eval.kit.device import describe
from pasa.eval.kit.timing import Call, Clock, CudaClock, copy_bandwidth, interleave, ratio, summary
from pasa.eval.models.video.clip import whole_fp32
from pasa.eval.models.video.overflow import bias_scores
from pasa.eval.speed.cases import SpeedCase
from pasa.eval.speed.implementations import CUDNN, FLASH, select_implementations
from pasa.eval.speed.parts import one_line
from pasa.eval.speed.run import NOT_RUN, OK, measure_case

SEED = 0
GUIDED = 2  # classifier-free guidance: every step runs the clip with and without the picture
OFFSET = 819200.0
"""Beyond 8 x 65504: at head dimension 64 the *scaled* scores pass what FP16 can hold, too."""
FARTHER = 1.10
"""PASA may be this much farther from FP32 than SDPA flash."""
STAGES = 5
EAGER, SDPA, PASA = "eager", "sdpa", "pasa"
WAYS = {
    EAGER: "diffusers' AttnProcessor: scores stored in FP16, already scaled",
    SDPA: "torch SDPA as diffusers calls it, backend chosen by torch",
    FLASH: "the same, held to the flash backend",
    PASA: "pasa.patch_pipeline(model)",
}
Record = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """Sizes of a step; the defaults are those of Stable Video Diffusion XT at 1024 x 576.

    Attributes
    ----------
    frames, height, width : int
        Of the clip; height and width in latents, an eighth of the pixels.
    decoded : int
        Frames that the VAE decodes at a time.
    unet, vae : dict
        Arguments of the two models.
    """

    frames: int = 25
    height: int = 72
    width: int = 128
    decoded: int = 8
    unet: dict[str, Any] = field(default_factory=dict)  # the defaults of the class are SVD's
    vae: dict[str, Any] = field(
        default_factory=lambda: {
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "block_out_channels": (128, 256, 512, 512),
            "layers_per_block": 2,
        }
    )


@dataclass(frozen=True)
class Work:
    """A model and what is asked of it: `run` gives one tensor, in the dtype of the model."""

    name: str
    model: Any
    run: Callable[[], Tensor]


def run_step(
    rounds: int = 3, scale: Scale | None = None, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Time a step of the UNet, and the VAE's decoding of some frames, on the current CUDA device.

    Parameters
    ----------
    rounds : int
        Turns of every way.
    scale : Scale, optional
        The full size by default.
    progress : callable, optional
        Called with a line before each part.

    Returns
    -------
    dict
        JSON-able: ``records`` (one per model, bias and way), ``attention`` (one per shape and implementation),
        ``shapes`` (calls of each shape in a step), ``gate``, ``environment``.

    Raises
    ------
    ValueError
        Fewer than one round.
    NotImplementedError
        Without a CUDA device.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} is not a positive integer")
    clock = CudaClock()
    with torch.inference_mode():
        return measure(clock, scale or Scale(), rounds, copy_bandwidth(clock), progress or (lambda line: None))


def measure(
    clock: Clock, scale: Scale, rounds: int, bandwidth: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    """What `run_step` does, on any clock; `bandwidth` in bytes per second."""
    import diffusers

    started = time.perf_counter()
    progress("UNet in FP32")
    unet = _unet_step(scale, clock.device)
    fixture = bias_scores(unet.model, 0)
    golden = _in_fp32(unet)
    progress("UNet")
    records = compare(unet, golden, clock, rounds)
    shapes = attention_shapes(unet)
    fixture = bias_scores(unet.model, OFFSET)
    progress("UNet whose scores overflow")
    records += [each | {"offset": fixture["offset"]} for each in compare(unet, golden, clock, rounds)]
    del unet
    progress("VAE")
    vae = _vae_decode(scale, clock.device)
    records += compare(vae, _in_fp32(vae), clock, rounds)
    del vae
    progress("attention by shape")
    attention = measure_attention(shapes, clock, bandwidth, rounds)
    return {
        "experiment": "step",
        "gate": judge(records),
        "ways": WAYS,
        "sizes": {name: getattr(scale, name) for name in ("frames", "height", "width", "decoded")},
        "fixture": fixture,
        "rounds": rounds,
        "duration_s": round(time.perf_counter() - started, 1),
        "environment": describe(clock.device) | {"diffusers": diffusers.__version__},
        "shapes": [{"shape": case.shape, "calls": calls} for case, calls in shapes],
        "attention": attention,
        "records": records,
    }


def _unet_step(scale: Scale, device: torch.device) -> Work:
    """The UNet in FP32, and one call of it on noise."""
    from diffusers import UNetSpatioTemporalConditionModel

    with _drawn(device) as generator:
        unet = UNetSpatioTemporalConditionModel(**scale.unet).eval().to(device)  # torch.Tensor() ignores the context
    size = (GUIDED, scale.frames, unet.config.in_channels, scale.height, scale.width)
    latents = torch.randn(size, generator=generator, device=device)
    context = torch.randn(GUIDED, 1, unet.config.cross_attention_dim, generator=generator, device=device)
    times = torch.tensor([[6.0, 127.0, 0.02]] * GUIDED, device=device)  # frames a second - 1, motion, noise: defaults
    step = torch.tensor(1.0, device=device)

    def run() -> Tensor:
        latents_, context_, times_ = (x.to(unet.dtype) for x in (latents, context, times))
        out: Tensor = unet(latents_, step, context_, added_time_ids=times_, return_dict=False)[0]
        return out

    return Work("UNet", unet, run)


def _vae_decode(scale: Scale, device: torch.device) -> Work:
    """The temporal decoder's VAE in FP32, and its decoding of some frames of noise."""
    from diffusers import AutoencoderKLTemporalDecoder

    with _drawn(device) as generator:
        vae = AutoencoderKLTemporalDecoder(**scale.vae).eval().to(device)
    size = (scale.decoded, vae.config.latent_channels, scale.height, scale.width)
    latents = torch.randn(size, generator=generator, device=device)

    def run() -> Tensor:
        frames: Tensor = vae.decode(latents.to(vae.dtype), num_frames=scale.decoded, return_dict=False)[0]
        return frames

    return Work("VAE", vae, run)


@contextmanager
def _drawn(device: torch.device) -> Iterator[torch.Generator]:
    """Whatever is made inside lies on the device, with random values that depend on `SEED` alone."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(SEED)
        yield torch.Generator(device).manual_seed(SEED)


def _in_fp32(work: Work) -> Tensor:
    """What the model gives in FP32, without TF32; leaves the model in FP16."""
    with whole_fp32():
        golden = work.run()
    work.model.half()
    return golden


def compare(work: Work, golden: Tensor, clock: Clock, rounds: int) -> list[Record]:
    """A record for every way: distance from `golden`, memory, time."""
    calls: dict[str, Call] = {}
    records = []
    for way in WAYS:
        call = Call(work.run, partial(_attention, work.model, way))
        record: Record = {"model": work.name, "offset": 0, "way": way, "status": OK, "why": ""}
        try:
            record |= distance(call.output(), golden) | {"workspace_bytes": clock.workspace(call)}
            calls[way] = call
        except Exception as error:  # too little memory, or a backend that refuses: the reason why there is no time
            record |= {"status": NOT_RUN, "why": one_line(error)}
            if clock.device.type == "cuda":
                torch.cuda.empty_cache()
        records.append(record)
    times, _ = interleave(clock, calls, rounds, cold=False)
    for record in records:
        if (own := times.get(record["way"])) is not None:
            record |= summary(own)
            record["to_flash"] = ratio(own, times[FLASH]) if FLASH in times else None
    return records


def _attention(model: Any, way: str) -> AbstractContextManager[Any]:
    """The model attends so inside of the context."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if way == PASA:
        return pasa.patch_pipeline(model)
    if way == EAGER:
        return _eager(model)
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if way == FLASH else nullcontext()


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    from diffusers.models.attention_processor import AttnProcessor

    saved = dict(model.attn_processors)
    model.set_attn_processor(AttnProcessor())
    try:
        yield
    finally:
        model.set_attn_processor(saved)


def distance(out: Tensor, golden: Tensor) -> Record:
    """Largest error, relative RMSE (both None where not finite) and the share of values that are not finite."""
    lost = float((~torch.isfinite(out)).float().mean())
    if lost:
        return {"max_error": None, "rmse": None, "nonfinite_share": lost}
    error = out.float() - golden
    rmse = float(error.norm() / golden.norm())
    return {"max_error": float(error.abs().max()), "rmse": rmse, "nonfinite_share": 0.0}


def attention_shapes(work: Work) -> list[tuple[SpeedCase, int]]:
    """What attention one run of the model asks for, most work first, and how often."""
    with pasa.patch_pipeline(work.model), _Shapes() as seen:
        work.run()
    cases = [(_case(*sizes), calls) for sizes, calls in seen.calls.items()]
    return sorted(cases, key=lambda entry: -entry[1] * entry[0].flops)


class _Shapes(TorchDispatchMode):
    """Counts attention calls by the sizes of q (B, H, S, D) and k."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[torch.Size, torch.Size]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.pasa.attention.default:
            self.calls[args[0].shape, args[1].shape] += 1
        return func(*args, **(kwargs or {}))


def _case(q: torch.Size, k: torch.Size) -> SpeedCase:
    """The same attention as a case of the speed benchmark."""
    batch, heads, rows, dim = q
    return SpeedCase(f"{batch}x{heads}x{rows}x{k[2]}x{dim}", batch, heads, k[1], rows, k[2], dim)


def measure_attention(shapes: list[tuple[SpeedCase, int]], clock: Clock, bandwidth: float, rounds: int) -> list[Record]:
    """Each shape alone on random data, through the gate of the speed benchmark."""
    records = []
    for case, calls in shapes:
        implementations = select_implementations([CUDNN, FLASH, PASA])
        found, _ = measure_case(case, implementations, clock, bandwidth, rounds)
        records += [each | {"shape": case.shape, "calls": calls} for each in found]
    return records


def judge(records: list[Record]) -> dict[str, Any]:
    """What must hold of the UNet: PASA finite with and without the bias, no slower and no farther off than flash."""
    unet = {(each["way"], bool(each["offset"])): each for each in records if each["model"] == "UNet"}
    ours, flash, biased = unet[PASA, False], unet[FLASH, False], unet[PASA, True]
    ran = all(each["status"] == OK for each in (ours, flash, biased))
    checks = {
        "finite": ran and ours["nonfinite_share"] == 0 == biased["nonfinite_share"],
        "error": ran and None not in (ours["rmse"], flash["rmse"]) and ours["rmse"] <= FARTHER * flash["rmse"],
        "not_slower_than_flash": ran and ours["to_flash"] >= 1,
    }
    return {"passed": all(checks.values()), "checks": checks}
