"""Mutants of the Hopper kernels, which gluon_interpreter.py runs on a CPU."""

from tests.mutants.kernels import mutant

CENTRE = "ops/attention/triton/centre_kernel.py"
PLAIN = "ops/attention/triton/hopper/plain_kernel.py"
EXACT = "ops/attention/triton/hopper/exact_kernel.py"
TILES = "ops/attention/triton/hopper/tile_math.py"
TESTS = "tests/ops/attention/triton/test_hopper_kernels.py::"
LONG = TESTS + "test_plain_data[1-1-70-700-True-64]"
BIASED = TESTS + "test_a_bias_takes_no_second_pass"

HOPPER = [
    mutant(
        "a consumer does not release a block of keys",
        PLAIN,
        "        b_s = warpgroup_mma_wait(0, deps=(scores(sm, q_s, stage),))\n"
        "        mbarrier.arrive(sm.empty.index(2 * stage), count=1)\n",
        "        b_s = warpgroup_mma_wait(0, deps=(scores(sm, q_s, stage),))\n",
        LONG,
    ),
    mutant(
        "keys are loaded into a stage that is still read",
        PLAIN,
        "    mbarrier.wait(sm.empty.index(2 * stage + WHICH), ((n // STAGES) & 1) ^ 1)",
        "    mbarrier.wait(sm.empty.index(2 * stage + WHICH), 1)",
        LONG,
    ),
    mutant(
        "blocks that were attended to are released again where K' counts",
        PLAIN,
        "                    _skip(sm, end, n, STAGES)",
        "                    _skip(sm, 0, n, STAGES)",
        BIASED + "[k-72-True]",
    ),
    mutant(
        "maxima of K are kept where K' counts",
        PLAIN,
        "                    b_max = gl.full_like(b_max, -INF)\n",
        "",
        BIASED + "[k-72-True]",
    ),
    mutant(
        "the log-sum-exp leaves out what K' left out",
        PLAIN,
        "    if note % 2 > 0:  # what K' left out",
        "    if note > 3:",
        BIASED + "[k-64-False]",
    ),
    mutant(
        "a tile is marked only if its keys alone say so",
        PLAIN,
        "    marked = (note > 1) | (_told(sm, 1) > 0) | (verdict == 2)",
        "    marked = (note > 1) | (verdict == 2)",
        TESTS + "test_long_queries_mark_a_tile_as_well",
    ),
    mutant(
        "old sums are not rescaled when the maximum rises",
        TILES,
        "    return b_half, b_new, b_add, gl.exp2((b_max - b_ref) * c)",
        "    return b_half, b_new, b_add, gl.exp2((b_max - b_max) * c)",
        LONG,
    ),
    mutant(
        "a row sees one key too many",
        TILES,
        "b_key[None, :] < limit(job, row, KEYS, CAUSAL)[:, None]",
        "b_key[None, :] <= limit(job, row, KEYS, CAUSAL)[:, None]",
        LONG,
    ),
    mutant(
        "the exact pass leaves the frame out of the log-sum-exp",
        EXACT,
        "        b_lse += b_framed * (job.c * LN2)  # the frame's part, which the softmax left out\n",
        "",
        TESTS + "test_a_bias_of_part_of_the_keys_reaches_the_exact_kernel[64-True]",
    ),
    mutant(
        "an infinite value reaches the row before those that see it",
        EXACT,
        "        b_o = gl.where(gl.convert_layout(b_limit, O_ROW)[:, None] > b_bad[None, :],",
        "        b_o = gl.where(gl.convert_layout(b_limit, O_ROW)[:, None] >= b_bad[None, :],",
        TESTS + "test_what_is_not_finite_reaches_the_rows_that_see_it[True-v-80-inf]",
    ),
    mutant(
        "K' counts although a key is further from the anchor than from 0",
        CENTRE,
        "tl.where(exact & (norm < INF), longest, INF)",
        "tl.where(norm < INF, longest, INF)",
        "tests/ops/attention/triton/test_centre.py::test_one_key_off_the_bias_switches_its_head_off",
    ),
    mutant(
        "queries of a group share tiles below a diagonal, too",
        "ops/attention/triton/hopper/launch.py",
        "    return adjacent and alike and together <= MOST_OF_TILES * apart",
        "    return adjacent and together <= MOST_OF_TILES * apart",
        "tests/ops/attention/triton/test_hopper_launch.py::test_queries_of_a_group_share_tiles_where_that_saves_some",
    ),
    mutant(
        "queries of a group that are no neighbours share tiles",
        "ops/attention/triton/hopper/launch.py",
        "    return adjacent and alike and together <= MOST_OF_TILES * apart",
        "    return alike and together <= MOST_OF_TILES * apart",
        "tests/ops/attention/triton/test_hopper_launch.py::test_queries_of_a_group_share_tiles_where_that_saves_some",
    ),
    mutant(
        "queries of a group share tiles in batch-invariant calls, too",
        "ops/attention/triton/hopper/launch.py",
        "    if call.options.batch_invariant:\n        return False\n",
        "",
        "tests/ops/attention/triton/test_hopper_launch.py::"
        "test_a_layout_of_the_batch_does_not_decide_how_a_batch_invariant_call_is_cut",
    ),
]
