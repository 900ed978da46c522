"""The exact pass on Hopper (sm_90), in Gluon: it computes the tiles again that plain_kernel.py marked.

A producer partition feeds three consumer warpgroups by TMA, each with 64 query rows and 160 registers a thread, or two
with 232 registers above D = 128. QK, softmax and PV of a warpgroup follow one another, with running maxima. If norms
were too large, the producer computes K' = K - a_j (exact) in shared memory, and a row adds q.(a_j - f_j) to its
reference. f_j is the frame of the row's scores (`next_frame`), so a bias that all keys share is never rounded. The log-
sum-exp adds q.f at the end.
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

from pasa.ops.attention.triton.hopper.tile_math import (
    BARRIER,
    INF,
    LN2,
    ONE,
    ROWS,
    UNSEEN,
    WAIT,
    Job,
    Shared,
    advance,
    anchor,
    clamped,
    column,
    exact_softmax,
    is_bounded,
    limit,
    load_tile,
    locate,
    longest_of_each,
    mask,
    pre_pass,
    scores,
    store_tile,
    treat_keys,
    treat_values,
    visible_blocks,
)
from pasa.ops.attention.triton.rounding_kernel import round_rows
from pasa.ops.attention.triton.tile_math import next_frame


@gluon.jit
def _load(sm, tile, desc, tiles, j, n, STAGES: gl.constexpr, WHICH: gl.constexpr):
    """Load K_j (WHICH 0) or V_j (WHICH 1) by TMA, as the n-th block overall, once its stage is free."""
    stage = n % STAGES
    arrived = sm.full.index(4 * stage + WHICH)
    mbarrier.wait(sm.empty.index(2 * stage + WHICH), ((n // STAGES) & 1) ^ 1)  # a fresh barrier counts as released
    mbarrier.expect(arrived, desc.block_type.nbytes)
    load_tile(desc, [tile.batch, tile.head_kv, j * sm.k.shape[3], 0], arrived, tiles.index(stage))


@gluon.jit
def _load_queries(sm, tile, desc, WARPGROUPS: gl.constexpr):
    for i in gl.static_range(WARPGROUPS):
        mbarrier.expect(sm.q_full.index(i), desc.block_type.nbytes)
        load_tile(desc, [tile.batch, tile.head, tile.row + i * ROWS, 0], sm.q_full.index(i), sm.q.index(i))


@gluon.jit
def _producer(sm, job, q_desc, k_desc, v_desc, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
              DIM: gl.constexpr):  # fmt: skip
    """Load Q, K' and V without NaN or infinity for all marked tiles."""
    D: gl.constexpr = sm.k.shape[4]
    KEYS: gl.constexpr = sm.k.shape[3]
    PART: gl.constexpr = 2048 // D  # rows of a tile that fit into 32 registers a thread
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0]))
    n = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for i in range(gl.program_id(0), job.work, gl.num_programs(0)):
        tile = locate(job, i, WARPGROUPS, KEYS, CAUSAL)
        marked = False
        for w in gl.static_range(WARPGROUPS):  # tiles of the first launch may have had another height
            row = tile.row + w * ROWS
            lse = gl.load(job.p_lse + tile.index.to(gl.int64) * job.rows + row, mask=row < job.rows, other=0.0)
            marked = marked | (lse == INF)
        if marked:
            mbarrier.wait(sm.done.index(0), (turn & 1) ^ 1)
            _load_queries(sm, tile, q_desc, WARPGROUPS)
            p_norm = pre_pass(job, tile, job.p_norms, KEYS, 1)
            longest, _ = longest_of_each(p_norm, p_norm, (job.keys + KEYS - 1) // KEYS)
            treated = is_bounded(sm, job, longest, turn, WARPGROUPS) == 0
            sm.work.store(gl.full([1], 0, gl.int32, ONE) + 2 * i + treated.to(gl.int32))
            sm.first_bad.store(gl.full([D], UNSEEN, gl.int32, COLUMN))
            mbarrier.arrive(sm.begin.index(0), count=1)
            # global memory is read one block ahead
            b_anchor = anchor(job, tile, 0, treated, KEYS, D, DIM)
            b_frame = b_anchor
            norm = gl.load(pre_pass(job, tile, job.p_norms, KEYS, 1))
            for j in range(tile.blocks):
                ahead = gl.minimum(j + 1, tile.blocks - 1)
                b_next = anchor(job, tile, ahead, treated, KEYS, D, DIM)
                next_norm = gl.load(pre_pass(job, tile, job.p_norms, KEYS, 1) + ahead)
                _load(sm, tile, k_desc, sm.k, j, n + j, STAGES, 0)
                _load(sm, tile, v_desc, sm.v, j, n + j, STAGES, 1)
                b_frame = next_frame(b_frame.to(gl.float32), b_anchor.to(gl.float32)).to(gl.float16)
                treat_keys(sm, b_anchor, b_frame, n + j, treated, STAGES, PART)
                if CAUSAL:
                    treat_values(sm, j, n + j, norm == INF, STAGES, PART)
                b_anchor = b_next
                norm = next_norm
            mbarrier.arrive(sm.end.index(0), count=1)
            n += tile.blocks
            turn += 1
    mbarrier.wait(sm.done.index(0), (turn & 1) ^ 1)
    sm.work.store(gl.full([1], -1, gl.int32, ONE))
    mbarrier.arrive(sm.begin.index(0), count=1)


@gluon.jit
def _offset(sm, q_s, stage):
    """Start q.(a_j - f_j) and q.f_j, two columns of (64, 8), without waiting for them."""
    C_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    b_c = gl.zeros([ROWS, 8], gl.float32, C_LAYOUT)
    return warpgroup_mma(q_s, sm.offset.index(stage).permute([1, 0]), b_c, use_acc=False, is_async=True)


@gluon.jit
def _add_values(sm, b_p, b_o, stage):
    """Start O (64, D) += P V, without waiting for it."""
    return warpgroup_mma(b_p, sm.v.index(stage).reshape([sm.v.shape[3], sm.v.shape[4]]), b_o, is_async=True)


@gluon.jit
def _message(sm, turn):
    """Wait for the producer's message of `turn`: the next tile."""
    mbarrier.wait(sm.begin.index(0), turn & 1)
    return gl.max(sm.work.load(ONE), axis=0)


@gluon.jit
def _attend(sm, job, q_s, row, full, stop, n, STAGES: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr):
    """Return O (64, D), not yet normalised, maximum, sum and q.f of a warpgroup's rows. n: number of earlier blocks."""
    D: gl.constexpr = sm.k.shape[4]
    b_o = gl.zeros([ROWS, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    b_max = gl.full([ROWS], -INF, gl.float32, limit(job, row, sm.k.shape[3], CAUSAL).type.layout)
    b_sum = gl.full([ROWS], 0.0, gl.float32, b_max.type.layout)
    b_framed = b_sum  # q.f of the last block with a key that a row saw
    stage = n % STAGES
    phase = (n // STAGES) & 1
    for j in range(stop):
        mbarrier.wait(sm.full.index(4 * stage), phase)
        mbarrier.wait(sm.full.index(4 * stage + 2), phase)
        b_c = _offset(sm, q_s, stage)
        b_c, b_s = warpgroup_mma_wait(0, deps=(b_c, scores(sm, q_s, stage)))
        mbarrier.arrive(sm.empty.index(2 * stage), count=1)
        if RAGGED:
            b_s = mask(job, b_s, row, j, full, CAUSAL)
        b_offset = gl.convert_layout(column(b_c, 0), b_max.type.layout)
        b_now = gl.convert_layout(column(b_c, 1), b_max.type.layout)
        if RAGGED:
            b_now = gl.where(gl.max(b_s, axis=1) == -INF, b_framed, b_now)
        b_max += b_framed - b_now
        b_framed = b_now
        b_p, b_max, b_add, b_alpha = exact_softmax(b_s, b_max, b_offset, job.c)
        b_sum = b_sum * b_alpha + b_add
        b_o = b_o * gl.convert_layout(b_alpha, gl.SliceLayout(1, b_o.type.layout))[:, None]
        mbarrier.wait(sm.full.index(4 * stage + 1), phase)
        if CAUSAL:
            mbarrier.wait(sm.full.index(4 * stage + 3), phase)
        b_p = gl.convert_layout(b_p, gl.DotOperandLayout(0, b_o.type.layout, 2))
        b_o = warpgroup_mma_wait(0, deps=(_add_values(sm, b_p, b_o, stage),))
        mbarrier.arrive(sm.empty.index(2 * stage + 1), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return b_o, b_max, b_sum, b_framed


@gluon.jit
def _store(sm, job, tile, o_desc, b_o, b_max, b_sum, b_framed, row, turn, treated, INDEX: gl.constexpr,
           CAUSAL: gl.constexpr, DROPPED: gl.constexpr, DIM: gl.constexpr):  # fmt: skip
    """Normalise, set rows to NaN that a NaN reaches, and write O (64, D) and the log-sum-exp."""
    D: gl.constexpr = sm.k.shape[4]
    COLUMN: gl.constexpr = gl.SliceLayout(0, b_o.type.layout)
    O_ROW: gl.constexpr = gl.SliceLayout(1, b_o.type.layout)
    b_column = gl.arange(0, D, layout=COLUMN)
    q_s = sm.q.index(INDEX).reshape([ROWS, D])
    b_limit = limit(job, row, sm.k.shape[3], CAUSAL)
    b_nan = b_o - b_o  # 0, or NaN if O is not finite
    b_inverse = gl.where(b_limit > 0, 1.0 / b_sum, 0.0)  # a row that sees no key is 0
    b_o = gl.fma(b_o, gl.convert_layout(b_inverse, O_ROW)[:, None], b_nan)
    b_lse = (b_max * job.c + gl.log2(b_sum)) * LN2
    if treated:
        b_lse += b_framed * (job.c * LN2)  # the frame's part, which the softmax left out
        mbarrier.wait(sm.end.index(0), turn & 1)
        b_bad = sm.first_bad.load(COLUMN)
        b_o = gl.where(gl.convert_layout(b_limit, O_ROW)[:, None] > b_bad[None, :], float("nan"), b_o)
    b_o = round_rows(b_o, b_column, DIM, DROPPED, False, True)
    q_s.store(clamped(b_o, DROPPED))
    fence_async_shared()
    store_tile(o_desc, [tile.batch, tile.head, row, 0], sm.q.index(INDEX))
    b_lse = gl.where((b_sum > 0.0) & (b_sum < INF), b_lse, float("nan"))  # else the row's query is not finite
    b_lse = gl.where(b_limit > 0, b_lse, -INF)
    b_row = row + gl.arange(0, ROWS, layout=b_limit.type.layout)
    p_row = job.p_lse + tile.index.to(gl.int64) * job.rows + b_row
    gl.store(p_row, b_lse, mask=b_row < job.rows)


@gluon.jit
def _consume(sm, job, tile, o_desc, n, turn, treated, INDEX: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
             RAGGED: gl.constexpr, DROPPED: gl.constexpr, DIM: gl.constexpr):  # fmt: skip
    """Compute 64 query rows of a tile. n: number of earlier blocks, in `turn` tiles."""
    KEYS: gl.constexpr = sm.k.shape[3]
    row = tile.row + INDEX * ROWS
    stop = visible_blocks(row + (ROWS - 1), job.rows, job.keys, KEYS, CAUSAL)
    full = job.keys // KEYS  # blocks that all rows see
    if CAUSAL:
        full = gl.maximum(row + 1 + job.keys - job.rows, 0) // KEYS
    mbarrier.wait(sm.q_full.index(INDEX), turn & 1)
    q_s = sm.q.index(INDEX).reshape([ROWS, sm.k.shape[4]])
    b_o, b_max, b_sum, b_framed = _attend(sm, job, q_s, row, full, stop, n, STAGES, CAUSAL, RAGGED)
    _store(sm, job, tile, o_desc, b_o, b_max, b_sum, b_framed, row, turn, treated, INDEX, CAUSAL, DROPPED, DIM)
    for j in range(n + stop, n + tile.blocks):  # blocks that only other warpgroups see
        stage = j % STAGES
        mbarrier.wait(sm.full.index(4 * stage), (j // STAGES) & 1)
        mbarrier.arrive(sm.empty.index(2 * stage), count=1)
        mbarrier.wait(sm.full.index(4 * stage + 1), (j // STAGES) & 1)
        mbarrier.arrive(sm.empty.index(2 * stage + 1), count=1)
    tma.store_wait(0)


@gluon.jit
def _consumer(sm, job, o_desc, INDEX: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
              CAUSAL: gl.constexpr, RAGGED: gl.constexpr, DROPPED: gl.constexpr, DIM: gl.constexpr):  # fmt: skip
    """Compute 64 rows of all tiles that the producer names."""
    n = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    work = _message(sm, turn)
    while work >= 0:
        tile = locate(job, work // 2, WARPGROUPS, sm.k.shape[3], CAUSAL)
        _consume(sm, job, tile, o_desc, n, turn, work % 2 == 1, INDEX, STAGES, CAUSAL, RAGGED, DROPPED, DIM)
        mbarrier.arrive(sm.done.index(0), count=1)
        n += tile.blocks
        turn += 1
        work = _message(sm, turn)


@gluon.jit(do_not_specialize=["heads", "group", "batch_heads", "section", "rows", "keys", "tiles", "work"])
def exact_kernel(
    q_desc, k_desc, v_desc, o_desc, p_norms, p_anchors, p_marked, p_lse,
    heads, group, batch_heads, section, rows, keys, tiles, work, scale_log2,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    DROPPED: gl.constexpr,  # how outputs are rounded: rounding_kernel.py
    DIM: gl.constexpr,  # head dimension: plain_kernel.py
):  # fmt: skip
    """Compute all marked tiles, of 64 * WARPGROUPS query rows each."""
    D: gl.constexpr = q_desc.block_shape[3]
    KEYS: gl.constexpr = k_desc.block_shape[2]
    gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, is_pure=False, pack=1)
    if gl.load(p_marked) == 0:  # mostly; so this test comes before any set-up
        return
    job = Job(
        heads, group, batch_heads, section, rows, keys, tiles, work, scale_log2, p_norms, p_anchors, p_marked, p_lse
    )
    q = gl.allocate_shared_memory(gl.float16, [WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(gl.float16, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v = gl.allocate_shared_memory(gl.float16, [STAGES, 1, 1, KEYS, D], v_desc.layout)
    offset = gl.allocate_shared_memory(gl.float16, [STAGES, 8, D], gl.NVMMASharedLayout(128, 16))
    first_bad = gl.allocate_shared_memory(gl.int32, [D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work_s = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    begin = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    end = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    done = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(4 * STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    mbarrier.init(begin.index(0), count=1)
    mbarrier.init(end.index(0), count=1)
    mbarrier.init(done.index(0), count=WARPGROUPS)
    fence_async_shared()
    sm = Shared(q, k, v, offset, first_bad, work_s, q_full, full, empty, begin, end, done)
    if WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (_consumer, (sm, job, o_desc, 0, 3, STAGES, CAUSAL, RAGGED, DROPPED, DIM)),
                (_consumer, (sm, job, o_desc, 1, 3, STAGES, CAUSAL, RAGGED, DROPPED, DIM)),
                (_consumer, (sm, job, o_desc, 2, 3, STAGES, CAUSAL, RAGGED, DROPPED, DIM)),
                (_producer, (sm, job, q_desc, k_desc, v_desc, 3, STAGES, CAUSAL, DIM)),
            ],
            [4, 4, 4],  # warps of the partitions behind the first
            [160, 160, 32],  # and registers a thread; the first gets the rest, 160 as well
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (sm, job, o_desc, 0, 2, STAGES, CAUSAL, RAGGED, DROPPED, DIM)),
                (_consumer, (sm, job, o_desc, 1, 2, STAGES, CAUSAL, RAGGED, DROPPED, DIM)),
                (_producer, (sm, job, q_desc, k_desc, v_desc, 2, STAGES, CAUSAL, DIM)),
            ],
            [4, 4],
            [232, 40],
        )
