"""Makes hostile calls of the backend `sdpa` with each of torch's kernels forced, and judges them against FP64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Annotated, Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pasa.eval.check_device import hostile
from pasa.eval.kit import output
from pasa.eval.kit.device import describe, find_device, origin, pick_device
from pasa.eval.kit.experiment import Experiment, gate, outcome
from pasa.eval.kit.stored import pick
from pasa.eval.kit.tables import Column, Table
from pasa.ops.attention.sdpa import fused

BACKEND = "sdpa"
COUNTED, RATIOS = ("calls", "faults", "outside"), ("error", "derived", "lse")
NOTE = (
    "Faults: elements that are NaN, infinite, or not 0 in rows without keys. Outside: elements beyond the values that "
    "their row sees, by 2^-10 max |V|. The others are largest errors over allowed errors. Error: 4 times that of "
    "attention with FP32 scores, plus 2^-10 max |V|, where FP32 scores determine the result. Derived, LSE: what FP32 "
    "sums may cause in the output and in the log-sum-exp."
)
Record = dict[str, Any]


@contextmanager
def _reduced() -> Iterator[None]:
    """Force torch's math path, and permit it to keep scores in FP16."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@contextmanager
def _unlisted() -> Iterator[None]:
    """Serve the device as one whose attention is not known: in FP32."""
    with mock.patch.dict(fused.FORMATS, clear=True):
        yield


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default": nullcontext,
    "unlisted": _unlisted,
    "cuDNN": partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION),
    "efficient": partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION),
    "flash": partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),
    "math": partial(sdpa_kernel, SDPBackend.MATH),
    "math, reduced": _reduced,
}
"""What a program may set before a call, by name. All but the first two choose among the kernels of CUDA."""
EVERYWHERE = ("default", "unlisted")


def run_hostile(
    device: Annotated[str | None, "A device, such as cuda:0 (the first accelerator, else the CPU)."] = None,
    progress: output.Report = output.silent,
) -> Record:
    """Hostile calls of the backend sdpa, by each kernel of torch, against FP64; exit 1 if one breaks a bound."""
    if device is not None:
        find_device(device)
    place = pick_device() if device is None else torch.device(device)
    names = tuple(SETTINGS) if place.type == "cuda" else EVERYWHERE
    records, cases, done = [], hostile.more_cases(), 0
    machine = describe(place)
    for kind, group in groupby(cases, key=lambda case: case[0]):
        progress(done, len(cases), kind)
        measured = list(_measure(list(group), names, str(place)))
        done += len(measured) // len(names)
        for name in names:
            records.append({"setting": name, "kind": kind} | summarise(pick(measured, setting=name)))
    checks = {name: all(map(holds, pick(records, setting=name))) for name in names}
    note = f"backend {BACKEND}, {len(cases)} calls with each setting"
    return {"note": note, "environment": machine, "gate": gate(checks), "records": records}


def _measure(cases: Sequence[hostile.Case], names: Sequence[str], device: str) -> Iterator[Record]:
    """Yield what each setting measures in each case; the truth is found once for all settings."""
    for case in cases:
        known = hostile.prepare_case(case)
        for name in names:
            with SETTINGS[name]():
                yield {"setting": name, "case": str(case[1:]), **hostile.measure(case, BACKEND, device, known)}


def summarise(measured: Iterable[Record]) -> Record:
    """Return the number of calls, the sums of counts and the largest ratios, with the case of the largest error."""
    measured = list(measured)
    counts = {name: sum(each[name] for each in measured) for name in COUNTED[1:]}
    worst = {name: max(each[name] for each in measured) for name in RATIOS}
    largest = max(measured, key=lambda each: each["faults"] + each["outside"] or max(each[name] for name in RATIOS))
    return {"calls": len(measured), **counts, **worst, "worst": largest["case"]}


def holds(record: Record) -> bool:
    """Return whether nothing is wrong, and every ratio is at most 1; NaN is not."""
    return not record["faults"] and not record["outside"] and all(record[name] <= 1 for name in RATIOS)


def setting_table(result: Record) -> Table:
    """Return a row for each setting, over all kinds of inputs."""
    rows = []
    for name in dict.fromkeys(each["setting"] for each in result["records"]):
        selected = pick(result["records"], setting=name)
        counts = {field: sum(each[field] for each in selected) for field in COUNTED}
        rows.append({"setting": name} | counts | {field: max(each[field] for each in selected) for field in RATIOS})
    return Table.of("Hostile calls", rows, {"setting": "setting", **_columns()}, NOTE)


def kind_table(result: Record) -> Table:
    """Return a row for each kind of inputs and setting."""
    return Table.of("By kind of inputs", result["records"], {"kind": "kind", "setting": "setting", **_columns()})


def _columns() -> dict[str, Column]:
    counted: dict[str, Column] = {name: (name, ".0f") for name in COUNTED}
    return counted | {name: (name, ".2f") for name in RATIOS}


EXPERIMENT = Experiment(
    name="hostile",
    run=run_hostile,
    report=lambda result: [setting_table(result), outcome(result), origin(result)],
    title="Hostile calls",
    appendix=lambda result: [kind_table(result)],
)
