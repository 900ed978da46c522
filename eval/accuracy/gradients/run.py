"""Errors of the gradients of every backend that differentiates, the gate, and times beside torch's flash attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pasa
from pasa.eval.accuracy.gradients.cases import BATCH, CASES, GradientCase, Inputs, make_inputs
from pasa.eval.accuracy.gradients.truth import Gradients, exact_gradients, plain_gradients
from pasa.eval.kit import experiment, output
from pasa.eval.kit.device import describe, find_device, named_here, origin, pick_device
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.eval.kit.stored import pick
from pasa.eval.kit.tables import Column, Table, short
from pasa.eval.kit.timing import Call, Clock, CudaClock, interleave, ratio
from pasa.eval.kit.timing import summary as summary_of
from pasa.eval.speed.cases import SpeedCase
from pasa.eval.speed.implementations import FLASH

FACTOR = 2.0  # of the error of a plain backward pass, which rounds P and dS nowhere; kernels round both, and dQ, dK, dV
NAMES = {"dq": "dQ", "dk": "dK", "dv": "dV"}
REFERENCE, TRITON, OURS = "reference", "triton", "pasa"
EXAMPLE = "scores of 131072"
PARTS = {"forward": 1.0, "forward + backward": 3.5}  # of `SpeedCase.flops`: two products forward, five backward
SHAPES = (
    SpeedCase("4x12x1024x64", 4, 12, 12, 1024, 1024, 64, causal=True),
    SpeedCase("1x28x8192x128", 1, 28, 28, 8192, 8192, 128, causal=True),
    SpeedCase("1x28/4x8192x128", 1, 28, 4, 8192, 8192, 128, causal=True),
)
PROFILED = 5  # calls
LONGEST = 8  # kernels of each shape that are shown
Record = dict[str, Any]


def run_gradients(
    seed: Annotated[int, "Seed of the inputs."] = 0,
    rounds: Annotated[int, "Timed turns of each implementation."] = 5,
    device: Annotated[str | None, "Device, such as npu:0; default: the accelerator, or the CPU."] = None,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Errors of gradients against FP64, and on a GPU their time beside SDPA's; exit 1 if one is too large.

    ``records`` are errors by case and backend; ``times`` and ``kernels`` are empty without a GPU, or if an error is
    too large.
    """
    at_least(0, seed=seed)
    at_least(1, rounds=rounds)
    place = pick_device() if device is None else find_device(device)
    on_gpu = place.type == "cuda"
    backends = [TRITON, REFERENCE] if on_gpu else [REFERENCE]
    steps = len(CASES) + len(SHAPES) * on_gpu
    records: list[Record] = []
    for index, case in enumerate(CASES):
        progress(index, steps, case.name)
        records += judge_case(case, backends, seed, place)
    gate = judge(records)
    measured: dict[str, list[Record]] = {"times": [], "kernels": []}
    if on_gpu and gate["passed"]:
        measured = measure(CudaClock(), rounds, lambda index, name: progress(len(CASES) + index, steps, name))
    return {
        "note": named_here("gradients", place),
        "environment": describe(place),
        "seed": seed,
        "rounds": rounds,
        "backends": backends,
        "cases": [asdict(case) | {"batch": BATCH} for case in CASES],
        "gate": gate,
        **measured,
        "records": records,
    }


def judge_case(case: GradientCase, backends: Sequence[str], seed: int, device: torch.device) -> list[Record]:
    """Return relative RMSEs of dQ, dK and dV: of every backend, and of the plain pass as `plain_dq` and so on."""
    inputs = make_inputs(case, seed, device)
    exact = exact_gradients(inputs)
    yardstick = {f"plain_{name}": error for name, error in errors(plain_gradients(inputs), exact).items()}
    records: list[Record] = []
    for backend in backends:
        head = {"case": case.name, "backend": backend, "judged": case.kernels_judged or backend != TRITON}
        records.append(head | errors(gradients(inputs, backend), exact) | yardstick)
    return records


def gradients(inputs: Inputs, backend: str) -> Gradients:
    """Return the gradients of the public function, by autograd."""
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    mask, causal = inputs.mask, inputs.causal
    results = pasa.attention(q, k, v, attn_mask=mask, is_causal=causal, return_lse=True, backend=backend)
    grads = [inputs.grad] if inputs.grad_lse is None else [inputs.grad, inputs.grad_lse]
    dq, dk, dv = torch.autograd.grad(results[: len(grads)], (q, k, v), grads)
    return dq, dk, dv


