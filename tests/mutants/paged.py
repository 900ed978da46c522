"""Mutants of the Triton kernels of pages, gradients, the published algorithm and the counters of sampled rows."""

from tests.mutants.kernels import CORNERS, FEATURES, FINITE, GAPS, SUMS, mutant

PAGED_KERNEL = "ops/attention/triton/decode/paged_kernel.py"
ANCHORS = "ops/attention/triton/decode/paged_anchored_kernel.py"
WRITE = "ops/attention/triton/paged/kernel.py"
CENTRE = "ops/attention/triton/backward/centre_kernel.py"
BACKWARD = "ops/attention/triton/backward/kernel.py"
PAPER = "ops/attention/triton/paper/kernel.py"
WATCH = "ops/attention/triton/watch/kernel.py"
HALF_STEP = "ops/spectral/half_step_kernel.py"

GRADIENTS = GAPS + "test_gradients"
OF_BACKWARD = "tests/ops/attention/spec/test_gradients.py::"
PAGE_ANCHORS = "tests/pasa/test_page_anchors.py::"
WATCHED = "tests/ops/attention/test_watch.py"

PAGED = [
    mutant(
        "pages: a block counts as seen whole one key too early",
        PAGED_KERNEL,
        "seen_by_all = diagonal + 1 if CAUSAL else end",
        "seen_by_all = diagonal + 2 if CAUSAL else end",
        GAPS + "test_pages[64-3-16-False-False]",
    ),
    mutant(
        "pages: all rows see a key behind the last",
        PAGED_KERNEL,
        "parts, keys, keys, stride_qb",
        "parts, keys + 1, keys, stride_qb",
        GAPS + "test_pages[64-1-16-False-False]",
    ),
    mutant(
        "page anchors: no page is far from the frame",
        ANCHORS,
        "FAR = tl.constexpr(2.0**14)",
        "FAR = tl.constexpr(2.0**60)",
        PAGE_ANCHORS + "test_pages_that_are_far_from_the_frame[biased later, no weight-16]",
    ),
    mutant(
        "page anchors: the merge leaves out the low part of maxima",
        "ops/attention/triton/decode/kernel.py",
        "        behind += b_low - low\n",
        "        behind += 0.0 * low\n",
        PAGE_ANCHORS + "test_pages_that_are_far_from_the_frame",
    ),
    mutant(
        "page anchors: an offset has no low term",
        ANCHORS,
        "tl.dot(b_high, b_transposed) + tl.dot(b_low, b_transposed)",
        "tl.dot(b_high, b_transposed)",
        CORNERS + "test_anchors_of_pages_that_are_far_apart_and_weigh_the_same",
    ),
    mutant(
        "page anchors: the first turn is the last",
        ANCHORS,
        "for begin in range(first, whole, step * TURNS):",
        "for begin in range(first, tl.minimum(whole, first + step * TURNS), step * TURNS):",
        CORNERS + "test_all_keys_of_a_long_sequence_weigh",
    ),
    mutant(
        "page anchors: weights are summed before they are rounded",
        ANCHORS,
        "behind[:, :, None]).to(tl.float16)\n        b_sum = b_sum * alpha + tl.sum(b_p.to(tl.float32), 2)",
        "behind[:, :, None])\n        b_sum = b_sum * alpha + tl.sum(b_p, 2)\n        b_p = b_p.to(tl.float16)",
        SUMS + "test_a_constant_comes_out_of_pages_unchanged[True-1.0]",
    ),
    mutant(
        "writing pages: the last token decides how long a page is",
        WRITE,
        "tl.atomic_max(p_last + page, row.to(tl.int32))",
        "tl.store(p_last + page, row.to(tl.int32))",
        PAGE_ANCHORS + "test_order_and_padding_change_no_bit",
    ),
    mutant(
        "writing pages: the last key enters no anchor",
        WRITE,
        "m_key = (o_n <= last)[:, None]",
        "m_key = (o_n < last)[:, None]",
        PAGE_ANCHORS + "test_a_sequence_that_is_cut_and_grows_anew[triton]",
        PAGE_ANCHORS + "test_an_anchor_is_the_block_mean_that_keys_lose_exactly",
    ),
    mutant(
        "writing pages: only the last columns are tested for NaN and infinity",
        WRITE,
        "good = tl.minimum(good, tl.min(",
        "good = tl.minimum(1, tl.min(",
        CORNERS + "test_a_key_that_is_not_finite_in_a_long_page",
    ),
    mutant(
        "a centre that rounds a key is subtracted",
        CENTRE,
        "anchor = tl.where(lossy > 0, 0.0, anchor)",
        "anchor = tl.where(lossy > 1, 0.0, anchor)",
        CORNERS + "test_gradients_of_keys_without_the_bias_that_have_the_weight",
    ),
    mutant(
        "the largest value is that of the last keys",
        CENTRE,
        "largest_v = tl.maximum(largest_v, tl.max(b_v, 0))",
        "largest_v = tl.max(b_v, 0)",
        CORNERS + "test_gradients_where_the_first_keys_have_the_largest_values",
    ),
    mutant(
        "gradients: a tile of rows counts as seeing keys whole that are before the window of some",
        BACKWARD,
        "whole_end // BLOCK_M * BLOCK_M",
        "tl.cdiv(whole_end, BLOCK_M) * BLOCK_M",
        FEATURES + "test_gradients[prefill-left-none-0]",
    ),
    mutant(
        "gradients: delta is that of the keys' weights without the sink",
        BACKWARD,
        "return top, b_sum, b_delta * keep",
        "return top, b_sum, b_delta",
        FEATURES + "test_gradients[prefill-sinks-none-0]",
    ),
    mutant(
        "gradients: the first row that sees a tile of keys is left out",
        BACKWARD,
        "begin = tl.maximum(first - diagonal, 0) // BLOCK_M * BLOCK_M",
        "begin = tl.maximum(first - diagonal + 1, 0) // BLOCK_M * BLOCK_M",
        GRADIENTS + "[triton]",
    ),
    mutant(
        "gradients: rows count as seeing a tile of keys whole one too early",
        BACKWARD,
        "whole = tl.cdiv(tl.maximum(first + BLOCK_N - 1 - diagonal, 0), BLOCK_M)",
        "whole = tl.cdiv(tl.maximum(first + BLOCK_N - 2 - diagonal, 0), BLOCK_M)",
        GRADIENTS + "[triton]",
    ),
    mutant(
        "gradients: the log-sum-exp of a fully masked row adds to the gradient",
        BACKWARD,
        "mask=m_row & (b_top < INF), other=0.0)",
        "mask=m_row, other=0.0)",
        OF_BACKWARD + "test_the_gradient_of_a_fully_masked_row_s_log_sum_exp_reaches_nothing",
    ),
    mutant(
        "gradients: a tile's own unit is not among the largest",
        BACKWARD,
        "mask=o_span <= o_tile)",
        "mask=o_span < o_tile)",
        OF_BACKWARD + "test_rows_whose_gradients_span_a_million",
        OF_BACKWARD + "test_loss_scaling_keeps_range_and_digits",
    ),
    mutant(
        "gradients: delta is not rescaled when the maximum rises",
        BACKWARD,
        "b_delta = b_delta * alpha + tl.sum(b_p * b_dp, 1)",
        "b_delta = b_delta + tl.sum(b_p * b_dp, 1)",
        GRADIENTS + "[triton]",
    ),
    mutant(
        "gradients: the mask of the first head serves all that share keys",
        BACKWARD,
        "p_rows_mask = p_mask + batch * stride_mask_b + head * stride_mask_h + at * stride_mask_n",
        "p_rows_mask = p_mask + batch * stride_mask_b + kv_head * group * stride_mask_h + at * stride_mask_n",
        GAPS + "test_gradients_with_a_mask",
    ),
    mutant(
        "published: a row at whose place a block begins does not reach it",
        PAPER,
        "m_reach = o_row + diagonal >= start",
        "m_reach = o_row + diagonal > start",
        GAPS + "test_prefill_of_packed_sequences[paper]",
    ),
    mutant(
        "published: a block of which a row sees nothing counts",
        PAPER,
        "new_max = tl.maximum(carried, tl.where(empty, -INF, tile_max))",
        "new_max = tl.maximum(carried, tile_max)",
        "tests/ops/attention/triton/test_backend.py::test_left_padding_and_causal",
        "tests/ops/attention/triton/test_backend.py::test_masks_broadcast",
        FINITE + "test_published_recovery",
    ),
    mutant(
        "watch: the first block is one block longer",
        WATCH,
        "if start < FIRST_BLOCK:",
        "if start <= FIRST_BLOCK:",
        WATCHED,
    ),
    mutant(
        "watch: maxima of two shares of the keys do not tie",
        WATCH,
        "below = tl.maximum(tl.maximum(below, tl.load(p_share + slots)), tl.minimum(top, b_top))",
        "below = tl.maximum(below, tl.load(p_share + slots))",
        WATCHED,
    ),
    mutant(
        "watch: a maximum that three lanes have is no tie",
        WATCH,
        "return tl.where(tl.sum(tl.where(m_top, 1, 0), 1) > 1, top, below)",
        "return tl.where(tl.sum(tl.where(m_top, 1, 0), 1) == 2, top, below)",
        WATCHED,
    ),
    mutant(
        "watch: the key at the diagonal is not seen",
        WATCH,
        "last = tl.where(m_row, o_row + (keys - rows) + 1, 0)",
        "last = tl.where(m_row, o_row + (keys - rows), 0)",
        WATCHED,
    ),
    mutant(
        "half step: a column behind a row's last counts",
        HALF_STEP,
        "mask=o_c[None, :] < columns",
        "mask=o_c[None, :] <= columns",
        "tests/ops/spectral/test_half_step.py",
    ),
    mutant(
        "half step: squares of the last piece alone count",
        HALF_STEP,
        "b_square += tl.sum(b_t * b_t, 1)",
        "b_square = tl.sum(b_t * b_t, 1)",
        "tests/ops/spectral/test_half_step.py",
    ),
]
