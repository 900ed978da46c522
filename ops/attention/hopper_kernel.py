"""Attention on Hopper (sm_90) in Gluon: a producer partition feeds three consumer warpgroups by TMA.

A consumer warpgroup owns 64 query rows and 160 registers a thread. S (64, 128), P and O of D = 128 fill them, so QK,
softmax and PV follow one another, and the other two warpgroups keep the matrix unit busy meanwhile. Only in the form
HALF, with S in FP16, QK of a block runs beside PV of the one before. Norms choose the form, once a warpgroup and tile.

A head is special if a pre-pass found anchors a_j to subtract, or keys or (causal) values that are not finite. The
producer then makes K' = K - a_j (exact) in shared memory, and a row adds q.(a_j - a_1) to its reference: a bias that
all keys share enters no number that is rounded. The log-sum-exp adds q.a_1 at the end.
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

from pasa.ops.attention.hopper_tiles import (
    CAREFUL,
    HALF,
    INF,
    KEYS,
    NAN,
    PLAIN,
    ROWS,
    UNSEEN,
    Shared,
    Tile,
    fold,
    largest,
    limit,
    pre_pass,
    softmax,
    treat_keys,
    treat_values,
    visible_blocks,
)

WARPGROUPS = gl.constexpr(3)
LN2 = gl.constexpr(0.6931471805599453)
ABS_MAX_F16X2 = gl.constexpr("{ .reg .b32 a, b; abs.f16x2 a, $1; abs.f16x2 b, $2; max.f16x2 $0, a, b; }")
CLAMP_F16X2 = gl.constexpr(  # to +-65504; NaN stays
    "{ .reg .b32 a, b; mov.b32 a, 0x7bff7bff; mov.b32 b, 0xfbfffbff; min.NaN.f16x2 a, $1, a; max.NaN.f16x2 $0, a, b; }"
)


@gluon.jit
def _load(sm, tile, desc, tiles, j, STAGES: gl.constexpr, WHICH: gl.constexpr):
    """K_j (WHICH 0) or V_j (WHICH 1) by TMA, once its place is free."""
    stage = j % STAGES
    arrived = sm.full.index(4 * stage + WHICH)
    mbarrier.wait(sm.empty.index(2 * stage + WHICH), ((j // STAGES) & 1) ^ 1)  # a fresh barrier counts as released
    mbarrier.expect(arrived, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [tile.batch, tile.head_kv, j * KEYS, 0], arrived, tiles.index(stage))


@gluon.jit
def _producer(sm, tile, q_desc, k_desc, v_desc, STAGES: gl.constexpr):
    """Q, K and V; in a special head K' and cleaned V, one block behind the copies."""
    D: gl.constexpr = sm.k.shape[4]
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0]))
    for i in gl.static_range(WARPGROUPS):
        mbarrier.expect(sm.q_full.index(i), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            q_desc, [tile.batch, tile.head, tile.row + i * ROWS, 0], sm.q_full.index(i), sm.q.index(i)
        )
        if i == 0:
            _load(sm, tile, k_desc, sm.k, gl.to_tensor(0), STAGES, 0)
    _load(sm, tile, v_desc, sm.v, gl.to_tensor(0), STAGES, 1)
    special = largest(tile, 2, True) == INF
    if special:
        sm.first_bad.store(gl.full([D], UNSEEN, gl.int32, COLUMN))
    for j in range(1, tile.blocks):
        _load(sm, tile, k_desc, sm.k, j, STAGES, 0)
        if special:
            treat_keys(sm, tile, j - 1, STAGES)
            treat_values(sm, tile, j - 1, STAGES)
        _load(sm, tile, v_desc, sm.v, j, STAGES, 1)
    if special:
        treat_keys(sm, tile, tile.blocks - 1, STAGES)
        treat_values(sm, tile, tile.blocks - 1, STAGES)
        mbarrier.arrive(sm.end.index(0), count=1)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _keys_ready(sm, q_s, stage, phase, special, FORM: gl.constexpr):
    """Wait for K; the rows' offset q.(a_j - a_1) (64,) in a special head, else 0."""
    C_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    b_offset = gl.zeros([ROWS], gl.float32, ROW)
    mbarrier.wait(sm.full.index(4 * stage), phase)
    if FORM != PLAIN:
        if special:
            mbarrier.wait(sm.full.index(4 * stage + 2), phase)
            b_c = gl.zeros([ROWS, 8], gl.float32, C_LAYOUT)
            b_c = warpgroup_mma(q_s, sm.offset.index(stage).permute([1, 0]), b_c, use_acc=False, is_async=True)
            b_c = warpgroup_mma_wait(0, deps=(b_c,))
            b_offset = gl.convert_layout(gl.sum(b_c, axis=1), ROW)
    return b_offset


