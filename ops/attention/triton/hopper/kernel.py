"""Attention on Hopper (sm_90) in Gluon: a producer partition feeds consumer warpgroups by TMA.

A consumer warpgroup has 64 query rows. With three warpgroups, each thread has 160 registers. S (64, 128), P and O of
D = 128 fill these, so QK, softmax and PV follow one another, and the other warpgroups keep the matrix unit busy
meanwhile. With two, a thread has 240 registers, and QK of a block runs beside PV of the previous one. Which variant is
faster depends on the number of tiles for each multiprocessor (launch.py).

The first launch is FP32-softmax attention with a short loop: the first block's row maximum is the reference of all
blocks that every row sees. A later weight may reach 2^16, which is 11 nats more, before FP16 makes it infinite, and
infinity shows in O. Beside the copies, the producer tests if the tile's scores may be too large for FP32 sums, or if
its head has a key or value that is not finite. In either case the tile is given up, and is marked by an infinite
log-sum-exp.

The second launch is the exact pass over the marked tiles, with running maxima. If norms were too large, its producer
computes K' = K - a_j (exact) in shared memory, and a row adds q.(a_j - f_j) to its reference. f_j is the frame of the
row's scores (`next_frame`), so a bias that all keys share is never rounded. The log-sum-exp adds q.f at the end.
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
    EXACT,
    FIXED,
    INF,
    KEYS,
    LN2,
    NAN,
    ROWS,
    RUNNING,
    UNSEEN,
    WAIT,
    Job,
    QueryTile,
    Shared,
    anchor,
    column,
    exact_softmax,
    fixed_softmax,
    is_bounded,
    limit,
    mask,
    pre_pass,
    running_softmax,
    treat_keys,
    treat_values,
    visible_blocks,
)
from pasa.ops.attention.triton.rounding_kernel import flag_rows, round_flagged, round_rows
from pasa.ops.attention.triton.tile_math import next_frame

CLAMP_F16X2 = gl.constexpr(  # to +-65504; NaN stays
    "{ .reg .b32 a, b; mov.b32 a, 0x7bff7bff; mov.b32 b, 0xfbfffbff; min.NaN.f16x2 a, $1, a; max.NaN.f16x2 $0, a, b; }"
)
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # layout of a number that a partition of four warps shares
LAUNCH_NEXT = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")


@gluon.jit
def _locate(job, work, WARPGROUPS: gl.constexpr, CAUSAL: gl.constexpr):
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
    blocks = visible_blocks(row + (WARPGROUPS * ROWS - 1), job.rows, job.keys, CAUSAL)
    head = index % job.heads
    return QueryTile(index // job.heads, head, head // job.group, row, blocks, index, index // job.group)


@gluon.jit
def _load(sm, tile, desc, tiles, j, n, STAGES: gl.constexpr, WHICH: gl.constexpr):
    """Load K_j (WHICH 0) or V_j (WHICH 1) by TMA, as the n-th block overall, once its stage is free."""
    stage = n % STAGES
    arrived = sm.full.index(4 * stage + WHICH)
    mbarrier.wait(sm.empty.index(2 * stage + WHICH), ((n // STAGES) & 1) ^ 1)  # a fresh barrier counts as released
    mbarrier.expect(arrived, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [tile.batch, tile.head_kv, j * KEYS, 0], arrived, tiles.index(stage))


@gluon.jit
def _load_queries(sm, tile, desc, WARPGROUPS: gl.constexpr):
    for i in gl.static_range(WARPGROUPS):
        mbarrier.expect(sm.q_full.index(i), desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            desc, [tile.batch, tile.head, tile.row + i * ROWS, 0], sm.q_full.index(i), sm.q.index(i)
        )


@gluon.jit
def _first_producer(sm, job, q_desc, k_desc, v_desc, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
                    CAUSAL: gl.constexpr):  # fmt: skip
    """Load Q, K and V of the program's tile, and decide if the tile must be given up."""
    tile = _locate(job, gl.program_id(0), WARPGROUPS, CAUSAL)
    zero = gl.to_tensor(0)
    _load_queries(sm, tile, q_desc, WARPGROUPS)
    ahead = gl.minimum(tile.blocks, STAGES)
    for j in range(ahead):
        _load(sm, tile, k_desc, sm.k, j, j, STAGES, 0)
        _load(sm, tile, v_desc, sm.v, j, j, STAGES, 1)
    unbounded = is_bounded(sm, job, tile, zero, WARPGROUPS) == 0
    sm.work.store(gl.full([1], 0, gl.int32, ONE) + unbounded.to(gl.int32))
    mbarrier.arrive(sm.begin.index(0), count=1)
    for j in range(ahead, tile.blocks):
        _load(sm, tile, k_desc, sm.k, j, j, STAGES, 0)
        _load(sm, tile, v_desc, sm.v, j, j, STAGES, 1)


