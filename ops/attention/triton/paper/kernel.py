"""Triton kernel of the published algorithm (arXiv:2503.01873, Algorithm 1): FP16 score tiles and global recovery.

K' comes from `shift_kernel`. Like the publication it is not free of overflow: K' and S' are bounded by their
inputs only. Row vectors stay in FP32, or in FP16 as printed (ROUND).
"""

import triton
import triton.language as tl

from pasa.ops.attention.triton.rounding_kernel import round_rows
from pasa.ops.attention.triton.tile_math import FP16_MAX, INF, add_values, load_mask, locate


@triton.jit
def rounded(x, ROUND: tl.constexpr):
    """Round a row vector or a tile to FP16 where Algorithm 1 keeps it in FP16."""
    return x.to(tl.float16).to(tl.float32) if ROUND else x


@triton.jit
def paper_step(b_s, b_masked, m_seen, m_reach, index, factor, b_mean, b_max, b_sum, ROUND: tl.constexpr):
    """Run lines 11 to 19 for one tile S' (M, N) stored in FP16; return P, the factors of O and of P V, F_j, m_j, l_j.

    b_masked: S' with the mask added; m_seen (M, N): the keys of the block that each row sees; m_reach (M,): rows whose
    causal band reaches the block (others do not change); index: number of earlier blocks; factor: the invariance;
    b_mean: F_{j-1}.
    """
    # The mean is over the whole shifted block, masked or not: the recovery undoes M, which replaced a NaN key by it.
    m_mean = b_s == b_s
    mean = tl.sum(tl.where(m_mean, b_s, 0.0), 1) / tl.maximum(tl.sum(tl.where(m_mean, 1.0, 0.0), 1), 1.0)
    mean = rounded(mean, ROUND)
    blocks = tl.cast(index, tl.float32)
    one = rounded(1.0 / (blocks + 1.0), ROUND)
    others = rounded(blocks / (blocks + 1.0), ROUND)
    new_mean = rounded(rounded(mean * one, ROUND) + rounded(b_mean * others, ROUND), ROUND)
    # F_0 is read as s, so block 1 has no correction. A mean may be infinite there, so a factor of 0 would give NaN.
    m_first = (mean == new_mean) & (index == 0)  # a vector: ascendnpu-ir 1.1.0 takes no scalar condition
    carry = tl.where(m_first, 0.0, rounded(factor * rounded(b_mean - new_mean, ROUND), ROUND))
    offset = tl.where(m_first, 0.0, rounded(factor * rounded(mean - new_mean, ROUND), ROUND))
    top = tl.max(tl.where(m_seen, b_masked, -INF), 1)
    empty = tl.max(tl.where(m_seen, 1, 0), 1) == 0
    top = tl.where(empty, 0.0, top)
    tile_max = rounded(top + offset, ROUND)
    carried = rounded(b_max + carry, ROUND)
    new_max = tl.maximum(carried, tl.where(empty, -INF, tile_max))
    b_p = rounded(tl.exp(rounded(b_masked - top[:, None], ROUND)), ROUND)
    b_p = tl.where(m_seen, b_p, 0.0)
    # A row without earlier keys has nothing to scale, and inf * 0 would be NaN.
    alpha = tl.where(b_sum == 0.0, 0.0, rounded(tl.exp(rounded(carried - new_max, ROUND)), ROUND))
    gain = tl.where(empty, 0.0, rounded(tl.exp(rounded(tile_max - new_max, ROUND)), ROUND))
    row_sum = rounded(tl.sum(b_p, 1), ROUND)
    new_sum = rounded(rounded(alpha * b_sum, ROUND) + rounded(gain * row_sum, ROUND), ROUND)
    alpha = tl.where(m_reach, alpha, 1.0)
    new_mean = tl.where(m_reach, new_mean, b_mean)
    new_max = tl.where(m_reach, new_max, b_max)
    new_sum = tl.where(m_reach, new_sum, b_sum)
    return b_p.to(tl.float16), alpha, gain, new_mean, new_max, new_sum


