"""Device functions that several kernels share: anchors and their bounds, loads, masks, the softmax step, sums.

One source for NVIDIA GPUs, the interpreter and Ascend (through triton-ascend): pointers and masks, no inline assembly.
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.rounding_kernel import round_rows

SLICE = 16  # columns of a block of 128 keys whose anchor is computed at a time: more need too many registers
LOG2_E = tl.constexpr(1.4426950408889634)
FP16_MAX = tl.constexpr(65504.0)
INF = tl.constexpr(float("inf"))
NORM_MARGIN = tl.constexpr(1.0 + 2.0**-10)  # norms are bounds, so this covers FP32's error in a sum of 512 squares
# Scores, in nats, up to which FP32 sums of products need no anchor: they round by 2^-13 a step, a quarter of what
# rounding a weight to FP16 costs.
ANCHOR_LIMIT = tl.constexpr(2048.0)
ANCHOR_GAIN = tl.constexpr(4.0)


@triton.jit
def in_steps(a, b, c, STEP: tl.constexpr):
    """Return three strides, multiples of STEP, so that the compiler knows it.

    Triton looks for multiples of 16 alone. With heads like D = 72 it would load two bytes at a time.
    """
    return a // STEP * STEP, b // STEP * STEP, c // STEP * STEP


@triton.jit
def wait_for_others(always):
    """Wait for the kernel before this one, which was launched early. `always` is a number that is above 0.

    The compiler cannot know that. So it leaves what comes before, such as addresses, in front of the wait, where it
    takes no time.
    """
    if always > 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def is_finite(x):
    """Test every element; false for NaN and infinity."""
    return tl.abs(x) <= FP16_MAX


@triton.jit
def on_grid(mean, largest):
    """Round means (W,) to the FP16 grid of each column's largest |k|."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.maximum(exponent - 10, -24)  # FP16 has 10 mantissa bits and nothing below 2^-24
    grid = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    steps = mean * ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return ((steps + 12582912.0) - 12582912.0) * grid  # 1.5 2^23: rounds |steps| <= 2^11 to the nearest integer


@triton.jit
def rounds(k, m_key, anchor):
    """Return 1 for columns (W,) in which subtracting the anchor rounds a key, or a key is less than a third of it.

    Arguments as in `exact_anchor`.
    """
    shifted = k - anchor[None, :]
    # The sum shows what FP32 lost in the difference: 2^-24 - 60000 is -60000 in FP32, which is an FP16 number.
    inexact = (shifted.to(tl.float16).to(tl.float32) != shifted) | (shifted + anchor[None, :] != k)
    small = anchor[None, :] * (3.0 * k - anchor[None, :]) < 0.0
    return tl.max(tl.where(m_key & (inexact | small), 1, 0), 0)


@triton.jit
def exact_anchor(k, m_key, count):
    """Return the part of the block's mean that can be subtracted from every key exactly, in each column; else 0.

    Every key must also be at least a third of it.

    k (BLOCK, W) FP32 with FP16 values, 0 where `m_key` (BLOCK, 1 or W) is false; count, scalar or (W,): how many are
    true. Returns the anchor (W,).
    """
    anchor = on_grid(tl.sum(k, 0) / tl.maximum(count, 1.0), tl.max(tl.abs(k), 0))
    return tl.where(rounds(k, m_key, anchor) > 0, 0.0, anchor)


@triton.jit
def middle_anchor(low, high):
    """Return the anchor (W,) FP16 of columns whose keys lie between `low` and `high`; 0 where there is none.

    It is their middle, if both have one sign and neither is more than three times the other. Then the difference from
    every key is exact in FP16. low, high (W,) FP32; NaN or infinite where a key is.
    """
    near = tl.minimum(tl.abs(low), tl.abs(high))
    far = tl.maximum(tl.abs(low), tl.abs(high), propagate_nan=tl.PropagateNan.ALL)
    shared = (low * high > 0.0) & (far <= 3.0 * near) & (far < INF)
    return tl.where(shared, (low + high) * 0.5, 0.0).to(tl.float16)


