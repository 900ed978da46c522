"""One denoising step of Stable Video Diffusion at its full size, on a GPU: time, memory and error by attention.

The models are built from configuration with random weights: shapes, kernels, time and memory are the real ones, the
picture is not. First as drawn; then with a bias in q and k that adds a constant to every score of the spatial
attention, so that FP16 scores overflow even after they have been scaled, as a GPU's eager attention stores them. Last,
every shape of attention of the step is timed alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.attention_calls import AttentionCalls
from pasa.eval.kit.device import describe, origin
from pasa.eval.kit.error_metrics import measure_errors
from pasa.eval.kit.experiment import Experiment, gate, outcome
from pasa.eval.kit.options import at_least, stages
from pasa.eval.kit.tables import Column, Table, short
from pasa.eval.kit.timing import Call, Clock, CudaClock, copy_bandwidth, interleave, ratio, summary
from pasa.eval.models.video.clip import whole_fp32
from pasa.eval.models.video.overflow import bias_scores
from pasa.eval.speed.cases import SpeedCase
from pasa.eval.speed.implementations import CUDNN, FLASH, select_implementations
from pasa.eval.speed.run import measure_case

TITLE = "One denoising step of the full-size video UNet"
SEED = 0
GUIDED = 2  # classifier-free guidance: every step runs the clip with and without the picture
OFFSET = 819200.0
"""Beyond 8 x 65504: at head dimension 64 the *scaled* scores pass what FP16 can hold, too."""
FARTHER = 1.10  # PASA may be this much farther from FP32 than SDPA flash
EAGER, SDPA, PASA = "eager", "sdpa", "pasa"
WAYS = {
    EAGER: "diffusers' AttnProcessor: scores stored in FP16, already scaled",
    SDPA: "torch SDPA as diffusers calls it, backend chosen by torch",
    FLASH: "the same, held to the flash backend",
    PASA: "pasa.patch_pipeline(model)",
}
Record = dict[str, Any]
FULL: Record = {
    "frames": 25, "height": 72, "width": 128, "decoded": 8, "unet": {},
    "vae": {
        "down_block_types": ("DownEncoderBlock2D",) * 4, "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
    },
}  # fmt: skip
"""SVD XT at 1024 x 576: sizes in latents (an eighth of the pixels), the frames that its VAE decodes at a time, and what
differs from the defaults of the classes."""


@dataclass(frozen=True)
class Work:
    """A model and a call of it: `run` returns one tensor, in the dtype of the model."""

    name: str
    model: Any
    run: Callable[[], Tensor]


def run_step(
    rounds: Annotated[int, "Timed turns of each attention."] = 3, progress: output.Report = output.silent
) -> Record:
    """Time a denoising step of the full-size video UNet on a CUDA device; exit 1 if PASA is slower or farther off."""
    at_least(1, rounds=rounds)
    with torch.inference_mode():
        clock = CudaClock()
        return measure(clock, FULL, rounds, copy_bandwidth(clock), stages(progress, 5))


def measure(clock: Clock, scale: Record, rounds: int, bandwidth: float, say: Callable[[str], None]) -> Record:
    """Do what `run_step` does, on any clock; `bandwidth` in bytes per second."""
    say("UNet in FP32")
    unet = _unet_step(scale, clock.device)
    bias_scores(unet.model, 0)
    golden = _in_fp32(unet)
    say("UNet")
    records = compare(unet, golden, clock, rounds)
    cases = attention_shapes(unet.model, unet.run)
    fixture = bias_scores(unet.model, OFFSET)
    say("UNet whose scores overflow")
    records += [each | {"offset": fixture["offset"]} for each in compare(unet, golden, clock, rounds)]
    del unet
    say("VAE")
    vae = _vae_decode(scale, clock.device)
    records += compare(vae, _in_fp32(vae), clock, rounds)
    del vae
    say("attention by shape")
    return {
        "gate": judge(records),
        "ways": WAYS,
        "sizes": {name: scale[name] for name in ("frames", "height", "width", "decoded")},
        "fixture": fixture,
        "rounds": rounds,
        "environment": describe(clock.device, "diffusers"),
        "shapes": [{"shape": case.shape, "calls": calls} for case, calls in cases],
        "attention": measure_attention(cases, clock, bandwidth, rounds),
        "records": records,
    }


def _unet_step(scale: Record, device: torch.device) -> Work:
    """Return the UNet in FP32, and one call of it on noise."""
    from diffusers import UNetSpatioTemporalConditionModel

    with _drawn(device):
        unet = UNetSpatioTemporalConditionModel(**scale["unet"]).eval().to(device)  # torch.Tensor() ignores the context
        latents = torch.randn(GUIDED, scale["frames"], unet.config.in_channels, scale["height"], scale["width"])
        context = torch.randn(GUIDED, 1, unet.config.cross_attention_dim)
        times = torch.tensor([[6.0, 127.0, 0.02]] * GUIDED)  # frames a second - 1, motion, noise: defaults
        step = torch.tensor(1.0)

    def run() -> Tensor:
        latents_, context_, times_ = (x.to(unet.dtype) for x in (latents, context, times))
        out: Tensor = unet(latents_, step, context_, added_time_ids=times_, return_dict=False)[0]
        return out

    return Work("UNet", unet, run)


def _vae_decode(scale: Record, device: torch.device) -> Work:
    """Return the temporal decoder's VAE in FP32, and its decoding of some frames of noise."""
    from diffusers import AutoencoderKLTemporalDecoder

    with _drawn(device):
        vae = AutoencoderKLTemporalDecoder(**scale["vae"]).eval().to(device)
        latents = torch.randn(scale["decoded"], vae.config.latent_channels, scale["height"], scale["width"])

    def run() -> Tensor:
        frames: Tensor = vae.decode(latents.to(vae.dtype), num_frames=scale["decoded"], return_dict=False)[0]
        return frames

    return Work("VAE", vae, run)


