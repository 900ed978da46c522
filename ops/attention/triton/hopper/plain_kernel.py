"""Plain attention on Hopper (sm_90) in Gluon, with FP32 scores and running maxima: any data at one speed.

Each program has a tile of 64 * WARPGROUPS query rows. A producer partition feeds the consumer warpgroups by TMA, each
with 64 rows. With three of them, each thread has 160 registers. S (64, 128), P and O of D = 128 fill these, so QK,
softmax and PV follow one another, and the other warpgroups keep the matrix unit busy meanwhile. With two, a thread has
240 registers, and QK of a block runs beside PV of the previous one. Which is faster depends on the number of tiles for
each multiprocessor (launch.py). Above D = 128 there are two, and S is (64, 64).

Keys come from K' where centre_kernel.py subtracted what the keys of a head share. A tile is marked by an infinite
log-sum-exp, and left to exact_kernel.py, if its scores may be too large for FP32 sums, or if its output is not finite.
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

from pasa.ops.attention.triton.centre_kernel import TILE
from pasa.ops.attention.triton.hopper.tile_math import (
    BARRIER,
    INF,
    LAUNCH_NEXT,
    LN2,
    ONE,
    ROWS,
    WAIT,
    advance,
    clamped,
    is_bounded,
    limit,
    load_tile,
    locate,
    longest_of_each,
    mask,
    running_softmax,
    scores,
    store_tile,
    visible_blocks,
)
from pasa.ops.attention.triton.rounding_kernel import flag_rows, round_flagged
from pasa.ops.attention.triton.tile_math import ANCHOR_LIMIT

EARLY_LIMIT = gl.constexpr(ANCHOR_LIMIT.value / 128)  # of log2(e) nats of the longest key and a query of length 1
AHEAD = gl.constexpr(2)  # blocks that are attended to before the pass over the keys must have ended
UNIFORM = gl.constexpr("redux.sync.max.s32 $0, $1, 0xffffffff;")


@gluon.jit
def _uniform(flag):
    """Return an integer that all threads of a warp share.

    It is kept in a uniform register. A loop whose length depends on any other register keeps its own counters in
    registers of each thread, which it lacks.
    """
    return gl.inline_asm_elementwise(UNIFORM, "=r,r", [flag.to(gl.int32)], gl.int32, is_pure=True, pack=1)


@aggregate
class PlainShared:
    """Hold shared memory: tiles (stage or warpgroup first) and their barriers."""

    q: gl.shared_memory_descriptor  # (WARPGROUPS, 1, 1, 64, D)
    k: gl.shared_memory_descriptor  # (STAGES, 1, 1, KEYS, D)
    v: gl.shared_memory_descriptor  # (STAGES, 1, 1, KEYS, D)
    notes: gl.shared_memory_descriptor  # (2, 1): the producer's messages, see `_producer`
    noted: gl.shared_memory_descriptor  # (2, 1): each message is there
    q_full: gl.shared_memory_descriptor  # (WARPGROUPS, 1)
    full: gl.shared_memory_descriptor  # (2 * STAGES, 1): K arrived, V arrived
    empty: gl.shared_memory_descriptor  # (2 * STAGES, 1): K read, V read

    @gluon.constexpr_function
    def __init__(self, q, k, v, notes, noted, q_full, full, empty):
        self.q, self.k, self.v, self.notes, self.noted = q, k, v, notes, noted
        self.q_full, self.full, self.empty = q_full, full, empty


@aggregate
class PlainJob:
    """Hold the sizes of a call, and pointers to what centre_kernel.py found and to the log-sum-exp."""

    heads: gl.tensor
    group: gl.tensor  # query heads of a key head
    batch_heads: gl.tensor
    section: gl.tensor  # heads that run together
    rows: gl.tensor  # Sq
    keys: gl.tensor  # Skv
    tiles: gl.tensor  # of a head
    work: gl.tensor  # tiles of all heads
    c: gl.tensor  # scale * log2(e)
    p_norms: gl.tensor  # (B Hkv, 2, blocks)
    p_anchors: gl.tensor  # (B Hkv, D)
    p_marked: gl.tensor  # (1,): 1 if any tile was marked
    p_lse: gl.tensor  # (B Hq, Sq)

    @gluon.constexpr_function
    def __init__(
        self, heads, group, batch_heads, section, rows, keys, tiles, work, c, p_norms, p_anchors, p_marked, p_lse
    ):  # fmt: skip
        self.heads, self.group, self.batch_heads, self.section = heads, group, batch_heads, section
        self.rows, self.keys, self.tiles, self.work, self.c = rows, keys, tiles, work, c
        self.p_norms, self.p_anchors, self.p_marked, self.p_lse = p_norms, p_anchors, p_marked, p_lse


@gluon.jit
def _load(sm, tile, desc, tiles, j, n, STAGES: gl.constexpr, WHICH: gl.constexpr):
    """Load K_j (WHICH 0) or V_j (WHICH 1) by TMA, as the n-th block overall, once its stage is free."""
    stage = n % STAGES
    arrived = sm.full.index(2 * stage + WHICH)
    mbarrier.wait(sm.empty.index(2 * stage + WHICH), ((n // STAGES) & 1) ^ 1)  # a fresh barrier counts as released
    mbarrier.expect(arrived, desc.block_type.nbytes)
    load_tile(desc, [tile.batch, tile.head_kv, j * sm.k.shape[3], 0], arrived, tiles.index(stage))


@gluon.jit
def _load_blocks(sm, tile, k_desc, v_desc, start, stop, n, STAGES: gl.constexpr):
    """Load key blocks start to stop and their values. n: number of blocks before those of the tile."""
    for j in range(start, stop):
        _load(sm, tile, k_desc, sm.k, j, n + j, STAGES, 0)
        _load(sm, tile, v_desc, sm.v, j, n + j, STAGES, 1)


@gluon.jit
def _tell(sm, WHICH: gl.constexpr, note):
    """Leave a message for the consumers."""
    sm.notes.index(WHICH).store(gl.full([1], 0, gl.int32, ONE) + note)
    mbarrier.arrive(sm.noted.index(WHICH), count=1)


@gluon.jit
def _told(sm, WHICH: gl.constexpr):
    """Wait for a message of the producer and return it."""
    mbarrier.wait(sm.noted.index(WHICH), 0)
    return _uniform(gl.max(sm.notes.index(WHICH).load(ONE), axis=0))


@gluon.jit
def _keys_of(job, tile, D: gl.constexpr):
    """Return the longest key of the tile's head in K', or in K if it has no K', and which."""
    PART: gl.constexpr = TILE // D
    parts = (job.keys + PART - 1) // PART
    p_norm = job.p_norms + (2 * tile.index_kv).to(gl.int64) * parts
    longest, longest_shifted = longest_of_each(p_norm, p_norm + parts, parts)
    shifted = _uniform(longest_shifted < INF)
    return gl.where(shifted > 0, longest_shifted, longest), shifted


