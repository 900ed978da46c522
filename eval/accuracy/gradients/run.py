"""Errors of the gradients of every backend that has its own, the gate, and the times behind it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.accuracy.gradients import times
from pasa.eval.accuracy.gradients.cases import CASES, GradientCase, Inputs, make_inputs
from pasa.eval.accuracy.gradients.truth import Gradients, exact_gradients, plain_gradients
from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.timing import CudaClock

FACTOR = 2.0  # of the error of a plain backward pass, which rounds P and dS nowhere; kernels round both, and dQ, dK, dV
NOTE = "gradients on the device named here; nothing was run on an NPU"
NAMES = ("dq", "dk", "dv")
REFERENCE, TRITON = "reference", "triton"
Record = dict[str, Any]


def run_gradients(seed: int = 0, rounds: int = 5, progress: output.Report | None = None) -> dict[str, Any]:
    """Judge gradients on the current CUDA device, and time them if they pass; without one, those of torch alone.

    Parameters
    ----------
    seed : int
        Of the inputs.
    rounds : int
        Turns of each implementation that is timed.
    progress : callable, optional

    Returns
    -------
    dict
        With ``records`` (errors by case and backend), ``gate``, ``times`` and ``kernels``: both empty without a GPU.

    Raises
    ------
    ValueError
        For a negative seed or no round.
    """
    if seed < 0:
        raise ValueError(f"seed={seed} is negative")
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends = [TRITON, REFERENCE] if device.type == "cuda" else [REFERENCE]
    started, say = time.perf_counter(), progress or (lambda done, total, label: None)
    steps = len(CASES) + (len(times.SHAPES) if device.type == "cuda" else 0)
    records: list[Record] = []
    for index, case in enumerate(CASES):
        say(index, steps, case.name)
        records += judge_case(case, backends, seed, device)
    gate = judge(records)
    found: dict[str, Any] = {"times": [], "kernels": []}
    if device.type == "cuda" and gate["passed"]:
        found = times.measure(
            CudaClock(), rounds, times.kernel_times, lambda index, name: say(len(CASES) + index, steps, name)
        )
    return {
        "experiment": "gradients",
        "note": NOTE,
        "environment": describe(device),
        "seed": seed,
        "rounds": rounds,
        "duration_s": round(time.perf_counter() - started, 1),
        "backends": backends,
        "cases": [case.describe() for case in CASES],
        "gate": gate,
        **found,
        "records": records,
    }


def judge_case(case: GradientCase, backends: Sequence[str], seed: int, device: torch.device) -> list[Record]:
    """Relative RMSE of dQ, dK and dV: of every backend, and of the plain pass as `plain_dq` and so on."""
    given = make_inputs(case, seed).to(device)
    exact = exact_gradients(given)
    yardstick = {f"plain_{name}": error for name, error in errors(plain_gradients(given), exact).items()}
    return [
        {
            "case": case.name,
            "backend": backend,
            "judged": case.kernels_judged or backend != TRITON,
            **errors(gradients(given, backend), exact),
            **yardstick,
        }
        for backend in backends
    ]


def gradients(given: Inputs, backend: str) -> Gradients:
    """Those of the public function, by autograd."""
    q, k, v = (x.detach().requires_grad_() for x in (given.q, given.k, given.v))
    out, lse = pasa.attention(
        q, k, v, attn_mask=given.mask, is_causal=given.causal, return_lse=True, backend=backend
    )  # fmt: skip
    results, grads = [out], [given.grad]
    if given.grad_lse is not None:
        results, grads = [out, lse], [given.grad, given.grad_lse]
    dq, dk, dv = torch.autograd.grad(results, (q, k, v), grads)
    return dq, dk, dv


def errors(found: Gradients, exact: Gradients) -> dict[str, float]:
    """||x - exact|| / ||exact|| of each; NaN if x is not finite."""
    return {name: _error(x, true) for name, x, true in zip(NAMES, found, exact, strict=True)}


def _error(x: Tensor, true: Tensor) -> float:
    return float((x.double() - true).norm() / true.norm()) if bool(x.isfinite().all()) else torch.nan


def judge(records: Sequence[Record]) -> dict[str, Any]:
    """Every error that is judged is at most `FACTOR` times the plain pass's."""
    failures = [
        {"case": each["case"], "backend": each["backend"], "of": name}
        for each in records
        for name in NAMES
        if each["judged"] and not each[name] <= FACTOR * each[f"plain_{name}"]
    ]
    return {"passed": not failures, "judged": sum(3 for each in records if each["judged"]), "failures": failures}
