"""What a call has to give: FP64 attention, where NaN belongs, and how large the numbers are that bounds are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import pasa
from pasa.eval.random_calls.soak.cases import Inputs, SoakCase
from pasa.eval.random_calls.soak.layouts import HEADS_LAST
from pasa.eval.random_calls.soak.masks import visible

PIECE = 2**25  # scores, or expanded keys, that are worked on at a time: 256 MiB in FP64
UNIT = 2.0**-24  # half a unit in the last place of FP32
NATS = 104.0  # weights below exp(-104) are zero in FP32


@dataclass(frozen=True)
class Plain:
    """A call as (B, H, S, D) in FP32 with FP16 values; packed ones are one entry.

    Attributes
    ----------
    pieces : list of Piece
        What attends to what.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    pieces: list[Piece]


@dataclass(frozen=True)
class Piece:
    """Rows of some entries, their keys, and how many more keys than its own number row 0 of `rows` sees."""

    entries: slice
    rows: slice
    keys: slice
    diagonal: int


@dataclass(frozen=True)
class Cut:
    """A piece: queries (B, Hq, rows, D), keys and values repeated for them (B, Hq, keys, D), and what hides keys.

    Attributes
    ----------
    mask : Tensor, optional
        As it was given.
    seen : Tensor, bool
        Which row sees which key; broadcasts to (B, Hq, rows, keys).
    added : Tensor, FP64, optional
        What a float mask adds, 0 for what is not finite, but -inf.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    seen: Tensor
    added: Tensor | None


@dataclass(frozen=True)
class Truth:
    """All of (B, Hq, Sq, ...), FP64 or bool.

    Attributes
    ----------
    out, lse : Tensor
        FP64 attention of the inputs with 0 for whatever is not finite.
    nan_rows, nan : Tensor (B, Hq, Sq), (B, Hq, Sq, D)
        Where a NaN or infinity of the inputs must be seen, in `lse` and in `out`.
    low, high : Tensor (B, Hq, Sq, D)
        Range of the values up to the last key that a row sees.
    products : Tensor (B, Hq, Sq)
        The largest scale sum |q_c| |k_c| of a key that the row sees and that may have weight: no scaled score of such a
        key and none of its partial sums is larger.
    norms : Tensor (B, Hq, Sq)
        scale |q| max |k| of those keys: by Cauchy and Schwarz a bound on the same, and for ordinary data a close one.
    added : Tensor (B, Hq, Sq)
        The largest number that a float mask adds to a score with weight.
    """

    out: Tensor
    lse: Tensor
    nan_rows: Tensor
    nan: Tensor
    low: Tensor
    high: Tensor
    products: Tensor
    norms: Tensor
    added: Tensor

    @property
    def blind(self) -> Tensor:
        """Rows that see no key."""
        return self.lse == -torch.inf


def plain(case: SoakCase, inputs: Inputs) -> Plain:
    """The call without its layout."""
    family = case.family
    q, k, v = (x.half().float() for x in (inputs.q, inputs.k, inputs.v))
    if family.packed:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    elif family.layout == HEADS_LAST:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = family.dim**-0.5 if case.scale is None else case.scale
    pieces = list(_packed_pieces(case) if family.packed else _pieces(q, k))
    return Plain(q, k, v, inputs.mask, family.causal, scale, pieces)


def _packed_pieces(case: SoakCase) -> Iterator[Piece]:
    q = k = 0
    for rows, keys in zip(case.rows, case.keys, strict=True):
        yield Piece(slice(0, 1), slice(q, q + rows), slice(k, k + keys), keys - rows)
        q, k = q + rows, k + keys


def _pieces(q: Tensor, k: Tensor) -> Iterator[Piece]:
    """All at once if it is small, else entry by entry and, if need be, rows by rows."""
    batch, heads, rows, dim = q.shape
    keys = k.shape[2]
    step = max(1, min(rows, PIECE // (heads * keys)))
    entries = batch if batch * heads * keys * max(rows, dim) <= PIECE else 1
    for entry in range(0, batch, entries):
        for row in range(0, rows, step):
            stop = min(row + step, rows)
            yield Piece(slice(entry, entry + entries), slice(row, stop), slice(0, keys), row + keys - rows)


def find_truth(call: Plain) -> Truth:
    """Work it out piece by piece."""
    shape, device = call.q.shape, call.q.device
    kinds = dict.fromkeys(("out", "low", "high"), (shape, torch.float64))
    kinds |= dict.fromkeys(("lse", "products", "norms", "added"), (shape[:3], torch.float64))
    kinds |= {"nan_rows": (shape[:3], torch.bool), "nan": (shape, torch.bool)}
    truth = Truth(**{name: torch.zeros(size, dtype=kind, device=device) for name, (size, kind) in kinds.items()})
    truth.lse.fill_(-torch.inf)
    for piece in call.pieces:
        if piece.rows.start < piece.rows.stop and piece.keys.start < piece.keys.stop:
            _fill(truth, call, piece)
    return truth


def cut(call: Plain, piece: Piece) -> Cut:
    """The tensors of a piece."""
    q = call.q[piece.entries, :, piece.rows]
    k, v = (x[piece.entries, :, piece.keys].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (call.k, call.v))
    mask = _cut_mask(call.mask, piece)
    seen = visible(mask, call.causal, 0, q.shape[2], k.shape[2], piece.diagonal, q.device)
    added = None if mask is None or mask.dtype == torch.bool else mask.double().nan_to_num(0.0, 0.0, -torch.inf)
    return Cut(q, k, v, mask, seen, added)


def _fill(truth: Truth, call: Plain, piece: Piece) -> None:
    part = cut(call, piece)
    q, k, v, mask, seen, added = part.q, part.k, part.v, part.mask, part.seen, part.added
    clean_q, clean_k, clean_v = (x.nan_to_num(0.0, 0.0, 0.0) for x in (q, k, v))
    hide = seen if added is None else added.where(seen, -torch.inf)
    at = (piece.entries, slice(None), piece.rows)
    out, lse = pasa.golden_attention(clean_q, clean_k, clean_v, attn_mask=hide, scale=call.scale)
    truth.out[at], truth.lse[at] = out, lse
    truth.nan_rows[at], truth.nan[at] = _reach(q, k, v, mask, seen)
    truth.low[at], truth.high[at] = _range(clean_v, torch.isfinite(v), seen, q.shape[2])
    wide_q, wide_k = clean_q.double(), clean_k.double()
    weighs, sums = _weighs(wide_q, wide_k, seen, added, call.scale)
    truth.products[at] = sums.where(weighs, 0.0).amax(-1)
    lengths = wide_k.norm(dim=-1).unsqueeze(2).where(weighs, 0.0).amax(-1)
    truth.norms[at] = wide_q.norm(dim=-1) * lengths * call.scale
    if added is not None:
        truth.added[at] = added.where(weighs, 0.0).abs().amax(-1)


def _weighs(q: Tensor, k: Tensor, seen: Tensor, added: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Which keys a row sees whose weights may not be zero, though scores err, and scale sum |q_c| |k_c|."""
    scores, sums = q @ k.mT * scale, q.abs() @ k.abs().mT * scale
    bias = scores.new_zeros(()) if added is None else added
    scores = (scores + bias).masked_fill(~seen, -torch.inf)
    return seen & may_weigh(scores, score_errors(sums, bias.nan_to_num(neginf=0.0), q.shape[-1])), sums