@gluon.jit
def _values_ready(sm, stage, phase, special, FORM: gl.constexpr):
    mbarrier.wait(sm.full.index(4 * stage + 1), phase)
    if FORM != PLAIN:
        mbarrier.wait(sm.full.index(4 * stage + 3), phase, pred=special)


@gluon.jit
def _scores(sm, q_s, stage, FORM: gl.constexpr):
    """S (64, 128) = Q K^T, still on its way.

    In FP16 no partial sum overflows: by Cauchy-Schwarz, over any subset of the columns, |sum q_c k'_c| <= |q| |k'|
    <= 2^15, and the FP16 roundings of at most D partial sums add a factor below (1 + 2^-11)^D < 1.07.
    """
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    b_s = gl.zeros([ROWS, KEYS], gl.float16 if FORM == HALF else gl.float32, S_LAYOUT)
    k_s = sm.k.index(stage).reshape([KEYS, sm.k.shape[4]]).permute([1, 0])
    return warpgroup_mma(q_s, k_s, b_s, use_acc=False, is_async=True)


@gluon.jit
def _add_values(sm, b_p, b_o, stage):
    """O (64, D) += P V, still on its way."""
    return warpgroup_mma(b_p, sm.v.index(stage).reshape([KEYS, sm.v.shape[4]]), b_o, is_async=True)