def errors(measured: Gradients, exact: Gradients) -> dict[str, float]:
    """Return ||x - exact|| / ||exact|| of each; NaN if x is not finite."""
    return {
        name: float((x.double() - true).norm() / true.norm()) if bool(x.isfinite().all()) else torch.nan
        for name, x, true in zip(NAMES, measured, exact, strict=True)
    }


def judge(records: Sequence[Record]) -> dict[str, Any]:
    """Check that every error that is judged is at most `FACTOR` times the plain pass's."""
    failures = [
        f"{title} of {each['backend']}: {each['case']}"
        for each in records
        for name, title in NAMES.items()
        if each["judged"] and not each[name] <= FACTOR * each[f"plain_{name}"]
    ]
    return {"passed": not failures, "judged": 3 * sum(each["judged"] for each in records), "failures": failures}


def calls(shape: SpeedCase, device: torch.device) -> dict[str, dict[str, Call]]:
    """Return the timed calls by part and implementation, each on its own copy of the inputs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = shape.inputs(device)
    grad = torch.randn_like(inputs.q)
    flash = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=inputs.q.shape[1] > inputs.k.shape[1])
    implementations: dict[str, tuple[Callable[..., Tensor], Any]] = {
        OURS: (partial(pasa.attention, is_causal=True, backend=TRITON), nullcontext),
        FLASH: (flash, partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
    }
    made: dict[str, dict[str, Call]] = {part: {} for part in PARTS}
    for name, (attend, scope) in implementations.items():
        for part, function in zip(PARTS, (forward, forward_and_backward), strict=True):
            leaves = [x.requires_grad_() for x in inputs.copy().tensors]
            made[part][name] = Call(partial(function, attend, leaves, grad.clone()), scope)
    return made


@torch.no_grad()
def forward(attend: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> Tensor:
    """Return the output."""
    return attend(*leaves)


def forward_and_backward(attend: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> Tensor:
    """Return the gradient of the queries, after that of keys and values was formed as well."""
    return torch.autograd.grad(attend(*leaves), leaves, grad)[0]


def measure(clock: Clock, rounds: int, progress: Callable[[int, str], None]) -> dict[str, list[Record]]:
    """Time all shapes eagerly and in CUDA graphs, and the kernels of a forward and backward pass of ours."""
    times: list[Record] = []
    kernels: list[Record] = []
    for index, shape in enumerate(SHAPES):
        progress(index, shape.name)
        for part, eager in calls(shape, clock.device).items():
            graphed = {name: clock.graph(call) for name, call in eager.items()}
            host = {name: {"host_us": round(clock.host_us(call))} for name, call in eager.items()}
            for how, timed in (("eager", eager), ("graph", graphed)):
                head = {"shape": shape.name, "part": part, "how": how}
                taken_by, _ = interleave(clock, timed, rounds)
                for name, taken in taken_by.items():
                    numbers = summary_of(taken)
                    numbers["tflops"] = PARTS[part] * shape.flops / numbers["median_ms"] * 1e-9
                    numbers["to_flash"] = ratio(taken, taken_by[FLASH])
                    times.append(head | {"implementation": name} | numbers | (host[name] if how == "eager" else {}))
        kernels += [{"shape": shape.name} | each for each in kernel_times(eager[OURS])]
    return {"times": times, "kernels": kernels}


def kernel_times(call: Call) -> list[Record]:
    """Return milliseconds per call of each kernel and its launches, the longest first; empty without a profiler."""
    from torch.profiler import ProfilerActivity, profile

    call.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            call.run()
        torch.cuda.synchronize()
    seen = [each for each in profiled.key_averages() if each.device_type.name == "CUDA"]
    times = [(each.self_device_time_total / PROFILED * 1e-3, each) for each in seen if each.self_device_time_total > 0]
    return [
        {"kernel": each.key[:60], "ms": ms, "launches": each.count / PROFILED}  # templates of torch's go on for lines
        for ms, each in sorted(times, key=lambda pair: -pair[0])
    ]


def error_table(result: Record) -> Table:
    """Return a row for every case and backend: our error, and the plain pass's."""
    note = (
        "Relative RMSE against FP64; in brackets that of a plain backward pass in FP32 with saved output and "
        f"log-sum-exp. Worst: the largest of the three over the plain pass's; at most {FACTOR:g} where judged."
    )
    columns: dict[str, Column] = {"case": "case", "backend": "backend"}
    columns |= {title: partial(_error_pair, name) for name, title in NAMES.items()} | {"worst": _worst}
    return Table.of("Errors of gradients", result["records"], columns, note)


