"""Times softmax="unbiased" beside "safe" on a GPU; outputs are judged first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

import pasa
from pasa.eval.accuracy.rounding_bias.arithmetic import spacing
from pasa.eval.kit import experiment, output
from pasa.eval.kit.device import describe, origin
from pasa.eval.kit.error_metrics import generator
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.eval.kit.stored import pick
from pasa.eval.kit.tables import Column, Table
from pasa.eval.kit.timing import Call, Clock, CudaClock, Rounds, interleave, quantile
from pasa.eval.speed.cases import Inputs, SpeedCase, select_cases
from pasa.eval.speed.gate import Gate

DATA = ("random", "tied")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TIED, REMAINDER, ELSE = 9.5, 0.5, -76.0  # scores: of two keys, of the third at the most, and of all others: no weight
LIMITS = {"random": 1.03, "tied": 1.08}  # ratios of the times, unbiased over safe: below the first, at most the second
TARGETS = {"random": "< 1.03", "tied": "≤ 1.08"}
BOTH = select_cases(("paper", "qwen2-8k"))  # in BF16 as well: a compilation each
CASES: tuple[tuple[SpeedCase, str], ...] = (
    *((case, fmt) for case in BOTH for fmt in DTYPES),
    *((case, "fp16") for case in select_cases(("qwen2-8k-full", "svd", "decode-1x32k"))),
    (SpeedCase("short", 9216, 5, 5, 25, 25, 64), "fp16"),  # temporal attention of a video model: 25 frames
)
SAFE, UNBIASED = pasa.PasaConfig(), pasa.PasaConfig(softmax="unbiased")
# Of a drawn row's values a quarter differ from nearest in the mean. Fewer than these: FP32 sums in another order.
DIFFERENT = 1 / 16
RANDOM_DRAWN = 1e-3  # of random rows, or one row: ten times what `dither.FLAG_SIGMAS` allows
GROWTH = 1.05  # of errors of random rows in BF16
FARTHEST = 1.1  # spacings from FP64: a draw errs by less than one, and P in FP16 by 2^-11 of a remainder of a tenth
SIGMAS, COIN = 4.0, 0.5  # of a bias that is gone; a tie errs by half a spacing to either side
DRIFT = 2.0**-7  # spacings by which the remainder itself, weighed in 16 bits, may move the mean
Record = dict[str, Any]


def run_cost(
    rounds: Annotated[int, "Timed turns of each softmax."] = 9, progress: output.Report = output.silent
) -> dict[str, Any]:
    """Time softmax="unbiased" beside "safe" on a CUDA device; exit 1 if an output is wrong, 0 if a target is missed.

    ``records``: a case, a format, data: checks, times where they hold, ratio.
    """
    at_least(1, rounds=rounds)
    clock = CudaClock()
    records = measure(CASES, clock, rounds, progress)
    failures = [f"{label(each)}: {each['why']}" for each in records if each["why"]]
    return {
        "note": "on the device named here; nothing was run on an NPU",
        "environment": describe(clock.device),
        "rounds": rounds,
        "targets": TARGETS,
        "gate": {"passed": not failures, "failures": failures},
        "records": records,
    }


def make_inputs(case: SpeedCase, data: str, fmt: str, device: torch.device) -> Inputs:
    """Draw N(0, 1), or rows that all repeat their maximum; the same on every call on one kind of device."""
    drawn = case.inputs(device) if data == "random" else _tied(case, device)
    q, k, v = (x.to(DTYPES[fmt]) for x in (drawn.q, drawn.k, drawn.v))
    return replace(drawn, q=q, k=k, v=v)


def _tied(case: SpeedCase, device: torch.device) -> Inputs:
    """Let the first two keys share each row, V uniform in [1, 2); the third, 9 to 9.5 nats below, has V = 2.5.

    O is then (v_0 + v_1) / 2 and a positive remainder that differs from row to row: nearest rounding raises every tie.
    """
    source = torch.Generator(device).manual_seed(generator(0, case.name, "tied").initial_seed())
    root = math.sqrt(case.dim)  # the kernels' scale is its inverse
    q = torch.zeros(case.batch, case.heads, case.rows, case.dim, device=device)
    k = torch.zeros(case.batch, case.kv_heads, case.keys, case.dim, device=device)
    v = torch.full_like(k, 2.5)
    q[..., 0] = TIED
    q[..., 1] = REMAINDER * torch.rand(q.shape[:-1], generator=source, device=device)
    k[..., 0] = ELSE / TIED * root
    k[:, :, :2, 0] = root
    k[:, :, 2, 0], k[:, :, 2, 1] = 0.0, root
    v[:, :, :2] = 1 + torch.rand(*v.shape[:2], 2, case.dim, generator=source, device=device)
    return Inputs(q, k, v, case.causal, case.decode)


def label(record: Record) -> str:
    """Name the record as ``paper, BF16, tied rows``."""
    return f"{record['case']}, {record['format'].upper()}, {record['data']} rows"


def measure(cases: Sequence[tuple[SpeedCase, str]], clock: Clock, rounds: int, progress: output.Report) -> list[Record]:
    """Return a record of each case and kind of data; those that fail a check have no times."""
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
            record |= {"target": TARGETS[data], "met": met(data, record["ratio"])}
        records.append(record)
    return records


def met(data: str, ratio: float) -> bool:
    """Return whether a ratio of times is within its limit."""
    return ratio < LIMITS[data] if data == "random" else ratio <= LIMITS[data]


def attend(inputs: Inputs, config: pasa.PasaConfig) -> Tensor:
    """Call the public function on the Triton backend."""
    return pasa.attention(inputs.q, inputs.k, inputs.v, is_causal=inputs.causal, config=config, backend="triton")


def ratios(times: dict[str, Rounds]) -> Record:
    """Return medians in milliseconds; of the rounds' ratios median, p20 and p80."""
    by_turn = {name: [statistics.median(turn) for turn in turns] for name, turns in times.items()}
    ratios = sorted(ours / safe for ours, safe in zip(by_turn["unbiased"], by_turn["safe"], strict=True))
    shares = {"ratio": 0.5, "p20": 0.2, "p80": 0.8}
    medians = {f"{name}_ms": statistics.median(turns) for name, turns in by_turn.items()}
    return medians | {name: quantile(ratios, share) for name, share in shares.items()}


