"""The RMSE experiments: random cases on the emulation and on kernels, resonance, large biases, biases of one side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import product
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from pasa.eval.accuracy.rmse import cases, devices, report
from pasa.eval.accuracy.rmse.cases import COMPETITOR, GATED, NAIVE, SDPA, Case, Shape
from pasa.eval.accuracy.rmse.measure import Job, Record, compare, golden_by_head, measure, quotient
from pasa.eval.kit import output
from pasa.eval.kit.device import describe, find_device, pick_device
from pasa.eval.kit.error_metrics import generator, measure_errors
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.eval.kit.stored import pick
from pasa.ops.numerics.formats import FP16_MAX, OVERFLOWS, Overflow, round_to

EMULATED = (COMPETITOR, NAIVE, "pasa-paper", "pasa-paper-fp16", GATED, "pasa-exact-fp16")  # beside the kernels
COMPARED = (COMPETITOR, NAIVE, "pasa-paper", GATED)  # where Q and K share a large bias
SIDES = {"none": "", "K": "k", "Q": "q", "both": "qk"}
STEPS = {"stored": None, "fp16 sums": 16}  # channels between two roundings to FP16; None: the whole sum is rounded
OURS = "pasa"
# Constants that are added to N(0, 1) in all channels of Q and of K. Alone, a bias of 4000 makes scores of standard
# deviation 4000 sqrt(128) = 45,300, of which a seventh leaves FP16. Shared, 30 is enough: 30^2 128 = 115,200.
BIASES = {"none": (0, 0), "K": (0, 4000), "Q": (4000, 0), "both": (30, 30)}
TWELVE = tuple(range(12))  # seeds
Heads: TypeAlias = Annotated[int | None, "Heads of every case (the paper has 16)."]
Positions: TypeAlias = Annotated[int | None, "Sequence length of every case (the paper has 1280)."]
Seeds: TypeAlias = Annotated[Sequence[int], "Seeds, such as 0,1,2 (0; twelve for --large-bias, three for --sides)."]


def run_rmse(
    heads: Heads = None, seq: Positions = None, seeds: Seeds = (0,), progress: output.Report = output.silent
) -> dict[str, Any]:
    """RMSE of every arithmetic against FP64 on the paper's cases; exit 1 if the default one fails gate (a) or (b).

    Scores that overflow become infinite in all cases, and on the six of table 4 saturate as well.
    """
    table_4 = [case for case in cases.PAPER_CASES if case.paper_nan_share is not None]
    return _run(cases.PAPER_CASES, heads, seq, seeds, saturated=table_4, progress=progress)


def run_kernels(
    heads: Heads = None,
    seq: Positions = None,
    seeds: Seeds = (0,),
    device: Annotated[str | None, "Device, such as npu:0; default: the accelerator, or the CPU."] = None,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """The same on our kernels: those in Ascend C on an NPU, else Triton's, whose FP32 scores cannot overflow."""
    place = pick_device() if device is None else find_device(device)
    return measure_kernels(place, "npu" if place.type == "npu" else "triton", heads, seq, seeds, progress)


def measure_kernels(
    place: torch.device, backend: str, heads: Heads, seq: Positions, seeds: Seeds, progress: output.Report
) -> dict[str, Any]:
    """Measure the kernels of a backend on a device, beside the emulation."""
    kernels = tuple(each for each in cases.KERNELS if each.backend == backend)
    arithmetics = (*(each for each in cases.ARITHMETICS if each.name in EMULATED), *kernels)
    machine = describe(place)
    where: dict[str, Any] = {"device": place, "gated": f"{backend}-exact", "progress": progress}
    measured = _run(cases.PAPER_CASES, heads, seq, seeds, arithmetics=arithmetics, **where)
    named = {"triton": "Triton", "npu": "Ascend C"}[backend]
    note = f"{named} kernels on {machine['device']}, and the emulation of an NPU's arithmetic run there"
    return measured | {"note": note, "environment": machine}


def run_resonance(
    heads: Heads = None, seq: Positions = None, seeds: Seeds = (0,), progress: output.Report = output.silent
) -> dict[str, Any]:
    """Every arithmetic on waves along the head dimension."""
    return _run(cases.RESONANCE_CASES, heads, seq, seeds, saturated=cases.RESONANCE_CASES, progress=progress)


