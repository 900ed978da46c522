"""Device functions of the Hopper kernels for one tile: its place, its scores, treatment of K and V, and the softmax.

`running_softmax` takes one FMA for each exponent. The exponents of `exact_softmax` are (s - r) * c <= 0 for any finite
inputs, over shifted and cleaned tiles.

The order of their statements matters. The longest chain of instructions between two exponentials decides the speed, and
ptxas follows the source. Values needed only behind the loops (`limit`, `pre_pass`) are computed where they are used.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.language.core import _aggregate as aggregate

from pasa.ops.attention.triton.tile_math import ANCHOR_LIMIT

ROWS = gl.constexpr(64)  # query rows of a consumer warpgroup
INF = gl.constexpr(float("inf"))
FP16_MAX = gl.constexpr(65504.0)
LN2 = gl.constexpr(0.6931471805599453)
UNSEEN = gl.constexpr(2**30)  # above any key's index
# A kernel that is launched early must execute this before it reads results of the previous kernel.
WAIT = gl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")
LAUNCH_NEXT = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")
CLAMP_F16X2 = gl.constexpr(  # to +-65504; NaN stays
    "{ .reg .b32 a, b; mov.b32 a, 0x7bff7bff; mov.b32 b, 0xfbfffbff; min.NaN.f16x2 a, $1, a; max.NaN.f16x2 $0, a, b; }"
)
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # layout of a number that a partition of four warps shares
LANE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # and of 128 numbers
# Triton 3.8 gave the copies by TMA these names; 3.9 has no others.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@aggregate
class Shared:
    """Hold shared memory: tiles (stage or warpgroup first) and their barriers."""

    q: gl.shared_memory_descriptor  # (WARPGROUPS, 1, 1, 64, D)
    k: gl.shared_memory_descriptor  # (STAGES, 1, 1, KEYS, D)
    v: gl.shared_memory_descriptor  # (STAGES, 1, 1, KEYS, D)
    offset: gl.shared_memory_descriptor  # (STAGES, 8, D): a_j - f_j, then f_j, then zeros
    first_bad: gl.shared_memory_descriptor  # (D,): first key whose value is not finite, by column
    work: gl.shared_memory_descriptor  # (1,): the producer's message, see kernel.py
    q_full: gl.shared_memory_descriptor  # (WARPGROUPS, 1)
    full: gl.shared_memory_descriptor  # (4 * STAGES, 1): K arrived, V arrived, K treated, V treated
    empty: gl.shared_memory_descriptor  # (2 * STAGES, 1): K read, V read
    begin: gl.shared_memory_descriptor  # (1, 1): `work` is there
    end: gl.shared_memory_descriptor  # (1, 1): all of V was treated
    done: gl.shared_memory_descriptor  # (1, 1): the tile is written

    @gluon.constexpr_function
    def __init__(self, q, k, v, offset, first_bad, work, q_full, full, empty, begin, end, done):
        self.q, self.k, self.v, self.offset, self.first_bad, self.work = q, k, v, offset, first_bad, work
        self.q_full, self.full, self.empty, self.begin, self.end, self.done = q_full, full, empty, begin, end, done


@aggregate
class Job:
    """Hold the sizes of a call, and pointers to the results of the pre-pass and to the log-sum-exp."""

    heads: gl.tensor
    group: gl.tensor  # query heads of a key head
    batch_heads: gl.tensor
    section: gl.tensor  # heads that run together
    rows: gl.tensor  # Sq
    keys: gl.tensor  # Skv
    tiles: gl.tensor  # of a head
    work: gl.tensor  # tiles of all heads
    c: gl.tensor  # scale * log2(e)
    p_norms: gl.tensor  # (B Hkv, nb)
    p_anchors: gl.tensor  # (B Hkv, nb, D)
    p_marked: gl.tensor  # (1,): 1 if any tile was given up
    p_lse: gl.tensor  # (B Hq, Sq)

    @gluon.constexpr_function
    def __init__(
        self, heads, group, batch_heads, section, rows, keys, tiles, work, c, p_norms, p_anchors, p_marked, p_lse
    ):  # fmt: skip
        self.heads, self.group, self.batch_heads, self.section = heads, group, batch_heads, section
        self.rows, self.keys, self.tiles, self.work, self.c = rows, keys, tiles, work, c
        self.p_norms, self.p_anchors, self.p_marked, self.p_lse = p_norms, p_anchors, p_marked, p_lse


@aggregate
class QueryTile:
    """Hold the position of a tile of query rows."""

    batch: gl.tensor
    head: gl.tensor
    head_kv: gl.tensor
    row: gl.tensor  # first query row
    blocks: gl.tensor  # key blocks that it visits
    index: gl.tensor  # of the head among all query heads
    index_kv: gl.tensor  # of its key head among all key heads

    @gluon.constexpr_function
    def __init__(self, batch, head, head_kv, row, blocks, index, index_kv):
        self.batch, self.head, self.head_kv, self.row = batch, head, head_kv, row
        self.blocks, self.index, self.index_kv = blocks, index, index_kv


@gluon.jit
def visible_blocks(last_row, rows, keys, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """Return how many key blocks the rows up to `last_row` see; at least one, so that every loop has a first tile."""
    seen = keys
    if CAUSAL:
        seen = gl.minimum(last_row, rows - 1) + 1 + keys - rows
    return gl.maximum((seen + KEYS - 1) // KEYS, 1)


@gluon.jit
def locate(job, work, WARPGROUPS: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """Return tile number `work`. Heads come in sections whose K and V fit in L2; causal: tiles with most keys first."""
    first = work // (job.section * job.tiles) * job.section
    size = gl.minimum(job.section, job.batch_heads - first)
    local = work - first * job.tiles
    if CAUSAL:
        row = (job.tiles - 1 - local // size) * (WARPGROUPS * ROWS)
        index = first + local % size
    else:
        row = local % job.tiles * (WARPGROUPS * ROWS)
        index = first + local // job.tiles
    blocks = visible_blocks(row + (WARPGROUPS * ROWS - 1), job.rows, job.keys, KEYS, CAUSAL)
    head = index % job.heads
    return QueryTile(index // job.heads, head, head // job.group, row, blocks, index, index // job.group)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of the ring of K and V, and the phase of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def scores(sm, q_s, stage):
    """Start S (64, KEYS) = Q K^T, without waiting for it."""
    KEYS: gl.constexpr = sm.k.shape[3]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    b_s = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    k_s = sm.k.index(stage).reshape([KEYS, sm.k.shape[4]]).permute([1, 0])
    return warpgroup_mma(q_s, k_s, b_s, use_acc=False, is_async=True)


@gluon.jit
def clamped(b_o, DROPPED: gl.constexpr):
    """Return an output for an FP16 descriptor.

    Weights are rounded after they are summed, so a mean may leave the range of its values by 2^-11: clamp. BF16 has a
    wider range.
    """
    if DROPPED == 16:
        return b_o.to(gl.bfloat16).to(gl.float16, bitcast=True)
    return gl.inline_asm_elementwise(CLAMP_F16X2, "=r,r", [b_o.to(gl.float16)], gl.float16, is_pure=True, pack=2)


@gluon.jit
def limit(job, row, KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the first key that each row does not see, (64,), in the layout of scores of KEYS keys."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    b_limit = gl.full([ROWS], 0, gl.int32, ROW) + job.keys
    if CAUSAL:
        b_row = gl.minimum(row + gl.arange(0, ROWS, layout=ROW), job.rows - 1)
        b_limit = b_row + 1 + job.keys - job.rows
    return b_limit


@gluon.jit
def mask(job, b_s, row, j, full, CAUSAL: gl.constexpr):
    """Set scores to -inf where a row does not see a key; all rows see the blocks before `full`."""
    if j >= full:
        KEYS: gl.constexpr = b_s.shape[1]
        b_key = j * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, b_s.type.layout))
        b_s = gl.where(b_key[None, :] < limit(job, row, KEYS, CAUSAL)[:, None], b_s, gl.full_like(b_s, -INF))
    return b_s


@gluon.jit
def column(b_c, INDEX: gl.constexpr):
    """Return column INDEX of (64, 8), as (64,)."""
    b_at = gl.arange(0, 8, layout=gl.SliceLayout(0, b_c.type.layout))
    return gl.sum(gl.where(b_at[None, :] == INDEX, b_c, gl.zeros_like(b_c)), axis=1)


@gluon.jit
def pre_pass(job, tile, p, KEYS: gl.constexpr, WIDTH: gl.constexpr):
    """Return a pointer to the head's part of the anchors or norms."""
    return p + tile.index_kv.to(gl.int64) * ((job.keys + KEYS - 1) // KEYS) * WIDTH


@gluon.jit
def longest_of_each(p_norm, p_other, blocks):
    """Return the largest of a head's norms, and of its other norms, for a partition of four warps."""
    b_lane = gl.arange(0, 128, layout=LANE)
    b_norm = gl.zeros([128], gl.float32, LANE)
    b_other = b_norm
    for i in range(0, blocks, 128):
        m_lane = i + b_lane < blocks
        b_new = gl.load(p_norm + i + b_lane, mask=m_lane, other=0.0)
        b_new_other = gl.load(p_other + i + b_lane, mask=m_lane, other=0.0)
        b_norm = gl.maximum(b_norm, b_new)
        b_other = gl.maximum(b_other, b_new_other)
    return gl.max(b_norm, axis=0), gl.max(b_other, axis=0)


@gluon.jit
def is_bounded(sm, job, longest, turn, WARPGROUPS: gl.constexpr):
    """Test if FP32 sums of the tile's scores are accurate enough, by the producer's partition.

    By Cauchy and Schwarz, no score exceeds the product of the largest norms. A NaN in a query reaches only its own row,
    whatever the result of this test. longest: the longest key. turn: number of earlier tiles.
    """
    D: gl.constexpr = sm.q.shape[4]
    PART: gl.constexpr = 8 if D == 256 else 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    nats = longest * (job.c * LN2)
    b_square = gl.zeros([PART], gl.float32, gl.SliceLayout(1, LAYOUT))
    for w in gl.static_range(WARPGROUPS):
        mbarrier.wait(sm.q_full.index(w), turn & 1)
        q_s = sm.q.index(w).reshape([ROWS, D])
        for i in gl.static_range(ROWS // PART):
            b_q = q_s.slice(i * PART, PART, 0).load(LAYOUT).to(gl.float32)
            b_square = gl.maximum(b_square, gl.sum(b_q * b_q, axis=1))
    return gl.max(b_square, axis=0) * nats * nats <= ANCHOR_LIMIT * ANCHOR_LIMIT


@gluon.jit
def anchor(job, tile, j, treated, KEYS: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr):
    """Load a_j (D,), of which DIM columns are stored, in the layout of `treat_keys`; 0 unless the tile is treated."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    b_col = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    p_a = pre_pass(job, tile, job.p_anchors, KEYS, DIM) + j * DIM + b_col
    b_a = gl.load(p_a) if DIM == D else gl.load(p_a, mask=b_col < DIM, other=0.0)
    return gl.where(treated, b_a, gl.zeros_like(b_a))


@gluon.jit
def treat_keys(sm, b_a, b_frame, n, treated, STAGES: gl.constexpr, PART: gl.constexpr):
    """Compute K' = K - a_j in place, and store the rows a_j - f_j and f_j, both FP16 numbers.

    K' is NaN where a key is not finite. b_frame: f_j, see `next_frame`. n: number of earlier blocks.
    """
    D: gl.constexpr = sm.k.shape[4]
    KEYS: gl.constexpr = sm.k.shape[3]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    stage = n % STAGES
    b_row = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    b_apart = (b_a.to(gl.float32) - b_frame.to(gl.float32)).to(gl.float16)
    b_zero = gl.zeros([8, D], gl.float16, LAYOUT)
    b_rows = gl.where(b_row[:, None] == 0, b_apart[None, :], gl.where(b_row[:, None] == 1, b_frame[None, :], b_zero))
    sm.offset.index(stage).store(b_rows)
    mbarrier.wait(sm.full.index(4 * stage), (n // STAGES) & 1)
    if treated:
        k_s = sm.k.index(stage).reshape([KEYS, D])
        for i in gl.static_range(KEYS // PART):
            part = k_s.slice(i * PART, PART, 0)
            b_k = part.load(LAYOUT)
            part.store((b_k - b_a[None, :]) + (b_k - b_k))  # x - x: zero, or NaN if x is not finite
    fence_async_shared()
    mbarrier.arrive(sm.full.index(4 * stage + 2), count=1)


@gluon.jit
def treat_values(sm, j, n, dirty, STAGES: gl.constexpr, PART: gl.constexpr):
    """Set values of block j that are not finite to 0, because 0 * NaN is NaN; `first_bad` records their keys.

    n: number of earlier blocks.
    """
    D: gl.constexpr = sm.k.shape[4]
    KEYS: gl.constexpr = sm.k.shape[3]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    stage = n % STAGES
    mbarrier.wait(sm.full.index(4 * stage + 1), (n // STAGES) & 1)
    if dirty:
        v_s = sm.v.index(stage).reshape([KEYS, D])
        b_bad = sm.first_bad.load(gl.SliceLayout(0, LAYOUT))
        for i in gl.static_range(KEYS // PART):
            part = v_s.slice(i * PART, PART, 0)
            b_v = part.load(LAYOUT)
            m_finite = gl.abs(b_v.to(gl.float32)) < INF
            b_key = j * KEYS + i * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
            part.store(gl.where(m_finite, b_v, gl.zeros_like(b_v)))
            b_bad = gl.minimum(b_bad, gl.min(gl.where(m_finite, UNSEEN, b_key[:, None]), axis=0))
        sm.first_bad.store(b_bad)
    fence_async_shared()
    mbarrier.arrive(sm.full.index(4 * stage + 3), count=1)


@gluon.jit
def running_softmax(b_s, b_max, c):
    """Return P (64, KEYS) in FP16, each row's new maximum, its part of the sum, and the factor of the old sum."""
    b_new = gl.maximum(b_max, gl.max(b_s, axis=1))
    b_ref = gl.where(b_new == -INF, 0.0, b_new)  # a row that has seen no key so far
    b_p = gl.exp2(gl.fma(b_s, c, (-(b_ref * c))[:, None]))
    b_half = b_p.to(gl.float16)
    b_add = gl.sum(b_p, axis=1)
    return b_half, b_new, b_add, gl.exp2((b_max - b_ref) * c)


@gluon.jit
def exact_softmax(b_s, b_max, b_offset, c):
    """Return what `running_softmax` returns, for scores s + offset; no exponent exceeds 0, however sums are rounded.

    The reference r is the tile's maximum if that is the row's maximum, else max(m - offset, maximum). So it is never
    below the tile's maximum, and equals it where the row's maximum lies in this tile, so that some weight is 1.
    """
    b_top = gl.max(b_s, axis=1)
    b_true = b_top + b_offset
    b_ref = gl.where(b_true >= b_max, b_top, gl.maximum(b_max - b_offset, b_top))
    b_ref = gl.where(b_ref == -INF, 0.0, b_ref)
    b_new = gl.maximum(b_max, b_true)
    b_p = gl.exp2((b_s - b_ref[:, None]) * c)
    b_add = gl.sum(b_p, axis=1)
    return b_p.to(gl.float16), b_new, b_add, gl.exp2((b_max - gl.where(b_new == -INF, 0.0, b_new)) * c)
