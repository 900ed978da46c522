"""The truth of a call: FP64 attention, where NaN belongs, and the numbers that its bounds are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

import pasa
from pasa.eval.random_calls.inputs import Call

UNIT = 2.0**-24  # half a unit in the last place of FP32
PIECE = 2**25  # scores, or expanded keys, that are worked on at a time: 256 MiB in FP64
EXACT_RANGE = 2**27  # scores times head dim: up to here the range of values is that of the very keys a row sees
NATS = 104.0  # weights below exp(-104) are zero in FP32
STORED = 2.0**-7  # an FP16 score within 16 nats of the maximum, relative to which it is stored: 2^-11 of it
SUMMED = 2.0**-14  # an FP32 score tile errs by so much at most
LIGHT = 20.0  # nats: what lies further below weighs e^-20 at most, less than an output's rounding
FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Truth:
    """The results a call must have, FP64 or bool: (B, Hq, Sq), and (B, Hq, Sq, D) where a comment says D."""

    out: Tensor  # D; attention of the inputs with 0 for whatever is not finite
    lse: Tensor
    bad_rows: Tensor  # what a NaN or infinity of the inputs must turn to NaN in `lse`
    bad: Tensor  # D; and in `out`
    # D; range of the values that a row sees. Of a very large call with a mask of its own for each row: of those up to
    # its last key that any row sees.
    low: Tensor
    high: Tensor
    # D; the same of the keys whose scores, each off by eps, may be within `LIGHT` nats of the largest
    heavy_low: Tensor
    heavy_high: Tensor
    # The largest scale sum |q_c| |k_c| of a key that the row sees and that may have weight: no scaled score of such a
    # key and none of its partial sums is larger.
    products: Tensor
    norms: Tensor  # scale |q| max |k| of those keys: by Cauchy and Schwarz the same, and close for ordinary data
    added: Tensor  # the largest number that a float mask adds to a score with weight
    eps: Tensor  # what a scaled score may err by, in nats
    keys: Tensor  # how many the row sees

    @property
    def fully_masked(self) -> Tensor:
        """Rows that see no key."""
        return self.keys == 0

    @property
    def largest(self) -> Tensor:
        """The largest magnitude of the values in a row's range."""
        return torch.maximum(self.low.abs(), self.high.abs())


@dataclass(frozen=True)
class Part:
    """A call in FP64 with 0 for what is not finite, keys and values once for each query head."""

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor  # (B, Hq, Sq, Skv), as the next two
    added: Tensor  # by a float mask
    scores: Tensor  # scaled, with the mask, -inf where masked out
    bad_rows: Tensor  # as in `Truth`
    bad: Tensor


def prepare(call: Call) -> Part:
    """Return what a call means: inputs are FP16 numbers first, and finite elements of a mask leave room for scores."""
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
    scores = (q @ k.mT * call.scale + added).masked_fill(~seen, -torch.inf)
    return Part(q, k, v, seen, added, scores, bad_rows, bad)


def find_truth(call: Call, fp16_scores: bool = True, chunks: int = 0) -> Truth:
    """Return the truth of a call with score tiles in FP16 (reference, Ascend C) or FP32 (Triton), piece by piece.

    `chunks` of keys may have outputs of their own, which are joined by log-sum-exps in FP32.
    """
    return Truth(**in_pieces(lambda piece: _describe(piece, STORED if fp16_scores else SUMMED, chunks), call))


