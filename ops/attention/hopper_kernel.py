"""Attention on Hopper (sm_90) in Gluon: a producer partition feeds consumer warpgroups of 64 query rows by TMA.

Three consumer warpgroups share 160 registers a thread. Where S (64, 128), P and O fit into them (D = 64, or S in FP16),
QK of a block runs beside PV of the block before it; else one follows the other and the other warpgroups fill the gap.
Three forms of the softmax, chosen once per warpgroup and tile from the norms of queries and keys:

PLAIN    FP32 softmax, one FMA per exponent. It serves while |score| < 2^17 (base 2), and the head needs no treatment.
         This *is* the plain FP32-softmax kernel of the same schedule: nothing of the shift is in it.
CAREFUL  FP32 softmax whose exponent is (s - r) * c <= 0 for any finite inputs; heads that are shifted or cleaned.
HALF     scores, exponents and weights in FP16 (true f16 accumulation); where the norms bound the scores.

A head is shifted if a pre-pass found anchors a_j to subtract: the producer then makes K' = K - a_j (exact) in shared
memory and a row adds q.(a_j - a_1) to its reference, so that a bias which all keys share enters no rounded number.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

ROWS = gl.constexpr(64)  # query rows of a consumer warpgroup
KEYS = gl.constexpr(128)  # keys of a block
PLAIN, CAREFUL, HALF = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
UNSEEN = gl.constexpr(2**30)  # no key has this index


@aggregate
class Shared:
    """Shared memory: tiles (stage or warpgroup first) and their barriers."""

    q: gl.shared_memory_descriptor  # (WG, 1, 1, 64, D)
    k: gl.shared_memory_descriptor  # (STAGES, 1, 1, 128, D)
    v: gl.shared_memory_descriptor
    offset: gl.shared_memory_descriptor  # (STAGES, 8, D): a_j - a_1 as high and low row, then zeros
    first_bad: gl.shared_memory_descriptor  # (D,): first key whose value is not finite, by column
    q_full: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # (4 * STAGES, 1): K arrived, V arrived, K treated, V treated
    empty: gl.shared_memory_descriptor  # (STAGES, 1): K_j and V_{j-1} read
    end: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, offset, first_bad, q_full, full, empty, end):
        self.q, self.k, self.v, self.offset, self.first_bad = q, k, v, offset, first_bad
        self.q_full, self.full, self.empty, self.end = q_full, full, empty, end


@aggregate
class Tile:
    """Where the tile of a CTA lies, how long the sequences are, and its head's part of the pre-pass."""

    batch: gl.tensor
    head: gl.tensor
    head_kv: gl.tensor
    row: gl.tensor  # first query row
    rows: gl.tensor  # Sq
    keys: gl.tensor  # Skv
    blocks: gl.tensor  # key blocks that the CTA visits
    p_anchor: gl.tensor  # (blocks, D)
    p_stats: gl.tensor  # (blocks, 4)
    p_lse: gl.tensor  # (Sq,)

    @gluon.constexpr_function
    def __init__(self, batch, head, head_kv, row, rows, keys, blocks, p_anchor, p_stats, p_lse):
        self.batch, self.head, self.head_kv, self.row, self.rows = batch, head, head_kv, row, rows
        self.keys, self.blocks, self.p_anchor, self.p_stats, self.p_lse = keys, blocks, p_anchor, p_stats, p_lse


