"""What the Hopper kernel does to one tile: the producer's treatment of K and V, and three forms of the softmax.

PLAIN    FP32 softmax, one FMA per exponent. It serves while |score| < 2^17 (base 2) and the head needs no treatment.
         This *is* the plain FP32-softmax kernel of the same schedule: nothing of the shift is in it.
CAREFUL  FP32 softmax whose exponents are (s - r) * c <= 0 for any finite inputs; heads that are shifted or cleaned.
HALF     scores, exponents and weights in FP16, with true f16 accumulation; only where the norms bound the scores.

Their order of statements is chosen: the longest row of instructions between two exponentials decides the speed, and
ptxas follows the source. Values needed only behind the loops (`limit`, `pre_pass`) are computed where they are used.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

ROWS = gl.constexpr(64)  # query rows of a consumer warpgroup
KEYS = gl.constexpr(128)  # keys of a block
PLAIN, CAREFUL, HALF = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
INF = gl.constexpr(float("inf"))
NAN = gl.constexpr(float("nan"))
FP16_MAX = gl.constexpr(65504.0)
UNSEEN = gl.constexpr(2**30)  # above any key's index
MAX_F16X2 = gl.constexpr("max.f16x2 $0, $1, $2;")
ADD_F16X2 = gl.constexpr("add.f16x2 $0, $1, $2;")
EXP2_F16X2 = gl.constexpr("{ .reg .b32 x; fma.rn.f16x2 x, $1, $3, $2; ex2.approx.f16x2 $0, x; }")


@aggregate
class Shared:
    """Shared memory: tiles (stage or warpgroup first) and their barriers."""

    q: gl.shared_memory_descriptor  # (3, 1, 1, 64, D)
    k: gl.shared_memory_descriptor  # (STAGES, 1, 1, 128, D)
    v: gl.shared_memory_descriptor  # (STAGES, 1, 1, 128, D)
    offset: gl.shared_memory_descriptor  # (STAGES, 8, D): a_j - a_1 as high and low row, then zeros
    first_bad: gl.shared_memory_descriptor  # (D,): first key whose value is not finite, by column
    q_full: gl.shared_memory_descriptor  # (3, 1)
    full: gl.shared_memory_descriptor  # (4 * STAGES, 1): K arrived, V arrived, K treated, V treated
    empty: gl.shared_memory_descriptor  # (2 * STAGES, 1): K read, V read
    end: gl.shared_memory_descriptor  # (1, 1): all of V was treated

    @gluon.constexpr_function
    def __init__(self, q, k, v, offset, first_bad, q_full, full, empty, end):
        self.q, self.k, self.v, self.offset, self.first_bad = q, k, v, offset, first_bad
        self.q_full, self.full, self.empty, self.end = q_full, full, empty, end


@aggregate
class Tile:
    """Where the tile of a CTA lies, how long the sequences are, and the results of the pre-pass."""

    batch: gl.tensor
    head: gl.tensor
    head_kv: gl.tensor
    row: gl.tensor  # first query row
    rows: gl.tensor  # Sq
    keys: gl.tensor  # Skv
    blocks: gl.tensor  # key blocks that the CTA visits
    index: gl.tensor  # of the head among all query heads
    index_kv: gl.tensor  # of its key head among all key heads
    p_anchors: gl.tensor  # (B Hkv, nb, D)
    p_stats: gl.tensor  # (B Hkv, nb, 4)
    p_lse: gl.tensor  # (B Hq, Sq)

    @gluon.constexpr_function
    def __init__(
        self, batch, head, head_kv, row, rows, keys, blocks, index, index_kv, p_anchors, p_stats, p_lse
    ):  # fmt: skip
        self.batch, self.head, self.head_kv, self.row, self.rows = batch, head, head_kv, row, rows
        self.keys, self.blocks, self.index, self.index_kv = keys, blocks, index, index_kv
        self.p_anchors, self.p_stats, self.p_lse = p_anchors, p_stats, p_lse


@gluon.jit
def visible_blocks(last_row, rows, keys, CAUSAL: gl.constexpr):
    """Key blocks that the rows up to `last_row` see; at least one, so that every loop has a first tile."""
    seen = keys
    if CAUSAL:
        seen = gl.minimum(last_row, rows - 1) + 1 + keys - rows
    return gl.maximum((seen + KEYS - 1) // KEYS, 1)


@gluon.jit
def limit(tile, row, CAUSAL: gl.constexpr):
    """First key that a row does not see, (64,)."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    b_limit = gl.full([ROWS], 0, gl.int32, ROW) + tile.keys
    if CAUSAL:
        b_limit = gl.minimum(row + gl.arange(0, ROWS, layout=ROW), tile.rows - 1) + 1 + tile.keys - tile.rows
    return b_limit