@gluon.jit
def _in_turn(sm, tile, q_s, b_o, b_max, b_sum, row, start, stop, full, stage, phase, special, c, STAGES: gl.constexpr,
             CAUSAL: gl.constexpr, MASKED: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """Key blocks start to stop: QK, softmax, PV."""
    for j in range(start, stop):
        b_offset = _keys_ready(sm, q_s, stage, phase, special, FORM)
        b_s = warpgroup_mma_wait(0, deps=(_scores(sm, q_s, stage, FORM),))
        mbarrier.arrive(sm.empty.index(2 * stage), count=1)
        b_p, b_max, b_sum, b_alpha = softmax(
            tile, b_s, b_max, b_sum, row, j, full, b_offset, c, CAUSAL, MASKED, FORM
        )  # fmt: skip
        b_o = b_o * gl.convert_layout(b_alpha, gl.SliceLayout(1, b_o.type.layout))[:, None]
        b_p = gl.convert_layout(b_p, gl.DotOperandLayout(0, b_o.type.layout, 2))
        _values_ready(sm, stage, phase, special, FORM)
        b_o = warpgroup_mma_wait(0, deps=(_add_values(sm, b_p, b_o, stage),))
        mbarrier.arrive(sm.empty.index(2 * stage + 1), count=1)
        stage, phase = _next(stage, phase, STAGES)
    return b_o, b_max, b_sum, stage, phase


@gluon.jit
def _overlapped(sm, tile, q_s, b_o, b_max, b_sum, row, stop, full, stage, phase, special, c, STAGES: gl.constexpr,
                CAUSAL: gl.constexpr, MASKED: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """Key blocks 0 to stop: QK of block j beside PV of block j - 1."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, b_o.type.layout, 2)
    b_first_offset = _keys_ready(sm, q_s, stage, phase, special, FORM)
    b_first = warpgroup_mma_wait(0, deps=(_scores(sm, q_s, stage, FORM),))
    mbarrier.arrive(sm.empty.index(0), count=1)
    b_first_p, b_max, b_sum, _ = softmax(
        tile, b_first, b_max, b_sum, row, 0, full, b_first_offset, c, CAUSAL, MASKED, FORM
    )  # fmt: skip
    b_p = gl.convert_layout(b_first_p, P_LAYOUT)
    v_stage = stage
    v_phase = phase
    stage, phase = _next(stage, phase, STAGES)
    for j in range(1, stop):
        b_offset = _keys_ready(sm, q_s, stage, phase, special, FORM)
        _values_ready(sm, v_stage, v_phase, special, FORM)
        b_s = _scores(sm, q_s, stage, FORM)
        b_o = _add_values(sm, b_p, b_o, v_stage)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        b_weights, b_max, b_sum, b_alpha = softmax(
            tile, b_s, b_max, b_sum, row, j, full, b_offset, c, CAUSAL, MASKED, FORM
        )  # fmt: skip
        b_o = warpgroup_mma_wait(0, deps=(b_o,))
        mbarrier.arrive(sm.empty.index(2 * stage), count=1)
        mbarrier.arrive(sm.empty.index(2 * v_stage + 1), count=1)
        b_o = b_o * gl.convert_layout(b_alpha, gl.SliceLayout(1, b_o.type.layout))[:, None]
        b_p = gl.convert_layout(b_weights, P_LAYOUT)
        v_stage = stage
        v_phase = phase
        stage, phase = _next(stage, phase, STAGES)
    _values_ready(sm, v_stage, v_phase, special, FORM)
    b_o = warpgroup_mma_wait(0, deps=(_add_values(sm, b_p, b_o, v_stage),))
    mbarrier.arrive(sm.empty.index(2 * v_stage + 1), count=1)
    return b_o, b_max, b_sum


@gluon.jit
def _attend(sm, tile, q_s, row, full, stop, special, c, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
            MASKED: gl.constexpr, FORM: gl.constexpr):  # fmt: skip
    """O (64, D), not yet normalised, maximum and sum of a warpgroup's rows."""
    D: gl.constexpr = sm.k.shape[4]
    b_o = gl.zeros([ROWS, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
    b_max = gl.full([ROWS], -INF, gl.float32, limit(tile, row, CAUSAL).type.layout)
    b_sum = gl.full([ROWS], 0.0, gl.float32, b_max.type.layout)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if FORM == HALF:
        b_o, b_max, b_sum = _overlapped(
            sm, tile, q_s, b_o, b_max, b_sum, row, stop, full, stage, phase, special, c, STAGES, CAUSAL, MASKED, FORM
        )
    elif CAUSAL and FORM == PLAIN:
        # a loop of its own for the blocks that need no mask: short hot code stays in the instruction cache
        seen = gl.minimum(full, stop)
        b_o, b_max, b_sum, stage, phase = _in_turn(
            sm, tile, q_s, b_o, b_max, b_sum, row, 0, seen, 0, stage, phase, special, c, STAGES, CAUSAL, False, FORM
        )
        b_o, b_max, b_sum, stage, phase = _in_turn(
            sm, tile, q_s, b_o, b_max, b_sum, row, seen, stop, 0, stage, phase, special, c, STAGES, CAUSAL, True, FORM
        )
    else:
        b_o, b_max, b_sum, stage, phase = _in_turn(
            sm, tile, q_s, b_o, b_max, b_sum, row, 0, stop, full, stage, phase, special, c, STAGES, CAUSAL, MASKED, FORM
        )
    return b_o, b_max, b_sum


@gluon.jit
def _store(sm, tile, o_desc, b_o, b_max, b_sum, row, special, c, INDEX: gl.constexpr, CAUSAL: gl.constexpr):
    """Normalise, mark what a NaN reaches, and write O (64, D) and the log-sum-exp."""
    D: gl.constexpr = sm.k.shape[4]
    COLUMN: gl.constexpr = gl.SliceLayout(0, b_o.type.layout)
    O_ROW: gl.constexpr = gl.SliceLayout(1, b_o.type.layout)
    q_s = sm.q.index(INDEX).reshape([ROWS, D])
    b_limit = limit(tile, row, CAUSAL)
    b_lse = (b_max * c + gl.log2(b_sum)) * LN2
    b_inverse = gl.where(b_limit > 0, 1.0 / b_sum, 0.0)  # a row that sees no key is 0
    b_o = gl.fma(b_o, gl.convert_layout(b_inverse, O_ROW)[:, None], b_o - b_o)  # x - x: 0, or NaN if x is infinite
    if special:
        # the softmax left out q.a_1, which all keys share
        b_a = gl.load(pre_pass(tile, tile.p_anchors, D) + gl.arange(0, D, layout=COLUMN)).to(gl.float32)
        b_dot = gl.sum(q_s.load(b_o.type.layout).to(gl.float32) * b_a[None, :], axis=1)
        b_lse += gl.convert_layout(b_dot, b_lse.type.layout) * (c * LN2)
        mbarrier.wait(sm.end.index(0), 0)
        b_bad = sm.first_bad.load(COLUMN)
        b_o = gl.where(gl.convert_layout(b_limit, O_ROW)[:, None] > b_bad[None, :], NAN, b_o)
    # weights are rounded after they are summed, so a mean may leave the range of its values by 2^-11: clamp
    b_out = gl.inline_asm_elementwise(CLAMP_F16X2, "=r,r", [b_o.to(gl.float16)], gl.float16, is_pure=True, pack=2)
    q_s.store(b_out)
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [tile.batch, tile.head, row, 0], sm.q.index(INDEX))
    b_lse = gl.where((b_sum > 0.0) & (b_sum < INF), b_lse, NAN)  # else the row's query is not finite
    b_row = row + gl.arange(0, ROWS, layout=b_limit.type.layout)
    p_row = tile.p_lse + tile.index.to(gl.int64) * tile.rows + b_row
    gl.store(p_row, gl.where(b_limit > 0, b_lse, -INF), mask=b_row < tile.rows)


@gluon.jit
def _consumer(sm, tile, o_desc, c, INDEX: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
              HALF_LIMIT: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """64 query rows: choose the form, run over the keys, write."""
    D: gl.constexpr = sm.k.shape[4]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    MASKED: gl.constexpr = CAUSAL or RAGGED
    row = tile.row + INDEX * ROWS
    stop = visible_blocks(row + (ROWS - 1), tile.rows, tile.keys, CAUSAL)
    full = tile.keys // KEYS  # blocks that all rows see
    if CAUSAL:
        full = gl.maximum(row + 1 + tile.keys - tile.rows, 0) // KEYS
    key = largest(tile, 1, True)
    special = key == INF
    mbarrier.wait(sm.q_full.index(INDEX), 0)
    q_s = sm.q.index(INDEX).reshape([ROWS, D])
    b_q = q_s.load(O_LAYOUT)
    if HALF_LIMIT > 0:
        far = largest(tile, 0, False)
        raw = gl.max(gl.sum(b_q.to(gl.float32) * b_q.to(gl.float32), axis=1), axis=0) * far * far
        bounded = (raw < 2.0**30) & (raw * (c * LN2) * (c * LN2) <= HALF_LIMIT * HALF_LIMIT)
        # for these c, c is a normal FP16 number and a reference beyond FP16 means weights of zero
        if bounded & (c >= 2.0**-7) & (c < 2.0**7):
            b_o, b_max, b_sum = _attend(sm, tile, q_s, row, full, stop, special, c, STAGES, CAUSAL, MASKED, HALF)
        else:
            b_o, b_max, b_sum = _attend(sm, tile, q_s, row, full, stop, special, c, STAGES, CAUSAL, MASKED, CAREFUL)
    else:
        # |q| <= sqrt(D) max |q_c|; below 2^17 the rounding of m * c moves an exponent by less than 2^-7
        query = gl.max(gl.max(fold(b_q, ABS_MAX_F16X2, 3).to(gl.float32), axis=1), axis=0)
        if query * query * D * key * key * c * c < 2.0**34:
            b_o, b_max, b_sum = _attend(sm, tile, q_s, row, full, stop, special, c, STAGES, CAUSAL, MASKED, PLAIN)
        else:
            b_o, b_max, b_sum = _attend(sm, tile, q_s, row, full, stop, special, c, STAGES, CAUSAL, MASKED, CAREFUL)
    _store(sm, tile, o_desc, b_o, b_max, b_sum, row, special, c, INDEX, CAUSAL)
    for j in range(stop, tile.blocks):  # blocks that only other warpgroups see
        stage = j % STAGES
        mbarrier.wait(sm.full.index(4 * stage), (j // STAGES) & 1)
        mbarrier.arrive(sm.empty.index(2 * stage), count=1)
        mbarrier.wait(sm.full.index(4 * stage + 1), (j // STAGES) & 1)
        mbarrier.arrive(sm.empty.index(2 * stage + 1), count=1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "group", "batch_heads", "section", "rows", "keys", "tiles"])
def attention_kernel(
    q_desc, k_desc, v_desc, o_desc, p_anchors, p_stats, p_lse,
    heads, group, batch_heads, section, rows, keys, tiles, scale_log2,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr, HALF_LIMIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """192 query rows of one head. Heads come in sections whose K and V fit in L2; causal: heaviest tiles first."""
    D: gl.constexpr = q_desc.block_shape[3]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    program = gl.program_id(0)
    first = program // (section * tiles) * section
    size = gl.minimum(section, batch_heads - first)
    local = program - first * tiles
    if CAUSAL:
        row = (tiles - 1 - local // size) * (WARPGROUPS * ROWS)
        index = first + local % size
    else:
        row = local % tiles * (WARPGROUPS * ROWS)
        index = first + local // tiles
    blocks = visible_blocks(row + (WARPGROUPS * ROWS - 1), rows, keys, CAUSAL)
    tile = Tile(
        index // heads, index % heads, index % heads // group, row, rows, keys, blocks, index, index // group,
        p_anchors, p_stats, p_lse,
    )  # fmt: skip
    q = gl.allocate_shared_memory(gl.float16, [WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    k = gl.allocate_shared_memory(gl.float16, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v = gl.allocate_shared_memory(gl.float16, [STAGES, 1, 1, KEYS, D], v_desc.layout)
    offset = gl.allocate_shared_memory(gl.float16, [STAGES, 8, D], gl.NVMMASharedLayout(128, 16))
    first_bad = gl.allocate_shared_memory(gl.int32, [D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    end = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(4 * STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    mbarrier.init(end.index(0), count=1)
    fence_async_shared()
    sm = Shared(q, k, v, offset, first_bad, q_full, full, empty, end)
    gl.warp_specialize(
        [
            (_consumer, (sm, tile, o_desc, scale_log2, 0, CAUSAL, RAGGED, HALF_LIMIT, STAGES)),
            (_consumer, (sm, tile, o_desc, scale_log2, 1, CAUSAL, RAGGED, HALF_LIMIT, STAGES)),
            (_consumer, (sm, tile, o_desc, scale_log2, 2, CAUSAL, RAGGED, HALF_LIMIT, STAGES)),
            (_producer, (sm, tile, q_desc, k_desc, v_desc, STAGES)),
        ],
        [4, 4, 4],  # warps of the partitions behind the first
        [160, 160, 32],  # and registers a thread; the first gets the rest, 160 as well
    )