def run_large_bias(
    heads: Heads = None, seq: Positions = None, seeds: Seeds = TWELVE, progress: output.Report = output.silent
) -> dict[str, Any]:
    """FP16 score tiles beside FP32 attention where Q and K share a large bias (N(0, 1) + b on 16 of 128 channels)."""
    arithmetics = (*(each for each in cases.ARITHMETICS if each.name in COMPARED), SDPA)
    measured = _run(cases.BIAS_CASES, heads, seq, seeds, arithmetics=arithmetics, progress=progress)
    return {"ratios": bias_ratios(measured["records"]), **measured}


def _run(
    table: Sequence[Case],
    heads: int | None,
    seq: int | None,
    seeds: Sequence[int],
    saturated: Sequence[Case] = (),
    **options: Any,
) -> dict[str, Any]:
    """Compare arithmetics on cases of other sizes, where sizes are set; those `saturated` in both overflow modes."""
    at_least(1, heads=heads, seq=seq)
    at_least(0, seeds=min(seeds))
    jobs: list[Job] = []
    described = []
    for case in table:
        batch, case_heads, case_seq, dim = case.shape
        resized = dataclasses.replace(case, shape=(batch, heads or case_heads, seq or case_seq, dim))
        modes = OVERFLOWS if case in saturated else OVERFLOWS[:1]
        jobs += [(resized, seed, mode) for seed in seeds for mode in modes]
        described.append(dataclasses.asdict(resized) | {"name": case.name})
    return {"note": output.NOTE, "shape": described[0]["shape"], "cases": described, **compare(jobs, **options)}


def bias_ratios(records: Sequence[Record]) -> list[Record]:
    """Per case: RMSE of each arithmetic pooled over the seeds, its ratio to the two FP32 ones, and the worst seed's."""
    rows = []
    for case in dict.fromkeys(each["case"] for each in records):
        rmse: dict[str, list[float]] = {}
        for each in pick(records, case=case):
            rmse.setdefault(each["arithmetic"], []).append(each["rmse"])
        row: Record = {"case": case} | {name: math.hypot(*x) / math.sqrt(len(x)) for name, x in rmse.items()}
        for other in (COMPETITOR, SDPA.name):
            row[f"pooled_to_{other}"] = quotient(row[GATED], row[other])
            row[f"worst_to_{other}"] = max(map(quotient, rmse[GATED], rmse[other]))
        rows.append(row)
    return rows


def run_sides(
    heads: Heads = None, seq: Positions = None, seeds: Seeds = (0, 1, 2), progress: output.Report = output.silent
) -> dict[str, Any]:
    """Shifts of K, of Q and of both where K, Q or both have a bias.

    Softmax and P V are FP64, so every error is one of the stored scores. Those are rounded once, as a cube stores its
    FP32 sums, or at every 16 channels, as GPUs do that accumulate in FP16 (FlashInfer's ``use_fp16_qk_reduction``).
    ``records``: per case, shift, kind of sum and seed the number of stored scores beyond FP16, the share of outputs
    that are not finite where such scores become infinite, and the RMSE where they saturate. Records of shift "pasa"
    are those of the operator itself, which rounds P and its output to FP16 as well.
    """
    at_least(1, heads=heads, seq=seq)
    shape = (1, heads or 2, seq or 1024, 128)
    jobs, records = list(product(BIASES, seeds)), []
    for done, (biased, seed) in enumerate(jobs):
        progress(done, len(jobs), f"bias in {biased}, seed {seed}")
        q, k, v = draw_biased(biased, shape, seed)
        golden, head = golden_by_head(q, k, v), {"case": biased, "seed": seed}
        for shift, sums in product(SIDES, STEPS):
            errors = _stored(q, k, v, golden, SIDES[shift], STEPS[sums])
            records.append(head | {"shift": shift, "sums": sums} | errors)
        records.append(head | {"shift": OURS, "sums": "stored"} | _operator(q, k, v, golden))
    head = {"note": output.NOTE, "seeds": list(seeds), "shape": shape, "biases": BIASES}
    return head | {"gate": judge_sides(records), "records": records}


