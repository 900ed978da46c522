"""Frames: vectors that ranks subtract from spans of keys, so that log-sum-exps keep their digits.

FP32 holds a log-sum-exp (LSE) of 131,072 in steps of 1/64. Chunks merged by such LSEs get weights
that are off by a percent. So all ranks first subtract one anchor from their keys, in every column
in which the subtraction is exact for every key of the sequence. Softmax does not see the anchor.
What the anchor adds to a row's scores, scale * q.anchor, is left out of all numbers that are
compared. In almost every model nothing more is needed.

If biases differ by block, no single anchor suits all keys. Then each rank cuts its keys into spans.
Each span has a separate frame, which can be subtracted exactly from all its keys. The LSE of a
span is small in its frame, and the difference between two frames, scale * q.(f - g), is formed in
FP64 (merge.py).

Error bound. Spans are made of cells: blocks of 128 keys, cut where a bias begins or ends. In the
frame of its span a key k has |score| <= max(REACH, 2 s). Here s is the largest sum of scale |q_c|
|k_c - a_c| over columns c within the cell of k, a is the anchor of that cell alone, and |q_c| is
the largest of all queries in column c. The LSE that a span contributes to a row is at most that
(plus the log of the number of keys). A call forms the LSE with two roundings to FP32, each of 2^-24
of its size, and a weight compares two LSEs. So these roundings change a weight by at most 2^-22 of
max(REACH, 2 s), where only the cells that the row sees count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pasa.ops.attention.spec.shift_keys import anchor_near, shifts_exactly
from pasa.ops.ring.group import Ring
from pasa.ops.ring.layout import Part, cut

BLOCK = 128
# In nats. FP32 stores an LSE of 1024 nats to 2^-14, an eighth of the error of rounding an output to
# FP16.
REACH = 1024.0
# The most cuts in a block of keys. More jumps than that within 128 keys are not a bias that keys
# share.
CUTS = 4
# A column has a frame only if the frame is this many times the remainder, so that spans with one
# bias share it.
PAYS = 4.0


@dataclass(frozen=True)
class Frames:
    """The spans of every rank's keys, and the frame of each.

    Attributes
    ----------
    anchor : Tensor (B, Hkv, 1, D), FP16
        Subtracted from every key; the same bits on every rank.
    edges : tuple of tuple of int
        For every rank, the first key of each span, then the number of its keys.
    shifts : tuple of Tensor (spans, B, Hkv, 1, D), FP64, optional
        Frames of every rank's spans, to subtract in addition to the anchor; None if all of them are
        0.
    """

    anchor: Tensor
    edges: tuple[tuple[int, ...], ...]
    shifts: tuple[Tensor, ...] | None

    def apply(self, k: Tensor, rank: int) -> Tensor:
        """Return the keys of a rank minus the anchor and their frames; both subtractions are exact."""
        shifted = k - self.anchor
        if self.shifts is not None:
            for shift, (start, stop) in zip(self.shifts[rank], pairwise(self.edges[rank]), strict=True):
                shifted[:, :, start:stop] -= shift.half()
        return shifted

    def pieces(self, part: Part, source: int) -> Iterator[tuple[Part, Tensor | None]]:
        """Yield the queries and keys of each operator call, with the frame of its keys (None for 0)."""
        edges = self.edges[source]
        if len(edges) == 2:
            yield part, None if self.shifts is None else self.shifts[source][0]
            return
        for index, (start, stop) in enumerate(pairwise(edges)):
            for piece in cut(part, start, stop, edges[-1]):
                yield piece, None if self.shifts is None else self.shifts[source][index]


def agree(q: Tensor, k: Tensor, lengths: tuple[int, ...], scale: float, ring: Ring) -> Frames:
    """Find the anchor and the frames of all ranks' keys; a collective call.

    Parameters
    ----------
    q : Tensor (B, Hq, Sq, D), FP16
    k : Tensor (B, Hkv, S, D), FP16
        Of this rank. NaN and infinities are ignored.
    lengths : tuple of int
        Keys of every rank.
    scale : float
    ring : Ring
    """
    anchor, largest = common_anchor(q, k, sum(lengths), ring)
    shifted, nats = k - anchor, scale * largest
    far = _reach(shifted, nats).max() > REACH
    if not bool(torch.stack(ring.gather(far.to(torch.uint8).reshape(1))).any()):
        return Frames(anchor, tuple((0, length) for length in lengths), None)
    starts, anchors = cut_spans(shifted, nats)
    limit = max(count for (count,) in ring.tell([len(starts)], k.device))
    stated = ring.tell([*starts, *[-1] * (limit - len(starts))], k.device)
    padded = anchors.new_zeros((limit, *anchors.shape[1:]))
    padded[: len(starts)] = anchors
    edges = tuple(
        (*(start for start in each if start >= 0), length) for each, length in zip(stated, lengths, strict=True)
    )
    every = torch.stack(ring.gather(padded))
    if not bool(every.any()):  # The keys are long, and no frame makes them shorter.
        return Frames(anchor, tuple((0, length) for length in lengths), None)
    return Frames(anchor, edges, tuple(x[: len(e) - 1].double() for x, e in zip(every, edges, strict=True)))


def common_anchor(q: Tensor, k: Tensor, keys: int, ring: Ring) -> tuple[Tensor, Tensor]:
    """Find what all ranks can subtract from their keys without rounding, and the largest |q| of every column.

    Parameters
    ----------
    q : Tensor (B, Hq, Sq, D), FP16
    k : Tensor (B, Hkv, S, D), FP16
        Of this rank; NaN and infinities are ignored.
    keys : int
        Number of keys of all ranks together.
    ring : Ring

    Returns
    -------
    anchor : Tensor (B, Hkv, 1, D), FP16
        The mean key on the grid of the largest one, or 0; the same bits on every rank.
    largest_query : Tensor (B, Hkv, 1, D), FP32
    """
    finite = _finite(k)
    sums = finite.sum(2, keepdim=True)
    queries = _finite(q).abs().amax(2, keepdim=True).unflatten(1, (k.shape[1], -1)).amax(2)
    gathered = torch.stack(ring.gather(torch.stack((sums, finite.abs().amax(2, keepdim=True), queries))))
    sums, largest, queries = gathered.unbind(1)
    anchor = anchor_near(sums.sum(0) / keys, largest.amax(0))
    exact = shifts_exactly(finite, anchor).all(2, keepdim=True)
    everywhere = torch.stack(ring.gather(exact.to(torch.uint8))).bool().all(0)
    return anchor.where(everywhere, 0.0).half(), queries.amax(0)


def cut_spans(k: Tensor, nats: Tensor) -> tuple[list[int], Tensor]:
    """Cut keys into as few spans as share an exact frame in which they are near 0.

    Parameters
    ----------
    k : Tensor (B, Hkv, S, D), FP16
    nats : Tensor (B, Hkv, 1, D)
        The largest |q| of every column, times the scale: the most that a unit of a key adds to a
        score.

    Returns
    -------
    starts : list of int
        First key of every span.
    frames : Tensor (spans, B, Hkv, 1, D), FP16
        0 wherever keys are near enough to 0 without a frame.
    """
    edges = _cells(k, nats)
    x = _gather_cells(k, edges)
    anchors = _cell_anchors(x)
    allowed = torch.clamp(2 * _reach(x - anchors, nats.unsqueeze(2)), min=REACH)

    def suited(frame: Tensor, first: int, stop: int) -> int:
        """Return how many cells from `first` on the frame serves, up to the first that it does not serve."""
        part = x[:, :, first:stop]
        exact = (shifts_exactly(_finite(part), frame) | ~part.isfinite()).all(-1).all(-1).all(0).all(0)
        near = (_reach(part - frame, nats.unsqueeze(2)) <= allowed[:, :, first:stop]).all(-1).all(0).all(0)
        return int((exact & near).int().cumprod(0).sum())

    starts, frames = [0], [torch.zeros_like(anchors[:, :, :1])]
    cell, ahead, cells = 0, 1, len(edges) - 1
    while cell < cells:
        stop = min(cell + ahead, cells)
        cell += suited(frames[-1], cell, stop)
        # A span of n cells costs fewer than 2 n + 1 tests, so a cell is tested at most three times
        # on average.
        ahead *= 2
        if cell < stop:
            nearest = anchors[:, :, cell : cell + 1]
            if cell:
                starts.append(edges[cell])
                frames.append(nearest)
            else:
                frames[0] = nearest
            cell, ahead = cell + 1, 1
    return starts, torch.stack(frames).squeeze(3).half()


def _cells(k: Tensor, nats: Tensor) -> list[int]:
    """Return where cells of at most BLOCK keys begin, and after these the number of keys.

    A cell ends before a key that lies more than REACH from the previous key, because a bias begins
    or ends there. If that happens more than CUTS times in a block, its keys share no bias and cuts
    would gain nothing, so the block stays whole.
    """
    jumps = (_reach(k.float().diff(dim=2), nats) > REACH).any(0).any(0)
    cuts = [[start] for start in range(0, k.shape[2], BLOCK)]
    for position in (jumps.nonzero().flatten() + 1).tolist():
        if position % BLOCK:
            cuts[position // BLOCK].append(position)
    calm = [each if len(each) <= 1 + CUTS else each[:1] for each in cuts]
    return [*(position for each in calm for position in each), k.shape[2]]


def _gather_cells(k: Tensor, edges: list[int]) -> Tensor:
    """Return keys by cells, (B, Hkv, cells, BLOCK, D), FP32: NaN behind the last key of a cell."""
    first, last = (torch.tensor(part, device=k.device)[:, None] for part in (edges[:-1], edges[1:]))
    index = first + torch.arange(BLOCK, device=k.device)
    keys = k.float()[:, :, index.clamp(max=k.shape[2] - 1)]
    return keys.masked_fill((index >= last)[..., None], torch.nan)


def _cell_anchors(x: Tensor) -> Tensor:
    """Return the anchor of every cell alone, (B, Hkv, cells, 1, D); 0 in columns where no exact anchor pays (PAYS)."""
    finite, counted = _finite(x), x.isfinite()
    mean = finite.sum(3, keepdim=True) / counted.sum(3, keepdim=True).clamp(min=1)
    anchor = anchor_near(mean, finite.abs().amax(3, keepdim=True))
    left = (finite - anchor).where(counted, 0.0).abs().amax(3, keepdim=True)
    exact = (shifts_exactly(finite, anchor) | ~counted).all(3, keepdim=True)
    return anchor.where(exact & (anchor.abs() >= PAYS * left), 0.0)


def _reach(x: Tensor, nats: Tensor) -> Tensor:
    """Return a bound, in nats, on all scores of x (..., D) with the queries of its head; its shape is (...)."""
    return (_finite(x).abs() * nats).sum(-1)


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0)