def score_errors(products: Tensor, added: Tensor, dim: int) -> Tensor:
    """Return what scaled scores may err by in FP32: `products` is scale sum |q_c| |k_c|, `added` what a mask adds."""
    return 4 * (dim + 4) * UNIT * products + 4 * UNIT * added.abs()


def may_weigh(scores: Tensor, errors: Tensor) -> Tensor:
    """Find the keys within `NATS` of the largest score, if each score may err: all (B, H, Sq, Skv)."""
    top, first = scores.max(-1, keepdim=True)
    return scores + 2 * errors >= top - 2 * errors.gather(-1, first) - NATS


def _cut_mask(mask: Tensor | None, piece: Piece) -> Tensor | None:
    if mask is None:
        return None
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    mask = mask[piece.entries] if mask.shape[0] > 1 else mask
    return mask[:, :, piece.rows] if mask.shape[2] > 1 else mask


def _reach(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and outputs that a NaN or infinity reaches: a query's, a seen key's and a seen mask's all of the row, a seen
    value's its column."""
    bad_q, bad_k, bad_v = ~torch.isfinite(q).all(-1), ~torch.isfinite(k).all(-1), ~torch.isfinite(v)
    rows = bad_q & seen.any(-1)
    if mask is not None and mask.dtype != torch.bool:
        rows = rows | (seen & (torch.isnan(mask) | (mask == torch.inf))).any(-1)
    if bool(bad_k.any()):
        rows = rows | (seen & bad_k.unsqueeze(2)).any(-1)
    columns = torch.zeros((), dtype=torch.bool, device=q.device)
    if bool(bad_v.any()):
        columns = seen.float() @ bad_v.float() > 0
    return rows, (rows.unsqueeze(-1) | columns).expand(q.shape)


def _range(v: Tensor, finite: Tensor, seen: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value (B, H, rows, D) up to the last key that a row sees, of keys that any row sees."""
    exists = seen.any(2).unsqueeze(-1) & finite
    low, high = v.where(exists, torch.inf), v.where(exists, -torch.inf)
    blind = ~seen.any(-1)
    last = seen.shape[-1] - 1 - seen.flip(-1).int().argmax(-1)
    if bool((last == last.amax()).all()):
        low, high = (x.expand(-1, -1, rows, -1) for x in (low.amin(2, keepdim=True), high.amax(2, keepdim=True)))
    else:
        index = last.expand(*v.shape[:2], rows).unsqueeze(-1).expand(*v.shape[:2], rows, v.shape[3])
        low, high = low.cummin(2).values.gather(2, index), high.cummax(2).values.gather(2, index)
    none = blind.unsqueeze(-1) | (low > high)
    return low.double().masked_fill(none, 0.0), high.double().masked_fill(none, 0.0)