def draw_biased(biased: str, shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q, k, v) in FP16 with the biases of a case; V has none."""
    q, k, v = (torch.randn(shape, generator=generator(seed, "sides", biased, part)) for part in "qkv")
    q_bias, k_bias = BIASES[biased]
    return (q + q_bias).half(), (k + k_bias).half(), v.half()


def judge_sides(records: Sequence[Record]) -> dict[str, Any]:
    """Check that shifted keys leave no score beyond FP16 but under a bias of Q alone, and that outputs are finite."""
    failures = []
    for each in records:
        what = f"bias in {each['case']}, shift {each['shift']}, seed {each['seed']}"
        if each["shift"] == "K" and each["case"] != "Q" and each["overflowed"]:
            failures.append(f"{what}: {each['overflowed']} scores beyond FP16")
        if each["shift"] == OURS and each["nonfinite_share"]:
            failures.append(f"{what}: {each['nonfinite_share']:.3g} of the output is not finite")
    return {"passed": not failures, "failures": failures}


def _stored(q: Tensor, k: Tensor, v: Tensor, golden: Tensor, side: str, step: int | None) -> Record:
    infinite, saturated = (stored_scores(q, k, side, step, mode) for mode in OVERFLOWS)
    return {
        "overflowed": int((~(infinite[0].abs() <= FP16_MAX)).sum()),
        "nonfinite_share": measure_errors(attend(*infinite, v), golden).nonfinite_share,
        "rmse": measure_errors(attend(*saturated, v), golden).rmse,
    }


def _operator(q: Tensor, k: Tensor, v: Tensor, golden: Tensor) -> Record:
    """Measure our default on the reference; scores that it stores as -inf or -65504 have no weight (its README)."""
    ours = next(each for each in cases.ARITHMETICS if each.name == GATED)
    infinite, saturated = (measure(ours, q, k, v, golden, mode) for mode in OVERFLOWS)
    count = q.shape[:3].numel() * k.shape[2]
    return {
        "overflowed": round(count * (infinite["scores_nonfinite_share"] + infinite["scores_saturated_share"])),
        "nonfinite_share": infinite["nonfinite_share"],
        "rmse": saturated["rmse"],
    }


def stored_scores(q: Tensor, k: Tensor, side: str, step: int | None, overflow: Overflow) -> tuple[Tensor, Tensor]:
    """Return Q K^T as FP16 stores it without the means of `side`, and what must be added to the scores of each key.

    A mean of K adds the same to all scores of a row, which softmax cancels. A mean of Q adds q_mean . k_j, which it
    does not: that is added back. Means are over the sequence, rounded to FP16, and so are the differences. `side` has
    letters out of "qk". The sum is rounded to FP16 after each `step` channels, or once at the end. Scores (B, H, Sq,
    Skv) are FP32 tensors of FP16 values, not scaled; the addition is (B, H, 1, Skv).
    """
    added = torch.zeros(*k.shape[:2], 1, k.shape[2])
    if "k" in side:
        k = k - k.float().mean(2, keepdim=True).half()
    if "q" in side:
        mean = q.float().mean(2, keepdim=True).half()
        q, added = q - mean, mean.float() @ k.float().mT
    total = torch.zeros(())
    for part_q, part_k in zip(*(x.float().split(step or x.shape[-1], -1) for x in (q, k)), strict=True):
        total = round_to(total + part_q @ part_k.mT, "fp16", overflow=overflow)
    return total, added


def attend(tile: Tensor, added: Tensor, v: Tensor) -> Tensor:
    """Return softmax of the scaled scores, times V, in FP64; the head dimension of V is that of the keys."""
    scores = tile.double() + added.double()
    return torch.softmax(scores / v.shape[-1] ** 0.5, -1) @ v.double()


EXPERIMENT = Experiment(
    name="rmse",
    run=run_rmse,
    report=report.rmse,
    title="RMSE on the paper's cases",
    figures=report.draw,
    variants=(
        Experiment("kernels", run_kernels, report.rmse, "RMSE of the Triton kernels on the paper's cases"),
        Experiment("resonance", run_resonance, report.rmse, "RMSE under resonance"),
        Experiment("large-bias", run_large_bias, report.large_bias, "Q and K share a large bias"),
        Experiment("sides", run_sides, report.sides, "Which side to shift"),
        devices.BACKENDS,
        devices.LAYERS,
    ),
)
