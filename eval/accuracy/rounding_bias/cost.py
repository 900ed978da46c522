"""What softmax="unbiased" costs on a GPU: its time over that of "safe". Outputs are judged first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

import pasa
from pasa.eval.accuracy.rounding_bias.cost_cases import CASES, DATA, DTYPES, TARGETS, Data, make_inputs
from pasa.eval.accuracy.rounding_bias.statistics import spacing
from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.timing import Call, Clock, CudaClock, Rounds, interleave, quantile
from pasa.eval.speed.cases import Inputs, SpeedCase
from pasa.eval.speed.gate import Gate

SAFE, UNBIASED = pasa.PasaConfig(), pasa.PasaConfig(softmax="unbiased")
ROUNDS = 9
# Of a drawn row's values a quarter differ from nearest in the mean. Fewer than these: FP32 sums in another order.
DIFFERENT = 1 / 16
RANDOM_DRAWN = 1e-3  # of random rows, or one row: ten times what `dither.FLAG_SIGMAS` allows
GROWTH = 1.05  # of errors of random rows in BF16
FARTHEST = 1.1  # spacings from FP64: a draw errs by less than one, and P in FP16 by 2^-11 of a trifle of a tenth
SIGMAS, COIN = 4.0, 0.5  # of a bias that is gone; a tie errs by half a spacing to either side
DRIFT = 2.0**-7  # spacings by which the trifle itself, weighed in 16 bits, may move the mean
NOTE = "on the device named here; nothing was run on an NPU"
Record = dict[str, Any]


def run_cost(rounds: int = ROUNDS, progress: output.Report | None = None) -> dict[str, Any]:
    """Judge and time every case on the current CUDA device.

    Parameters
    ----------
    rounds : int
        Turns of each softmax.
    progress : callable, optional

    Returns
    -------
    dict
        With ``records`` (a case, a format, data: checks, times where they hold, ratio) and ``gate``.

    Raises
    ------
    ValueError
        For no round.
    NotImplementedError
        Without a CUDA device.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    clock, started = CudaClock(), time.perf_counter()
    records = measure(CASES, clock, rounds, progress or (lambda done, total, label: None))
    failed = [each for each in records if each["why"]]
    return {
        "experiment": "rounding-cost",
        "note": NOTE,
        "environment": describe(clock.device),
        "rounds": rounds,
        "duration_s": round(time.perf_counter() - started, 1),
        "targets": {data: str(target) for data, target in TARGETS.items()},
        "gate": {"passed": not failed, "failures": [f"{label(each)}: {each['why']}" for each in failed]},
        "records": records,
    }


def label(record: Record) -> str:
    """Such as ``paper, BF16, tied rows``."""
    return f"{record['case']}, {record['format'].upper()}, {record['data']} rows"


def measure(cases: Sequence[tuple[SpeedCase, str]], clock: Clock, rounds: int, progress: output.Report) -> list[Record]:
    """A record of each case and kind of data; those that fail a check have no times."""
    jobs = [(case, fmt, data) for case, fmt in cases for data in DATA]
    records: list[Record] = []
    for case, fmt, data in jobs:
        record: Record = {"case": case.name, "shape": case.shape, "format": fmt, "data": data}
        progress(len(records), len(jobs), label(record))
        inputs = make_inputs(case, data, fmt, clock.device)
        calls = {config.softmax: Call(partial(attend, inputs, config)) for config in (SAFE, UNBIASED)}
        record |= judge(case, inputs, data, *(call.output() for call in calls.values()))
        if not record["why"]:
            graphs = {name: clock.graph(call) for name, call in calls.items()}
            record |= ratios(interleave(clock, graphs, rounds)[0])
            record |= {"target": str(TARGETS[data]), "met": TARGETS[data].met(record["ratio"])}
        records.append(record)
    return records


def attend(inputs: Inputs, config: pasa.PasaConfig) -> Tensor:
    """The public function on the Triton backend."""
    return pasa.attention(inputs.q, inputs.k, inputs.v, is_causal=inputs.causal, config=config, backend="triton")


def ratios(times: dict[str, Rounds]) -> Record:
    """Medians in milliseconds; of the rounds' ratios median, p20 and p80."""
    safe, unbiased = ([statistics.median(turn) for turn in times[each.softmax]] for each in (SAFE, UNBIASED))
    each = sorted(own / other for own, other in zip(unbiased, safe, strict=True))
    low, middle, high = (quantile(each, share) for share in (0.2, 0.5, 0.8))
    return {
        "safe_ms": statistics.median(safe),
        "unbiased_ms": statistics.median(unbiased),
        "ratio": middle,
        "p20": low,
        "p80": high,
    }


def judge(case: SpeedCase, inputs: Inputs, data: Data, safe: Tensor, unbiased: Tensor) -> Record:
    """Checks of the unbiased output; ``why`` is empty where all hold.

    All: finite, and an RMSE that the speed benchmark's gate allows. Random rows: hardly one is drawn, and none is more
    than a spacing from safe's (BF16: no greater errors). Tied rows: each within a spacing of FP64, and no bias where
    rounding to nearest has one.
    """
    gate, fmt = Gate(case, inputs), _format(inputs)
    verdict = gate.judge(unbiased, None, UNBIASED, shifted=True)
    golden, nearest, ours = (x.double() for x in (gate.golden, gate.sampled(safe), gate.sampled(unbiased)))
    if fmt == "bf16" and data == "tied":  # safe's outputs were FP16 before
        nearest = golden.bfloat16().double()
    rows = ((ours != nearest).double().mean(-1) >= DIFFERENT).double()
    found: Record = {"drawn": float(rows.mean()), "rmse": verdict.rmse, "rmse_limit": verdict.rmse_limit}
    reasons = [verdict.why] if verdict.why else []
    if data == "random" and fmt == "bf16":  # twice rounded, safe differs anywhere; drawn rows err sqrt(2) times as much
        growth = float((ours - golden).norm() / (nearest - golden).norm())
        reasons += [f"errors are {growth:.2f} times safe's"] * (not growth <= GROWTH)
        return found | {"drawn": None, "why": "; ".join(reasons)}
    if data == "random":
        far = float(((ours - nearest).abs() / spacing(nearest, fmt)).max())
        limit = max(RANDOM_DRAWN * rows.numel(), 1)
        reasons += [f"{far:.2f} spacings from safe"] * (not far <= 1)
        reasons += [f"{rows.sum():.0f} of {rows.numel()} rows drawn"] * (not rows.sum() <= limit)
        return found | {"why": "; ".join(reasons)}
    unit = spacing(golden, fmt)
    far = float(((ours - golden).abs() / unit).max())
    bias, before = (float(((x - golden) / unit).mean()) for x in (ours, nearest))
    limit = bias_limit(golden)
    reasons += [f"{far:.2f} spacings from FP64"] * (not far < FARTHEST)
    reasons += [f"bias {bias:+.4f} spacings, limit {limit:.4f}"] * (not abs(bias) <= limit)
    reasons += [f"safe has no bias to remove: {before:+.4f} spacings"] * (not abs(before) > limit)
    return found | {"bias": bias, "bias_safe": before, "bias_limit": limit, "why": "; ".join(reasons)}


def bias_limit(golden: Tensor) -> float:
    """Spacings: 4 sigma of the mean of ties that fall like coins, of which equal outputs share one, and `DRIFT`."""
    together = golden.float().unique(return_counts=True)[1].double()
    return SIGMAS * COIN * float(together.norm()) / golden.numel() + DRIFT


def _format(inputs: Inputs) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == inputs.q.dtype)