@gluon.jit
def _second_producer(sm, job, q_desc, k_desc, v_desc, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
                      CAUSAL: gl.constexpr):  # fmt: skip
    """Load Q, K' and V without NaN or infinity for all marked tiles."""
    D: gl.constexpr = sm.k.shape[4]
    PART: gl.constexpr = 16 if D == 128 else 32  # rows of a tile that fit into 32 registers a thread
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0]))
    n = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for i in range(gl.program_id(0), job.work, gl.num_programs(0)):
        tile = _locate(job, i, WARPGROUPS, CAUSAL)
        marked = False
        for w in gl.static_range(WARPGROUPS):  # tiles of the first launch may have had another height
            row = tile.row + w * ROWS
            lse = gl.load(job.p_lse + tile.index.to(gl.int64) * job.rows + row, mask=row < job.rows, other=0.0)
            marked = marked | (lse == INF)
        if marked:
            mbarrier.wait(sm.done.index(0), (turn & 1) ^ 1)
            _load_queries(sm, tile, q_desc, WARPGROUPS)
            treated = is_bounded(sm, job, tile, turn, WARPGROUPS) == 0
            sm.work.store(gl.full([1], 0, gl.int32, ONE) + 2 * i + treated.to(gl.int32))
            sm.first_bad.store(gl.full([D], UNSEEN, gl.int32, COLUMN))
            mbarrier.arrive(sm.begin.index(0), count=1)
            # global memory is read one block ahead
            b_anchor = anchor(job, tile, 0, treated, D)
            b_frame = b_anchor
            norm = gl.load(pre_pass(job, tile, job.p_norms, 1))
            for j in range(tile.blocks):
                ahead = gl.minimum(j + 1, tile.blocks - 1)
                b_next = anchor(job, tile, ahead, treated, D)
                next_norm = gl.load(pre_pass(job, tile, job.p_norms, 1) + ahead)
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
def _producer(sm, job, q_desc, k_desc, v_desc, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
              SECOND: gl.constexpr):  # fmt: skip
    if not SECOND:
        _first_producer(sm, job, q_desc, k_desc, v_desc, WARPGROUPS, STAGES, CAUSAL)
    else:
        _second_producer(sm, job, q_desc, k_desc, v_desc, WARPGROUPS, STAGES, CAUSAL)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _scores(sm, q_s, stage):
    """Start S (64, 128) = Q K^T, without waiting for it."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    b_s = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    k_s = sm.k.index(stage).reshape([KEYS, sm.k.shape[4]]).permute([1, 0])
    return warpgroup_mma(q_s, k_s, b_s, use_acc=False, is_async=True)


@gluon.jit
def _offset(sm, q_s, stage):
    """Start q.(a_j - f_j) and q.f_j, two columns of (64, 8), without waiting for them."""
    C_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    b_c = gl.zeros([ROWS, 8], gl.float32, C_LAYOUT)
    return warpgroup_mma(q_s, sm.offset.index(stage).permute([1, 0]), b_c, use_acc=False, is_async=True)


@gluon.jit
def _add_values(sm, b_p, b_o, stage):
    """Start O (64, D) += P V, without waiting for it."""
    return warpgroup_mma(b_p, sm.v.index(stage).reshape([KEYS, sm.v.shape[4]]), b_o, is_async=True)


@gluon.jit
def _message(sm, turn):
    """Wait for the producer's message of `turn`: the next tile, or in the first launch, 1 to give up the tile."""
    mbarrier.wait(sm.begin.index(0), turn & 1)
    return gl.max(sm.work.load(ONE), axis=0)


