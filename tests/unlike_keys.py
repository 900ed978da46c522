"""Keys that differ so much that keys which a row does not see may harm it, and the error that a row may then have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pasa.eval.random_calls import judge, truth
from pasa.eval.random_calls.inputs import Call
from pasa.ops.numerics.formats import FP32_UNIT

BLOCK = 128
# README.md of ops/attention, "What a row may err by", derives SUMS and REACH. SUMS: a score's error in units of
# (D + 40) 2^-24 scale sum |q_d||k_d|. In units of 2^-24 scale sum |q_d||k_d|, q.k', c_ij and the first and the
# last q.f_j err by (2 + 3 + 6 + 6)(D + 1). At most D carries are rounded at 13 units each, 16 additions make rho,
# and 8 more join scores, offset and maximum, at 7 units each. That makes 30 D + 17 + 24 * 7 units, which is less
# than 32 (D + 40) for every D.
SUMS = 32
# REACH: nats between a key's score and its tile's reference, in addition to those between it and the largest. No
# score is stored more than 6 nats above its reference, and no reference stands more than 6 nats above the row's largest
# score; 1 more leaves room for the reference's own rounding, and for 2^-14 nats that are not subtracted.
REACH = 7.0
# The bound, in errors of attention in FP32; the reference and the interpreter use half of it.
FP32 = 8.0


class Case(NamedTuple):
    """Hold one call: (1, 1, S, D) tensors, and the mask that decides what the rows see."""

    q: Tensor
    k: Tensor
    v: Tensor
    how: dict[str, Any]


def normal(rows: int, keys: int, seed: int = 0) -> list[Tensor]:
    """Return N(0, 1) queries, keys and values with head dimension 64."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 1, n, 64, generator=g).half() for n in (rows, keys, keys)]


def biased(pattern: list[float], bias: float, rows: int = 32) -> Case:
    """Return blocks of 128 keys whose first column is `bias` times an entry of the pattern.

    The first column of the queries is `bias`.
    """
    q, k, v = normal(rows, BLOCK * len(pattern))
    q[..., 0] = bias
    k[..., 0] = bias * torch.tensor(pattern).repeat_interleave(BLOCK)
    return Case(q, k, v, {})


def later_keys_of_the_block(bias: float) -> Case:
    """Return a call whose rows 0 to 31 see keys with a first column of 0.

    The anchor of their block used to be a quarter of the bias.
    """
    q, k, v = normal(BLOCK, BLOCK)
    q[..., 0], k[..., 0], k[:, :, 32:, 0] = bias, 0.0, bias
    return Case(q, k, v, {"is_causal": True})


def small_integers(bias: float) -> Case:
    """Return the same with 0, 1 and 2 in the first keys' column, where a subtraction is exact by luck."""
    case = later_keys_of_the_block(bias)
    case.k[:, :, :32, 0] = torch.arange(32) % 3
    return case


def two_keys(sign: float, before: bool, rows: int = 64) -> Case:
    """Return a call whose rows see two keys of a block of 32, with values 1 and -1, that no anchor helps.

    The other keys of their block are far off and determine the first tile's guess. Or an earlier block is far
    off, which the rows see and give no weight, but which sets the next tile's reference.
    """
    q, k, v = normal(rows + 1, 64)
    k = (k * 64).round() / 64  # so that the scale can be folded in
    q[..., 0] = 2000.0
    k[..., 0] = 2.0**-7 * k[..., 1]
    far = torch.arange(64) < 32 if before else (torch.arange(64) >= 34)
    k[:, :, far, 0] = 2000.0 * sign
    v[:] = torch.where(torch.arange(64) == 32, 1.0, -1.0)[:, None]
    keep = (torch.arange(64) == 32) | (torch.arange(64) == 33) | (far & before)
    keep = keep | (torch.arange(rows + 1) == rows)[:, None]  # one row sees them all
    first = 0 if before else 32
    return Case(q, k[:, :, first:], v[:, :, first:], {"attn_mask": keep[:, first:]})


def beside_them(bias: float) -> Case:
    """Return a call whose rows see biased keys of their own block, and give them no weight."""
    q, k, v = normal(32, BLOCK)
    q[..., 0], k[..., 0] = bias, 0.0
    k[:, :, 32:, 0] = -bias
    return Case(q, k, v, {})