@triton.jit
def next_frame(b_frame, b_anchor):
    """Return the frame (D,) from a block with this anchor (D,) on.

    A column becomes 0 if frame and anchor are further apart than one of them is from 0. So keys without a bias are
    counted from 0, and anchor - frame is an FP16 number (Sterbenz).
    """
    near = tl.abs(b_anchor - b_frame) <= tl.minimum(tl.abs(b_anchor), tl.abs(b_frame))
    return tl.where(near, b_frame, 0.0)


@triton.jit
def two_products(b_q, b_first, b_second):
    """Return q.first and q.second (M,) of queries (M, D) and two rows (D,) of FP16 numbers.

    Both come from one matrix product. Triton would repeat a plain sum in every layout that needs it, in another order.
    The results could differ so much that huge weights no longer match their sum.
    """
    o_row = tl.arange(0, 16)[:, None]
    b_rows = tl.where(o_row == 0, b_first[None, :], tl.where(o_row == 1, b_second[None, :], 0.0)).to(tl.float16)
    b_products = tl.dot(b_q, tl.trans(b_rows))
    o_column = tl.arange(0, 16)[None, :]
    return tl.sum(tl.where(o_column == 0, b_products, 0.0), 1), tl.sum(tl.where(o_column == 1, b_products, 0.0), 1)


@triton.jit
def capped_scores(b_s, ratio, CAP: tl.constexpr):
    """Return tanh(s / cap) of products q.k, in any shape; ratio: scale / cap.

    Its exponent is at most 0, so nothing overflows. A product that is not finite gives NaN. Near 0 the quotient of
    exponentials errs by 2^-23 of the cap. A "high" cap cannot afford that, so it takes a Pade approximant there, which
    errs by 2^-23 of the score.
    """
    b_x = b_s * ratio
    b_size = tl.abs(b_x)
    b_power = tl.exp2(b_size * (-2.0 * LOG2_E))
    b_top = 1.0 - b_power
    b_bottom = 1.0 + b_power
    if CAP == "high":
        square = b_size * b_size
        b_top = tl.where(b_size < 1.0, b_size * (945.0 + square * (105.0 + square)), b_top)
        b_bottom = tl.where(b_size < 1.0, 945.0 + square * (420.0 + 15.0 * square), b_bottom)
    b_top = b_top / b_bottom
    return tl.where(tl.abs(b_s) < INF, tl.where(b_x < 0.0, -b_top, b_top), float("nan"))


@triton.jit
def beside_sink(lse, sink):
    """Return the share of its weights that a row keeps beside a sink, and its log-sum-exp with the sink.

    Either may be -inf. NaN in the log-sum-exp or the sink gives NaN.
    """
    lead = tl.where(lse == sink, 0.0, lse - sink)  # Triton's interpreter has no & of scalars
    power = tl.exp2(tl.abs(lead) * -LOG2_E)
    share = tl.where(lead < 0.0, power, 1.0) / (1.0 + power)
    alone = tl.where(lead < 0.0, sink, lse)
    return share, tl.where(alone == -INF, alone, alone + tl.log(1.0 + power))


@triton.jit
def largest_score(b_max, b_sum, nats):
    """Return the largest score of rows in nats (`nats`, unless NaN): -inf if fully masked, NaN if the sum is NaN."""
    return tl.where((b_sum == 0.0) & (b_max == -INF), -INF, tl.where(b_sum == b_sum, nats, b_sum))


@triton.jit
def largest_norm(p_norms, parts, BLOCK: tl.constexpr):
    """Return the largest of the norms of a head's parts, BLOCK at a time; 0 if there are none."""
    longest = 0.0
    for start in range(0, parts, BLOCK):
        o_part = start + tl.arange(0, BLOCK)
        longest = tl.maximum(longest, tl.max(tl.load(p_norms + o_part, mask=o_part < parts, other=0.0), 0))
    return longest