@gluon.jit
def _in_turn(sm, job, q_s, b_o, b_max, b_sum, b_framed, row, start, stop, full, stage, phase, STAGES: gl.constexpr,
             CAUSAL: gl.constexpr, MASKED: gl.constexpr, MODE: gl.constexpr):  # fmt: skip
    """Attend to key blocks start to stop in turn; b_framed (64,): q.f of the last block with a key that a row saw."""
    for j in range(start, stop):
        mbarrier.wait(sm.full.index(4 * stage), phase)
        if MODE == EXACT:
            mbarrier.wait(sm.full.index(4 * stage + 2), phase)
            b_c = _offset(sm, q_s, stage)
            b_c, b_s = warpgroup_mma_wait(0, deps=(b_c, _scores(sm, q_s, stage)))
        else:
            b_s = warpgroup_mma_wait(0, deps=(_scores(sm, q_s, stage),))
        mbarrier.arrive(sm.empty.index(2 * stage), count=1)
        if MASKED:
            b_s = mask(job, b_s, row, j, full, CAUSAL)
        if MODE == FIXED:
            if j == 0:
                b_max = gl.max(b_s, axis=1)
            b_p, b_add = fixed_softmax(b_s, b_max, job.c)
            b_sum += b_add
        else:
            if MODE == RUNNING:
                b_p, b_max, b_add, b_alpha = running_softmax(b_s, b_max, job.c)
            else:
                b_offset = gl.convert_layout(column(b_c, 0), b_max.type.layout)
                b_now = gl.convert_layout(column(b_c, 1), b_max.type.layout)
                if MASKED:
                    b_now = gl.where(gl.max(b_s, axis=1) == -INF, b_framed, b_now)
                b_max += b_framed - b_now
                b_framed = b_now
                b_p, b_max, b_add, b_alpha = exact_softmax(b_s, b_max, b_offset, job.c)
            b_sum = b_sum * b_alpha + b_add
            b_o = b_o * gl.convert_layout(b_alpha, gl.SliceLayout(1, b_o.type.layout))[:, None]
        mbarrier.wait(sm.full.index(4 * stage + 1), phase)
        if (MODE == EXACT) and CAUSAL:
            mbarrier.wait(sm.full.index(4 * stage + 3), phase)
        b_p = gl.convert_layout(b_p, gl.DotOperandLayout(0, b_o.type.layout, 2))
        b_o = warpgroup_mma_wait(0, deps=(_add_values(sm, b_p, b_o, stage),))
        mbarrier.arrive(sm.empty.index(2 * stage + 1), count=1)
        stage, phase = _next(stage, phase, STAGES)
    return b_o, b_max, b_sum, b_framed, stage, phase


