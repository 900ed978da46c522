"""The true result of a random call: FP64 attention, the places of NaN, and the numbers that its bounds need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.random_calls.inputs import Call
from pasa.ops.numerics.formats import FP32_MAX, FP32_UNIT

PIECE = 2**25  # elements of the scores, or of the expanded keys, that are computed at a time: 256 MiB in FP64
# Scores times head dimension. Up to here, the range of values is computed from just the keys that each row sees.
EXACT_RANGE = 2**27
NATS = 104.0  # weights below exp(-104) are 0 in FP32
# nats; error of a score stored in FP16 relative to the row maximum: 2^-11 of the 16 nats within which it may lie
STORED = 2.0**-7
SUMMED = 2.0**-14  # nats; the largest error of a score in an FP32 tile
LIGHT = 20.0  # nats; a key further below the maximum weighs at most e^-20, less than the rounding of an output


@dataclass(frozen=True)
class Truth:
    """The results that a call must have, and the numbers that bound its errors.

    Tensors are FP64 or bool, of shape (B, Hq, Sq), or (B, Hq, Sq, D) where the comment begins with D.
    """

    out: Tensor  # D; attention of the inputs, with 0 in place of NaN and infinity
    lse: Tensor
    bad_rows: Tensor  # elements of `lse` that must be NaN, because the row sees NaN or infinity
    bad: Tensor  # D; elements of `out` that must be NaN
    # D; smallest and largest value that a row sees. Above `EXACT_RANGE`, they are taken over the keys up to the row's
    # last one, without those that no row sees: the same for a causal band, and no narrower for other masks.
    low: Tensor
    high: Tensor
    # D; the same range over the keys whose scores, if each errs by eps, may lie within `LIGHT` nats of the largest
    heavy_low: Tensor
    heavy_high: Tensor
    # The largest scale * sum |q_c| |k_c| over the keys that the row sees and that may have weight. It bounds the scaled
    # score of such a key, and every partial sum of that score.
    products: Tensor
    norms: Tensor  # scale * |q| * max |k| over those keys: bounds the scores too, by Cauchy-Schwarz
    added: Tensor  # the largest number that a float mask adds to a score with weight
    eps: Tensor  # largest error of a scaled score, in nats
    keys: Tensor  # number of keys that the row sees

    @property
    def fully_masked(self) -> Tensor:
        """Return the mask of the rows that see no key."""
        return self.keys == 0

    @property
    def largest(self) -> Tensor:
        """Return the largest magnitude in the range of values of each row."""
        return torch.maximum(self.low.abs(), self.high.abs())


@dataclass(frozen=True)
class Part:
    """A call in FP64, with 0 in place of NaN and infinity; keys and values are repeated for each query head."""

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor  # (B, Hq, Sq, Skv), like `added` and `scores`
    added: Tensor  # what a float mask adds
    scores: Tensor  # scaled, with the mask, -inf where masked out
    bad_rows: Tensor  # as in `Truth`
    bad: Tensor


def prepare(call: Call) -> Part:
    """Return a call in FP64, after its inputs are rounded to FP16.

    Finite elements of a float mask are clamped, so that a score added to one stays within FP32.
    """
    q, k, v = (x.half().double() for x in (call.q, call.k, call.v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = call.visible()
    added = torch.zeros((), dtype=torch.float64, device=q.device)
    if call.mask is not None and call.mask.dtype != torch.bool:
        added = call.mask.double()
    added = added.expand(seen.shape)
    bad_rows = ~torch.isfinite(q).all(-1) & seen.any(-1)
    bad_rows |= (seen & ~(torch.isfinite(added) & torch.isfinite(k).all(-1).unsqueeze(2))).any(-1)
    bad = bad_rows.unsqueeze(-1) | (seen.float() @ (~torch.isfinite(v)).float() > 0)
    q, k, v, added = (torch.where(torch.isfinite(x), x, 0.0) for x in (q, k, v, added))
    room = FP32_MAX - 2.0**46 * call.scale
    added = added.clamp(-room, room)
    scores = (capped(q @ k.mT * call.scale, call.softcap) + added).masked_fill(~seen, -torch.inf)
    return Part(q, k, v, seen, added, scores, bad_rows, bad)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(scores / softcap), or the scores themselves without a soft cap."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def find_truth(call: Call, fp16_scores: bool = True, chunks: int = 0) -> Truth:
    """Return the truth of a call, computed piece by piece.

    Score tiles are FP16 in the reference and in Ascend C, and FP32 in Triton. `chunks` is the number of key chunks with
    outputs of their own, which are merged by log-sum-exps in FP32; 0 if the keys are not split.
    """
    return Truth(**in_pieces(lambda piece: _describe(piece, STORED if fp16_scores else SUMMED, chunks), call))


def _describe(call: Call, tile: float, chunks: int) -> dict[str, Tensor]:
    if not call.k.shape[2]:  # no keys: the same as one key that is masked out everywhere
        k = call.k.new_zeros(*call.k.shape[:2], 1, call.k.shape[3])
        hidden = torch.zeros(1, dtype=torch.bool, device=k.device)
        call = dataclasses.replace(call, k=k, v=k, mask=hidden)
    part, dim = prepare(call), call.q.shape[-1]
    bias = part.added.masked_fill(~part.seen, -torch.inf)
    how: Any = {"attn_mask": bias, "scale": call.scale, "softcap": call.softcap, "sinks": call.sinks}
    out, lse = pasa.golden_attention(part.q, part.k, part.v, **how)
    sums = part.q.abs() @ part.k.abs().mT * call.scale
    weighs = part.seen & may_weigh(part.scores, score_errors(sums, part.added, dim))
    products, added = (x.abs().where(weighs, 0.0).amax(-1) for x in (sums, part.added))
    lengths = part.k.norm(dim=-1).unsqueeze(2).where(weighs, 0.0).amax(-1)
    eps = score_errors(products, added, dim) + tile
    if chunks:  # an FP32 log-sum-exp rounds by this much, and the weight of its chunk errs as much
        eps = eps + 8 * FP32_UNIT * lse.abs() * chunks
    finite = torch.isfinite(call.v).repeat_interleave(part.q.shape[1] // call.v.shape[1], 1)
    low, high = heavy = value_range(part.v, finite, part.seen)
    if part.seen.numel() * dim <= EXACT_RANGE:
        near = part.scores >= part.scores.amax(-1, keepdim=True) - 2 * eps.unsqueeze(-1) - LIGHT
        heavy = value_range(part.v, finite, part.seen & near)
    if call.sinks is not None:  # one more value, of 0
        (low, high), heavy = ((ends[0].clamp(max=0), ends[1].clamp(min=0)) for ends in ((low, high), heavy))
    return {
        "out": out, "lse": lse, "bad_rows": part.bad_rows, "bad": part.bad, "low": low, "high": high,
        "heavy_low": heavy[0], "heavy_high": heavy[1], "products": products, "added": added, "eps": eps,
        "norms": part.q.norm(dim=-1) * lengths * call.scale, "keys": part.seen.sum(-1),
    }  # fmt: skip


def score_errors(products: Tensor, added: Tensor, dim: int) -> Tensor:
    """Return the largest error of scaled FP32 scores; `products` is scale * sum |q_c| |k_c|, `added` the float mask."""
    return 4 * (dim + 4) * FP32_UNIT * products + 4 * FP32_UNIT * added.abs()


def may_weigh(scores: Tensor, errors: Tensor) -> Tensor:
    """Find the keys that may lie within `NATS` of the largest score, given an error of each score: (B, H, Sq, Skv)."""
    top, first = scores.max(-1, keepdim=True)
    return scores + 2 * errors >= top - 2 * errors.gather(-1, first) - NATS


def value_range(v: Tensor, finite: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest finite value (B, H, Sq, D) among the keys that a row sees; 0 if there is none."""
    ends = v.float().where(finite, torch.inf), v.float().where(finite, -torch.inf)  # FP16 numbers: exact
    if seen.numel() * v.shape[-1] <= EXACT_RANGE:
        step = max(1, PIECE // (v.numel() or 1))
        masks = seen.unsqueeze(-1).split(step, 2)
        low = torch.cat([ends[0].unsqueeze(2).where(mask, torch.inf).amin(3) for mask in masks], 2)
        high = torch.cat([ends[1].unsqueeze(2).where(mask, -torch.inf).amax(3) for mask in masks], 2)
    else:
        exists = seen.any(2).unsqueeze(-1)
        last = seen.shape[-1] - 1 - seen.flip(-1).int().argmax(-1)
        at = last.unsqueeze(-1).expand(*last.shape, v.shape[-1])
        low = ends[0].where(exists, torch.inf).cummin(2).values.gather(2, at)
        high = ends[1].where(exists, -torch.inf).cummax(2).values.gather(2, at)
    none = ~seen.any(-1, keepdim=True) | (low > high)
    return low.masked_fill(none, 0.0).double(), high.masked_fill(none, 0.0).double()


def in_pieces(work: Callable[[Call], dict[str, Tensor]], call: Call) -> dict[str, Tensor]:
    """Apply `work` to each piece of a call, and concatenate the results by rows and batch entries."""
    entries = [[work(piece) for piece in row] for row in pieces(call)]
    return {
        name: torch.cat([torch.cat([each[name] for each in row], 2) for row in entries], 0) for name in entries[0][0]
    }


def pieces(call: Call) -> list[list[Call]]:
    """Split a call into smaller calls: packed calls by sequence, others by rows until `PIECE` scores are left.

    Results are concatenated along the rows within a list, and along the batch from list to list.
    """
    if call.sequences is not None:
        rows, keys = (pairwise(accumulate(lengths, initial=0)) for lengths in zip(*call.sequences, strict=True))
        return [[_cut(call, slice(a, b), slice(c, d)) for (a, b), (c, d) in zip(rows, keys, strict=True) if a < b]]
    batch, heads, length, dim = call.q.shape
    count = call.k.shape[2]
    if batch > 1 and batch * heads * count * max(length, dim) > PIECE:
        masks = [None] * batch if call.mask is None else call.mask.expand(*call.q.shape[:3], count).split(1)
        tensors = zip(call.q.split(1), call.k.split(1), call.v.split(1), masks, strict=True)
        return [pieces(dataclasses.replace(call, q=q, k=k, v=v, mask=mask))[0] for q, k, v, mask in tensors]
    step = length if call.window else max(1, min(length, PIECE // (heads * count)))  # a window ends with the last row
    ends = [min(row + step, length) for row in range(0, length, step)]
    # The causal band stays aligned to the last row and key where keys after the last row's are cut off.
    last = [max(count - (length - end), 0) if call.causal else count for end in ends]
    return [[_cut(call, slice(a, b), slice(0, n)) for (a, b), n in zip(pairwise([0, *ends]), last, strict=True)]]


def _cut(call: Call, rows: slice, keys: slice) -> Call:
    mask = call.mask
    if mask is not None:
        mask = mask.expand(*call.q.shape[:3], call.k.shape[2])[:, :, rows, keys]
    k, v = (x[:, :, keys] for x in (call.k, call.v))
    return dataclasses.replace(call, q=call.q[:, :, rows], k=k, v=v, mask=mask, sequences=None)


def naive_fp16(call: Call) -> Tensor:
    """Return naive FP16 attention, the one that overflows: Q K^T in FP16 before the scale, P in FP16, sums in FP32."""
    part = prepare(call)
    q, k, v = part.q.float(), part.k.float(), part.v.float()
    bias = part.added.float().masked_fill(~part.seen, -torch.inf)
    scores = capped((q @ k.mT).half().float() * call.scale, call.softcap) + bias
    top = scores.amax(-1, keepdim=True)
    masked_out = top == -torch.inf
    weights = torch.exp(scores - top.masked_fill(masked_out, 0.0))
    sink = 0.0 if call.sinks is None else torch.exp(call.sinks.float()[:, None, None] - top)
    total = (weights.sum(-1, keepdim=True) + sink).masked_fill(masked_out, 1.0)
    return (weights.half().float() @ v / total).half().double()