@contextmanager
def _drawn(device: torch.device) -> Iterator[None]:
    """Make everything inside lie on the device, with random values that depend on `SEED` alone."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(SEED)
        yield


def _in_fp32(work: Work) -> Tensor:
    """Return what the model computes in FP32, without TF32; leave the model in FP16."""
    with whole_fp32():
        golden = work.run()
    work.model.half()
    return golden


def compare(work: Work, golden: Tensor, clock: Clock, rounds: int) -> list[Record]:
    """Return a record for every way: distance from `golden`, memory, time."""
    calls = {way: Call(work.run, partial(_attention, work.model, way)) for way in WAYS}
    kept = {"model": work.name, "offset": 0}
    records = {way: {**kept, "way": way, **_try(call, golden, clock)} for way, call in calls.items()}
    timed = {way: calls[way] for way, record in records.items() if record["status"] == "ok"}
    times, _ = interleave(clock, timed, rounds, cold=False)
    for way, taken in times.items():
        records[way] |= summary(taken) | {"to_flash": ratio(taken, times[FLASH]) if FLASH in times else None}
    return list(records.values())


def _try(call: Call, golden: Tensor, clock: Clock) -> Record:
    """Return the errors and the memory of a call, or why it cannot run: too little memory, a backend that refuses."""
    try:
        errors = measure_errors(call.output(), golden)
        shown = {name: getattr(errors, name) for name in ("max_error", "rmse", "nonfinite_share")}
        return {"status": "ok", "why": "", **shown, "workspace_bytes": clock.workspace(call)}
    except Exception as error:
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()
        return {"status": "not run", "why": output.error_line(error)}


def _attention(model: Any, way: str) -> AbstractContextManager[Any]:
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


def judge(records: list[Record]) -> Record:
    """Return what must hold of the UNet: finite with and without the bias; no slower and no farther off than flash."""
    unet = {(each["way"], bool(each["offset"])): each for each in records if each["model"] == "UNet"}
    ours, flash, biased = unet[PASA, False], unet[FLASH, False], unet[PASA, True]
    ran = all(each["status"] == "ok" for each in (ours, flash, biased))
    return gate(
        {
            "finite": ran and ours["nonfinite_share"] == 0 == biased["nonfinite_share"],
            "error": ran and ours["rmse"] <= FARTHER * flash["rmse"],
            "not_slower_than_flash": ran and ours["to_flash"] >= 1,
        }
    )


def attention_shapes(model: Any, run: Callable[[], Tensor]) -> list[tuple[SpeedCase, int]]:
    """Return the attention that one run of the model asks for, most work first, and how often."""
    sizes: Counter[tuple[torch.Size, torch.Size]] = Counter()
    with pasa.patch_pipeline(model), AttentionCalls(lambda q, k: sizes.update([(q.shape, k.shape)])):
        run()
    cases = []
    for (q, k), calls in sizes.items():
        batch, heads, rows, dim = q
        cases.append((SpeedCase(f"{batch}x{heads}x{rows}x{k[2]}x{dim}", batch, heads, k[1], rows, k[2], dim), calls))
    return sorted(cases, key=lambda each: -each[1] * each[0].flops)


def measure_attention(cases: list[tuple[SpeedCase, int]], clock: Clock, bandwidth: float, rounds: int) -> list[Record]:
    """Time every shape alone, on random data, through the gate of the speed benchmark; a record an implementation."""
    implementations = select_implementations([CUDNN, FLASH, PASA])
    return [
        each | {"shape": case.shape, "calls": calls}
        for case, calls in cases
        for each in measure_case(case, implementations, clock, bandwidth, rounds)[0]
    ]


def table(result: Record) -> Table:
    """Return a row for every model, bias and way of attending."""
    size = result["sizes"]
    note = (
        f"{size['frames']} frames of {8 * size['width']} x {8 * size['height']}, guided; the VAE "
        f"decodes {size['decoded']} frames. Random weights. Errors: against FP32 without the bias. Beside "
        "flash: time of SDPA flash over that of the row. Memory: what the call allocates beyond weights and output. "
        + " ".join(f"{name}: {way}." for name, way in result["ways"].items())
        + " Not run on an NPU."
    )
    columns: dict[str, Column] = {
        "model": lambda each: each["model"] + (f", scores + {each['offset']:,}" if each["offset"] else ""),
        "attention": "way",
        "ms": ("median_ms", ".1f"),
        "beside flash": ("to_flash", ".2f"),
        "memory GiB": lambda each: f"{each['workspace_bytes'] / 2**30:.1f}" if each["status"] == "ok" else "-",
        "RMSE": lambda each: short(each["rmse"]) if each["status"] == "ok" else "-",
        "largest error": lambda each: short(each["max_error"]) if each["status"] == "ok" else each["why"][:60],
    }
    return Table.of(TITLE, result["records"], columns, note)


def shape_table(result: Record) -> Table:
    """Return a row for every shape of attention, and what they take together in a step."""
    times: dict[str, Record] = {}
    for each in result["attention"]:
        times.setdefault(each["shape"], {})[each["implementation"]] = each.get("median_ms")
    rows = [{"shape": each["shape"], "calls": each["calls"], **times[each["shape"]]} for each in result["shapes"]]
    total = {name: sum(row["calls"] * (row[name] or 0) for row in rows) for name in (FLASH, PASA)}
    columns: dict[str, Column] = {
        "shape": "shape",
        "calls": "calls",
        **{name: (name, ".3f") for name in (CUDNN, FLASH, PASA)},
        "pasa beside flash": lambda row: f"{row[FLASH] / row[PASA]:.2f}" if row[FLASH] and row[PASA] else "-",
    }
    note = "Each shape alone, random data, ms of one call; (batch, heads, queries x keys, head dim)."
    together = {"shape": "all of a step", "calls": sum(row["calls"] for row in rows), **total}
    return Table.of("Its attention", [*rows, together], columns, note)


EXPERIMENT = Experiment(
    name="video",
    run=run_step,
    report=lambda result: [outcome(result), table(result), shape_table(result), origin(result)],
    title=TITLE,
    needs_models=True,
)
