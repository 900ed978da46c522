"""Reference attention: the specification of the operator, on a model of the NPU's arithmetic.

A GEMM accumulates in FP32 and is rounded once, when it is stored. Every value kept in FP16 is rounded when it is
computed. All query rows are processed at once, and key blocks one after another. This changes no number, because
query tiles only decide which rows are rescued together. Equation and line numbers are those of arXiv:2503.01873.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from pasa.ops.attention.call import NO_WINDOW, Call, Results, to_fp16
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.spec.diagnostics import ScoreCounts
from pasa.ops.attention.spec.masking import KeyMask, dense_mask, fitting_mask, hidden_keys, non_finite_reach, read_mask
from pasa.ops.attention.spec.packed import attend_apart, attend_each, concatenated, without_keys
from pasa.ops.attention.spec.pages import attend_gathered
from pasa.ops.attention.spec.repeated_maxima import EPSILON, bounded_shift, published_shift, repeats
from pasa.ops.attention.spec.scores import Block, PaperScores, ScoreTile, score_model, whole_tiles
from pasa.ops.notices import caller
from pasa.ops.numerics.dither import round_unbiased
from pasa.ops.numerics.formats import FORMATS, FP16, FP32, Format, Overflow, round_to

SILENCE = """to silence: warnings.filterwarnings("ignore", "softmax='unbiased_paper'", UserWarning)"""
NOTICED = -11 * math.log(2)  # nats: such keys weigh 2^-11, FP16's rounding
# In nats: the largest distance of a score above what its row's weights are relative to. Further
# above, the row's weights become relative to that score. FP16 holds exp(4) = 54.6 times `LIFT`.
MOVE_REACH = 4.0
# In nats: the largest distance of a tile's reference from that of the weights, row by row, that is
# not subtracted. It is an eighth of the error of rounding a weight to FP16.
ALIGNED = 2.0**-14
# Weights are stored in FP16 as multiples of 1 / LIFT, so they vanish only 24.3 nats below the
# reference. A power of two, so that O / l does not change.
LIFT = 2.0**10
# What unbiased rounding rounds to directly: rounding FP16 again to BF16 would bring back a bias.
ROUNDS_ONCE = {torch.bfloat16: FORMATS["bf16"]}


def attend(call: Call) -> Results:
    """Attend from queries to keys and values, Hq a multiple of Hkv; `Call` has the shapes.

    FP16 is computed with; BF16 and FP32 are converted to FP16 first, as the paper does. Diagnostics cost one more GEMM.

    Returns
    -------
    Results
        The log-sum-exp is a natural logarithm, and -inf where a row sees neither a key nor a sink. `counts` is None
        without `diagnose`; see `diagnostics.ScoreCounts`. Packed sequences have theirs joined, (1, Hq, 7).

    Raises
    ------
    ValueError
        If a finite value of a BF16 or FP32 input does not fit into FP16, or cumulative lengths do not rise from 0 to
        the number of tokens.

    Notes
    -----
    A key that no query of its batch entry may see is ignored, so it enters no mean. A NaN or infinity in a key turns
    the rows that see it to NaN, one in a value its column of those rows, one in a query its row.
    softmax="unbiased_paper" warns of rows whose largest weights underflow; if all weights of a row do, its output is
    NaN.
    """
    if call.pages is not None:
        return attend_gathered(attend, call)
    if call.cu_q is not None:
        return attend_apart(_attend_dense, call)
    return attend_each(_attend_dense, call) if call.options.batch_invariant else _attend_dense(call)


def _attend_dense(call: Call) -> Results:
    q, k, v, attn_mask, options = call.q, call.k, call.v, call.mask, call.options
    if attn_mask is not None:
        attn_mask = fitting_mask(attn_mask, call.scale)
        full = dense_mask(call, attn_mask)
        if bool((hidden := hidden_keys(full, k)).any()):
            return _without_hidden_keys(call, full, hidden)
    mask = read_mask(call, attn_mask)
    inputs = to_fp16(q, "q").float(), to_fp16(k, "k").float(), to_fp16(v, "v").float()
    clean_q, clean_k, clean_v = (torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in inputs)
    rows = clean_q.unflatten(1, (k.shape[1], -1))
    target = ROUNDS_ONCE.get(q.dtype, FP16) if options.softmax == "unbiased" else FP16
    out, lse, max_logits, counts = _blocks(call, rows, clean_k, clean_v, mask, target)
    out, lse, max_logits = (x.flatten(1, 2) for x in (out, lse, max_logits))
    if mask.adds_nonfinite or not all(bool(torch.isfinite(x).all()) for x in inputs):
        bad_rows, bad = non_finite_reach(*inputs, mask, options.block_k)
        out, lse = out.masked_fill(bad, torch.nan), lse.masked_fill(bad_rows, torch.nan)
        max_logits = max_logits.masked_fill(bad_rows, torch.nan)
    return Results(out.to(q.dtype), lse, max_logits.amax(-1) if call.max_logits else None, counts)


def _without_hidden_keys(call: Call, full: Tensor, hidden: Tensor) -> Results:
    """Process one batch entry at a time, without keys hidden from all its queries (padding, empty cache slots)."""
    q, k, v = call.q, call.k, call.v
    parts = []
    for b, gone in enumerate(hidden):
        if bool(gone.all()):
            lse = without_keys(call, torch.Size((1, *q.shape[1:3])), heads=1)
            counts = ScoreCounts(1, q.shape[1], q.device).table if call.diagnose else None
            max_logits = lse.new_full((1, q.shape[1]), -torch.inf) if call.max_logits else None
            parts.append(Results(torch.zeros_like(q[b : b + 1]), lse, max_logits, counts))
            continue
        keys, values = k[b : b + 1, :, ~gone], v[b : b + 1, :, ~gone]
        mask = full[b % full.shape[0]].unsqueeze(0)
        mask = mask if mask.shape[-1] == 1 else mask[..., ~gone]
        one = replace(call, q=q[b : b + 1], k=keys, v=values, mask=mask, is_causal=False, window=NO_WINDOW)
        parts.append(_attend_dense(one))
    return concatenated(parts)


def _blocks(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: KeyMask, target: Format
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loop over key blocks for q (B, Hkv, G, Sq, D).

    Returns out, lse, the largest score of each row (B, Hkv, G, Sq, ...), and counts.
    """
    options = call.options
    # A soft cap needs the true score, in FP32. It passes no more of a rounding on, so anchors would gain nothing.
    scored = replace(options, precision="fp32") if call.softcap else options
    model = score_model(replace(call, options=scored), q, k)
    softmax = OnlineSoftmax(q, options, target)
    published = isinstance(model, PaperScores)  # its mean F_j counts blocks from the first of all
    counts = ScoreCounts(q.shape[0], q.shape[1] * q.shape[2], q.device) if call.diagnose else None
    for index, start in enumerate(range(0, k.shape[-2], options.block_k)):
        stop = min(start + options.block_k, k.shape[-2])
        first, end = mask.rows_of(start, stop)  # other rows see no key of this block
        first, end = first if index else 0, q.shape[-2] if published else end
        if first >= end:
            continue
        visible, bias = mask.tile(first, end, start, stop)
        rows = q[..., first:end, :]
        behind, guessed = softmax.behind[..., first:end, :], softmax.guessed[..., first:end, :]
        block = Block(index, rows, k[..., start:stop, :], visible, bias, behind, first, guessed)
        tile = model.tile(block)
        frame = model.frame(q) if options.softmax == "unbiased_paper" else 0.0
        softmax.add(tile, block, v[..., start:stop, :], frame if isinstance(frame, float) else frame[..., first:end, :])
        if counts is not None:
            counts.add(block, tile, softmax.flushed, scored)
    sinks = None if call.sinks is None else call.sinks.float().reshape(-1, q.shape[2], 1, 1)
    return *softmax.finish(model.frame(q), sinks), None if counts is None else counts.table


