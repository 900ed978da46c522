"""Stages of `pasa check-device --npu`, each a list of named checks that run in a process of their own.

A check that kills its process is noted as failed, and the stage goes on behind it (`running.py`).
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

import pasa
from pasa.eval.accuracy.rmse.cases import PAPER_CASES, RandomCase
from pasa.eval.check_device import hostile
from pasa.eval.check_device.npu import probes_310p, speed
from pasa.eval.check_device.run import check
from pasa.eval.kit import output, overflowing
from pasa.eval.random_calls.run import run_soak
from pasa.ops import registry
from pasa.ops.attention.ascend import backend as npu_backend

Record: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[], Record]
PASSED, HARMLESS, DEVIATES, FAILED = "passed", "differs, harmless", "DEVIATES", "FAILED"
QUICK_SHAPE = (1, 1, 130, 64)  # of the paper's cases: two tiles and two blocks
RANDOM_CALLS, QUICK_RANDOM_CALLS = 200, 12
QUICK_HOSTILE = 9  # one hostile case in so many
ROUNDING = 2.0**-10  # of the largest value: the output's rounding to FP16, and that of the weights


def judged(passed: bool, detail: str, **more: Any) -> Record:
    """Return the record of a check that holds or not."""
    return {"verdict": PASSED if passed else FAILED, "detail": detail, **more}


# ---- calls


def smoke(device: str, quick: bool) -> dict[str, Check]:
    """Load the library, and make three calls whose scores overflow FP16."""

    def load() -> Record:
        why = npu_backend.library_error()
        return judged(why is None, why or "the library loads")

    def call() -> Record:
        checked = overflowing.check("npu", device, overflowing.inputs())
        return judged(checked["passed"], checked["why"] or f"largest error {checked['max_error']:.2e}")

    return {"load": load, "calls": call}


def paper(device: str, quick: bool) -> dict[str, Check]:
    """Attend to the paper's 15 cases in both overflow modes, at full or reduced length."""
    cases = [RandomCase(c.distribution, c.mean, c.amplitude, QUICK_SHAPE) if quick else c for c in PAPER_CASES]
    return {
        f"{case.name}, overflow={mode}": partial(attend_to_paper_case, case, mode, device)
        for case in cases
        for mode in ("inf", "saturate")
    }


def attend_to_paper_case(case: RandomCase, overflow: Any, device: str) -> Record:
    """Compare one case with FP64, and with attention whose scores are FP32; count what left the range of the values."""
    q, k, v = case.tensors(0)
    config = pasa.PasaConfig(overflow=overflow)
    out = pasa.attention(*(x.to(device) for x in (q, k, v)), backend="npu", config=config).cpu().double()
    golden, _ = pasa.golden_attention(q, k, v)
    plain = pasa.attention(q, k, v, backend="reference", config=pasa.PasaConfig(precision="fp32")).double()
    slack = ROUNDING * float(v.double().abs().max())
    beyond = outside(out, v, slack)
    ours, theirs = (float((x - golden).abs().max()) for x in (out, plain))
    allowed = 4 * theirs + slack
    passed = beyond == 0 and ours <= allowed
    return judged(passed, f"largest error {ours:.2e}, allowed {allowed:.2e}; {beyond} outputs beyond the values")


def outside(out: Tensor, v: Tensor, slack: float) -> int:
    """Count outputs beyond the values of their column by more than `slack`, and those that are not finite."""
    low, high = v.double().amin(2, keepdim=True) - slack, v.double().amax(2, keepdim=True) + slack
    return int((~((out >= low) & (out <= high))).sum())


def hostile_calls(device: str, quick: bool) -> dict[str, Check]:
    """Make the hostile calls of `pasa check-device` that the kernels take."""
    every = hostile.cases()
    cases = [case for case in every[:: QUICK_HOSTILE if quick else 1] if case[1] in ("none", "causal")]

    def call() -> Record:
        found = check(registry.BACKENDS["npu"], device, lambda text: None, cases)
        numbers = f"{found['faults']:.0f} faults, {found['outside']:.0f} outside, largest error {found['error']:.2f}"
        return judged(found["passed"], found["failure"] or f"{found['calls']} calls: {numbers}")

    return {"calls": call}


def random_calls(device: str, quick: bool) -> dict[str, Check]:
    """Make random calls, and hold them against FP64 and the guarantee."""

    def call() -> Record:
        found = run_soak(QUICK_RANDOM_CALLS if quick else RANDOM_CALLS, backend="npu", small=quick, device=device)
        gate, failures = found["gate"], [f"{each['why']} {json.dumps(each['shrunk'])}" for each in found["failures"]]
        return judged(gate["passed"], f"{gate['failed']} of {gate['run']} fail", failures=failures)

    return {"calls": call}


def probe(device: str, quick: bool) -> dict[str, Check]:
    """Compare the device with each assumption that no document promises, of the kernels for its chip."""
    probes = probes_310p.for_library()

    def compare(name: str) -> Record:
        assumption, find = probes[name]
        found = find(device)
        verdict = PASSED if not found.deviates else HARMLESS if found.harmless else DEVIATES
        return {"verdict": verdict, "detail": found.detail, "assumption": assumption}

    return {name: partial(compare, name) for name in probes}


def times(device: str, quick: bool) -> dict[str, Check]:
    """Time the kernels beside torch_npu's attention and the model of the chip."""
    cases = speed.cases(quick)
    return {case.name: partial(speed.measure, case, device) for case in cases}


STAGES: dict[str, Callable[[str, bool], dict[str, Check]]] = {
    "smoke": smoke,
    "probes": probe,
    "paper's cases": paper,
    "hostile calls": hostile_calls,
    "random calls": random_calls,
    "speed": times,
}
"""Each stage by name: a function of the device, and of whether the run is quick."""


def run_stage(name: str, device: str, quick: bool, skip: int) -> None:
    """Run the checks of a stage behind the first `skip`; print each record as a line of JSON on stdout."""
    for check_name, measure in list(STAGES[name](device, quick).items())[skip:]:
        print(json.dumps({"starts": check_name}), flush=True)
        started = time.perf_counter()
        try:
            record = measure()
        except Exception as error:  # of any kind: it is what the check reports
            record = judged(False, output.error_line(error))
        taken = {"seconds": round(time.perf_counter() - started, 1)}
        print(json.dumps(output.jsonable({"name": check_name} | record | taken)), flush=True)


if __name__ == "__main__":
    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")  # where torch does not load it by itself
    torch.set_grad_enabled(False)
    run_stage(sys.argv[1], sys.argv[2], sys.argv[3] == "quick", int(sys.argv[4]))