@gluon.jit
def pre_pass(tile, p, WIDTH: gl.constexpr):
    """Where the head's part of the anchors or statistics begins."""
    return p + tile.index_kv.to(gl.int64) * ((tile.keys + KEYS - 1) // KEYS) * WIDTH


@gluon.jit
def largest(tile, COLUMN: gl.constexpr, FLAGS: gl.constexpr):
    """Largest number of a column of the head's statistics; with FLAGS, inf if any block must be treated."""
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    b_lane = gl.arange(0, 128, layout=LANE)
    b_most = gl.zeros([128], gl.float32, LANE)
    blocks = (tile.keys + KEYS - 1) // KEYS
    for i in range(0, blocks, 128):
        p_block = pre_pass(tile, tile.p_stats, 4) + (i + b_lane) * 4
        m_block = i + b_lane < blocks
        b_x = gl.load(p_block + COLUMN, mask=m_block, other=0.0)
        if FLAGS:
            b_keys = gl.load(p_block + 2, mask=m_block, other=0.0)
            b_values = gl.load(p_block + 3, mask=m_block, other=0.0)
            b_x = gl.where(b_keys + b_values > 0.0, INF, b_x)
        b_most = gl.maximum(b_most, b_x)
    return gl.max(b_most, axis=0)


@gluon.jit
def treat_keys(sm, tile, j, STAGES: gl.constexpr):
    """K' = K - a_j in place, NaN where a key is not finite, and the rows of a_j - a_1."""
    D: gl.constexpr = sm.k.shape[4]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    stage = j % STAGES
    b_col = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    b_a = gl.load(pre_pass(tile, tile.p_anchors, D) + j * D + b_col)
    b_first = gl.load(pre_pass(tile, tile.p_anchors, D) + b_col)
    treat = gl.load(pre_pass(tile, tile.p_stats, 4) + j * 4 + 2)
    # a_j - a_1 as two FP16 numbers; |a_j - a_1| <= 2 * 65504, so the low row holds what the clamp takes
    b_row = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    b_delta = b_a.to(gl.float32) - b_first.to(gl.float32)
    b_high = gl.minimum(gl.maximum(b_delta, -FP16_MAX), FP16_MAX).to(gl.float16)
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
def treat_values(sm, tile, j, STAGES: gl.constexpr):
    """Zero for values that are not finite, since a weight of zero must hide them; `first_bad` marks their rows."""
    D: gl.constexpr = sm.k.shape[4]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    stage = j % STAGES
    dirty = gl.load(pre_pass(tile, tile.p_stats, 4) + j * 4 + 3)
    mbarrier.wait(sm.full.index(4 * stage + 1), (j // STAGES) & 1)
    if dirty != 0.0:
        v_s = sm.v.index(stage).reshape([KEYS, D])
        b_bad = sm.first_bad.load(gl.SliceLayout(0, LAYOUT))
        for i in gl.static_range(KEYS // 16):
            part = v_s.slice(i * 16, 16, 0)
            b_v = part.load(LAYOUT)
            m_finite = gl.abs(b_v.to(gl.float32)) < INF
            b_key = j * KEYS + i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
            part.store(gl.where(m_finite, b_v, gl.zeros_like(b_v)))
            b_bad = gl.minimum(b_bad, gl.min(gl.where(m_finite, UNSEEN, b_key[:, None]), axis=0))
        sm.first_bad.store(b_bad)
    fence_async_shared()
    mbarrier.arrive(sm.full.index(4 * stage + 3), count=1)


@gluon.jit
def _plain(b_s, b_max, c, MASKED: gl.constexpr):
    b_new = gl.maximum(b_max, gl.max(b_s, axis=1))
    b_ref = b_new
    if MASKED:
        b_ref = gl.where(b_new == -INF, 0.0, b_new)  # a row without a key so far
    b_p = gl.exp2(gl.fma(b_s, c, (-b_ref * c)[:, None]))
    b_add = gl.sum(b_p, axis=1)
    return b_p.to(gl.float16), b_new, b_add, gl.exp2((b_max - b_ref) * c)


@gluon.jit
def _careful(b_s, b_max, b_offset, c):
    """True score = s + offset, and no exponent is above 0 whatever was rounded.

    The reference r is the tile's own maximum where that leads, else max(m - offset, maximum): never below the tile's
    maximum, and equal to it where the row's maximum lies in this tile, so that some weight of the row is 1.
    """
    b_top = gl.max(b_s, axis=1)
    b_true = b_top + b_offset
    b_ref = gl.where(b_true >= b_max, b_top, gl.maximum(b_max - b_offset, b_top))
    b_ref = gl.where(b_ref == -INF, 0.0, b_ref)
    b_new = gl.maximum(b_max, b_true)
    b_p = gl.exp2((b_s - b_ref[:, None]) * c)
    b_add = gl.sum(b_p, axis=1)
    return b_p.to(gl.float16), b_new, b_add, gl.exp2((b_max - gl.where(b_new == -INF, 0.0, b_new)) * c)


@gluon.jit
def fold(b_x, asm: gl.constexpr, TIMES: gl.constexpr):
    """Halve an FP16 tile along its columns, two numbers an instruction."""
    for _ in gl.static_range(TIMES):
        b_parts = gl.permute(gl.reshape(b_x, [b_x.shape[0], 2, b_x.shape[1] // 2]), (0, 2, 1))
        b_left, b_right = gl.split(b_parts)
        b_x = gl.inline_asm_elementwise(asm, "=r,r,r", [b_left, b_right], dtype=gl.float16, is_pure=True, pack=2)
    return b_x


@gluon.jit
def _half(b_s, b_max, b_offset, c):
    """P = 2^(s * c - r), two numbers an instruction; c and r are FP16.

    The maximum that is kept is the exact value of the rounded r, so that rounding r costs nothing; rounding c changes
    the temperature by less than 2^-11.
    """
    ROW: gl.constexpr = b_offset.type.layout
    b_top = gl.convert_layout(gl.max(fold(b_s, MAX_F16X2, 4), axis=1).to(gl.float32), ROW)
    c16 = c.to(gl.float16)
    c32 = c16.to(gl.float32)
    b_far = gl.maximum(b_max - b_offset, b_top) * c32
    b_ref = gl.minimum(gl.where(b_far == -INF, 0.0, b_far), FP16_MAX).to(gl.float16)
    # a reference beyond FP16: s * c is so much smaller that all weights of the tile are 0, and the maximum stays
    m_keep = (b_far > FP16_MAX) | (b_far == -INF)
    b_new = gl.where(m_keep, b_max, b_ref.to(gl.float32) / c32 + b_offset)
    args = [b_s, -b_ref[:, None], c16]
    b_p = gl.inline_asm_elementwise(EXP2_F16X2, "=r,r,r,r", args, dtype=gl.float16, is_pure=True, pack=2)
    b_add = gl.convert_layout(gl.sum(fold(b_p, ADD_F16X2, 2).to(gl.float32), axis=1), ROW)
    return b_p, b_new, b_add, gl.exp2((b_max - gl.where(b_new == -INF, 0.0, b_new)) * c)


@gluon.jit
def softmax(tile, b_s, b_max, b_sum, row, j, full, b_offset, c, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
            FORM: gl.constexpr):  # fmt: skip
    """A tile of the running softmax: P (64, 128) in FP16, maximum, sum, and the factor for O.

    c = scale * log2(e); blocks from `full` on are masked.
    """
    if MASKED:
        if j >= full:
            b_key = j * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, b_s.type.layout))
            b_s = gl.where(b_key[None, :] < limit(tile, row, CAUSAL)[:, None], b_s, gl.full_like(b_s, -INF))
    if FORM == PLAIN:
        b_p, b_max, b_add, b_alpha = _plain(b_s, b_max, c, MASKED)
    elif FORM == CAREFUL:
        b_p, b_max, b_add, b_alpha = _careful(b_s, b_max, b_offset, c)
    else:
        b_p, b_max, b_add, b_alpha = _half(b_s, b_max, b_offset, c)
    return b_p, b_max, b_sum * b_alpha + b_add, b_alpha