@gluon.jit
def _producer(sm, job, q_desc, k_desc, shifted_desc, v_desc, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
              CAUSAL: gl.constexpr):  # fmt: skip
    """Load Q, K' and V, and decide if the tile is marked.

    The first blocks are loaded before the pass over the keys has ended. If it made a K', they are loaded again.
    Message 0 is 1 if there is a K', plus 2 if the tile is marked for certain. Message 1 is 1 if the tile is marked. It
    comes after all blocks are on their way, so that no block waits for it.
    """
    tile = locate(job, gl.program_id(0), WARPGROUPS, sm.k.shape[3], CAUSAL)
    for w in gl.static_range(WARPGROUPS):
        mbarrier.expect(sm.q_full.index(w), q_desc.block_type.nbytes)
        load_tile(q_desc, [tile.batch, tile.head, tile.row + w * ROWS, 0], sm.q_full.index(w), sm.q.index(w))
    ahead = gl.minimum(tile.blocks, STAGES)
    _load_blocks(sm, tile, k_desc, v_desc, 0, ahead, 0, STAGES)
    gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, is_pure=False, pack=1)
    longest, shifted = _keys_of(job, tile, sm.k.shape[4])
    marked = gl.to_tensor(0)
    if _uniform(longest * job.c > EARLY_LIMIT) > 0:
        marked = _uniform(is_bounded(sm, job, longest, 0, WARPGROUPS) == 0)
    _tell(sm, 0, shifted + 2 * marked)
    if shifted > 0:
        _load_blocks(sm, tile, shifted_desc, v_desc, 0, tile.blocks, ahead, STAGES)
    else:
        _load_blocks(sm, tile, k_desc, v_desc, ahead, tile.blocks, 0, STAGES)
    _tell(sm, 1, (is_bounded(sm, job, longest, 0, WARPGROUPS) == 0).to(gl.int32))


