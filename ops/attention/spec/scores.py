"""Compute the tile of scores of one key block, in the arithmetic of each precision.

In a tile, ``scores + offset`` are the scaled scores minus the *frame* of their row. A frame is one
number for all scores of a row, so softmax does not depend on it. `ScoreModel.frame` returns it for the
log-sum-exp. The running softmax (attention.py) needs nothing else, so precisions differ in this file
alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pasa.ops.attention.call import Call
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.spec.shift_keys import shift_exact, shift_paper, whole_blocks
from pasa.ops.numerics.formats import FP16, FP16_MAX, FP32, round_to
from pasa.ops.numerics.shifting import (
    NoOptimalBetaError,
    invariance,
    optimal_beta,
    practical_invariance,
    shifting_matrix,
)

# In nats: the largest distance of a score above the row's reference. FP16 stores scores further
# above too coarsely, so their tile stays in FP32. Up to 6 nats FP16 spacing is at most 2^-7 in tile
# units (one unit is 0.7 to 1.4 nats), so a weight is off by at most 0.6 %. With 8 nats, scores whose
# maximum rises from block to block err twice as much (tests/properties/test_large_bias.py).
RESCUE_REACH = 6.0
# In nats: weights below exp(-104) are zero even as FP32 subnormals.
ZERO_WEIGHT = 104.0
# The most nats in one unit of a stored tile. Above it FP16's subnormals, 2^-24 units apart, are too
# coarse, because errors exceed 2^-8 nats.
COARSE_UNIT = 2.0**17
# In nats: the largest distance of a reference from 0. References are clamped to it below 0, and in a
# row's first tile above 0 as well. A larger reference would make FP32 round sums by more than 2^-13
# nats a step, although the scores that the row sees may lie near 0. 2^-13 nats is a quarter of the
# error of rounding a weight to FP16. See README.md.
FARTHEST_REFERENCE = 2.0**11
PAPER_BETA0 = 1 - 2.0**-6  # the start that the paper uses (section 2.3)


@dataclass
class ScoreTile:
    """Hold the scores of query rows against one key block.

    Attributes
    ----------
    stored : Tensor (..., rows, n)
        Scores as they leave the matrix unit, before they are scaled: FP32 tensors with values of
        the stored format.
    scores : Tensor (..., rows, n)
        Scaled scores without the offset.
    offset, carry : Tensor (..., rows, 1) or 0.0
        Added to this tile's scores, and to the running maximum of earlier tiles (the paper's
        correction terms).
    rescued : Tensor (..., rows, 1), bool, optional
        Rows whose tile stayed in FP32.
    """

    stored: Tensor
    scores: Tensor
    offset: Tensor | float = 0.0
    carry: Tensor | float = 0.0
    rescued: Tensor | None = None


@dataclass
class Block:
    """Describe one tile's inputs: query rows, keys, and which keys the rows may see.

    Attributes
    ----------
    index : int
        Number of the key block.
    q : Tensor (B, Hkv, G, rows, D)
    k : Tensor (B, Hkv, n, D)
    visible : Tensor (..., rows, n), bool, optional
    bias : Tensor (..., rows, n), FP32, optional
    reference : Tensor (B, Hkv, G, rows, 1)
        What the rows' weights were relative to before the previous block. It is -inf before the
        first visible key, and then, for one block, the guess that the first tile referred to.
    rows_before : int
        Number of rows of the sequence before these.
    guessed : Tensor (B, Hkv, G, rows, 1), bool, optional
        Rows whose reference is such a guess.
    """

    index: int
    q: Tensor
    k: Tensor
    visible: Tensor | None
    bias: Tensor | None
    reference: Tensor
    rows_before: int
    guessed: Tensor | None = None


class ScoreModel(Protocol):
    """Define one precision: how it computes tiles, and the frame of its running maximum."""

    def tile(self, block: Block) -> ScoreTile:
        """Return the scores of one block, as stored and as the softmax uses them."""
        ...

    def frame(self, q: Tensor) -> Tensor | float:
        """Return what to add to the running maximum to get true scaled scores, (B, Hkv, G, Sq, 1)."""
        ...


def score_model(call: Call, q: Tensor, k: Tensor) -> ScoreModel:
    """Return the model that a call selects for queries (B, Hkv, G, Sq, D) and keys (B, Hkv, Skv, D)."""
    options, scale = call.options, call.scale
    if options.precision != "pasa":
        return FlashScores(options, k, scale, call.softcap)
    return PaperScores(options, k, scale) if options.recovery == "paper" else ExactScores(options, q, scale)


def matmul_rows(q: Tensor, k: Tensor) -> Tensor:
    """Return q k^T, (B, Hkv, G, R, n), for queries (B, Hkv, G, R, D) and keys (B, Hkv, n, D), accumulated in FP32."""
    rows: Tensor = (q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4])
    return rows


def soft_capped(scores: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(scores / cap), or the scores themselves for a cap of 0."""
    return cap * torch.tanh(scores / cap) if cap else scores