class OnlineSoftmax:
    """Accumulate running maximum m, row sum l and output O over key blocks (Algorithm 1, lines 12 and 16 to 22).

    P is taken relative to the maximum of its own block, as in Algorithm 1, so it never waits for the previous block.
    Under the published rule for repeated maxima it is relative to the running maximum, as in line 10 of that
    algorithm. With FP16 accumulation, `exact` keeps m and l in FP32 and O normalised, so every O is a mean of values
    and within range.
    """

    def __init__(self, q: Tensor, options: AttentionOptions, target: Format) -> None:
        exact = options.precision == "pasa" and options.recovery == "exact"
        low = options.accumulate == "fp16" or options.precision == "fp16"
        self.overflow = options.overflow
        self.rows: Format = FP16 if low and not exact else FP32
        self.normalised = low and exact
        self.rule, self.target = options.softmax, target
        self.exact = exact  # l sums the rounded weights, so that V = 1 gives 1 and O stays a mean of values
        # A mean fits wherever its values do. But the sums above and below the fraction bar are rounded separately,
        # and a few thousand roundings may carry 65504 past 65520, where infinity begins.
        self.stored: Overflow = "saturate" if exact else options.overflow
        # The weights of these modes are relative to a reference that seldom moves, so O need not be rescaled.
        self.lazy = exact and not low and options.softmax in ("safe", "unbiased")
        self.lift, self.block_q = LIFT if self.lazy else 1.0, options.block_q
        self.maximum = q.new_full((*q.shape[:-1], 1), -torch.inf)  # what l and O are relative to
        self.behind = self.maximum.clone()  # the same, one block ago, in the frame of the last block
        self.guessed = torch.zeros_like(self.behind, dtype=torch.bool)
        self.flushed = self.guessed  # rows of the last block whose O so far was rescaled before it
        self.sum = torch.zeros_like(self.maximum)
        self.lost = self.maximum.clone()  # largest score of the blocks whose weights have all underflowed
        self.max_logits = self.maximum.clone()  # without what a rule adds
        self.out = torch.zeros_like(q)

    def _row(self, x: Tensor) -> Tensor:
        return round_to(x, self.rows, overflow=self.overflow)

    def _output(self, x: Tensor, target: Format) -> Tensor:
        """Round a value of the output by the rule in use."""
        rounded: Tensor = (round_unbiased if self.rule == "unbiased" else round_to)(x, target, overflow=self.stored)
        # 0 / 0 stays NaN; saturation gives 0.
        return rounded.masked_fill(torch.isnan(x), torch.nan) if self.exact else rounded

    def add(self, tile: ScoreTile, block: Block, v: Tensor, frame: Tensor | float = 0.0) -> None:
        """Add one tile and its values (B, Hkv, n, D); the published rule needs the `frame` of the true scores."""
        old = slice(block.rows_before, block.rows_before + block.reference.shape[-2])
        unseen = self.maximum[..., old, :] == -torch.inf  # -inf here must not saturate
        carried = self._row(self.maximum[..., old, :] + tile.carry).masked_fill(unseen, -torch.inf)
        scores, alive = _masked(tile, block)
        top = scores.amax(-1, keepdim=True)
        # If all visible scores of a row are -inf, they are too far below its maximum for FP16: their weights are 0.
        if self.exact:
            alive = top > -torch.inf
        if alive is not None:
            top = top.where(alive, 0.0)
        highest = top + tile.offset
        seen = highest if alive is None else highest.where(alive, -torch.inf)
        self.max_logits[..., old, :] = torch.maximum(self.max_logits[..., old, :] + tile.carry, seen)
        self._remember(old, unseen, carried, tile, alive)
        if self.lazy:
            shift, maximum, new = self._lazy_reference(top, carried, tile, block, seen > -torch.inf)
        else:
            if self.rule != "safe":
                top = self._row(top + self._shift(scores, top, tile, carried, frame))
            shift, maximum, new = self._own_reference(top, carried, tile, alive)
        weights = self._row(torch.exp(self._row(scores - shift)))
        rounded = round_to(weights * self.lift, FP16, overflow=self.overflow) / self.lift
        row_sum = self._sum(rounded if self.exact else weights)
        begun = self.sum[..., old, :] != 0
        moved = maximum > carried if tile.rescued is None else (maximum > carried) | tile.rescued
        self.flushed = moved & begun
        keep = self._factor(carried - maximum, begun)
        before = self.sum[..., old, :] * keep
        self.sum[..., old, :] = self._row(self._row(before) + self._row(new * row_sum))
        self.maximum[..., old, :] = maximum
        if self.rule == "unbiased_paper":
            gone = (rounded == 0).all(-1, keepdim=True) & (scores > -torch.inf).any(-1, keepdim=True)
            self.lost[..., old, :] = torch.maximum(self.lost[..., old, :] + tile.carry, highest.where(gone, -torch.inf))
        self._add_output(old, rounded, row_sum, keep, new, before, v)

    def _lazy_reference(
        self, top: Tensor, carried: Tensor, tile: ScoreTile, block: Block, alive: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what this tile's scores lose, the reference after it, and the factor of its weights.

        References stay as long as no score of a tile lies more than MOVE_REACH above its row's. Otherwise those of all
        rows of the tile become running maxima.
        """
        here = carried - tile.offset
        moves = whole_tiles((top - here > MOVE_REACH) & alive, block.rows_before, self.block_q)
        maximum = torch.where(moves & alive, torch.maximum(carried, top + tile.offset), carried)
        apart = whole_tiles(here.abs() > ALIGNED, block.rows_before, self.block_q)
        shift = torch.where(moves, torch.maximum(here, top), here.where(apart, 0.0))
        return shift.where(alive, 0.0), maximum, alive.type(top.dtype)

    def _own_reference(
        self, top: Tensor, carried: Tensor, tile: ScoreTile, alive: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same where a tile's weights are relative to its own maximum, as in Algorithm 1."""
        tile_max = self._row(top + tile.offset)
        maximum = torch.maximum(carried, tile_max if alive is None else tile_max.where(alive, -torch.inf))
        return top, maximum, self._factor(tile_max - maximum, alive)

    def _remember(self, old: slice, unseen: Tensor, carried: Tensor, tile: ScoreTile, alive: Tensor | None) -> None:
        """Keep what the next block refers to: a cube forms its scores while this block's weights are made."""
        guess = torch.as_tensor(tile.offset, device=carried.device).expand_as(carried)
        first = unseen if alive is None else unseen & alive
        self.behind[..., old, :] = torch.where(first, guess, carried)
        self.guessed[..., old, :] = first

    def _shift(
        self, scores: Tensor, top: Tensor, tile: ScoreTile, carried: Tensor, frame: Tensor | float
    ) -> Tensor | float:
        """Return what the rule adds to the maximum of rows that repeat it, in this block or across blocks."""
        if self.rule == "unbiased_paper":
            return torch.maximum(published_shift(scores, top, tile.offset + frame), carried - tile.offset - top)
        if self.rows is FP32:
            return 0.0  # O is divided before it is rounded, so a factor on the row cancels
        return bounded_shift(repeats(scores, top) | ((top + tile.offset - carried).abs() <= EPSILON), top)

    def _add_output(
        self, old: slice, weights: Tensor, row_sum: Tensor, keep: Tensor, new: Tensor, before: Tensor, v: Tensor
    ) -> None:
        """Update O_j = keep O_{j-1} + new (P_j V_j)  (line 20), or its normalised form."""
        out = self.out[..., old, :]
        if not self.normalised:
            product = self._row(_times_values(weights, v))
            self.out[..., old, :] = self._row(self._row(keep * out) + self._row(new * product))
            return
        # P / l' rounded towards zero sums to at most 1, so P V fits wherever V does. The sum of the rounded shares
        # replaces l'.
        shares = round_to(weights / row_sum.clamp(min=1.0), FP16, rounding="toward_zero")
        product = self._output(_times_values(shares, v), FP16)
        gained = new * row_sum
        total = before + gained * self._sum(shares)
        self.sum[..., old, :] = total
        mixed = (before * out + gained * product) / total.where(total != 0, 1.0)
        self.out[..., old, :] = self._output(mixed, FP16)

    def _factor(self, exponent: Tensor, exists: Tensor | None) -> Tensor:
        """Return exp, and 0 where nothing is scaled: no earlier block (trap of line 4), no visible key."""
        factor = self._row(torch.exp(self._row(exponent)))
        return factor if exists is None else factor.where(exists, 0.0)

    def _sum(self, x: Tensor) -> Tensor:
        """Sum each row in FP32, as the cube does, or by the FP16 vector unit's binary tree, rounded at every step."""
        if self.rows is FP32:
            return x.sum(-1, keepdim=True)
        x = torch.nn.functional.pad(x, (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
        while x.shape[-1] > 1:
            x = self._row(x[..., ::2] + x[..., 1::2])
        return x

    def finish(self, frame: Tensor | float, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rounded output, the log-sum-exp and the largest score of each row, both in the true frame.

        A row without a key has 0, its sink or -inf, and -inf. A sink takes a share of the weights, and gives nothing.
        """
        empty = (self.sum == 0) & (self.maximum == -torch.inf)
        divisor = self.sum.where(~empty, 1.0)
        lse = (self.maximum + frame + torch.log(divisor)).masked_fill(empty, -torch.inf)
        out = self.out if self.normalised else self.out / divisor
        if sinks is not None:
            share = torch.sigmoid(lse - sinks).masked_fill(empty, 0.0)
            out, lse = out * share, torch.logaddexp(lse, sinks)
        if sinks is not None or not self.normalised:
            out = self._output(out, self.target)
        if self.rule == "unbiased_paper" and (lost := int((self.lost + frame - lse > NOTICED).sum())):
            text = f"softmax='unbiased_paper': weights of {lost} rows underflow: NaN, or wrong ({SILENCE})"
            warnings.warn(text, UserWarning, stacklevel=caller())
        return out, lse.squeeze(-1), (self.max_logits + frame).squeeze(-1)


def _times_values(weights: Tensor, v: Tensor) -> Tensor:
    """Multiply grouped weights (B, Hkv, G, R, n) by values (B, Hkv, n, D), with FP32 accumulation."""
    rows: Tensor = (weights.flatten(2, 3) @ v).unflatten(2, weights.shape[2:4])
    return rows


def _masked(tile: ScoreTile, block: Block) -> tuple[Tensor, Tensor | None]:
    """Return the scores with bias and mask applied, and which rows (..., R, 1) see a key of the block (None: all)."""
    scores = tile.scores if block.bias is None else tile.scores + block.bias
    if block.visible is None:
        return scores, None
    return scores.masked_fill(~block.visible, -torch.inf), block.visible.any(-1, keepdim=True)