@gluon.jit
def _visible_blocks(last_row, rows, keys, CAUSAL: gl.constexpr):
    """Key blocks that the rows up to `last_row` see; at least one, so that every loop has a first tile."""
    seen = keys
    if CAUSAL:
        seen = gl.minimum(last_row, rows - 1) + 1 + keys - rows
    return gl.maximum((seen + KEYS - 1) // KEYS, 1)


@gluon.jit
def _most(tile, COLUMN: gl.constexpr, FLAGS: gl.constexpr):
    """Largest number of a column of the head's statistics; with FLAGS, inf if a block must be treated."""
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    b_lane = gl.arange(0, 128, layout=LANE)
    b_most = gl.zeros([128], gl.float32, LANE)
    blocks = (tile.keys + KEYS - 1) // KEYS
    for i in range(0, blocks, 128):
        p_block = tile.p_stats + (i + b_lane) * 4
        m_block = i + b_lane < blocks
        b_x = gl.load(p_block + COLUMN, mask=m_block, other=0.0)
        if FLAGS:
            b_keys = gl.load(p_block + 2, mask=m_block, other=0.0)
            b_values = gl.load(p_block + 3, mask=m_block, other=0.0)
            b_x = gl.where(b_keys + b_values > 0.0, INF, b_x)
        b_most = gl.maximum(b_most, b_x)
    return gl.max(b_most, axis=0)


# ---------------------------------------------------------------- producer


@gluon.jit
def _load(sm, tile, desc, tiles, j, STAGES: gl.constexpr, WHICH: gl.constexpr):
    """K_j (WHICH 0) or V_j (WHICH 1) by TMA."""
    stage = j % STAGES
    bar = sm.full.index(4 * stage + WHICH)
    mbarrier.expect(bar, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [tile.batch, tile.head_kv, j * KEYS, 0], bar, tiles.index(stage))


@gluon.jit
def _treat_keys(sm, tile, j, STAGES: gl.constexpr):
    """K' = K - a_j in place, NaN where a key is not finite, and the rows of a_j - a_1."""
    D: gl.constexpr = sm.k.shape[4]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    stage = j % STAGES
    b_col = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    b_a = gl.load(tile.p_anchor + j * D + b_col)
    b_first = gl.load(tile.p_anchor + b_col)
    treat = gl.load(tile.p_stats + j * 4 + 2)
    # a_j - a_1 as two FP16 numbers; |a_j - a_1| <= 2 * 65504, so what the clamp takes the low row holds
    b_row = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    b_delta = b_a.to(gl.float32) - b_first.to(gl.float32)
    b_high = gl.minimum(gl.maximum(b_delta, -65504.0), 65504.0).to(gl.float16)
    b_low = (b_delta - b_high.to(gl.float32)).to(gl.float16)
    b_zero = gl.zeros([8, D], gl.float16, LAYOUT)
    b_rows = gl.where(b_row[:, None] == 0, b_high[None, :], gl.where(b_row[:, None] == 1, b_low[None, :], b_zero))
    sm.offset.index(stage).store(b_rows)
    mbarrier.wait(sm.full.index(4 * stage), (j // STAGES) & 1)
    if treat != 0.0:
        k_s = sm.k.index(stage).reshape([KEYS, D])
        for i in gl.static_range(KEYS // 16):
            part = k_s.slice(i * 16, 16, 0)
            b_k = part.load(LAYOUT)
            part.store((b_k - b_a[None, :]) + (b_k - b_k))  # x - x: zero, or NaN if x is not finite
    fence_async_shared()
    mbarrier.arrive(sm.full.index(4 * stage + 2), count=1)


@gluon.jit
def _treat_values(sm, tile, j, STAGES: gl.constexpr):
    """Zero for values that are not finite: a weight of zero must hide them. Their rows are marked by `first_bad`."""
    D: gl.constexpr = sm.k.shape[4]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    stage = j % STAGES
    dirty = gl.load(tile.p_stats + j * 4 + 3)
    mbarrier.wait(sm.full.index(4 * stage + 1), (j // STAGES) & 1)
    if dirty != 0.0:
        v_s = sm.v.index(stage).reshape([KEYS, D])
        b_bad = sm.first_bad.load(gl.SliceLayout(0, LAYOUT))
        for i in gl.static_range(KEYS // 16):
            part = v_s.slice(i * 16, 16, 0)
            b_v = part.load(LAYOUT)
            b_finite = gl.abs(b_v.to(gl.float32)) < INF
            b_key = j * KEYS + i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
            part.store(gl.where(b_finite, b_v, gl.zeros_like(b_v)))
            b_bad = gl.minimum(b_bad, gl.min(gl.where(b_finite, UNSEEN, b_key[:, None]), axis=0))
        sm.first_bad.store(b_bad)
    fence_async_shared()
    mbarrier.arrive(sm.full.index(4 * stage + 3), count=1)


@gluon.jit
def _producer(sm, tile, q_desc, k_desc, v_desc, STAGES: gl.constexpr, WG: gl.constexpr):
    """K_j comes with V_{j-1}, as one release frees their places; in a special head both are treated one step later."""
    D: gl.constexpr = sm.k.shape[4]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for i in gl.static_range(WG):
        mbarrier.expect(sm.q_full.index(i), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            q_desc, [tile.batch, tile.head, tile.row + i * ROWS, 0], sm.q_full.index(i), sm.q.index(i)
        )
        if i == 0:
            _load(sm, tile, k_desc, sm.k, gl.to_tensor(0), STAGES, 0)
    if tile.blocks > 1:
        _load(sm, tile, k_desc, sm.k, gl.to_tensor(1), STAGES, 0)
    _load(sm, tile, v_desc, sm.v, gl.to_tensor(0), STAGES, 1)
    special = _most(tile, 2, True) == INF
    if special:
        sm.first_bad.store(gl.full([D], UNSEEN, gl.int32, gl.SliceLayout(0, LAYOUT)))
        _treat_keys(sm, tile, gl.to_tensor(0), STAGES)
    for j in range(2, tile.blocks + 1):
        mbarrier.wait(sm.empty.index(j % STAGES), ((j // STAGES) & 1) ^ 1)
        if j < tile.blocks:
            _load(sm, tile, k_desc, sm.k, j, STAGES, 0)
        _load(sm, tile, v_desc, sm.v, j - 1, STAGES, 1)
        if special:
            _treat_keys(sm, tile, j - 1, STAGES)
            _treat_values(sm, tile, j - 2, STAGES)
    if special:
        _treat_values(sm, tile, tile.blocks - 1, STAGES)
        mbarrier.arrive(sm.end.index(0), count=1)


# ---------------------------------------------------------------- softmax


@gluon.jit
def _plain(s, m, scale_log2):
    """P, the new maximum, the sum of the tile and the factor for what is older."""
    m_new = gl.maximum(m, gl.max(s, axis=1))
    b_ref = gl.where(m_new == -INF, 0.0, m_new)  # a row without a key so far
    p = gl.exp2(gl.fma(s, scale_log2, (-b_ref * scale_log2)[:, None]))
    return p, m_new, gl.sum(p, axis=1), gl.exp2((m - b_ref) * scale_log2)


@gluon.jit
def _careful(s, m, b_offset, scale_log2):
    """The same; true score = s + offset, and no exponent is above 0 whatever was rounded.

    The reference r of the tile is the tile's own maximum where that leads, else max(m - offset, maximum): never below
    the tile's maximum, and equal to it where the row's maximum lies in this tile, so that some weight is 1.
    """
    b_top = gl.max(s, axis=1)
    b_true = b_top + b_offset
    b_ref = gl.where(b_true >= m, b_top, gl.maximum(m - b_offset, b_top))
    b_ref = gl.where(b_ref == -INF, 0.0, b_ref)
    m_new = gl.maximum(m, b_true)
    p = gl.exp2((s - b_ref[:, None]) * scale_log2)
    alpha = gl.exp2((m - gl.where(m_new == -INF, 0.0, m_new)) * scale_log2)
    return p, m_new, gl.sum(p, axis=1), alpha


@gluon.jit
def _fold(x, asm: gl.constexpr, TIMES: gl.constexpr):
    """Halve an FP16 tile along the keys, two numbers per instruction."""
    for _ in gl.static_range(TIMES):
        left, right = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
        x = gl.inline_asm_elementwise(asm, "=r,r,r", [left, right], dtype=gl.float16, is_pure=True, pack=2)
    return x


@gluon.jit
def _half(s, m, b_offset, scale_log2):
    """The same in FP16, two numbers an instruction: P = 2^(s * c - r) with c and r rounded to FP16.

    m is the exact FP32 value of the rounded reference, so that rounding r costs nothing; rounding c changes the
    temperature by less than 2^-11.
    """
    ROW: gl.constexpr = b_offset.type.layout
    b_top = gl.convert_layout(gl.max(_fold(s, "max.f16x2 $0, $1, $2;", 4), axis=1).to(gl.float32), ROW)
    c = scale_log2.to(gl.float16)
    c32 = c.to(gl.float32)
    b_far = gl.maximum(m - b_offset, b_top) * c32
    b_ref = gl.minimum(gl.where(b_far == -INF, 0.0, b_far), 65504.0).to(gl.float16)
    # a reference beyond FP16: all weights of the tile are 0, since s * c is far smaller, and the maximum stays
    keep = (b_far > 65504.0) | (b_far == -INF)
    m_new = gl.where(keep, m, b_ref.to(gl.float32) / c32 + b_offset)
    asm: gl.constexpr = "{ .reg .b32 x; fma.rn.f16x2 x, $1, $3, $2; ex2.approx.f16x2 $0, x; }"
    p = gl.inline_asm_elementwise(asm, "=r,r,r,r", [s, -b_ref[:, None], c], dtype=gl.float16, is_pure=True, pack=2)
    b_sum = gl.sum(_fold(p, "add.f16x2 $0, $1, $2;", 2).to(gl.float32), axis=1)
    alpha = gl.exp2((m - gl.where(m_new == -INF, 0.0, m_new)) * scale_log2)
    return p, m_new, gl.convert_layout(b_sum, ROW), alpha


@gluon.jit
def _softmax(s, m, l, b_limit, j, full, b_offset, scale_log2, MASKED: gl.constexpr, FORM: gl.constexpr):
    """A tile of the running softmax: P, maximum, sum and the factor for O."""
    if MASKED:
        if j >= full:
            b_key = j * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, s.type.layout))
            s = gl.where(b_key[None, :] < b_limit[:, None], s, gl.full_like(s, -INF))
    if FORM == PLAIN:
        p, m, b_sum, alpha = _plain(s, m, scale_log2)
    elif FORM == CAREFUL:
        p, m, b_sum, alpha = _careful(s, m, b_offset, scale_log2)
    else:
        p, m, b_sum, alpha = _half(s, m, b_offset, scale_log2)
    return p, m, l * alpha + b_sum, alpha


# ---------------------------------------------------------------- consumer


@gluon.jit
def _scores(sm, q_s, j, special, STAGES: gl.constexpr, FORM: gl.constexpr):
    """S (64, 128) = Q K^T, still on its way, and the offset q.(a_j - a_1) of its rows."""
    D: gl.constexpr = sm.k.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    C_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    stage = j % STAGES
    phase = (j // STAGES) & 1
    mbarrier.wait(sm.full.index(4 * stage), phase)
    b_offset = gl.zeros([ROWS], gl.float32, ROW)
    if FORM != PLAIN:
        if special:
            mbarrier.wait(sm.full.index(4 * stage + 2), phase)
            c = gl.zeros([ROWS, 8], gl.float32, C_LAYOUT)
            c = warpgroup_mma(q_s, sm.offset.index(stage).permute([1, 0]), c, use_acc=False, is_async=True)
            c = warpgroup_mma_wait(0, deps=(c,))
            b_offset = gl.convert_layout(gl.sum(c, axis=1), ROW)
    s = gl.zeros([ROWS, KEYS], gl.float16 if FORM == HALF else gl.float32, S_LAYOUT)
    k_s = sm.k.index(stage).reshape([KEYS, D]).permute([1, 0])
    return warpgroup_mma(q_s, k_s, s, use_acc=False, is_async=True), b_offset


@gluon.jit
def _values(sm, p, o, j, special, STAGES: gl.constexpr, FORM: gl.constexpr):
    """O (64, D) += P V_j, still on its way."""
    D: gl.constexpr = sm.v.shape[4]
    stage = j % STAGES
    mbarrier.wait(sm.full.index(4 * stage + 1), (j // STAGES) & 1)
    if FORM != PLAIN:
        mbarrier.wait(sm.full.index(4 * stage + 3), (j // STAGES) & 1, pred=special)
    return warpgroup_mma(p, sm.v.index(stage).reshape([KEYS, D]), o, is_async=True)


@gluon.jit
def _loop(sm, q_s, l, b_limit, full, stop, special, scale_log2, STAGES: gl.constexpr, MASKED: gl.constexpr,
          FORM: gl.constexpr, OVERLAP: gl.constexpr):  # fmt: skip
    """Key blocks 0 to stop of a warpgroup: O (64, D), maximum and sum."""
    D: gl.constexpr = sm.k.shape[4]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    o = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    m = gl.full([ROWS], -INF, gl.float32, b_limit.type.layout)
    if OVERLAP:  # QK of block j beside PV of block j - 1
        s_first, b_off = _scores(sm, q_s, gl.to_tensor(0), special, STAGES, FORM)
        s_first = warpgroup_mma_wait(0, deps=(s_first,))
        p_first, m, l, _ = _softmax(s_first, m, l, b_limit, 0, full, b_off, scale_log2, MASKED, FORM)
        p = gl.convert_layout(p_first.to(gl.float16), P_LAYOUT)
        mbarrier.arrive(sm.empty.index(0), count=1)
        for j in range(1, stop):
            s, b_offset = _scores(sm, q_s, j, special, STAGES, FORM)
            o = _values(sm, p, o, j - 1, special, STAGES, FORM)
            s = warpgroup_mma_wait(1, deps=(s,))
            weights, m, l, alpha = _softmax(s, m, l, b_limit, j, full, b_offset, scale_log2, MASKED, FORM)
            o = warpgroup_mma_wait(0, deps=(o,))
            mbarrier.arrive(sm.empty.index(j % STAGES), count=1)
            o = o * gl.convert_layout(alpha, O_ROW)[:, None]
            p = gl.convert_layout(weights.to(gl.float16), P_LAYOUT)
        o = _values(sm, p, o, stop - 1, special, STAGES, FORM)
        o = warpgroup_mma_wait(0, deps=(o,))
    else:
        for j in range(stop):
            s, b_offset = _scores(sm, q_s, j, special, STAGES, FORM)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(sm.empty.index(j % STAGES), count=1)
            weights, m, l, alpha = _softmax(s, m, l, b_limit, j, full, b_offset, scale_log2, MASKED, FORM)
            o = o * gl.convert_layout(alpha, O_ROW)[:, None]
            p = gl.convert_layout(weights.to(gl.float16), P_LAYOUT)
            o = _values(sm, p, o, j, special, STAGES, FORM)
            o = warpgroup_mma_wait(0, deps=(o,))
    return o, m, l


@gluon.jit
def _store(sm, tile, o_desc, o, m, l, b_limit, row, special, scale_log2, WG_INDEX: gl.constexpr):
    """Normalise, mark what a NaN reaches, and write O (64, D) and the log-sum-exp."""
    D: gl.constexpr = sm.k.shape[4]
    COLUMN: gl.constexpr = gl.SliceLayout(0, o.type.layout)
    O_ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    q_s = sm.q.index(WG_INDEX).reshape([ROWS, D])
    b_lse = (m * scale_log2 + gl.log2(l)) * LN2
    b_inv = gl.where(b_limit > 0, 1.0 / l, 0.0)  # a row that sees no key is 0
    o = o * gl.convert_layout(b_inv, O_ROW)[:, None]
    if special:
        # the softmax left out q.a_1, which all keys share
        b_a = gl.load(tile.p_anchor + gl.arange(0, D, layout=COLUMN)).to(gl.float32)
        b_dot = gl.sum(q_s.load(o.type.layout).to(gl.float32) * b_a[None, :], axis=1)
        b_lse += gl.convert_layout(b_dot, b_lse.type.layout) * (scale_log2 * LN2)
        mbarrier.wait(sm.end.index(0), 0)
        b_bad = sm.first_bad.load(COLUMN)
        o = gl.where(gl.convert_layout(b_limit, O_ROW)[:, None] > b_bad[None, :], float("nan"), o)
    # weights are rounded after they are summed: the mean may leave the range of the values by 2^-11
    b_size = gl.abs(o)
    o = gl.where(b_size > 65504.0, gl.where(b_size == INF, float("nan"), gl.where(o > 0, 65504.0, -65504.0)), o)
    q_s.store(o.to(gl.float16))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [tile.batch, tile.head, row, 0], sm.q.index(WG_INDEX))
    b_row = row + gl.arange(0, ROWS, layout=b_limit.type.layout)
    b_lse = gl.where((l > 0.0) & (l < INF), b_lse, float("nan"))  # the row's query is not finite
    gl.store(tile.p_lse + b_row, gl.where(b_limit > 0, b_lse, -INF), mask=b_row < tile.rows)


@gluon.jit
def _consumer(sm, tile, o_desc, scale_log2, WG_INDEX: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
              STAGES: gl.constexpr, HALF_LIMIT: gl.constexpr):  # fmt: skip
    """64 query rows: choose the form, run the loop, write."""
    D: gl.constexpr = sm.k.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    MASKED: gl.constexpr = CAUSAL or RAGGED
    # which keys the rows see: all of the first `full` blocks; b_limit is the first key that a row does not see
    row = tile.row + WG_INDEX * ROWS
    b_limit = gl.full([ROWS], 0, gl.int32, ROW) + tile.keys
    full = tile.keys // KEYS
    if CAUSAL:
        b_limit = gl.minimum(row + gl.arange(0, ROWS, layout=ROW), tile.rows - 1) + 1 + tile.keys - tile.rows
        full = gl.maximum(row + 1 + tile.keys - tile.rows, 0) // KEYS
    blocks = _visible_blocks(row + (ROWS - 1), tile.rows, tile.keys, CAUSAL)
    # bounds of the scores (Cauchy-Schwarz)
    key = _most(tile, 1, True)
    special = key == INF
    mbarrier.wait(sm.q_full.index(WG_INDEX), 0)
    q_s = sm.q.index(WG_INDEX).reshape([ROWS, D])
    b_q = q_s.load(O_LAYOUT)
    l = gl.zeros([ROWS], gl.float32, ROW)
    if HALF_LIMIT > 0:
        far = _most(tile, 0, False)
        raw = gl.max(gl.sum(b_q.to(gl.float32) * b_q.to(gl.float32), axis=1), axis=0) * far * far
        half = (raw < 2.0**30) & (raw * scale_log2 * scale_log2 <= HALF_LIMIT * HALF_LIMIT)
        if half & (scale_log2 >= 2.0**-7) & (scale_log2 < 2.0**7):
            o, m, l = _loop(sm, q_s, l, b_limit, full, blocks, special, scale_log2, STAGES, MASKED, HALF, True)
        else:
            o, m, l = _loop(sm, q_s, l, b_limit, full, blocks, special, scale_log2, STAGES, MASKED, CAREFUL, False)
    else:
        asm: gl.constexpr = "{ .reg .b32 a, b; abs.f16x2 a, $1; abs.f16x2 b, $2; max.f16x2 $0, a, b; }"
        query = gl.max(gl.max(_fold(b_q, asm, 3).to(gl.float32), axis=1), axis=0)
        # norm of q <= sqrt(D) max |q|
        if query * query * D * key * key * scale_log2 * scale_log2 < 2.0**34:
            o, m, l = _loop(sm, q_s, l, b_limit, full, blocks, special, scale_log2, STAGES, MASKED, PLAIN, D == 64)
        else:
            o, m, l = _loop(sm, q_s, l, b_limit, full, blocks, special, scale_log2, STAGES, MASKED, CAREFUL, False)
    _store(sm, tile, o_desc, o, m, l, b_limit, row, special, scale_log2, WG_INDEX)
    # the last V, and the blocks that only other warpgroups see
    mbarrier.arrive(sm.empty.index(blocks % STAGES), count=1)
    for j in range(blocks, tile.blocks):
        mbarrier.wait(sm.full.index(4 * (j % STAGES) + 1), (j // STAGES) & 1)
        mbarrier.arrive(sm.empty.index((j + 1) % STAGES), count=1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "group", "batch_heads", "section", "rows", "keys", "tiles"])
def attention_kernel(
    q_desc, k_desc, v_desc, o_desc, p_anchors, p_stats, p_lse,
    heads, group, batch_heads, section, rows, keys, tiles, scale_log2,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, HALF_LIMIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """192 query rows of one head. Heads come in sections whose K and V fit in L2; causal: heaviest tiles first."""
    D: gl.constexpr = q_desc.block_shape[3]
    WG: gl.constexpr = 3
    pid = gl.program_id(0)
    first = pid // (section * tiles) * section
    size = gl.minimum(section, batch_heads - first)
    local = pid - first * tiles
    if CAUSAL:
        index = tiles - 1 - local // size
        head = first + local % size
    else:
        index = local % tiles
        head = first + local // tiles
    kv = (head // group).to(gl.int64)
    row = index * (WG * ROWS)
    visited = _visible_blocks(row + (WG * ROWS - 1), rows, keys, CAUSAL)
    blocks = (keys + KEYS - 1) // KEYS
    tile = Tile(
        head // heads, head % heads, head % heads // group, row, rows, keys, visited,
        p_anchors + kv * blocks * D, p_stats + kv * blocks * 4, p_lse + head.to(gl.int64) * rows,
    )  # fmt: skip
    q = gl.allocate_shared_memory(gl.float16, [WG, 1, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(gl.float16, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v = gl.allocate_shared_memory(gl.float16, [STAGES, 1, 1, KEYS, D], v_desc.layout)
    offset = gl.allocate_shared_memory(gl.float16, [STAGES, 8, D], gl.NVMMASharedLayout(128, 16))
    first_bad = gl.allocate_shared_memory(gl.int32, [D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [WG, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    end = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(WG):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(4 * STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=WG)
    mbarrier.init(end.index(0), count=1)
    fence_async_shared()
    sm = Shared(q, k, v, offset, first_bad, q_full, full, empty, end)
    gl.warp_specialize(
        [
            (_consumer, (sm, tile, o_desc, scale_log2, 0, CAUSAL, RAGGED, STAGES, HALF_LIMIT)),
            (_consumer, (sm, tile, o_desc, scale_log2, 1, CAUSAL, RAGGED, STAGES, HALF_LIMIT)),
            (_consumer, (sm, tile, o_desc, scale_log2, 2, CAUSAL, RAGGED, STAGES, HALF_LIMIT)),
            (_producer, (sm, tile, q_desc, k_desc, v_desc, STAGES, WG)),
        ],
        [4, 4, 4],
        [160, 160, 32],
    )