class FlashScores:
    """Model the paper's precision allocations (figures 1 to 3), and the two fair baselines."""

    def __init__(self, options: AttentionOptions, k: Tensor, scale: float, softcap: float = 0.0) -> None:
        self.precision, self.overflow, self.scale = options.precision, options.overflow, scale
        self.softcap = softcap
        self.key_mean = k.mean(-2, keepdim=True) if self.precision == "smooth_k" else None

    def tile(self, block: Block) -> ScoreTile:
        """Compute S = Q K^T, stored in FP32 (`fp32`) or FP16, and scaled after the store unless `prescaled`."""
        q, k, scale = block.q, block.k, self.scale
        if self.precision == "prescaled":
            q, scale = round_to(q * scale, FP16, overflow=self.overflow), 1.0
        if self.key_mean is not None:
            k = round_to(k - self.key_mean, FP16, overflow=self.overflow)
        stored = matmul_rows(q, k)
        if self.precision != "fp32":
            stored = round_to(stored, FP16, overflow=self.overflow)
        scores = soft_capped(stored * scale, self.softcap)
        return ScoreTile(stored, round_to(scores, FP16, overflow=self.overflow) if self.precision == "fp16" else scores)

    def frame(self, q: Tensor) -> Tensor | float:
        """Return the frame; only `smooth_k` shifts the scores, by q . mean(K), the same for every key."""
        if self.key_mean is None:
            return 0.0
        return matmul_rows(q, self.key_mean) * self.scale


