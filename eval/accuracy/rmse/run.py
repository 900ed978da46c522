"""The RMSE experiments: the paper's random cases, on the emulation and on kernels, resonance, and large biases."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeAlias

import torch

from pasa.eval.accuracy.rmse import plots, report
from pasa.eval.accuracy.rmse import shift_sides as sides
from pasa.eval.accuracy.rmse.cases import (
    ARITHMETICS,
    BIAS_CASES,
    COMPETITOR,
    GATED,
    GATED_KERNEL,
    KERNELS,
    NAIVE,
    PAPER_CASES,
    RESONANCE_CASES,
    SDPA,
    Case,
)
from pasa.eval.accuracy.rmse.gates import Record, quotient
from pasa.eval.accuracy.rmse.measure import Job, compare
from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.ops.numerics.formats import OVERFLOWS

EMULATED = (COMPETITOR, NAIVE, "pasa-paper", "pasa-paper-fp16", GATED, "pasa-exact-fp16")  # beside the kernels
COMPARED = (COMPETITOR, NAIVE, "pasa-paper", GATED)  # where Q and K share a large bias
Heads: TypeAlias = Annotated[int | None, "Heads of every case (the paper has 16)."]
Positions: TypeAlias = Annotated[int | None, "Sequence length of every case (the paper has 1280)."]
Seeds: TypeAlias = Annotated[Sequence[int], "Seeds, such as 0,1,2 (0; twelve for --large-bias, three for --sides)."]


def run_rmse(
    heads: Heads = None, seq: Positions = None, seeds: Seeds = (0,), progress: output.Report = output.silent
) -> dict[str, Any]:
    """RMSE of every arithmetic against FP64 on the paper's cases; exit 1 if the default one fails gate (a) or (b).

    Scores that overflow become infinite in all cases, and on the six of table 4 saturate as well.
    """
    table_4 = [case for case in PAPER_CASES if case.paper_nan_share is not None]
    return {"note": output.NOTE, **_run(PAPER_CASES, heads, seq, seeds, saturated=table_4, progress=progress)}


def run_kernels(
    heads: Heads = None, seq: Positions = None, seeds: Seeds = (0,), progress: output.Report = output.silent
) -> dict[str, Any]:
    """The same on the Triton kernels, on a GPU or interpreted; their score tiles are FP32 and cannot overflow."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arithmetics = (*(each for each in ARITHMETICS if each.name in EMULATED), *KERNELS)
    machine = describe(device)
    where: dict[str, Any] = {"device": device, "gated": GATED_KERNEL, "progress": progress}
    note = f"Triton kernels on {machine['device']}, and the emulation of an NPU's arithmetic run there"
    measured = _run(PAPER_CASES, heads, seq, seeds, arithmetics=arithmetics, **where)
    return {"note": note, "environment": machine, **measured}


def run_resonance(
    heads: Heads = None, seq: Positions = None, seeds: Seeds = (0,), progress: output.Report = output.silent
) -> dict[str, Any]:
    """Every arithmetic on waves along the head dimension."""
    measured = _run(RESONANCE_CASES, heads, seq, seeds, saturated=RESONANCE_CASES, progress=progress)
    return {"note": output.NOTE, **measured}


def run_large_bias(
    heads: Heads = None,
    seq: Positions = None,
    seeds: Seeds = tuple(range(12)),
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """FP16 score tiles beside FP32 attention where Q and K share a large bias (N(0, 1) + b on 16 of 128 channels)."""
    arithmetics = (*(each for each in ARITHMETICS if each.name in COMPARED), SDPA)
    measured = _run(BIAS_CASES, heads, seq, seeds, arithmetics=arithmetics, progress=progress)
    return {"note": output.NOTE, "ratios": bias_ratios(measured["records"]), **measured}


def _run(
    cases: Sequence[Case],
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
    for case in cases:
        batch, case_heads, case_seq, dim = case.shape
        resized = dataclasses.replace(case, shape=(batch, heads or case_heads, seq or case_seq, dim))
        modes = OVERFLOWS if case in saturated else OVERFLOWS[:1]
        jobs += [(resized, seed, mode) for seed in seeds for mode in modes]
        described.append(dataclasses.asdict(resized) | {"name": case.name, "shape": list(resized.shape)})
    return {"shape": described[0]["shape"], "cases": described, **compare(jobs, **options)}


def bias_ratios(records: Sequence[Record]) -> list[Record]:
    """Per case: RMSE of each arithmetic pooled over the seeds, its ratio to the two FP32 ones, and the worst seed's."""
    rows = []
    for case in dict.fromkeys(each["case"] for each in records):
        rmse: dict[str, dict[int, float]] = {}
        for each in records:
            if each["case"] == case:
                rmse.setdefault(each["arithmetic"], {})[each["seed"]] = each["rmse"]
        row: Record = {"case": case} | {name: _root_mean_square(by_seed.values()) for name, by_seed in rmse.items()}
        for other in (COMPETITOR, SDPA.name):
            worst = max(quotient(value, rmse[other][seed]) for seed, value in rmse[GATED].items())
            row |= {f"pooled_to_{other}": quotient(row[GATED], row[other]), f"worst_to_{other}": worst}
        rows.append(row)
    return rows


def _root_mean_square(values: Iterable[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values))


EXPERIMENT = Experiment(
    name="rmse",
    run=run_rmse,
    report=report.rmse,
    title="RMSE on the paper's cases",
    figures=plots.draw,
    variants=(
        Experiment("kernels", run_kernels, report.rmse, "RMSE of the Triton kernels on the paper's cases"),
        Experiment("resonance", run_resonance, report.rmse, "RMSE under resonance"),
        Experiment("large-bias", run_large_bias, report.large_bias, "Q and K share a large bias"),
        sides.EXPERIMENT,
    ),
)
