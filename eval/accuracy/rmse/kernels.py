"""The paper's random cases on the Triton kernels, beside the emulation of the same modes on the same device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from pasa import PasaConfig
from pasa.eval.accuracy.rmse.cases import (
    ARITHMETICS,
    COMPETITOR,
    GATED,
    NAIVE,
    PAPER_CASES,
    SHAPE,
    Arithmetic,
    RandomCase,
)
from pasa.eval.accuracy.rmse.run import Job, Progress, check, run_jobs, wrap
from pasa.eval.kit.device import describe

EMULATED = (COMPETITOR, NAIVE, "pasa-paper", "pasa-paper-fp16", GATED, "pasa-exact-fp16")
KERNELS = (
    Arithmetic("triton-fp32", PasaConfig(precision="fp32"), "kernel: plain FP32-softmax flash attention", "triton"),
    Arithmetic("triton-paper", PasaConfig(recovery="paper"), "kernel: the published recovery, rows in FP32", "triton"),
    Arithmetic(
        "triton-paper-fp16",
        PasaConfig(recovery="paper", accumulate="fp16"),
        "kernel: the published algorithm to the letter",
        "triton",
    ),
    Arithmetic("triton-exact", PasaConfig(), "kernel: the default", "triton"),
    Arithmetic("triton-exact-fp16", PasaConfig(accumulate="fp16"), 'kernel: accumulate="fp16"', "triton"),
)
GATED_KERNEL = "triton-exact"


def run_kernels(
    heads: int = SHAPE[1],
    seq: int = SHAPE[2],
    dim: int = SHAPE[3],
    seeds: Sequence[int] = (0,),
    cases: Sequence[RandomCase] = PAPER_CASES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the kernels and what they are to be compared with, on a GPU, or interpreted on the CPU.

    Parameters
    ----------
    heads, seq, dim : int
        Shape (1, heads, seq, dim); the paper's is (1, 16, 1280, 128).
    seeds : sequence of int
    cases : sequence of RandomCase
    progress : callable, optional
        Called with (done, total, what comes next).

    Returns
    -------
    dict
        As of `run.run_rmse`; the gates judge the default mode of the kernels, whose score tiles are FP32 and cannot
        overflow.

    Raises
    ------
    ValueError
        On a size below 1 or no seed.
    NotImplementedError
        If the Triton backend cannot run here, with the reason.
    """
    check(seeds, heads=heads, seq=seq, dim=dim)
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sized = [dataclasses.replace(case, shape=(1, heads, seq, dim)) for case in cases]
    jobs: list[Job] = [(case, seed, "inf") for case in sized for seed in seeds]
    arithmetics = (*(each for each in ARITHMETICS if each.name in EMULATED), *KERNELS)
    records = run_jobs(jobs, arithmetics, progress, device)
    table = [dataclasses.asdict(case) | {"name": case.name} for case in sized]
    what = {"shape": [1, heads, seq, dim], "seeds": list(seeds), "overflow": "inf", "cases": table}
    result = wrap("rmse-kernels", started, what, records, arithmetics, GATED_KERNEL)
    on = describe(device)
    note = f"Triton kernels on {on['device']}, and the emulation of an NPU's arithmetic run there"
    return result | {"environment": on, "note": note}
