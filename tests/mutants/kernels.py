"""Mutants of the Triton kernels of prefill and short keys, and how mutants of kernels are made."""

from tests.mutants.mutant import Mutant

TILE_MATH = "ops/attention/triton/tile_math.py"
PREFILL = "ops/attention/triton/prefill/kernel.py"
MASK = "ops/attention/triton/prefill/mask_kernel.py"
SHORT = "ops/attention/triton/short/kernel.py"
SHIFT = "ops/attention/triton/anchor_kernel.py"
ROUNDING = "ops/attention/triton/rounding_kernel.py"

SECOND_PASS = "tests/ops/attention/triton/test_second_pass.py::"
ANCHORS = "tests/ops/attention/triton/test_anchors.py::"
GAPS = "tests/ops/attention/test_gaps.py::"
CORNERS = "tests/ops/attention/test_corners.py::"
SAMPLES = "tests/ops/attention/test_samples.py::"
SUMS = "tests/ops/attention/test_sums.py::"
FEATURES = "tests/ops/attention/triton/test_features.py::"
TRITON = "tests/ops/attention/triton/test_backend.py::"
FEW_KEYS = "tests/ops/attention/triton/test_short.py::"
FINITE = "tests/ops/attention/test_finite_masks.py::"
PACKED = GAPS + "test_prefill_of_packed_sequences"