@triton.jit
def is_bounded(b_square, longest, scale):
    """Test if all keys of the head are finite and scores of the queries stay below `ANCHOR_LIMIT`.

    b_square (M,): squared norms of the queries; longest: norm of the longest key. By Cauchy and Schwarz, no score
    exceeds the product of the largest norms. A query of infinite norm is not bounded. A NaN in a query may pass, and
    makes the output NaN.
    """
    return tl.sqrt(tl.max(b_square, 0)) * longest * scale <= ANCHOR_LIMIT


@triton.jit
def anchored_scores(b_q, b_k, m_key, longest, LAZY: tl.constexpr):
    """Return q k'^T (M, N) and the block's anchor (D,), which is 0 if scores are small without one.

    b_q (M, D); b_k (N, D); m_key (N,): keys that some row sees; longest: largest norm of a query, in nats. LAZY
    computes an anchor only if one is needed. It must not be used in a loop, because the branch led to illegal accesses
    there (Triton 3.6, sm_90, 64 rows).
    """
    b_wide = b_k.to(tl.float32)
    m_finite = tl.min(tl.where(tl.abs(b_wide) <= FP16_MAX, 1, 0), 1) > 0
    m_mean = m_key & m_finite
    b_clean = tl.where(m_mean[:, None], b_wide, 0.0)
    small = tl.sqrt(tl.max(tl.sum(b_clean * b_clean, 1), 0)) * longest <= ANCHOR_LIMIT
    if LAZY:
        anchor = tl.zeros((b_k.shape[1],), tl.float32)
        if small == 0:
            anchor = exact_anchor(b_clean, m_mean[:, None], tl.sum(tl.where(m_mean, 1.0, 0.0), 0))
    else:
        anchor = exact_anchor(b_clean, m_mean[:, None], tl.sum(tl.where(m_mean, 1.0, 0.0), 0))
        anchor = tl.where(small, 0.0, anchor)
    b_new = tl.where(m_finite[:, None], b_wide - anchor[None, :], float("nan")).to(tl.float16)
    return tl.dot(b_q, tl.trans(b_new)), anchor