def _describe(call: Call, tile: float, chunks: int) -> dict[str, Tensor]:
    if not call.k.shape[2]:  # no key is one that no row sees
        k = call.k.new_zeros(*call.k.shape[:2], 1, call.k.shape[3])
        hidden = torch.zeros(1, dtype=torch.bool, device=k.device)
        call = dataclasses.replace(call, k=k, v=k, mask=hidden)
    part, dim = prepare(call), call.q.shape[-1]
    bias = part.added.masked_fill(~part.seen, -torch.inf)
    out, lse = pasa.golden_attention(part.q, part.k, part.v, attn_mask=bias, scale=call.scale)
    sums = part.q.abs() @ part.k.abs().mT * call.scale
    weighs = part.seen & may_weigh(part.scores, score_errors(sums, part.added, dim))
    products, added = (x.abs().where(weighs, 0.0).amax(-1) for x in (sums, part.added))
    lengths = part.k.norm(dim=-1).unsqueeze(2).where(weighs, 0.0).amax(-1)
    eps = score_errors(products, added, dim) + tile
    if chunks:  # an LSE in FP32 is that coarse, and so is a chunk's weight
        eps = eps + 8 * UNIT * lse.abs() * chunks
    finite = torch.isfinite(call.v).repeat_interleave(part.q.shape[1] // call.v.shape[1], 1)
    low, high = heavy = value_range(part.v, finite, part.seen)
    if part.seen.numel() * dim <= EXACT_RANGE:
        near = part.scores >= part.scores.amax(-1, keepdim=True) - 2 * eps.unsqueeze(-1) - LIGHT
        heavy = value_range(part.v, finite, part.seen & near)
    return {
        "out": out, "lse": lse, "bad_rows": part.bad_rows, "bad": part.bad, "low": low, "high": high,
        "heavy_low": heavy[0], "heavy_high": heavy[1], "products": products, "added": added, "eps": eps,
        "norms": part.q.norm(dim=-1) * lengths * call.scale, "keys": part.seen.sum(-1),
    }  # fmt: skip


def score_errors(products: Tensor, added: Tensor, dim: int) -> Tensor:
    """Return what scaled scores may err by in FP32: `products` is scale sum |q_c| |k_c|, `added` what a mask adds."""
    return 4 * (dim + 4) * UNIT * products + 4 * UNIT * added.abs()


def may_weigh(scores: Tensor, errors: Tensor) -> Tensor:
    """Find the keys within `NATS` of the largest score, if each score may err: all (B, H, Sq, Skv)."""
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
    """Work on a call piece by piece, and join the results."""
    entries = [[work(piece) for piece in row] for row in pieces(call)]
    return {
        name: torch.cat([torch.cat([each[name] for each in row], 2) for row in entries], 0) for name in entries[0][0]
    }


def pieces(call: Call) -> list[list[Call]]:
    """Return what a call is made of: packed sequences; otherwise some entries, and of each of these some rows."""
    if call.sequences is not None:
        rows, keys = (pairwise(accumulate(lengths, initial=0)) for lengths in zip(*call.sequences, strict=True))
        return [[_cut(call, slice(a, b), slice(c, d)) for (a, b), (c, d) in zip(rows, keys, strict=True) if a < b]]
    batch, heads, length, dim = call.q.shape
    count = call.k.shape[2]
    if batch > 1 and batch * heads * count * max(length, dim) > PIECE:
        masks = [None] * batch if call.mask is None else call.mask.expand(*call.q.shape[:3], count).split(1)
        tensors = zip(call.q.split(1), call.k.split(1), call.v.split(1), masks, strict=True)
        return [pieces(dataclasses.replace(call, q=q, k=k, v=v, mask=mask))[0] for q, k, v, mask in tensors]
    step = max(1, min(length, PIECE // (heads * count)))
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
    """Return attention with Q K^T in FP16 before it is scaled, P in FP16 and sums in FP32: what is said to overflow."""
    part = prepare(call)
    q, k, v = part.q.float(), part.k.float(), part.v.float()
    bias = part.added.float().masked_fill(~part.seen, -torch.inf)
    scores = (q @ k.mT).half().float() * call.scale + bias
    top = scores.amax(-1, keepdim=True)
    masked_out = top == -torch.inf
    weights = torch.exp(scores - top.masked_fill(masked_out, 0.0))
    total = weights.sum(-1, keepdim=True).masked_fill(masked_out, 1.0)
    return (weights.half().float() @ v / total).half().double()