def mutant(what: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(what, file, old, new, tests)


KERNELS = [
    mutant(
        "packed sequences share the anchors of the first",
        TILE_MATH,
        "first_block = tl.load(p_first_block + sequence)",
        "first_block = 0",
        CORNERS + "test_packed_sequences_with_other_biases",
    ),
    mutant(
        "a tile of which a row sees nothing raises its maximum",
        TILE_MATH,
        "        top = tl.where(empty, 0.0, top)\n        reached = tl.where(empty, -INF, reached)",
        "        top = tl.where(empty, 0.0, top)\n        reached = tl.where(empty, offset, reached)",
        TRITON + "test_left_padding_and_causal",
        TRITON + "test_masks_with_tiles_that_are_whole_hidden_and_torn",
    ),
    mutant(
        "the exact pass sums weights before they are rounded",
        TILE_MATH,
        "behind[:, None]).to(tl.float16)\n        b_sum = b_sum * alpha + tl.sum(b_p.to(tl.float32), 1)",
        "behind[:, None])\n        b_sum = b_sum * alpha + tl.sum(b_p, 1)\n        b_p = b_p.to(tl.float16)",
        SUMS + "test_a_constant_comes_out_unchanged[exact-1.0]",
    ),
    mutant(
        "a later tile's sum forgets to rescale where exponents take one instruction",
        TILE_MATH,
        "b_sum = b_sum * alpha + tl.sum(b_p.to(tl.float16)",
        "b_sum = b_sum + tl.sum(b_p.to(tl.float16)",
        PACKED + "[fp32]",
    ),
    mutant(
        "outputs are not rescaled when a later block has a higher maximum",
        PREFILL,
        "            b_acc = tl.dot(b_p, b_v, b_acc * alpha[:, None])\n    if OVERLAP:",
        "            b_acc = tl.dot(b_p, b_v, b_acc)\n    if OVERLAP:",
        TRITON + "test_odd_lengths_with_grouped_heads",
    ),
    mutant(
        "a tile of rows leaves out the last key of its last row",
        TILE_MATH,
        "end = tl.maximum(tl.minimum(keys, first + BLOCK_M), 0)",
        "end = tl.maximum(tl.minimum(keys, first + BLOCK_M - 1), 0)",
        PACKED + "[fast]",
    ),
    mutant(
        "a block counts as seen whole one row too early",
        TILE_MATH,
        "tl.minimum(first + 1, keys), 0) // BLOCK_N",
        "tl.minimum(first + 2, keys), 0) // BLOCK_N",
        PACKED + "[fast]",
    ),
    mutant(
        "an offset is not in nats under a float mask",
        PREFILL,
        "            offset = offset * scale\n",
        "            offset = offset * 1.0\n",
        CORNERS + "test_biases_that_differ_by_block_under_a_mask[70-16-float]",
    ),
    mutant(
        "the fast pass keeps a tile whose values are not finite",
        PREFILL,
        "marked = (is_bounded(b_square, longest, scale) & all_finite(b_acc)) == 0",
        "marked = is_bounded(b_square, longest, scale) == 0",
        CORNERS + "test_a_number_that_is_not_finite_in_the_last_keys",
    ),
    mutant(
        "the log-sum-exp lacks what K' lacks",
        PREFILL,
        "b_framed = b_shared",
        "b_framed = b_shared * 0.0",
        SECOND_PASS + "test_a_bias_takes_no_second_pass[160-causal]",
    ),
    mutant(
        "packed heads share the first head's anchors",
        PREFILL,
        "o_anchor = pair * (parts // PARTS) + first_block if VARLEN",
        "o_anchor = first_block if VARLEN",
        SECOND_PASS + "test_packed_sequences_take_no_second_pass",
    ),
    mutant(
        "keys that no row sees take part in the choice of anchors",
        "ops/attention/triton/centre_kernel.py",
        "low = tl.min(tl.where(m_sample, b_sample.to(tl.float32), INF), 0)",
        "low = tl.min(b_sample.to(tl.float32), 0)",
        SECOND_PASS + "test_padding_takes_no_second_pass[bool-0.0]",
    ),
    mutant(
        "key heads of a later batch entry are counted as query heads",
        PREFILL,
        "head_block = (batch * (heads // group) + kv_head) * blocks + first_block",
        "head_block = (batch * heads // group // 2 + kv_head) * blocks + first_block",
        CORNERS + "test_biases_that_differ_by_batch_entry_and_head[16]",
    ),
    mutant(
        "a mask is read at the key head",
        PREFILL,
        "p_rows_mask = p_mask + batch * stride_mask_b + head * stride_mask_h",
        "p_rows_mask = p_mask + batch * stride_mask_b + kv_head * stride_mask_h",
        GAPS + "test_masked_prefill[bool]",
    ),
    mutant(
        "the last product of an overlapped loop forgets to rescale",
        PREFILL,
        "b_v, b_acc * alpha[:, None])\n    return b_max",
        "b_v, b_acc)\n    return b_max",
        TRITON + "test_first_block_unlike_the_rest",
        TRITON + "test_odd_lengths_with_grouped_heads",
    ),
    mutant(
        "a block is weighed by one instruction under a mask of finite numbers",
        PREFILL,
        'FAST and MASK != "float"',
        "FAST",
        FINITE + "test_forward[triton-fp32-prefill-torch.float32]",
    ),
    mutant(
        "the log-sum-exp lacks the frame",
        PREFILL,
        "    nats += b_framed * scale\n",
        "    nats += 0.0 * b_framed * scale\n",
        PACKED + "[exact]",
    ),
    mutant(
        "a value that is not finite reaches rows that do not see it",
        TILE_MATH,
        "b_seen = tl.where(m_seen, 1.0, 0.0).to(tl.float16)",
        "b_seen = tl.where(m_seen, 1.0, 1.0).to(tl.float16)",
        CORNERS + "test_a_number_that_is_not_finite_in_the_last_keys",
    ),
    mutant(
        "a tile is whole that one row does not see whole",
        MASK,
        "b_all = tl.where(b_count >> 16 == tl.minimum(",
        "b_all = tl.where(b_count >> 16 >= -1 + tl.minimum(",
        TRITON + "test_mask_tiles_are_sorted",
    ),
    mutant(
        "the order of mask tiles begins again at every block",
        MASK,
        "p_row_order + whole + tl.cumsum(",
        "p_row_order + tl.cumsum(",
        TRITON + "test_more_mask_tiles_than_are_ordered_together",
    ),
    mutant(
        "the bias of a mask is left out where scores are small",
        MASK,
        "m_plain = m_seen & (b_mask == 0.0)",
        "m_plain = m_seen & (tl.abs(b_mask) < 1.0)",
        TRITON + "test_mask_tiles_are_sorted",
    ),
    mutant(
        "the lowest finite number masks a key out",
        TILE_MATH,
        "        m_seen = m_seen & (b_mask != -INF)\n",
        "        m_seen = m_seen & (b_mask > -60000.0)\n",
        FINITE + "test_forward",
    ),
    mutant(
        "a key head looks at what rows of the first one see",
        "ops/attention/triton/centre_kernel.py",
        "stride_visible_b + o_pair % heads * stride_visible_h",
        "stride_visible_b",
        "tests/ops/attention/triton/test_centre.py::test_each_head_has_keys_that_its_own_rows_see",
    ),
    mutant(
        "a key block has the anchor of keys that rows of the first head see",
        "ops/attention/triton/anchor_kernel.py",
        "stride_visible_b + tl.cast(o_head, tl.int64) * stride_visible_h",
        "stride_visible_b",
        ANCHORS + "test_each_head_has_anchors_of_the_keys_that_its_own_rows_see",
    ),
    mutant(
        "a mask of odd length is not copied",
        "ops/attention/triton/prefill/mask_launch.py",
        "all(step % ALIGNED == 0",
        "all(step >= 0",
        TRITON + "test_a_mask_is_copied_where_its_rows_are_not_aligned",
    ),
    mutant(
        "the copy of a mask lacks the last keys",
        MASK,
        "tl.store(p_tile, b_mask, mask=m_tile)",
        "tl.store(p_tile, b_mask, mask=m_tile & (o_key < keys - 1)[None, :])",
        TRITON + "test_a_mask_is_copied_where_its_rows_are_not_aligned",
    ),
    mutant(
        "the band of a sorted mask is one key narrower",
        MASK,
        "o_row[:, None] + (keys - rows)",
        "o_row[:, None] + (keys - rows - 1)",
        GAPS + "test_masked_prefill[bool]",
    ),
    mutant(
        "short: keys that no row sees make the program start again",
        SHORT,
        "tl.max(tl.where(m_seen, 1, 0), 0) > 0",
        "o_n < end",
        FEW_KEYS + "test_a_key_that_no_row_sees_changes_no_bit_of_few_keys",
    ),
    mutant(
        "short: a tile of a masked call looks at the last keys, which it may not see",
        SHORT,
        "tl.where(found > 0, found, end)",
        "end",
        FEW_KEYS + "test_a_mask_over_the_last_keys_needs_one_anchor",
    ),
    mutant(
        "short: scores of any size need no anchor",
        SHORT,
        "* longest <= ANCHOR_LIMIT",
        "* longest < INF",
        FEW_KEYS + "test_short_keys",
    ),
    mutant(
        "short: a value that is not finite does not start the program again",
        SHORT,
        "(infinite == 0)",
        "(infinite <= 1)",
        FEW_KEYS + "test_bad_numbers_among_short_keys",
    ),
    mutant(
        "short: the restart takes an infinite query as it is",
        SHORT,
        "            b_q = without_infinities(b_q)\n",
        "",
        CORNERS + "test_an_infinite_query_that_every_key_points_away_from",
    ),
    mutant(
        "short: a program holds more keys than its shared memory has room for",
        "ops/attention/triton/short/launch.py",
        "min(together, room // pad)",
        "together",
        FEW_KEYS + "test_a_program_alone_on_its_multiprocessor_holds_all_keys",
    ),
    mutant(
        "short: an infinite key does not start the program again",
        SHORT,
        "b_squares = tl.sum(b_wide * b_wide, 1)\n    if HIDES",
        "b_squares = tl.sum(tl.where(tl.abs(b_wide) < INF, b_wide * b_wide, 0.0), 1)\n    if HIDES",
        CORNERS + "test_a_key_of_minus_infinity_that_weighs_nothing",
    ),
    mutant(
        "short: the anchor stays in the keys of one block",
        SHORT,
        "b_k = b_k - b_anchor[None, :]\n                is_small",
        "is_small",
        FEW_KEYS + "test_few_keys_with_a_bias_need_one_anchor",
    ),
    mutant(
        "short: the anchor stays in the keys of several blocks",
        SHORT,
        "b_anchor.to(tl.float32), b_far",
        "b_anchor.to(tl.float32) * 0.0, b_far",
        FEW_KEYS + "test_few_keys_with_a_bias_need_one_anchor",
    ),
    mutant(
        "split: weights are summed before they are rounded",
        "ops/attention/triton/split_kernel.py",
        "HIDES, FAST, True)",
        "HIDES, FAST, False)",
        SUMS + "test_a_constant_comes_out_unchanged[few-keys-in-blocks-1.0]",
    ),
    mutant(
        "short: the keys of the last block alone are measured",
        SHORT,
        "is_exact = is_near(b_far, b_acc, longest, D)",
        "is_exact = is_small",
        FEW_KEYS + "test_long_keys_before_short_ones",
    ),
    mutant(
        "short: the last block alone tells whether an anchor rounds",
        SHORT,
        "is_exact = is_near(b_far, b_acc, longest, D)",
        "is_exact = is_small | 1",
        FEW_KEYS + "test_an_anchor_of_the_last_keys_that_would_round_others",
    ),
    mutant(
        "split: keys before the windows of a tile count in it",
        "ops/attention/triton/split_kernel.py",
        "tl.min(tl.where(m_row, o_query, 2147483647), 0) + diagonal - span",
        "diagonal - span",
        FEW_KEYS + "test_a_key_that_other_tiles_see_changes_no_bit_of_a_tile[64-0]",
    ),
    mutant(
        "short: an anchor may be so small that its unit is infinite",
        SHORT,
        "tl.abs(b_anchor) >= LEAST_ANCHOR",
        "tl.abs(b_anchor) >= 0.0",
        FEW_KEYS + "test_a_column_of_small_steady_keys_needs_no_other_anchors[0.005-300]",
    ),
    mutant(
        "short: other sequences decide on the kernel of a call that must not depend on them",
        "ops/attention/triton/short/launch.py",
        "0 if call.options.batch_invariant else processors",
        "processors",
        FEW_KEYS + "test_a_prompt_is_short_where_its_tiles_run_soon",
    ),
    mutant(
        "short: rows of padding have sinks",
        SHORT,
        "tl.where(m_row, o_head, 0)",
        "o_head",
        FEATURES + "test_no_sink_is_read_behind_the_last_one[short]",
    ),
    mutant(
        "short: weights are summed before they are rounded",
        SHORT,
        "* factor).to(tl.float16)\n    b_sum = tl.sum(b_p.to(tl.float32), 1)",
        "* factor)\n    b_sum = tl.sum(b_p, 1)\n    b_p = b_p.to(tl.float16)",
        SUMS + "test_a_constant_comes_out_unchanged[short-1.0]",
    ),
    mutant(
        "short: a tile of several heads ends with the keys of its last row",
        SHORT,
        "tl.where(one_head, last % rows, rows - 1)",
        "last % rows",
        FEATURES + "test_a_tile_of_several_heads_ends_with_the_keys_of_the_last_row",
    ),
    mutant(
        "short: the band is one key wider",
        SHORT,
        "(o_n[None, :] <= o_query[:, None] + diagonal)",
        "(o_n[None, :] <= o_query[:, None] + diagonal + 1)",
        GAPS + "test_short_keys",
    ),
    mutant(
        "a window begins one key late",
        PREFILL,
        "(o_n[None, :] >= o_row[:, None] + diagonal - span)",
        "(o_n[None, :] > o_row[:, None] + diagonal - span)",
        FEATURES + "test_agrees_with_fp64[prefill-left]",
    ),
    mutant(
        "the block with the first key of a window counts as seen whole",
        TILE_MATH,
        "tl.cdiv(tl.maximum(first + BLOCK_M - 1 - span, 0), BLOCK_N) * BLOCK_N",
        "tl.maximum(first + BLOCK_M - 1 - span, 0) // BLOCK_N * BLOCK_N",
        FEATURES + "test_agrees_with_fp64[prefill-whole blocks]",
    ),
    mutant(
        "a sink takes no weight",
        TILE_MATH,
        "b_out = b_out * share[:, None]",
        "b_out = b_out * 1.0",
        FEATURES + "test_agrees_with_fp64[short-sinks]",
    ),
    mutant(
        "a cap loses the sign of a score",
        TILE_MATH,
        "tl.where(b_x < 0.0, -b_top, b_top)",
        "b_top",
        FEATURES + "test_agrees_with_fp64[prefill-low cap]",
    ),
    mutant(
        "a capped score of an infinite key is finite",
        TILE_MATH,
        "tl.where(tl.abs(b_s) < INF, tl.where(b_x < 0.0",
        "tl.where(b_s == b_s, tl.where(b_x < 0.0",
        FEATURES + "test_non_finite_elements_reach_the_rows_that_see_them[short-low cap]",
    ),
    mutant(
        "short: the frame is scaled twice",
        SHORT,
        "b_shift * scale",
        "b_shift * scale * scale",
        FEW_KEYS + "test_short_keys",
    ),
    mutant(
        "a masked first key decides on its block's anchor",
        SHIFT,
        "hidden = hidden | (tl.max(tl.where(tl.arange(0, BLOCK) == 0, seen, False).to(tl.int32), 0) == 0)",
        "hidden = hidden & (n > 0)",
        ANCHORS + "test_a_key_counts_that_any_group_of_queries_sees",
    ),
    mutant(
        "only keys that the first 16 groups of queries see count as seen",
        SHIFT,
        "for start in range(0, groups, GROUPS):",
        "for start in range(0, tl.minimum(groups, GROUPS), GROUPS):",
        "tests/ops/attention/triton/test_anchors.py::test_a_key_counts_that_any_group_of_queries_sees",
    ),
    mutant(
        "norms of the first blocks alone bound the scores",
        TILE_MATH,
        "    for start in range(0, parts, BLOCK):\n        o_part",
        "    for start in range(0, tl.minimum(parts, BLOCK), BLOCK):\n        o_part",
        SAMPLES + "test_only_the_last_of_many_blocks_is_large",
    ),
    mutant(
        "a key that is not finite has the norm 0",
        SHIFT,
        "tl.store(p_norm + o_out, tl.sqrt(longest) * NORM_MARGIN)",
        "tl.store(p_norm + o_out, tl.where(longest < INF, tl.sqrt(longest) * NORM_MARGIN, 0.0))",
        ANCHORS + "test_each_head_has_anchors_of_the_keys_that_its_own_rows_see",
    ),
    mutant(
        "a key counts as rounded by the anchor if the sum is right",
        TILE_MATH,
        "(shifted + anchor[None, :] != k)",
        "(shifted + anchor[None, :] == k)",
        CORNERS + "test_biases_that_differ_by_batch_entry_and_head[64]",
    ),
    mutant(
        "both products are with the first row",
        TILE_MATH,
        "tl.where(o_column == 1, b_products, 0.0)",
        "tl.where(o_column == 0, b_products, 0.0)",
        CORNERS + "test_biases_that_differ_by_batch_entry_and_head[64]",
    ),
    mutant(
        "the hash keys of columns may be even",
        ROUNDING,
        "key = (o_column * 31865 & 0x7FFF) | 1",
        "key = o_column * 31865 & 0x7FFF",
        "tests/ops/attention/triton/test_rounding.py::test_rows_are_rounded_as_in_the_reference",
    ),
    mutant(
        "numbers just above the smallest normal one are rounded to nearest",
        ROUNDING,
        "m_normal = (tl.abs(b_x) >= MIN_NORMAL)",
        "m_normal = (tl.abs(b_x) > MIN_NORMAL * 2)",
        CORNERS + "test_rows_of_the_smallest_normal_numbers",
    ),
]

UNNOTICED = {  # Faults that no test on a CPU can notice, with the reason; these are not run.
    mutant(
        "page anchors: marks of the first programs alone are read",
        "ops/attention/triton/decode/paged_anchored_kernel.py",
        "for start in range(0, splits, MARKS):",
        "for start in range(0, tl.minimum(splits, MARKS), MARKS):",
        SAMPLES + "test_only_the_last_of_many_programs_fails",
    ): "a head whose mark is missed keeps FP32's accuracy, which no test here is below",
    mutant(
        "page anchors: the frame is the anchor of one page",
        "ops/attention/triton/decode/paged_anchored_kernel.py",
        "b_frame = tl.maximum(tl.minimum(b_low, b_high), tl.minimum(tl.maximum(b_low, b_high), b_third))",
        "b_frame = tl.maximum(tl.minimum(b_low, b_high), tl.minimum(b_low, b_third))",
        SAMPLES + "test_frame_of_pages_that_are_not_like_the_rest",
        CORNERS + "test_one_of_the_pages_that_a_frame_is_taken_from",
    ): "pages far from the frame are done again in FP64: a worse frame costs time, no digit",
    mutant(
        "the grid of an anchor is as fine as the next smaller binade's",
        TILE_MATH,
        "exponent = tl.maximum(exponent - 10, -24)",
        "exponent = tl.maximum(exponent - 11, -24)",
        "tests/pasa/test_page_anchors.py",
        TRITON + "test_bias_that_all_keys_share_never_enters_a_rounded_number",
    ): "an anchor on a finer grid is also subtracted only where it rounds no key",
    mutant(
        "the rounding of a difference in FP32 is not tested",
        TILE_MATH,
        "(shifted.to(tl.float16).to(tl.float32) != shifted) | (shifted + anchor[None, :] != k)",
        "(shifted.to(tl.float16).to(tl.float32) != shifted)",
        CORNERS + "test_an_anchor_that_would_round_a_key",
    ): "FP32 rounds only keys below a third of the anchor, and those count as too small anyway",
    mutant(
        "the fourth wave has six bits",
        ROUNDING,
        "deviates((word >> 18) & 127, COLUMNS)",
        "deviates((word >> 18) & 63, COLUMNS)",
        "tests/ops/attention/triton/test_rounding.py::test_rows_are_rounded_as_in_the_reference",
    ): "64 of 64 columns then read as 0, which flags the row too; the carry reaches a row that is flagged already",
}