@gluon.jit
def _add_values(sm, b_p, b_o, stage):
    """Start O (64, D) += P V, without waiting for it."""
    return warpgroup_mma(b_p, sm.v.index(stage).reshape([sm.v.shape[3], sm.v.shape[4]]), b_o, is_async=True)


@gluon.jit
def _in_turn(sm, job, q_s, b_o, b_max, b_sum, row, start, stop, full, stage, phase, STAGES: gl.constexpr,
             CAUSAL: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Attend to key blocks start to stop: QK, softmax and PV follow one another."""
    for j in range(start, stop):
        mbarrier.wait(sm.full.index(2 * stage), phase)
        b_s = warpgroup_mma_wait(0, deps=(scores(sm, q_s, stage),))
        mbarrier.arrive(sm.empty.index(2 * stage), count=1)
        if MASKED:
            b_s = mask(job, b_s, row, j, full, CAUSAL)
        b_p, b_max, b_add, b_alpha = running_softmax(b_s, b_max, job.c)
        b_sum = b_sum * b_alpha + b_add
        b_o = b_o * gl.convert_layout(b_alpha, gl.SliceLayout(1, b_o.type.layout))[:, None]
        mbarrier.wait(sm.full.index(2 * stage + 1), phase)
        b_p = gl.convert_layout(b_p, gl.DotOperandLayout(0, b_o.type.layout, 2))
        b_o = warpgroup_mma_wait(0, deps=(_add_values(sm, b_p, b_o, stage),))
        mbarrier.arrive(sm.empty.index(2 * stage + 1), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return b_o, b_max, b_sum, stage, phase


@gluon.jit
def _overlapped(sm, job, q_s, b_o, row, stop, full, stage, phase, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
                MASKED: gl.constexpr):  # fmt: skip
    """Attend to all key blocks (at least one): QK of block j runs beside PV of block j - 1."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, b_o.type.layout, 2)
    mbarrier.wait(sm.full.index(2 * stage), phase)
    b_first = warpgroup_mma_wait(0, deps=(scores(sm, q_s, stage),))
    mbarrier.arrive(sm.empty.index(2 * stage), count=1)
    if MASKED:
        b_first = mask(job, b_first, row, 0, full, CAUSAL)
    b_none = gl.full([ROWS], -INF, gl.float32, gl.SliceLayout(1, b_first.type.layout))
    b_weights, b_max, b_sum, _ = running_softmax(b_first, b_none, job.c)
    b_p = gl.convert_layout(b_weights, P_LAYOUT)
    v_stage, v_phase = stage, phase
    stage, phase = advance(stage, phase, STAGES)
    for j in range(1, stop):
        mbarrier.wait(sm.full.index(2 * stage), phase)
        b_s = scores(sm, q_s, stage)
        mbarrier.wait(sm.full.index(2 * v_stage + 1), v_phase)
        b_o = _add_values(sm, b_p, b_o, v_stage)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        mbarrier.arrive(sm.empty.index(2 * stage), count=1)
        if MASKED:
            b_s = mask(job, b_s, row, j, full, CAUSAL)
        b_next, b_max, b_add, b_alpha = running_softmax(b_s, b_max, job.c)
        b_sum = b_sum * b_alpha + b_add
        b_o = warpgroup_mma_wait(0, deps=(b_o,))
        mbarrier.arrive(sm.empty.index(2 * v_stage + 1), count=1)
        b_o = b_o * gl.convert_layout(b_alpha, gl.SliceLayout(1, b_o.type.layout))[:, None]
        b_p = gl.convert_layout(b_next, P_LAYOUT)
        v_stage, v_phase = stage, phase
        stage, phase = advance(stage, phase, STAGES)
    mbarrier.wait(sm.full.index(2 * v_stage + 1), v_phase)
    b_o = warpgroup_mma_wait(0, deps=(_add_values(sm, b_p, b_o, v_stage),))
    mbarrier.arrive(sm.empty.index(2 * v_stage + 1), count=1)
    return b_o, b_max, b_sum


@gluon.jit
def _store(sm, job, tile, o_desc, q_s, b_o, b_max, b_sum, row, note, INDEX: gl.constexpr, CAUSAL: gl.constexpr,
           DROPPED: gl.constexpr, DIM: gl.constexpr):  # fmt: skip
    """Normalise, mark the tile if it needs the exact pass, and write O (64, D) and the log-sum-exp."""
    D: gl.constexpr = sm.k.shape[4]
    COLUMN: gl.constexpr = gl.SliceLayout(0, b_o.type.layout)
    O_ROW: gl.constexpr = gl.SliceLayout(1, b_o.type.layout)
    b_column = gl.arange(0, D, layout=COLUMN)
    b_limit = limit(job, row, sm.k.shape[3], CAUSAL)
    b_finite = gl.sum(b_o * 0.0, axis=1)  # 0, or NaN if a weight or value was not finite
    b_inverse = gl.where(b_limit > 0, 1.0 / b_sum, 0.0)  # a row that sees no key is 0
    b_o = b_o * gl.convert_layout(b_inverse, O_ROW)[:, None]
    b_verdict = gl.where(b_finite == 0.0, 0, 2)  # 0: nothing to do, 1: flagged, 2: mark the tile
    if DROPPED != 0:
        m_flagged = flag_rows(b_o, b_column, DIM, DROPPED, True)
        b_verdict = gl.maximum(b_verdict, m_flagged.to(gl.int32))
    verdict = gl.max(b_verdict, axis=0)
    marked = (note > 1) | (_told(sm, 1) > 0) | (verdict == 2)
    if marked:
        gl.store(job.p_marked + gl.arange(0, 1, layout=ONE), gl.full([1], 1, gl.int32, ONE))
    if DROPPED != 0:
        if verdict == 1:
            b_o = round_flagged(b_o, m_flagged, b_column, DIM, DROPPED)
    b_lse = (b_max * job.c + gl.log2(b_sum)) * LN2
    if note % 2 > 0:  # what K' left out
        b_anchor = gl.load(job.p_anchors + tile.index_kv * D + b_column).to(gl.float32)
        b_q = q_s.load(b_o.type.layout).to(gl.float32)
        b_lse += gl.convert_layout(gl.sum(b_q * b_anchor[None, :], axis=1), b_lse.type.layout) * (job.c * LN2)
    q_s.store(clamped(b_o, DROPPED))
    fence_async_shared()
    store_tile(o_desc, [tile.batch, tile.head, row, 0], sm.q.index(INDEX))
    b_lse = gl.where((b_sum > 0.0) & (b_sum < INF), b_lse, float("nan"))  # else the row's query is not finite
    b_lse = gl.where(b_limit > 0, b_lse, -INF)
    b_row = row + gl.arange(0, ROWS, layout=b_limit.type.layout)
    p_row = job.p_lse + tile.index.to(gl.int64) * job.rows + b_row
    gl.store(p_row, gl.where(marked, INF, b_lse), mask=b_row < job.rows)


@gluon.jit
def _skip(sm, start, stop, STAGES: gl.constexpr):
    """Release blocks without reading them."""
    for j in range(start, stop):
        stage = j % STAGES
        for which in gl.static_range(2):
            mbarrier.wait(sm.full.index(2 * stage + which), (j // STAGES) & 1)
            mbarrier.arrive(sm.empty.index(2 * stage + which), count=1)


@gluon.jit
def _consumer(sm, job, o_desc, INDEX: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
              CAUSAL: gl.constexpr, RAGGED: gl.constexpr, DROPPED: gl.constexpr, DIM: gl.constexpr):  # fmt: skip
    """Compute 64 query rows of the tile."""
    D: gl.constexpr = sm.k.shape[4]
    KEYS: gl.constexpr = sm.k.shape[3]
    tile = locate(job, gl.program_id(0), WARPGROUPS, sm.k.shape[3], CAUSAL)
    row = tile.row + INDEX * ROWS
    stop = visible_blocks(row + (ROWS - 1), job.rows, job.keys, KEYS, CAUSAL)
    full = job.keys // KEYS  # blocks that all rows see
    if CAUSAL:
        full = gl.maximum(row + 1 + job.keys - job.rows, 0) // KEYS
    ahead = gl.minimum(tile.blocks, STAGES)
    n = gl.to_tensor(0)  # blocks that were loaded too early
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.wait(sm.q_full.index(INDEX), 0)
    q_s = sm.q.index(INDEX).reshape([ROWS, D])
    b_o = gl.zeros([ROWS, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    if D == 256 or ((not CAUSAL) and (WARPGROUPS == 2 or D == 64)):  # registers are left for it
        note = _told(sm, 0)
        if note % 2 > 0:
            n = ahead
            _skip(sm, 0, n, STAGES)
            stage = n % STAGES
            phase = n // STAGES
        stop = gl.where(note > 1, 1, stop)
        b_o, b_max, b_sum = _overlapped(sm, job, q_s, b_o, row, stop, full, stage, phase, STAGES, CAUSAL, RAGGED)
    else:
        b_max = gl.full([ROWS], -INF, gl.float32, limit(job, row, KEYS, CAUSAL).type.layout)
        b_sum = gl.full([ROWS], 0.0, gl.float32, b_max.type.layout)
        # Causal: the blocks that need no mask have a separate loop, whose short code stays in the instruction cache.
        split = gl.minimum(full, stop) if CAUSAL else stop
        start = gl.to_tensor(0)
        end = gl.minimum(split, AHEAD)
        note = gl.to_tensor(0)
        for part in range(2):
            b_o, b_max, b_sum, stage, phase = _in_turn(
                sm, job, q_s, b_o, b_max, b_sum, row, start, end, full, stage, phase, STAGES,
                CAUSAL, RAGGED and not CAUSAL,
            )  # fmt: skip
            start = end  # used behind the loop, too: else Triton 3.6 forgets it between the parts
            if part == 0:
                note = _told(sm, 0)
                if note % 2 > 0:  # begin again, with K'
                    n = ahead
                    _skip(sm, end, n, STAGES)
                    stage = n % STAGES
                    phase = n // STAGES
                    start = gl.to_tensor(0)
                    b_o = gl.zeros_like(b_o)
                    b_max = gl.full_like(b_max, -INF)
                    b_sum = gl.zeros_like(b_sum)
                split = gl.where(note > 1, start, split)
                stop = gl.where(note > 1, start, stop)
                end = split
        if CAUSAL:
            b_o, b_max, b_sum, stage, phase = _in_turn(
                sm, job, q_s, b_o, b_max, b_sum, row, start, stop, 0, stage, phase, STAGES, CAUSAL, True
            )
        else:
            stop = start
    _skip(sm, n + stop, n + tile.blocks, STAGES)  # blocks that only other warpgroups see
    _store(sm, job, tile, o_desc, q_s, b_o, b_max, b_sum, row, note, INDEX, CAUSAL, DROPPED, DIM)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "group", "batch_heads", "section", "rows", "keys", "tiles", "work"])
def plain_kernel(
    q_desc, k_desc, shifted_desc, v_desc, o_desc, p_norms, p_anchors, p_marked, p_lse,
    heads, group, batch_heads, section, rows, keys, tiles, work, scale_log2,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    DROPPED: gl.constexpr,  # how outputs are rounded: rounding_kernel.py
    DIM: gl.constexpr,  # head dimension; a tile has as many columns or more, which TMA fills with zeros
):  # fmt: skip
    """Compute a tile of 64 * WARPGROUPS query rows."""
    D: gl.constexpr = q_desc.block_shape[3]
    KEYS: gl.constexpr = k_desc.block_shape[2]
    job = PlainJob(
        heads, group, batch_heads, section, rows, keys, tiles, work, scale_log2, p_norms, p_anchors, p_marked, p_lse
    )
    q = gl.allocate_shared_memory(gl.float16, [WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(gl.float16, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v = gl.allocate_shared_memory(gl.float16, [STAGES, 1, 1, KEYS, D], v_desc.layout)
    notes = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    noted = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(noted.index(i), count=1)
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    gl.inline_asm_elementwise(LAUNCH_NEXT, "=r", [], gl.int32, is_pure=False, pack=1)
    sm = PlainShared(q, k, v, notes, noted, q_full, full, empty)
    if WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (_consumer, (sm, job, o_desc, 0, 3, STAGES, CAUSAL, RAGGED, DROPPED, DIM)),
                (_consumer, (sm, job, o_desc, 1, 3, STAGES, CAUSAL, RAGGED, DROPPED, DIM)),
                (_consumer, (sm, job, o_desc, 2, 3, STAGES, CAUSAL, RAGGED, DROPPED, DIM)),
                (_producer, (sm, job, q_desc, k_desc, shifted_desc, v_desc, 3, STAGES, CAUSAL)),
            ],
            [4, 4, 4],  # warps of the partitions behind the first
            [160, 160, 32],  # and registers a thread; the first gets the rest, 160 as well
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (sm, job, o_desc, 0, 2, STAGES, CAUSAL, RAGGED, DROPPED, DIM)),
                (_consumer, (sm, job, o_desc, 1, 2, STAGES, CAUSAL, RAGGED, DROPPED, DIM)),
                (_producer, (sm, job, q_desc, k_desc, shifted_desc, v_desc, 2, STAGES, CAUSAL)),
            ],
            [4, 4],
            [240, 24],
        )
