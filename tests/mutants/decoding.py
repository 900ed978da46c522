"""Mutants of the Triton kernels of decoding."""

from tests.mutants.kernels import CORNERS, FEATURES, FINITE, GAPS, SAMPLES, SUMS, TRITON, mutant

DECODE = "ops/attention/triton/decode/kernel.py"
SPLIT = "ops/attention/triton/split_kernel.py"
LANES = "ops/attention/triton/decode/lanes_kernel.py"
SAMPLING = "ops/attention/triton/decode/tile_math.py"
OF_DECODE = "tests/ops/attention/triton/test_decode.py::"

DECODING = [
    mutant(
        "decoding: rows do not hide the keys before their windows",
        DECODE,
        "begin < rows - 1 + diagonal - span, begin",
        "begin < diagonal - span, begin",
        FEATURES + "test_agrees_with_fp64[decode-tiles-wider]",
    ),
    mutant(
        "decoding: a block counts as seen whole one key too early",
        DECODE,
        "seen_by_all = diagonal + 1 if CAUSAL else keys",
        "seen_by_all = diagonal + 2 if CAUSAL else keys",
        GAPS + "test_decode[160-32-False]",
    ),
    mutant(
        "decoding: the frame is the anchor of the first block, seen or not",
        SPLIT,
        "tl.where(tl.max(b_max, 0) == -INF, b_anchor, b_first)",
        "tl.where(start == begin, b_anchor, b_first)",
        TRITON + "test_padding_before_keys_with_a_bias",
    ),
    mutant(
        "decoding: a value that is not finite does not mark its split",
        SPLIT,
        "return (far == 0) & (infinite == 0)",
        "return far == 0",
        CORNERS + "test_a_number_that_is_not_finite_in_the_last_keys",
    ),
    mutant(
        "decoding: a query's norm is that of the smallest row",
        DECODE,
        "tl.sqrt(tl.max(tl.sum(b_wide * b_wide, 1), 0)) * scale",
        "tl.sqrt(tl.min(tl.sum(b_wide * b_wide, 1), 0)) * scale",
        SAMPLES + "test_decode",
    ),
    mutant(
        "merge: splits beyond the last have the maximum 0",
        DECODE,
        "b_max = tl.where(m_split, b_max, -INF)",
        "b_max = tl.where(m_split, b_max, b_max)",
        CORNERS + "test_scores_far_below_0",
    ),
    mutant(
        "merge: maxima stay in the frames of their splits",
        DECODE,
        "b_max = tl.where(b_max == -INF, -INF, b_max + offset",
        "b_max = tl.where(b_max == -INF, -INF, b_max + 0.0 * offset",
        TRITON + "test_many_splits_and_frames",
    ),
    mutant(
        "merge: distances of frames are in units of q.k where maxima are in nats",
        DECODE,
        "b_max = tl.where(b_max == -INF, -INF, b_max + offset * (scale if NATS else 1.0))",
        "b_max = tl.where(b_max == -INF, -INF, b_max + offset)",
        CORNERS + "test_a_mask_that_outweighs_biases_by_block",
    ),
    mutant(
        "merge: the split of the largest score is found by units of q.k where maxima are in nats",
        DECODE,
        "b_true = tl.where(b_max == -INF, -INF, b_max + offset * (scale if NATS else 1.0))",
        "b_true = tl.where(b_max == -INF, -INF, b_max + offset)",
        CORNERS + "test_a_far_bias_that_a_mask_leaves_without_weight",
    ),
    mutant(
        "merge: the maximum is scaled twice under a float mask",
        DECODE,
        "top * scale_left + frame",
        "top * scale + frame",
        FINITE + "test_forward[triton-exact-decode by lanes' head dims-torch.float16]",
        GAPS + "test_decode[160-32-False]",
        TRITON + "test_masks_broadcast",
    ),
    mutant(
        "decoding: a mask is read at the key head",
        DECODE,
        "p_mask + batch * stride_mask_b + o_head * stride_mask_h",
        "p_mask + batch * stride_mask_b + kv_head * stride_mask_h",
        GAPS + "test_masked_decode[64]",
    ),
    mutant(
        "decoding: keys that no row sees count as far",
        SPLIT,
        "b_new = tl.where(m_key[None, :], b_new, 0.0)",
        "b_new = b_new * 1.0",
        OF_DECODE + "test_garbage_that_a_mask_hides_marks_no_split",
    ),
    mutant(
        "decoding: the mask of a block is that of the first",
        SPLIT,
        "b_ahead = tl.load(p_masks + (at + BLOCK_N) * stride_mask_n, mask=m_ahead, other=0)",
        "b_ahead = tl.load(p_masks + (begin + 0 * at) * stride_mask_n, mask=m_ahead, other=0)",
        CORNERS + "test_a_number_that_is_not_finite_in_the_last_keys",
        OF_DECODE + "test_garbage_that_a_mask_hides_marks_no_split",
    ),
    mutant(
        "decoding: of a program's blocks the last alone is tested",
        SPLIT,
        "b_far = tl.maximum(b_far, b_new, propagate_nan=tl.PropagateNan.ALL)",
        "b_far = b_new * 1.0",
        OF_DECODE + "test_a_long_key_in_tiles",
    ),
    mutant(
        "decoding: padding takes part in the sample",
        SAMPLING,
        'm_seen = m_seen & ((b_mask != 0.0) if MASK == "bool" else (b_mask != -INF))\n    return m_seen',
        "m_seen = m_seen & (b_mask == b_mask)\n    return m_seen",
        OF_DECODE + "test_padding_is_no_sample",
    ),
    mutant(
        "decoding: a sample's anchor is that of two means",
        SAMPLING,
        "m_near = m_seen[:, None] & (tl.abs(b_k - b_middle[None, :]) <= 0.5",
        "m_near = m_seen[:, None] & (tl.abs(b_k - b_middle[None, :]) <= 50.0",
        OF_DECODE + "test_unlike_keys_in_the_sample",
    ),
    mutant(
        "merge: frames of splits count as one if the first has one",
        DECODE,
        "elif most > tl.where(least > 0, 1, 0):",
        "elif most > 1:",
        OF_DECODE + "test_frames_of_0_beside_an_anchor",
    ),
    mutant(
        "lanes: the check of all keys is lost",
        SPLIT,
        "return tl.minimum(0.99 * highest * highest - D * 2.0**-25, FP32_MAX)",
        "return highest * 0.0 + FP32_MAX",
        OF_DECODE + "test_a_long_key_beside_ordinary_ones",
    ),
    mutant(
        "lanes: keys may be as far from an anchor as scores allow",
        SPLIT,
        "b_half = tl.abs(b_anchor.to(tl.float32)) * 0.5",
        "b_half = tl.abs(b_anchor.to(tl.float32)) * 5.0",
        CORNERS + "test_an_anchor_that_would_round_a_key",
        OF_DECODE + "test_a_difference_that_fp16_would_round",
        OF_DECODE + "test_a_rounded_difference_within_the_limit_of_scores",
    ),
    mutant(
        "lanes: a column with an anchor counts in its own unit",
        SPLIT,
        "(b_weight * b_weight + 2.0**-24).to(tl.float16)",
        "(b_weight * 0.0 + 1.0).to(tl.float16)",
        OF_DECODE + "test_one_pass_serves_these_data",
    ),
    mutant(
        "lanes: a key that fails a bound marks its lane only if its score is far above all others",
        LANES,
        "m_bad = b_worst > b_max - NEGLIGIBLE / scale",
        "m_bad = b_worst > b_max + NEGLIGIBLE / scale",
        OF_DECODE + "test_a_long_key_beside_ordinary_ones",
    ),
    mutant(
        "lanes: a long key is settled whatever the others are",
        LANES,
        "m_settled = (least == most) | (least - far > others_most)",
        "m_settled = (least == most) | (least == least) | (least - far > others_most)",
        OF_DECODE + "test_two_long_keys_compete",
    ),
    mutant(
        "lanes: a long key is settled among ordinary keys of its lane",
        LANES,
        "m_alone = (b_sum == 1.0) & (b_worst < INF)",
        "m_alone = b_worst < INF",
        OF_DECODE + "test_a_long_key_beside_ordinary_ones",
    ),
    mutant(
        "lanes: FP16 cannot hold the square of a long key",
        SPLIT,
        "return tl.minimum(tl.maximum(longest / ANCHOR_LIMIT, 2.0**-8), 2.0**15).to(tl.float16)",
        "return longest.to(tl.float16)",
        OF_DECODE + "test_one_pass_serves_these_data",
    ),
    mutant(
        "lanes: a block counts as seen whole one key too early",
        LANES,
        "tl.maximum(keys - rows + 1 if CAUSAL else keys, 0)",
        "tl.maximum(keys - rows + 2 if CAUSAL else keys, 0)",
        GAPS + "test_decode[128-64-False]",
    ),
    mutant(
        "lanes: weights are summed before they are rounded",
        LANES,
        "b_p = tl.exp2((b_s - base[:, :, None]) * factor).to(tl.float16)\n"
        "        b_sum = b_sum * alpha + tl.sum(b_p.to(tl.float32), 2)",
        "b_p = tl.exp2((b_s - base[:, :, None]) * factor)\n"
        "        b_sum = b_sum * alpha + tl.sum(b_p, 2)\n"
        "        b_p = b_p.to(tl.float16)",
        SUMS + "test_a_constant_comes_out_unchanged[lanes-1.0]",
    ),
    mutant(
        "lanes: a value that is not finite does not mark its lane",
        LANES,
        "b_far = tl.where(finite[:, None, :], b_far, INF)",
        "b_far = tl.where(finite[:, None, :], b_far, b_far)",
        CORNERS + "test_a_number_that_is_not_finite_in_the_last_keys",
    ),
    mutant(
        "lanes: a lane of a page that is larger than it has one page",
        LANES,
        "    if PAGE % BLOCK_N != 0:\n",
        "    if PAGE < BLOCK_N:\n",
        SAMPLES + "test_paged_decode",
        GAPS + "test_pages[64-1-48-True-False]",
    ),
    mutant(
        "lanes: the last key of a program's rest is left out",
        LANES,
        "        m_n = start + o_n < keys\n",
        "        m_n = start + o_n < keys - (keys % 64 == 1)\n",
        GAPS + "test_decode[128-64-False]",
    ),
]
