"""Compares shifts of the keys, of the queries, of both and of neither where scores are stored in FP16.

Softmax and P V are FP64 here, so every error is one of the stored scores, of two kinds: rounded once, as a cube stores
its FP32 sums, or at every 16 channels, as matrix units of GPUs do that accumulate in FP16 (FlashInfer's
``use_fp16_qk_reduction``; the order of the sum within 16 channels is this CPU's, in FP32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import torch
from torch import Tensor

from pasa.eval.accuracy.rmse import report
from pasa.eval.accuracy.rmse.cases import ARITHMETICS, GATED, Shape
from pasa.eval.accuracy.rmse.gates import Record
from pasa.eval.accuracy.rmse.measure import golden_by_head, measure
from pasa.eval.kit import output
from pasa.eval.kit.error_metrics import generator, measure_errors
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.options import at_least
from pasa.ops.numerics.formats import FORMATS, OVERFLOWS, Overflow, round_to

SIDES = {"none": "", "K": "k", "Q": "q", "both": "qk"}
STEPS = {"stored": None, "fp16 sums": 16}  # channels between two roundings to FP16; None: the whole sum is rounded
OURS = "pasa"


@dataclass(frozen=True)
class SideCase:
    """N(0, 1), and a constant added to all channels of Q, of K or of both.

    Alone, a bias of 4000 makes scores of standard deviation 4000 sqrt(128) = 45,300, of which a seventh leaves FP16;
    inputs are even integers there. Shared, 30 is enough: 30^2 128 = 115,200.
    """

    biased: str
    q_bias: float
    k_bias: float

    def tensors(self, shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw (q, k, v) in FP16; V has no bias."""
        q, k, v = (torch.randn(shape, generator=generator(seed, "sides", self.biased, part)) for part in "qkv")
        return (q + self.q_bias).half(), (k + self.k_bias).half(), v.half()


CASES = (SideCase("none", 0, 0), SideCase("K", 0, 4000), SideCase("Q", 4000, 0), SideCase("both", 30, 30))


def run_sides(
    heads: Annotated[int | None, "Number of heads (2)."] = None,
    seq: Annotated[int | None, "Sequence length (1024)."] = None,
    seeds: Annotated[Sequence[int], "Seeds."] = (0, 1, 2),
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Shifts of K, of Q and of both where K, Q or both have a bias.

    ``records``: per case, shift, kind of sum and seed the number of stored scores beyond FP16, the share of outputs
    that are not finite where such scores become infinite, and the RMSE where they saturate. Records of shift "pasa"
    are those of the operator itself, which rounds P and its output to FP16 as well.
    """
    at_least(1, heads=heads, seq=seq)
    shape, records = (1, heads or 2, seq or 1024, 128), []
    jobs = list(product(CASES, seeds))
    for done, (case, seed) in enumerate(jobs):
        progress(done, len(jobs), f"bias in {case.biased}, seed {seed}")
        q, k, v = case.tensors(shape, seed)
        golden, head = golden_by_head(q, k, v), {"case": case.biased, "seed": seed}
        for shift, sums in product(SIDES, STEPS):
            errors = _measure(q, k, v, golden, SIDES[shift], STEPS[sums])
            records.append(head | {"shift": shift, "sums": sums} | errors)
        records.append(head | {"shift": OURS, "sums": "stored"} | _operator(q, k, v, golden))
    return {
        "note": output.NOTE,
        "seeds": list(seeds),
        "shape": list(shape),
        "biases": {case.biased: [case.q_bias, case.k_bias] for case in CASES},
        "gate": verdict(records),
        "records": records,
    }


def verdict(records: Sequence[Record]) -> dict[str, Any]:
    """Check that shifted keys leave no score beyond FP16 but under a bias of Q alone, and that outputs are finite."""
    failures = []
    for each in records:
        what = f"bias in {each['case']}, shift {each['shift']}, seed {each['seed']}"
        if each["shift"] == "K" and each["case"] != "Q" and each["overflowed"]:
            failures.append(f"{what}: {each['overflowed']} scores beyond FP16")
        if each["shift"] == OURS and each["nonfinite_share"]:
            failures.append(f"{what}: {each['nonfinite_share']:.3g} of the output is not finite")
    return {"passed": not failures, "failures": failures}


def _measure(q: Tensor, k: Tensor, v: Tensor, golden: Tensor, side: str, step: int | None) -> Record:
    loud, quiet = (stored_scores(q, k, side, step, mode) for mode in OVERFLOWS)
    return {
        "overflowed": int((~(loud[0].abs() <= FORMATS["fp16"].max)).sum()),
        "nonfinite_share": measure_errors(attend(*loud, v), golden).nonfinite_share,
        "rmse": measure_errors(attend(*quiet, v), golden).rmse,
    }


def _operator(q: Tensor, k: Tensor, v: Tensor, golden: Tensor) -> Record:
    """Measure our default on the reference; scores that it stores as -inf or -65504 have no weight (its README)."""
    ours = next(each for each in ARITHMETICS if each.name == GATED)
    loud, quiet = (measure(ours, q, k, v, golden, mode) for mode in OVERFLOWS)
    count = q.shape[:3].numel() * k.shape[2]
    return {
        "overflowed": round(count * (loud["scores_nonfinite_share"] + loud["scores_saturated_share"])),
        "nonfinite_share": loud["nonfinite_share"],
        "rmse": quiet["rmse"],
        "rescued_share": loud["scores_rescued_share"],
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


EXPERIMENT = Experiment("sides", run_sides, report.sides, "Which side to shift")