def documents(bias: float) -> Case:
    """Return documents: the first block is biased and seen by the first 16 rows only.

    The others see parts of later blocks.
    """
    q, k, v, _ = biased([1, 0, 1, 0], bias, 64)
    key, row = torch.arange(4 * BLOCK), torch.arange(64).unsqueeze(1)
    keep = torch.where(row < 16, key < 100, (key >= 140) & (key < 140 + 5 * row) & (key // BLOCK != 2))
    return Case(q, k, v, {"attn_mask": keep})


def mixed_signs(bias: float) -> Case:
    """Return three biased columns, which leave the frame at different blocks, and queries of both signs."""
    q, k, v = normal(64, 5 * BLOCK)
    pattern = torch.tensor([[1.0, 1.0, -1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0, 0.5], [-1.0, -1.0, -0.3, -1.0, 0.0]])
    for d, factors in enumerate(pattern):
        k[..., d] = (bias * factors.repeat_interleave(BLOCK) + 0.01 * bias * k[..., d]).half()
        q[..., d] = bias / 4 * q[..., d].sign()
    return Case(q, k, v, {})


def late_rows(bias: float) -> Case:
    """Return the last rows of a longer sequence: one query tile mixes rows that see a frame move, and others."""
    q, k, v, _ = biased([-1, -1, 0, -1], bias, 200)
    return Case(q, k[:, :, :450], v[:, :, :450], {"is_causal": True})


CASES: dict[str, Callable[[float], Case]] = {
    "later keys of the block": later_keys_of_the_block,
    "small integers": small_integers,
    "beside them": beside_them,
    "biased first, no weight": lambda bias: biased([-1, 0, -1, 0], bias),
    "biased later, no weight": lambda bias: biased([0, -1, 0, -1], bias),
    "biased first alone": lambda bias: biased([-1, 0, 0, 0], bias),
    "less and less biased": lambda bias: biased([-1, -0.6, -0.4, -0.1], bias),
    "more and more biased": lambda bias: biased([-0.1, -0.15, -0.4, -1], bias),
    "biased with all weight": lambda bias: biased([1, 0, 1, 0], bias),
    "mixed signs": mixed_signs,
    "late rows": late_rows,
}
MASKED = CASES | {"documents": documents}


def golden(case: Case) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp in FP64."""
    return found(case)[0].out, found(case)[0].lse


def found(case: Case) -> tuple[truth.Truth, float]:
    """Return the truth of a case, and its scale."""
    return truth.find_truth(call_of(case)), call_of(case).scale


def call_of(case: Case) -> Call:
    """Return a case with its defaults filled in."""
    scale = case.how.get("scale", case.q.shape[-1] ** -0.5)
    return Call(case.q, case.k, case.v, case.how.get("attn_mask"), case.how.get("is_causal", False), scale)


def allowed(case: Case, stores: int = 1) -> tuple[Tensor, Tensor]:
    """Return the allowed errors of output (1, 1, Sq, D) and log-sum-exp (1, 1, Sq), from keys that the row sees alone.

    A score errs by the FP32 sums of keys that weigh at least as much, by its rounding to FP16, and by that of
    its weight. Weights p that err by a factor e^d, |d| <= e, move their mean by at most sum p (e^e - 1) |v -
    mean| over sum p e^-e. `stores` is how often an output is rounded to FP16.

    If scores are so large that this bound is useless, FP32 gives another: no row errs by more than 8 times the
    error of attention in FP32, plus roundings to FP16.
    """
    true, scale = found(case)
    part = truth.prepare(call_of(case))
    gap = part.scores.amax(-1, keepdim=True) - part.scores
    sums = case.q.double().abs() @ case.k.double().abs().mT * scale
    order = gap.argsort(-1)
    heavier = sums.masked_fill(~part.seen, 0.0).gather(-1, order).cummax(-1).values
    sums = torch.zeros_like(sums).scatter(-1, order, heavier)
    eps = SUMS * (case.q.shape[-1] + 40) * FP32_UNIT * sums + judge.HALF_ULP[torch.float16] * (REACH + gap) + 2.0**-10
    p = torch.exp(part.scores - true.lse.unsqueeze(-1))
    factor = eps.clamp(max=80.0)  # beyond, the bound is useless anyway
    away = (part.v.unsqueeze(2) - true.out.unsqueeze(3)).abs()
    growth = (p * torch.expm1(factor)).unsqueeze(3)
    moved = (growth @ away).squeeze(3) / (p * torch.exp(-factor)).sum(-1, keepdim=True)
    moved = torch.minimum(moved, true.high - true.low)
    largest = torch.maximum(true.low.abs(), true.high.abs())
    lse = eps.where(p > 2.0**-30, 0.0).amax(-1) + true.lse.abs() * 2.0**-22
    out = moved + (stores + 1) * 2.0**-11 * largest
    fp32, fp32_lse = errors_in_fp32(case, true, scale)
    most = FP32 * fp32 + (stores + 1) * 2.0**-11 * largest.amax(-1, keepdim=True)
    return torch.minimum(out, most), torch.minimum(lse, FP32 * fp32_lse + true.lse.abs() * 2.0**-22 + 1e-3)


def errors_in_fp32(case: Case, true: truth.Truth, scale: float) -> tuple[Tensor, Tensor]:
    """Return the largest errors of FP32 attention of each row, (1, 1, Sq, 1) and (1, 1, Sq).

    They are the worst of three orders of its sums, since one may be right by luck. A log-sum-exp counts with half a
    spacing of FP32 at least, what storing it costs: on an H200 one of 128 rows was off by three spacings (0.77 of two
    million) where all three orders happened to be right within a fifteenth of a spacing.
    """
    q, k, v = (x.float() for x in case[:3])
    products = (q @ k.mT * scale, (q * scale) @ k.mT, (q.flip(-1) @ k.flip(-1).mT) * scale)
    outs, lses, seen = [], [], call_of(case).visible()
    for scores in products:
        hidden = scores.masked_fill(~seen, -torch.inf)
        outs.append((torch.softmax(hidden, -1).nan_to_num() @ v - true.out).abs().amax(-1, keepdim=True))
        lses.append((torch.logsumexp(hidden, -1) - true.lse).abs().nan_to_num())
    return torch.stack(outs).amax(0), torch.maximum(torch.stack(lses).amax(0), true.lse.abs() * 2.0**-24)