@triton.jit
def locate(o_work, work, p_tile, p_cu_q, p_cu_k, p_first_block, heads, tiles, rows, keys,
           VARLEN: tl.constexpr, LAST_FIRST: tl.constexpr):  # fmt: skip
    """Return the tile of query rows of a unit of work, and the extent of its sequence.

    These are batch, head, tile; first row, first key and first key block of the sequence; its rows and keys. Causal
    tiles are dealt out from the last, which sees the most keys, so that light tiles fill the gaps at the end.
    """
    o_batch = 0
    begin_q = 0
    begin_k = 0
    first_block = 0
    if VARLEN:
        o_head = o_work % heads
        sequence = tl.load(p_tile + 2 * (o_work // heads))
        o_tile = tl.load(p_tile + 2 * (o_work // heads) + 1)
        used = sequence >= 0  # the table has room for more tiles than there are
        sequence = tl.maximum(sequence, 0)
        begin_q = tl.load(p_cu_q + sequence)
        begin_k = tl.load(p_cu_k + sequence)
        first_block = tl.load(p_first_block + sequence)
        rows = tl.where(used, tl.load(p_cu_q + sequence + 1) - begin_q, 0)
        keys = tl.where(used, tl.load(p_cu_k + sequence + 1) - begin_k, 0)
    elif LAST_FIRST:
        o_tile = tiles - 1 - o_work // (work // tiles)
        o_batch = (o_work % (work // tiles)) // heads
        o_head = o_work % heads
    else:
        o_tile = o_work % tiles
        o_batch = o_work // tiles // heads
        o_head = (o_work // tiles) % heads
    return o_batch, o_head, o_tile, begin_q, begin_k, first_block, rows, keys


@triton.jit
def load_keys(p_k, o_head, first, n, stride_kh, stride_kn, start, D: tl.constexpr, WIDTH: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """Load WIDTH columns (BLOCK, WIDTH) from `start` on of a block of keys or values; p_k: of the batch entry."""
    o_n = tl.arange(0, BLOCK)
    o_d = start + tl.arange(0, WIDTH)
    p_tile = p_k + tl.cast(o_head, tl.int64) * stride_kh + first * stride_kn
    m_tile = (o_n < n)[:, None] & (o_d < D)[None, :]
    return tl.load(p_tile + o_n[:, None] * stride_kn + o_d[None, :], mask=m_tile, other=0.0)


@triton.jit
def load_rows(p_x, start, stride_n, o_batch, o_head, begin, length, WHOLE: tl.constexpr, DESCRIPTORS: tl.constexpr,
              D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Load keys or values (N, D) from `start` on, 0 beyond `length`; p_x: pointer to the first, or a descriptor."""
    if DESCRIPTORS:
        b_x = p_x.load([o_batch, o_head, (begin + start).to(tl.int32), 0]).reshape(BLOCK_N, D_PAD)
    else:
        o_n = tl.arange(0, BLOCK_N)
        o_d = tl.arange(0, D_PAD)
        p_tile = p_x + start * stride_n + o_n[:, None] * stride_n + o_d[None, :]
        if WHOLE and D == D_PAD:
            b_x = tl.load(p_tile)
        else:
            b_x = tl.load(p_tile, mask=(start + o_n < length)[:, None] & (o_d < D)[None, :], other=0.0)
    return b_x


@triton.jit
def load_mask(p_tile, m_tile, m_seen, stride_m, stride_n, MASK: tl.constexpr):
    """Load a tile (M, N) of a mask of bytes or floats; return the visible pairs and the bias that the mask adds.

    The mask is read under m_tile, a rectangle, which is one copy on an NPU. m_seen already contains the causal band.
    """
    o_m = tl.arange(0, m_seen.shape[0])
    o_n = tl.arange(0, m_seen.shape[1])
    b_mask = tl.load(p_tile + o_m[:, None] * stride_m + o_n[None, :] * stride_n, mask=m_tile, other=0).to(tl.float32)
    if MASK == "bool":
        m_seen = m_seen & (b_mask != 0.0)
        b_mask = tl.zeros_like(b_mask)
    else:
        m_seen = m_seen & (b_mask != -INF)
    return m_seen, b_mask


@triton.jit
def softmax_step(
    b_s, offset, factor, b_max, b_sum, HIDES: tl.constexpr, FAST: tl.constexpr, ROUNDED: tl.constexpr = False
):
    """Return the weights P of a tile, the factor for earlier results, and the new maximum and sum of every row.

    b_s (M, N): scores, -inf where masked out (only with HIDES); offset (M,): to be added to all scores of a row;
    factor: log2(e) times the scale of both. No exponent exceeds 0, for numbers of any size, and the sum is that of the
    same rounded weights that multiply V. FAST spends one instruction on an exponent, which may then exceed 0 by 2^-24
    of the largest score, and sums weights before FP16 rounds them, unless ROUNDED.
    """
    top = tl.max(b_s, 1)
    reached = top + offset
    if HIDES:
        empty = top == -INF
        top = tl.where(empty, 0.0, top)
        reached = tl.where(empty, -INF, reached)
    new_max = tl.maximum(b_max, reached)
    base = tl.where(new_max == -INF, 0.0, new_max) if HIDES else new_max
    alpha = tl.exp2((b_max - base) * factor)
    if FAST:
        b_p = tl.exp2(b_s * factor - ((base - offset) * factor)[:, None])
        b_sum = b_sum * alpha + tl.sum(b_p.to(tl.float16).to(tl.float32) if ROUNDED else b_p, 1)
        b_p = b_p.to(tl.float16)
    else:
        behind = (reached - base) * factor
        if HIDES:
            behind = tl.where(empty, 0.0, behind)
        b_p = tl.exp2((b_s - top[:, None]) * factor + behind[:, None]).to(tl.float16)
        b_sum = b_sum * alpha + tl.sum(b_p.to(tl.float32), 1)
    return b_p, alpha, new_max, b_sum


@triton.jit
def add_values(b_acc, b_p, b_v, m_seen):
    """Return acc + P V where rows see different keys.

    0 * NaN is NaN, so a value that is not finite is left out of the product, and the rows that see it become NaN.
    b_acc (M, D); b_p (M, N) FP16; b_v (N, D); m_seen (M, N).
    """
    m_good = tl.abs(b_v.to(tl.float32)) <= FP16_MAX
    if tl.min(tl.min(tl.where(m_good, 1, 0), 1), 0) == 0:
        b_acc = tl.dot(b_p, tl.where(m_good, b_v, 0.0).to(tl.float16), b_acc)
        b_seen = tl.where(m_seen, 1.0, 0.0).to(tl.float16)
        hits = tl.dot(b_seen, tl.where(m_good, 0.0, 1.0).to(tl.float16))
        b_acc = tl.where(hits > 0.0, float("nan"), b_acc)
    else:
        b_acc = tl.dot(b_p, b_v, b_acc)
    return b_acc


@triton.jit
def mean_of_values(b_acc, b_max, b_sum, nats, p_sink, D: tl.constexpr, DROPPED: tl.constexpr, LAZY: tl.constexpr,
                   SINKS: tl.constexpr):  # fmt: skip
    """Return output (M, D), to be cast, and log-sum-exp (M,) of rows after their last key; nats (M,): their maxima.

    A mean of values lies in FP16's range up to the last bit. Infinity in the sum comes from a value. A fully masked row
    gets 0 and -inf. p_sink: the sink of the head, if SINKS.
    """
    fully_masked = (b_sum == 0.0) & (b_max == -INF)
    divisor = tl.where(fully_masked, 1.0, b_sum)
    b_out = b_acc / divisor[:, None]
    b_lse = tl.where(fully_masked, -INF, nats + tl.log(divisor))
    if SINKS:
        share, b_lse = beside_sink(b_lse, tl.load(p_sink))
        b_out = b_out * share[:, None]
    b_out = tl.where(tl.abs(b_out) < INF, tl.minimum(tl.maximum(b_out, -FP16_MAX), FP16_MAX), float("nan"))
    b_out = round_rows(b_out, tl.arange(0, b_acc.shape[1]), D, DROPPED, LAZY)
    return b_out, b_lse


@triton.jit
def tile_keys(o_tile, rows, keys, right, span, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Return which keys a tile of rows sees: row i those up to i + `diagonal`, some row those from `begin` to `end`.

    Every row sees those from `whole_from` to `whole`. Between are whole blocks; `begin` is the first key of a block.
    """
    first = o_tile * BLOCK_M + keys - rows
    diagonal = keys - rows
    begin = 0
    whole_from = 0
    end = keys
    whole = keys // BLOCK_N * BLOCK_N
    if WINDOW:
        first += right
        diagonal += right
        begin = tl.maximum(first - span, 0) // BLOCK_N * BLOCK_N
        whole_from = tl.cdiv(tl.maximum(first + BLOCK_M - 1 - span, 0), BLOCK_N) * BLOCK_N
    if CAUSAL:
        end = tl.maximum(tl.minimum(keys, first + BLOCK_M), 0)
        whole = tl.maximum(tl.minimum(first + 1, keys), 0) // BLOCK_N * BLOCK_N
    if MASKED:
        whole_from = begin
        whole = begin
    if WINDOW:
        whole = tl.maximum(whole, whole_from)
    return diagonal, begin, whole_from, whole, end