def _error_pair(name: str, record: Mapping[str, Any]) -> str:
    return f"{short(record[name])} ({short(record[f'plain_{name}'])})"


def _worst(record: Mapping[str, Any]) -> str:
    pairs = [(record[name], record[f"plain_{name}"]) for name in NAMES]
    finite = all(value is not None and value == value for pair in pairs for value in pair)
    worst = f"{max(ours / plain for ours, plain in pairs):.2f}" if finite else "not finite"
    return worst + ", not judged" * (not record["judged"])


def time_table(result: Record) -> Table:
    """Return a row for every shape, part and way to call."""
    records = []
    for ours in pick(result["times"], implementation=OURS):
        same = {name: ours[name] for name in ("shape", "part", "how")}
        (flash,) = pick(result["times"], implementation=FLASH, **same)
        case = ours["shape"] + ", graph" * (ours["how"] == "graph")
        records.append(ours | {"case": case, "flash_ms": flash["median_ms"], "flash_us": flash.get("host_us")})
    columns: dict[str, Column] = {
        "causal, FP16": "case",
        "part": "part",
        f"{FLASH} ms": ("flash_ms", ".4g"),
        "pasa ms": ("median_ms", ".4g"),
        "pasa TFLOPS": ("tflops", ".0f"),
        f"x {FLASH}": ("to_flash", ".2f"),
        f"{FLASH} host us": ("flash_us", ".0f"),
        "pasa host us": ("host_us", ".0f"),
    }
    note = (
        f"x {FLASH}: time of {FLASH} over ours; above 1 ours is faster. graph: in a CUDA graph, without the host. "
        "host us: what the host takes to enqueue a call."
    )
    return Table.of("Forward and backward", records, columns, note)


def kernel_table(result: Record) -> Table:
    """Return the longest kernels of a forward and backward pass."""
    records = []
    for shape in dict.fromkeys(each["shape"] for each in result["kernels"]):
        kernels = pick(result["kernels"], shape=shape)
        total = sum(each["ms"] for each in kernels)
        records += [each | {"share": each["ms"] / total} for each in kernels[:LONGEST]]
    columns: dict[str, Column] = {"shape": "shape", "kernel": "kernel", "launches": ("launches", "g")}
    columns |= {"ms": ("ms", ".4f"), "share": lambda each: f"{100 * each['share']:.0f} %"}
    note = (
        "By torch's profiler. centre, rows, keys and queries_kernel are the backward pass; torch's own find its units."
    )
    return Table.of("Kernels of pasa, forward + backward", records, columns, note)


def verdict(result: Record) -> str:
    """Return what the exit status says."""
    judged, failures = result["gate"]["judged"], result["gate"]["failures"]
    passed = f"All {judged} judged errors ({' and '.join(result['backends'])}) are within {FACTOR:g} times a plain "
    failed = f"{len(failures)} of {judged} errors are too large; nothing is timed"
    return experiment.verdict(result, f"{passed}backward pass's.", failed)


def summary(result: Record) -> str:
    """Return verdict, the errors of one case, times and origin, for README.md."""
    case = pick(result["records"], case=EXAMPLE)[0]
    ours, plain = (", ".join(f"{title} {short(case[how + n])}" for n, title in NAMES.items()) for how in ("", "plain_"))
    example = f"Errors with {EXAMPLE}: {case['backend']} {ours}; a plain backward pass {plain}."
    return "\n\n".join([f"{verdict(result)} {example}", time_table(result).captioned(), origin(result)])


def report(result: Record) -> list[Table | str]:
    """Return errors, times and kernels; tables without rows are left out."""
    tables = [table for table in (error_table(result), time_table(result), kernel_table(result)) if table.rows]
    return [verdict(result), *tables, origin(result)]


EXPERIMENT = Experiment("gradients", run_gradients, report, "Gradients")