@triton.jit(do_not_specialize=["stride_lb", "stride_lh", "heads", "group", "tiles", "work", "all_rows"])
def paper_kernel(
    p_q,  # as in `attention_kernel`, like every argument without a comment
    p_k,  # K' in whole blocks; of packed sequences, each begins with its first block
    p_v,
    p_out,
    p_lse,
    p_mask,
    p_tile,
    p_cu_q,
    p_cu_k,
    p_first_block,
    factor,  # the invariance
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    stride_lb,
    stride_lh,
    stride_lm,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    heads,
    group,
    tiles,
    work,
    all_rows,
    all_keys,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr,
    ROUND: tl.constexpr,
    CLEAN: tl.constexpr,  # values are finite: an NPU cannot branch round a product
    DROPPED: tl.constexpr,  # how outputs are rounded: rounding_kernel.py
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Run Algorithm 1 with the scale folded into K'; BLOCK_N is the block that M shifts."""
    for o_work in range(tl.program_id(0), work, tl.num_programs(0)):
        o_batch, o_head, o_tile, begin_q, begin_k, first_block, rows, keys = locate(
            o_work, work, p_tile, p_cu_q, p_cu_k, p_first_block, heads, tiles, all_rows, all_keys, VARLEN, CAUSAL
        )
        batch = tl.cast(o_batch, tl.int64)
        head = tl.cast(o_head, tl.int64)
        o_m = tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, D_PAD)
        o_row = o_tile * BLOCK_M + o_m
        m_d = o_d < D
        m_out = (o_row < rows)[:, None] & m_d[None, :]
        at = tl.cast(begin_q + o_tile * BLOCK_M, tl.int64)
        p_rows = p_q + batch * stride_qb + head * stride_qh + at * stride_qm
        b_q = tl.load(p_rows + o_m[:, None] * stride_qm + o_d[None, :], mask=m_out, other=0.0)
        b_q = tl.where(tl.abs(b_q.to(tl.float32)) <= FP16_MAX, b_q, float("nan")).to(tl.float16)
        first_key = tl.cast(first_block, tl.int64) * BLOCK_N
        p_keys = p_k + batch * stride_kb + (head // group) * stride_kh + first_key * stride_kn
        p_values = p_v + batch * stride_vb + (head // group) * stride_vh + tl.cast(begin_k, tl.int64) * stride_vn
        p_rows_mask = p_mask + batch * stride_mask_b + head * stride_mask_h + at * stride_mask_m
        diagonal = keys - rows
        end = keys
        if CAUSAL:
            end = tl.maximum(tl.minimum(keys, o_tile * BLOCK_M + BLOCK_M + diagonal), 0)
        b_mean = tl.zeros((BLOCK_M,), tl.float32)
        b_max = tl.full((BLOCK_M,), -INF, tl.float32)
        b_sum = tl.zeros((BLOCK_M,), tl.float32)
        b_acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
        for start in range(0, end, BLOCK_N):
            o_n = start + tl.arange(0, BLOCK_N)
            m_key = o_n < keys
            p_key = p_keys + tl.cast(start, tl.int64) * stride_kn + tl.arange(0, BLOCK_N)[:, None] * stride_kn
            p_value = p_values + tl.cast(start, tl.int64) * stride_vn + tl.arange(0, BLOCK_N)[:, None] * stride_vn
            b_k = tl.load(p_key + o_d[None, :], mask=m_d[None, :], other=0.0)
            b_s = tl.dot(b_q, tl.trans(b_k)).to(tl.float16).to(tl.float32)
            m_tile = m_key[None, :] & (o_row < rows)[:, None]
            m_seen = m_tile
            m_reach = o_row >= 0
            if CAUSAL:
                m_reach = o_row + diagonal >= start
                m_seen = m_seen & (o_n[None, :] <= o_row[:, None] + diagonal)
            b_masked = b_s  # what FP16 stored, before a mask is added
            if MASK != "none":
                p_block_mask = p_rows_mask + tl.cast(start, tl.int64) * stride_mask_n
                m_seen, b_bias = load_mask(p_block_mask, m_tile, m_seen, stride_mask_m, stride_mask_n, MASK)
                b_masked = b_s + b_bias
            b_p, alpha, gain, b_mean, b_max, b_sum = paper_step(
                b_s, b_masked, m_seen, m_reach, start // BLOCK_N, factor, b_mean, b_max, b_sum, ROUND
            )
            b_v = tl.load(p_value + o_d[None, :], mask=m_key[:, None] & m_d[None, :], other=0.0)
            if CLEAN:
                product = rounded(tl.dot(b_p, b_v), ROUND)
            else:
                product = rounded(add_values(tl.zeros((BLOCK_M, D_PAD), tl.float32), b_p, b_v, m_seen), ROUND)
            b_acc = rounded(rounded(alpha[:, None] * b_acc, ROUND) + rounded(gain[:, None] * product, ROUND), ROUND)
        fully_masked = (b_sum == 0.0) & (b_max == -INF)
        divisor = tl.where(fully_masked, 1.0, b_sum)
        # This is o_d plus a 0 that the compiler does not know. Otherwise the compiler computes the columns' hash keys
        # before the loop over keys, and spills them there (1112 bytes of stack instead of 1016).
        o_column = (o_d & 6) + (tl.min(b_sum, 0) < 0.0).to(tl.int32) + (o_d & ~6)
        b_out = round_rows(b_acc / divisor[:, None], o_column, D, DROPPED, False).to(p_out.dtype.element_ty)
        b_lse = tl.where(fully_masked, -INF, b_max + factor * b_mean + tl.log(divisor))
        p_rows = p_out + batch * stride_ob + head * stride_oh + at * stride_om
        tl.store(p_rows + o_m[:, None] * stride_om + o_d[None, :], b_out, mask=m_out)
        p_rows_lse = p_lse + batch * stride_lb + head * stride_lh + at * stride_lm
        tl.store(p_rows_lse + o_m * stride_lm, b_lse, mask=o_row < rows)