def judge(case: SpeedCase, inputs: Inputs, data: str, safe: Tensor, unbiased: Tensor) -> Record:
    """Check the unbiased output by the rules of README.md; ``why`` is empty where all hold."""
    gate, fmt = Gate(case, inputs), "bf16" if inputs.q.dtype == torch.bfloat16 else "fp16"
    verdict = gate.judge(unbiased, None, UNBIASED, shifted=True)
    golden, nearest, ours = (x.double() for x in (gate.golden, gate.sampled(safe), gate.sampled(unbiased)))
    if fmt == "bf16" and data == "tied":  # safe's outputs were FP16 before
        nearest = golden.bfloat16().double()
    rows = ((ours != nearest).double().mean(-1) >= DIFFERENT).double()
    record: Record = {"drawn": float(rows.mean()), "rmse": verdict.rmse, "rmse_limit": verdict.rmse_limit}
    missed = {verdict.why: bool(verdict.why)}
    if data == "tied":
        unit, limit = spacing(golden, fmt), bias_limit(golden)
        far = float(((ours - golden).abs() / unit).max())
        bias, before = (float(((x - golden) / unit).mean()) for x in (ours, nearest))
        record |= {"bias": bias, "bias_safe": before, "bias_limit": limit}
        missed[f"{far:.2f} spacings from FP64"] = not far < FARTHEST
        missed[f"bias {bias:+.4f} spacings, limit {limit:.4f}"] = not abs(bias) <= limit
        missed[f"safe has no bias to remove: {before:+.4f} spacings"] = not abs(before) > limit
    elif fmt == "fp16":
        far, drawn = float(((ours - nearest).abs() / spacing(nearest, fmt)).max()), float(rows.sum())
        missed[f"{far:.2f} spacings from safe"] = not far <= 1
        missed[f"{drawn:.0f} of {rows.numel()} rows drawn"] = not drawn <= max(RANDOM_DRAWN * rows.numel(), 1)
    else:  # twice rounded, safe differs anywhere; drawn rows err sqrt(2) times as much
        growth = float((ours - golden).norm() / (nearest - golden).norm())
        record["drawn"] = None
        missed[f"errors are {growth:.2f} times safe's"] = not growth <= GROWTH
    return record | {"why": "; ".join(reason for reason, applies in missed.items() if applies)}


def bias_limit(golden: Tensor) -> float:
    """Return 4 sigma of the mean, in spacings, of ties that fall like coins, and drift; equal outputs share a coin."""
    together = golden.float().unique(return_counts=True)[1].double()
    return SIGMAS * COIN * float(together.norm()) / golden.numel() + DRIFT


def cost_table(result: Record) -> Table:
    """Return a row for every case, format and data."""
    columns: dict[str, Column] = {
        "case": lambda each: f"{each['case']}, {each['data']}",
        "shape": "shape",
        "format": lambda each: str(each["format"]).upper(),
        "rows drawn": ("drawn", ".2%"),
        "safe ms": ("safe_ms", ".4g"),
        "unbiased ms": ("unbiased_ms", ".4g"),
        "ratio": ("ratio", ".3f"),
        "p20 to p80": lambda each: f"{each['p20']:.3f} to {each['p80']:.3f}" if "ratio" in each else "-",
        "target": verdict_of,
        "bias, safe": ("bias_safe", "+.4f"),
        "bias, unbiased": ("bias", "+.4f"),
    }
    note = (
        "In CUDA graphs; calls under 2 ms start with a cold L2. Ratio: unbiased over safe, median of rounds in turns. "
        "Bias: mean signed error of tied rows against FP64, in spacings of the format."
    )
    return Table.of('Cost of softmax="unbiased"', result["records"], columns, note)


def verdict_of(record: Mapping[str, Any]) -> str:
    """Return the target, and whether it is met."""
    return "WRONG, not timed" if record["why"] else f"{record['target']}: {'met' if record['met'] else 'missed'}"


def verdict(result: Record) -> str:
    """Return what the exit status says, and how many targets are met."""
    timed = [each for each in result["records"] if not each["why"]]
    reached = f"{sum(each['met'] for each in timed)} of {len(timed)} targets are met"
    return experiment.verdict(result, f"All outputs are right. {reached}.", "Wrong outputs, which are not timed")


def summary(result: Record) -> str:
    """Return a line for README.md: the range of the ratios by data."""
    spans = []
    for data in DATA:
        ratios = [each["ratio"] for each in pick(result["records"], data=data) if "ratio" in each]
        span = f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "not timed"
        spans.append(f"{data} rows {span} (target {result['targets'][data]})")
    line = f'Time over that of `softmax="safe"` (`pasa bench unbiased`): {", ".join(spans)}.'
    return f"{line} {verdict(result)}\n\n{origin(result)}"


def report(result: Record) -> list[Table | str]:
    """Return the table, the verdict and the origin."""
    return [verdict(result), cost_table(result), origin(result)]


EXPERIMENT = Experiment("unbiased", run_cost, report, 'Cost of softmax="unbiased"')