class PaperScores:
    """Model PASA as published: S' = Q K'^T in FP16, and the global recovery of Algorithm 1, lines 13 to 17.

    Where the paper leaves something open, this follows its authors' script. A ragged block is
    filled as in `whole_blocks`. F_j is s / j + F_{j-1} (j-1) / j, which stays between the two
    values, while the printed (j-1) F_{j-1} may overflow.
    """

    def __init__(self, options: AttentionOptions, k: Tensor, scale: float) -> None:
        # the authors' blocks have 128 keys, so a longer block gets no more zeros than theirs would
        self.block, self.overflow = min(options.block_k, -(-k.shape[-2] // 128) * 128), options.overflow
        self.row_format = FP16 if options.accumulate == "fp16" else FP32
        self.keys = whole_blocks(k, self.block)
        beta, factor = paper_beta(options.beta, self.block, scale)
        self.matrix = shifting_matrix(self.block, beta, scale=scale).float()
        self.factor = self._number(factor)  # the invariance I
        self.frame_mean: Tensor | None = None  # F_j of the rows; the frame is factor * F_j

    def _round(self, x: Tensor) -> Tensor:
        return round_to(x, self.row_format, overflow=self.overflow)

    def _number(self, x: float) -> float:
        """Round a scalar operand to the format of the rows, in which a vector instruction takes it."""
        return float(self._round(torch.tensor(x, dtype=torch.float64)))

    def tile(self, block: Block) -> ScoreTile:
        """Return S', and the correction terms that carry its maximum into the moving frame F_j (Eq. 14, 15)."""
        start = block.index * self.block
        keys = shift_paper(self.keys[:, :, start : start + self.block], self.matrix, self.overflow)
        whole = round_to(matmul_rows(block.q, keys), FP16, overflow=self.overflow)
        stored = whole[..., : block.k.shape[-2]]
        # The mean is that of the whole shifted block, because the recovery inverts M, which ignores
        # the mask.
        mean = self._round(whole.mean(-1, keepdim=True))
        if self.frame_mean is None:  # F_0 is taken to be s, the block's mean, so block 1 has no correction
            self.frame_mean = mean
            return ScoreTile(stored, stored)
        before = self.frame_mean[..., block.rows_before :, :]
        one, others = (self._number(x / (block.index + 1)) for x in (1, block.index))
        current = self._round(self._round(mean * one) + self._round(before * others))
        carry = self._round(self.factor * self._round(before - current))
        offset = self._round(self.factor * self._round(mean - current))
        before.copy_(current)  # a view of the running frame, so it is updated only after its last use
        return ScoreTile(stored, stored, offset, carry)

    def frame(self, q: Tensor) -> Tensor | float:
        """Return I F_N, because L = m_N + I F_N + ln l_N."""
        return 0.0 if self.frame_mean is None else self.factor * self.frame_mean


def paper_beta(beta: float | None, n: int, scale: float) -> tuple[float, float]:
    """Return beta and the invariance I for a block of n keys, with the scale folded into M.

    A beta from the caller is used unchanged, with I = beta / (1 - beta). Otherwise beta is
    the fixed point for the rounded matrix, iterated from PAPER_BETA0. For the few n without a fixed
    point, beta is PAPER_BETA0, with the invariance that the rounded matrix has (Eq. 20).
    """
    if beta is not None:
        return beta, invariance(beta)
    if n == 1:
        return 0.0, 0.0  # the mean of one key is the key, so a shift would leave only rounding errors
    try:
        solved = optimal_beta(PAPER_BETA0, n, scale=scale)
    except NoOptimalBetaError:
        return PAPER_BETA0, practical_invariance(PAPER_BETA0, n, scale=scale)
    return solved.beta, solved.invariance


def scale_unit(scale: float) -> float:
    """Return the power of two nearest to the scale, at most 1, which the exact recovery folds into the keys."""
    return min(1.0, 2.0 ** math.floor(math.log2(scale) + 0.5))


class ExactScores:
    """Model the exact recovery: anchored keys, FP32 block offsets, and a row reference subtracted before the rounding.

    With K' = (K - a_j) u exact, the true score of key k in block j is q.k'/u + q.a_j. Scores are
    relative to a frame f_j that starts as the first block's anchor. So a bias that all blocks share
    never enters a rounded number: c_ij = q_i.(a_j - f_j), with a_j - f_j in FP16. The stored tile
    is fl16(q.k' - rho_ij). rho_ij is the row's running maximum minus c_ij, as two FP16 numbers
    (columns of an extra K fractal). Both rho_ij and c_ij are added back in FP32. So what FP16
    stores is near zero where the softmax has its weight.

    In each column, the frame becomes 0 with the first block whose anchor is further from it than
    the smaller of the two is from 0. Then `carry` moves the running maximum into the new frame. So
    every FP32 number is bounded by sums |q||k| of keys that the row sees (README.md).
    """

    def __init__(self, options: AttentionOptions, q: Tensor, scale: float) -> None:
        self.q, self.scale, self.block_q, self.overflow = q, scale, options.block_q, options.overflow
        self.unit = scale_unit(scale)
        self.anchor: Tensor | None = None  # f_j of the last block
        self.framed: Tensor | None = None  # q.f_j for each row's last block

    def tile(self, block: Block) -> ScoreTile:
        """Return referenced scores in FP16; rows of a tile that exceeds its reference too far keep FP32."""
        keys = shift_exact(block.k, self.unit)
        unit = keys.unit.unsqueeze(2)
        carry, anchor = self._move_frame(block, keys.anchor)
        offset = matmul_rows(block.q, keys.anchor - anchor)
        guess = matmul_rows(block.q, keys.mean_residual)  # the block's mean score, in the frame of the block's anchor
        started = (block.reference > -torch.inf) & (block.bias is None)
        settled = started if block.guessed is None else started & ~block.guessed
        reference = torch.where(started, (block.reference + carry) / self.scale - offset, guess) * unit
        farthest = (FARTHEST_REFERENCE * unit / self.scale).clamp(max=2 * FP16_MAX)
        clamped = torch.maximum(reference, -farthest)
        clamped = torch.where(settled, clamped, torch.minimum(clamped, farthest))
        rho = sum(two_terms(clamped))
        wide = matmul_rows(block.q, keys.keys) - rho
        narrow = round_to(wide, FP16, overflow=self.overflow)
        rescued = self._rescued(block, narrow, clamped - reference, self.scale / unit, settled)
        stored = torch.where(rescued, wide, narrow)
        return ScoreTile(stored, stored * (self.scale / unit), (rho / unit + offset) * self.scale, carry, rescued)

    def frame(self, q: Tensor) -> Tensor | float:
        """Return q.f_j of each row's last block, which is missing from every score of the row."""
        return 0.0 if self.framed is None else self.framed * self.scale

    def _move_frame(self, block: Block, anchor: Tensor) -> tuple[Tensor | float, Tensor]:
        """Return the carry into the frame of the block, in nats, and that frame."""
        if self.anchor is None or self.framed is None:
            self.anchor, self.framed = anchor, matmul_rows(self.q, anchor)
            return 0.0, anchor
        before, self.anchor = self.anchor, next_frame(self.anchor, anchor)
        if torch.equal(before, self.anchor):
            return 0.0, before
        # Also for rows that see no key yet: the frame in which they start is the one of that block.
        self.framed[..., block.rows_before :, :] = matmul_rows(self.q[..., block.rows_before :, :], self.anchor)
        return matmul_rows(block.q, before - self.anchor) * self.scale, self.anchor

    def _rescued(self, block: Block, narrow: Tensor, raised: Tensor, scale: Tensor, settled: Tensor) -> Tensor:
        """Return the rows (whole tiles of block_q) whose largest visible score is too far from the reference for FP16.

        `raised` is how far the clamp put the reference above the running maximum. `scale` is the
        nats in a unit of the tile.
        """
        # The mask is added in FP32, after the reference was chosen. With a coarse unit, FP16 cannot
        # hold even a score near its reference.
        if block.bias is not None or float(scale.max()) > COARSE_UNIT:
            return torch.ones_like(block.reference, dtype=torch.bool)
        seen = narrow if block.visible is None else narrow.masked_fill(~block.visible, -torch.inf)
        top = seen.amax(-1, keepdim=True)
        # Scores below a guess or a raised reference may be the largest of the row.
        reach = torch.where(settled, torch.maximum(top, raised), top.abs())
        # At a tiny scale, scores reach 65504 within the allowed distance.
        lost = (reach * scale > RESCUE_REACH) | (reach >= FP16_MAX)
        if block.visible is not None:
            lost &= block.visible.any(-1, keepdim=True)
        if FP16_MAX * float(scale.min()) < ZERO_WEIGHT:  # at a tiny scale, even a score of -65504 may have weight
            bottom = narrow <= -FP16_MAX
            lost |= (bottom if block.visible is None else bottom & block.visible).any(-1, keepdim=True)
        return whole_tiles(lost, block.rows_before, self.block_q)


def next_frame(frame: Tensor, anchor: Tensor) -> Tensor:
    """Return the frame that is used from a block with this anchor on.

    A column keeps its frame if |anchor - frame| <= min(|anchor|, |frame|), and otherwise gets 0. So
    anchor - frame is an FP16 number (Sterbenz's lemma), and no larger than the anchor.
    """
    return torch.where((anchor - frame).abs() <= torch.minimum(anchor.abs(), frame.abs()), frame, 0.0)


def two_terms(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split x into high + low FP16 numbers: 22 bits, and a range of 131008, beyond which x is clamped."""
    high = round_to(x, FP16, overflow="saturate")
    return high, round_to(x - high, FP16, overflow="saturate")


def tiles_with(rows: Tensor, rows_before: int, block_q: int) -> Tensor:
    """Return which tiles of block_q rows hold a marked row: (..., R, 1) to (..., tiles); tiles start at row 0."""
    margin = (rows_before % block_q, -(rows_before + rows.shape[-2]) % block_q)
    tiles: Tensor = torch.nn.functional.pad(rows.squeeze(-1), margin).unflatten(-1, (-1, block_q))
    return tiles.any(-1)


def whole_tiles(rows: Tensor, rows_before: int, block_q: int) -> Tensor:
    """Mark all rows (..., R, 1) of each tile of block_q rows that holds a marked row."""
    start = rows_before % block_q
    marked = tiles_with(rows, rows_before, block_q).repeat_interleave(block_q, -1)
    return marked[..., start : start + rows.shape[-2]].unsqueeze(-1)