@gluon.jit
def _overlapped(sm, job, q_s, b_o, b_sum, row, stop, full, STAGES: gl.constexpr, MASKED: gl.constexpr):
    """Attend to all key blocks (at least one), not causal, FIXED: QK of block j beside PV of block j - 1."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, b_o.type.layout, 2)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.wait(sm.full.index(0), phase)
    b_first = warpgroup_mma_wait(0, deps=(_scores(sm, q_s, stage),))
    mbarrier.arrive(sm.empty.index(0), count=1)
    if MASKED:
        b_first = mask(job, b_first, row, 0, full, False)
    b_max = gl.max(b_first, axis=1)
    b_weights, b_add = fixed_softmax(b_first, b_max, job.c)
    b_sum += b_add
    b_p = gl.convert_layout(b_weights, P_LAYOUT)
    v_stage, v_phase = stage, phase
    stage, phase = _next(stage, phase, STAGES)
    marked = _message(sm, 0)
    end = gl.where(marked > 0, 1, stop)
    for j in range(1, end):
        mbarrier.wait(sm.full.index(4 * stage), phase)
        b_s = _scores(sm, q_s, stage)
        mbarrier.wait(sm.full.index(4 * v_stage + 1), v_phase)
        b_o = _add_values(sm, b_p, b_o, v_stage)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        mbarrier.arrive(sm.empty.index(2 * stage), count=1)
        if MASKED:
            b_s = mask(job, b_s, row, j, full, False)
        b_next, b_add = fixed_softmax(b_s, b_max, job.c)
        b_sum += b_add
        b_o = warpgroup_mma_wait(0, deps=(b_o,))
        mbarrier.arrive(sm.empty.index(2 * v_stage + 1), count=1)
        b_p = gl.convert_layout(b_next, P_LAYOUT)
        v_stage, v_phase = stage, phase
        stage, phase = _next(stage, phase, STAGES)
    mbarrier.wait(sm.full.index(4 * v_stage + 1), v_phase)
    b_o = warpgroup_mma_wait(0, deps=(_add_values(sm, b_p, b_o, v_stage),))
    mbarrier.arrive(sm.empty.index(2 * v_stage + 1), count=1)
    return b_o, b_max, b_sum, end, marked


@gluon.jit
def _attend(sm, job, q_s, row, full, stop, n, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
            CAUSAL: gl.constexpr, RAGGED: gl.constexpr, SECOND: gl.constexpr):  # fmt: skip
    """Return O (64, D), not yet normalised, maximum, sum and q.f of a warpgroup's rows.

    Then the block at which it stopped, and whether the tile was given up. n: number of earlier blocks.
    """
    D: gl.constexpr = sm.k.shape[4]
    b_o = gl.zeros([ROWS, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    b_max = gl.full([ROWS], -INF, gl.float32, limit(job, row, CAUSAL).type.layout)
    b_sum = gl.full([ROWS], 0.0, gl.float32, b_max.type.layout)
    b_framed = b_sum
    stage = n % STAGES
    phase = (n // STAGES) & 1
    marked = gl.to_tensor(0)
    if SECOND:
        b_o, b_max, b_sum, b_framed, stage, phase = _in_turn(
            sm, job, q_s, b_o, b_max, b_sum, b_framed, row, 0, stop, full, stage, phase, STAGES,
            CAUSAL, RAGGED, EXACT,
        )  # fmt: skip
    elif (not CAUSAL) and (WARPGROUPS == 2 or D == 64):  # registers are left for it
        b_o, b_max, b_sum, stop, marked = _overlapped(sm, job, q_s, b_o, b_sum, row, stop, full, STAGES, RAGGED)
    else:
        # Causal: the blocks that need no mask have a separate loop, whose short code stays in the instruction cache.
        split = gl.minimum(full, stop) if CAUSAL else stop
        end = gl.minimum(split, 2)
        for part in range(2):
            b_o, b_max, b_sum, b_framed, stage, phase = _in_turn(
                sm, job, q_s, b_o, b_max, b_sum, b_framed, row, gl.minimum(split, 2 * part), end, full, stage, phase,
                STAGES, CAUSAL, RAGGED and not CAUSAL, FIXED,
            )  # fmt: skip
            if part == 0:
                marked = _message(sm, 0)  # decided long before, so nothing waits here
                end = gl.where(marked > 0, end, split)
                stop = gl.where(marked > 0, end, stop)
        if CAUSAL:
            b_o, b_max, b_sum, b_framed, stage, phase = _in_turn(
                sm, job, q_s, b_o, b_max, b_sum, b_framed, row, end, stop, 0, stage, phase, STAGES,
                CAUSAL, True, RUNNING,
            )  # fmt: skip
    return b_o, b_max, b_sum, b_framed, stop, marked > 0


@gluon.jit
def _store(sm, job, tile, o_desc, b_o, b_max, b_sum, b_framed, row, marked, turn, treated, INDEX: gl.constexpr,
           CAUSAL: gl.constexpr, SECOND: gl.constexpr, DROPPED: gl.constexpr):  # fmt: skip
    """Normalise, set rows to NaN that a NaN reaches, and write O (64, D) and the log-sum-exp."""
    D: gl.constexpr = sm.k.shape[4]
    COLUMN: gl.constexpr = gl.SliceLayout(0, b_o.type.layout)
    O_ROW: gl.constexpr = gl.SliceLayout(1, b_o.type.layout)
    b_column = gl.arange(0, D, layout=COLUMN)
    q_s = sm.q.index(INDEX).reshape([ROWS, D])
    b_limit = limit(job, row, CAUSAL)
    b_nan = b_o - b_o  # 0, or NaN if O is not finite
    b_inverse = gl.where(b_limit > 0, 1.0 / b_sum, 0.0)  # a row that sees no key is 0
    b_o = gl.fma(b_o, gl.convert_layout(b_inverse, O_ROW)[:, None], b_nan)
    if not SECOND:
        # O is not finite if a weight exceeded FP16 or a value is not finite. 0: nothing to do, 1: flagged, 2: give up.
        b_verdict = gl.where(gl.sum(b_nan, axis=1) == 0.0, 0, 2)
        if DROPPED != 0:
            m_flagged = flag_rows(b_o, b_column, D, DROPPED, True)
            b_verdict = gl.maximum(b_verdict, m_flagged.to(gl.int32))
        verdict = gl.max(b_verdict, axis=0)
        marked = marked | (verdict == 2)
        if marked:
            gl.store(job.p_marked + gl.arange(0, 1, layout=ONE), gl.full([1], 1, gl.int32, ONE))
        if DROPPED != 0:
            if verdict == 1:
                b_o = round_flagged(b_o, m_flagged, b_column, D, DROPPED)
    b_lse = (b_max * job.c + gl.log2(b_sum)) * LN2
    if SECOND:
        if treated:
            b_lse += b_framed * (job.c * LN2)  # the frame's part, which the softmax left out
            mbarrier.wait(sm.end.index(0), turn & 1)
            b_bad = sm.first_bad.load(COLUMN)
            b_o = gl.where(gl.convert_layout(b_limit, O_ROW)[:, None] > b_bad[None, :], NAN, b_o)
        b_o = round_rows(b_o, b_column, D, DROPPED, False, True)
    # Weights are rounded after they are summed, so a mean may leave the range of its values by 2^-11: clamp.
    if DROPPED == 16:  # BF16 has a wider range; its bytes are stored through an FP16 descriptor
        b_out = b_o.to(gl.bfloat16).to(gl.float16, bitcast=True)
    else:
        b_out = gl.inline_asm_elementwise(CLAMP_F16X2, "=r,r", [b_o.to(gl.float16)], gl.float16, is_pure=True, pack=2)
    q_s.store(b_out)
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [tile.batch, tile.head, row, 0], sm.q.index(INDEX))
    b_lse = gl.where((b_sum > 0.0) & (b_sum < INF), b_lse, NAN)  # else the row's query is not finite
    b_lse = gl.where(b_limit > 0, b_lse, -INF)
    b_row = row + gl.arange(0, ROWS, layout=b_limit.type.layout)
    p_row = job.p_lse + tile.index.to(gl.int64) * job.rows + b_row
    gl.store(p_row, gl.where(marked, INF, b_lse), mask=b_row < job.rows)


@gluon.jit
def _consume(sm, job, tile, o_desc, n, turn, treated, INDEX: gl.constexpr, WARPGROUPS: gl.constexpr,
             STAGES: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr, SECOND: gl.constexpr,
             DROPPED: gl.constexpr):  # fmt: skip
    """Compute 64 query rows of a tile. n: number of earlier blocks, in `turn` tiles."""
    row = tile.row + INDEX * ROWS
    stop = visible_blocks(row + (ROWS - 1), job.rows, job.keys, CAUSAL)
    full = job.keys // KEYS  # blocks that all rows see
    if CAUSAL:
        full = gl.maximum(row + 1 + job.keys - job.rows, 0) // KEYS
    mbarrier.wait(sm.q_full.index(INDEX), turn & 1)
    q_s = sm.q.index(INDEX).reshape([ROWS, sm.k.shape[4]])
    b_o, b_max, b_sum, b_framed, stop, marked = _attend(
        sm, job, q_s, row, full, stop, n, WARPGROUPS, STAGES, CAUSAL, RAGGED, SECOND
    )
    _store(sm, job, tile, o_desc, b_o, b_max, b_sum, b_framed, row, marked, turn, treated, INDEX, CAUSAL, SECOND,
           DROPPED)  # fmt: skip
    for j in range(n + stop, n + tile.blocks):  # blocks that only other warpgroups see
        stage = j % STAGES
        mbarrier.wait(sm.full.index(4 * stage), (j // STAGES) & 1)
        mbarrier.arrive(sm.empty.index(2 * stage), count=1)
        mbarrier.wait(sm.full.index(4 * stage + 1), (j // STAGES) & 1)
        mbarrier.arrive(sm.empty.index(2 * stage + 1), count=1)
    tma.store_wait(0)


@gluon.jit
def _consumer(sm, job, o_desc, INDEX: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
              CAUSAL: gl.constexpr, RAGGED: gl.constexpr, SECOND: gl.constexpr, DROPPED: gl.constexpr):  # fmt: skip
    """Compute the tile of the program; in the second launch, all tiles that the producer names."""
    if not SECOND:
        tile = _locate(job, gl.program_id(0), WARPGROUPS, CAUSAL)
        zero = gl.to_tensor(0)
        _consume(sm, job, tile, o_desc, zero, zero, False, INDEX, WARPGROUPS, STAGES, CAUSAL, RAGGED, SECOND, DROPPED)
    else:
        n = gl.to_tensor(0)
        turn = gl.to_tensor(0)
        work = _message(sm, turn)
        while work >= 0:
            tile = _locate(job, work // 2, WARPGROUPS, CAUSAL)
            treated = work % 2 == 1
            _consume(sm, job, tile, o_desc, n, turn, treated, INDEX, WARPGROUPS, STAGES, CAUSAL, RAGGED, SECOND,
                     DROPPED)  # fmt: skip
            mbarrier.arrive(sm.done.index(0), count=1)
            n += tile.blocks
            turn += 1
            work = _message(sm, turn)


@gluon.jit(do_not_specialize=["heads", "group", "batch_heads", "section", "rows", "keys", "tiles", "work"])
def attention_kernel(
    q_desc, k_desc, v_desc, o_desc, p_norms, p_anchors, p_marked, p_lse,
    heads, group, batch_heads, section, rows, keys, tiles, work, scale_log2,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, SECOND: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    DROPPED: gl.constexpr,  # how outputs are rounded: rounding_kernel.py
):  # fmt: skip
    """Compute tiles of 64 * WARPGROUPS query rows: one for each program, or (SECOND) all marked tiles."""
    D: gl.constexpr = q_desc.block_shape[3]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    if SECOND:  # mostly no tile is marked, so this test comes before any set-up
        gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, is_pure=False, pack=1)
        if gl.load(p_marked) == 0:
            return
    job = Job(
        heads, group, batch_heads, section, rows, keys, tiles, work, scale_log2, p_norms, p_anchors, p_marked, p_lse
    )
    q = gl.allocate_shared_memory(gl.float16, [WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(gl.float16, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v = gl.allocate_shared_memory(gl.float16, [STAGES, 1, 1, KEYS, D], v_desc.layout)
    offset = gl.allocate_shared_memory(gl.float16, [STAGES if SECOND else 1, 8, D], gl.NVMMASharedLayout(128, 16))
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
    gl.inline_asm_elementwise(LAUNCH_NEXT, "=r", [], gl.int32, is_pure=False, pack=1)
    sm = Shared(q, k, v, offset, first_bad, work_s, q_full, full, empty, begin, end, done)
    if WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (_consumer, (sm, job, o_desc, 0, 3, STAGES, CAUSAL, RAGGED, SECOND, DROPPED)),
                (_consumer, (sm, job, o_desc, 1, 3, STAGES, CAUSAL, RAGGED, SECOND, DROPPED)),
                (_consumer, (sm, job, o_desc, 2, 3, STAGES, CAUSAL, RAGGED, SECOND, DROPPED)),
                (_producer, (sm, job, q_desc, k_desc, v_desc, 3, STAGES, CAUSAL, SECOND)),
            ],
            [4, 4, 4],  # warps of the partitions behind the first
            [160, 160, 32],  # and registers a thread; the first gets the rest, 160 as well
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (sm, job, o_desc, 0, 2, STAGES, CAUSAL, RAGGED, SECOND, DROPPED)),
                (_consumer, (sm, job, o_desc, 1, 2, STAGES, CAUSAL, RAGGED, SECOND, DROPPED)),
                (_producer, (sm, job, q_desc, k_desc, v_desc, 2, STAGES, CAUSAL, SECOND)),
            ],
            [4, 4],
            [240, 24],
        )
