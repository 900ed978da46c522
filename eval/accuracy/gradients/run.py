"""Errors of the gradients of every backend that differentiates, the gate, and times beside torch's flash attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

import pasa
from pasa.eval.accuracy.gradients import times
from pasa.eval.accuracy.gradients.cases import CASES, GradientCase, Inputs, make_inputs
from pasa.eval.accuracy.gradients.truth import Gradients, exact_gradients, plain_gradients
from pasa.eval.kit import experiment, output
from pasa.eval.kit.device import describe, origin
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.eval.kit.tables import Table, number, short
from pasa.eval.kit.timing import CudaClock
from pasa.eval.speed.implementations import FLASH

FACTOR = 2.0  # of the error of a plain backward pass, which rounds P and dS nowhere; kernels round both, and dQ, dK, dV
NAMES = {"dq": "dQ", "dk": "dK", "dv": "dV"}
REFERENCE, TRITON = "reference", "triton"
EXAMPLE = "scores of 131072"
LONGEST = 8  # kernels of each shape that are shown
Record = dict[str, Any]


def run_gradients(
    seed: Annotated[int, "Seed of the inputs."] = 0,
    rounds: Annotated[int, "Timed turns of each implementation."] = 5,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Errors of gradients against FP64, and on a GPU their time beside SDPA's; exit 1 if one is too large.

    ``records`` are errors by case and backend; ``times`` and ``kernels`` are empty without a GPU, or if an error is
    too large.
    """
    at_least(0, seed=seed)
    at_least(1, rounds=rounds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends = [TRITON, REFERENCE] if device.type == "cuda" else [REFERENCE]
    steps = len(CASES) + (len(times.SHAPES) if device.type == "cuda" else 0)
    records: list[Record] = []
    for index, case in enumerate(CASES):
        progress(index, steps, case.name)
        records += judge_case(case, backends, seed, device)
    gate = judge(records)
    measured: dict[str, Any] = {"times": [], "kernels": []}
    if device.type == "cuda" and gate["passed"]:
        measured = times.measure(
            CudaClock(), rounds, times.kernel_times, lambda index, name: progress(len(CASES) + index, steps, name)
        )
    return {
        "note": "gradients on the device named here; nothing was run on an NPU",
        "environment": describe(device),
        "seed": seed,
        "rounds": rounds,
        "backends": backends,
        "cases": [case.describe() for case in CASES],
        "gate": gate,
        **measured,
        "records": records,
    }


def judge_case(case: GradientCase, backends: Sequence[str], seed: int, device: torch.device) -> list[Record]:
    """Return relative RMSEs of dQ, dK and dV: of every backend, and of the plain pass as `plain_dq` and so on."""
    inputs = make_inputs(case, seed).to(device)
    exact = exact_gradients(inputs)
    yardstick = {f"plain_{name}": error for name, error in errors(plain_gradients(inputs), exact).items()}
    return [
        {
            "case": case.name,
            "backend": backend,
            "judged": case.kernels_judged or backend != TRITON,
            **errors(gradients(inputs, backend), exact),
            **yardstick,
        }
        for backend in backends
    ]


def gradients(inputs: Inputs, backend: str) -> Gradients:
    """Return the gradients of the public function, by autograd."""
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = pasa.attention(
        q, k, v, attn_mask=inputs.mask, is_causal=inputs.causal, return_lse=True, backend=backend
    )  # fmt: skip
    results, grads = [out], [inputs.grad]
    if inputs.grad_lse is not None:
        results, grads = [out, lse], [inputs.grad, inputs.grad_lse]
    dq, dk, dv = torch.autograd.grad(results, (q, k, v), grads)
    return dq, dk, dv


def errors(measured: Gradients, exact: Gradients) -> dict[str, float]:
    """Return ||x - exact|| / ||exact|| of each; NaN if x is not finite."""
    return {name: _error(x, true) for name, x, true in zip(NAMES, measured, exact, strict=True)}


def _error(x: Tensor, true: Tensor) -> float:
    return float((x.double() - true).norm() / true.norm()) if bool(x.isfinite().all()) else torch.nan


def judge(records: Sequence[Record]) -> dict[str, Any]:
    """Check that every error that is judged is at most `FACTOR` times the plain pass's."""
    failures = [
        f"{title} of {each['backend']}: {each['case']}"
        for each in records
        for name, title in NAMES.items()
        if each["judged"] and not each[name] <= FACTOR * each[f"plain_{name}"]
    ]
    return {"passed": not failures, "judged": 3 * sum(each["judged"] for each in records), "failures": failures}


def tables(result: Record) -> list[Table]:
    """Return errors, times and kernels; tables without rows are left out."""
    return [table for table in (error_table(result), time_table(result), kernel_table(result)) if table.rows]


def error_table(result: Record) -> Table:
    """Return a row for every case and backend: our error, and the plain pass's."""
    rows = []
    for each in result["records"]:
        cells = [f"{short(each[name])} ({short(each[f'plain_{name}'])})" for name in NAMES]
        pairs = [(each[name], each[f"plain_{name}"]) for name in NAMES]
        finite = all(value is not None and value == value for pair in pairs for value in pair)
        worst = f"{max(ours / plain for ours, plain in pairs):.2f}" if finite else "not finite"
        rows.append([each["case"], each["backend"], *cells, worst + ", not judged" * (not each["judged"])])
    note = (
        "Relative RMSE against FP64; in brackets that of a plain backward pass in FP32 with saved output and "
        f"log-sum-exp. Worst: the largest of the three over the plain pass's; at most {FACTOR:g} where judged."
    )
    return Table("Errors of gradients", ["case", "backend", *NAMES.values(), "worst"], rows, note)


def time_table(result: Record) -> Table:
    """Return a row for every shape, part and way to call."""
    rows, same = [], ("shape", "part", "how")
    flash = {tuple(each[key] for key in same): each for each in result["times"] if each["implementation"] == FLASH}
    for ours in (each for each in result["times"] if each["implementation"] != FLASH):
        both = (flash[tuple(ours[key] for key in same)], ours)
        milliseconds = [number(each["median_ms"], ".4g") for each in both]
        host = [number(each.get("host_us"), ".0f") for each in both]
        ratios = [number(ours["tflops"], ".0f"), number(ours["to_flash"], ".2f")]
        case = ours["shape"] if ours["how"] == "eager" else f"{ours['shape']}, graph"
        rows.append([case, ours["part"], *milliseconds, *ratios, *host])
    header = ["causal, FP16", "part", f"{FLASH} ms", "pasa ms", "pasa TFLOPS", f"x {FLASH}", f"{FLASH} host us"]
    note = (
        f"x {FLASH}: its time over ours, above 1 is faster. graph: in a CUDA graph, without the host. host us: what "
        "the host takes to enqueue a call."
    )
    return Table("Forward and backward", [*header, "pasa host us"], rows, note)


def kernel_table(result: Record) -> Table:
    """Return the longest kernels of a forward and backward pass."""
    rows = []
    for shape in dict.fromkeys(each["shape"] for each in result["kernels"]):
        kernels = [each for each in result["kernels"] if each["shape"] == shape]
        total = sum(each["ms"] for each in kernels)
        rows += [
            [shape, each["kernel"], f"{each['launches']:g}", f"{each['ms']:.4f}", f"{100 * each['ms'] / total:.0f} %"]
            for each in kernels[:LONGEST]
        ]
    note = (
        "By torch's profiler. centre, rows, keys and queries_kernel are the backward pass; torch's own find its units."
    )
    return Table("Kernels of pasa, forward + backward", ["shape", "kernel", "launches", "ms", "share"], rows, note)


def verdict(result: Record) -> str:
    """Return what the exit status says."""
    judged, failures = result["gate"]["judged"], result["gate"]["failures"]
    passed = f"All {judged} judged errors ({' and '.join(result['backends'])}) are within {FACTOR:g} times a plain "
    failed = f"{len(failures)} of {judged} errors are too large; nothing is timed"
    return experiment.verdict(result, f"{passed}backward pass's.", failed)


def summary(result: Record) -> str:
    """Return verdict, the errors of one case, times and origin, for README.md."""
    case = next(each for each in result["records"] if each["case"] == EXAMPLE)
    ours, plain = (", ".join(f"{title} {short(case[how + n])}" for n, title in NAMES.items()) for how in ("", "plain_"))
    example = f"With {EXAMPLE}: {case['backend']} {ours}; plain {plain}."
    table = time_table(result)
    return "\n\n".join([f"{verdict(result)} {example}", *([table.captioned()] if table.rows else []), origin(result)])


EXPERIMENT = Experiment(
    name="gradients",
    run=run_gradients,
    report=lambda result: [*tables(result), verdict(result), origin(result)],
    title="Gradients",
)
