"""Mutants of backend `sdpa`, which guards the attention of a device."""

from tests.mutants.kernels import mutant

ANCHORS = "ops/attention/sdpa/anchors.py"
SDPA = "ops/attention/sdpa/backend.py"
DEVICES = "ops/attention/sdpa/fused.py"
NPU = "ops/attention/sdpa/npu.py"
GUARD = "ops/attention/triton/guard/kernel.py"
MATH = "ops/attention/triton/tile_math.py"

OF_ANCHORS = "tests/ops/attention/sdpa/test_anchors.py::"
OF_SDPA = "tests/ops/attention/sdpa/test_backend.py::"
OF_GUARD = "tests/ops/attention/triton/test_guard.py::"
OF_SEEN_KEYS = "tests/ops/attention/triton/test_seen_keys.py::"
OF_NPU = "tests/ops/attention/sdpa/test_npu.py::"

DEFINITION = OF_SDPA + "test_results_are_those_of_the_definition[device-True-((4, 2), (50, 300), 32, 2)]"
BITS = OF_GUARD + "test_anchors_and_keys_less_them_have_the_bits_of_the_specification"
AGAIN = OF_GUARD + "test_rows_that_a_kernel_got_wrong_are_computed_again"
KEPT = OF_GUARD + "test_rows_that_a_kernel_got_right_keep_their_bits"
REACH = OF_SDPA + "test_nan_and_infinity_reach_the_rows_that_see_them[other guard-limits0-inf]"

FUSED = [
    mutant(
        "a NaN query of a row without keys makes its log-sum-exp NaN",
        GUARD,
        "b_lse = tl.where(m_empty, -INF, b_lse)",
        "b_lse = tl.where(m_empty & (b_lse == b_lse), -INF, b_lse)",
        OF_GUARD + "test_the_query_of_a_row_without_keys_may_be_anything",
    ),
    mutant(
        "below a mask, a row whose log-sum-exp is -inf counts as a row without keys",
        GUARD,
        "tl.where(m_empty[:, None], 0, tl.where((b_lse > -INF)[:, None], broken, 1))",
        "tl.where(m_empty[:, None], 0, broken)",
        OF_GUARD + "test_below_a_mask_a_row_with_keys_is_not_taken_for_one_without",
    ),
    mutant(
        "rows without keys are left to the fused kernel",
        GUARD,
        "tl.where(b_any > 0, 0, 1)",
        "tl.where(b_any > 0, 0, 0)",
        OF_GUARD + "test_whatever_a_kernel_makes_of_rows_without_keys_they_get_0",
    ),
    mutant(
        "keys that a later batch entry sees count for the first entry",
        GUARD,
        "p_bytes = p_seen + o_pair // heads * keys + tl",
        "p_bytes = p_seen + tl",
        OF_SEEN_KEYS + "test_the_keys_that_some_row_sees_are_found_with_the_bias",
    ),
    mutant(
        "rows beyond the last one see keys",
        GUARD,
        "m_seen = m_seen & m_tile\n",
        "m_seen = m_seen & (o_n < keys)[None, :]\n",
        OF_SEEN_KEYS + "test_the_keys_that_some_row_sees_are_found_with_the_bias",
    ),
    mutant(
        "the keys that some row sees are not looked for with the bias",
        "ops/attention/triton/guard/launch.py",
        "_shifted(kernel_call, seen, anchored)",
        "_shifted(kernel_call, None, anchored)",
        OF_SEEN_KEYS + "test_masked_out_keys_enter_no_anchor",
    ),
    mutant(
        "a repeated call hands its keys over as they are",
        "ops/attention/triton/guard/launch.py",
        "out, lse = fused(q, shifted, v",
        "out, lse = fused(q, k, v",
        "tests/ops/attention/sdpa/test_repeated_calls.py::test_a_repeated_call_has_anchors_of_its_own",
    ),
    mutant(
        "an anchor of keys that differ by a factor of four",
        ANCHORS,
        "farthest <= 3 * nearest",
        "farthest <= 4 * nearest",
        OF_ANCHORS + "test_keys_and_anchors_give_the_keys_back",
    ),
    mutant(
        "keys that no row sees enter the anchor",
        ANCHORS,
        "least = k.masked_fill(hidden, torch.inf).amin(2, keepdim=True)",
        "least = k.amin(2, keepdim=True)",
        OF_ANCHORS + "test_keys_that_no_row_sees_enter_no_anchor",
    ),
    mutant(
        "the log-sum-exp lacks what the anchor took from the scores",
        SDPA,
        "lse = lse + matmul_rows",
        "lse = lse + 0 * matmul_rows",
        OF_ANCHORS + "test_a_shared_bias_costs_no_accuracy",
    ),
    mutant(
        "a shifted key beyond FP16 stays infinite",
        SDPA,
        "k = (k - anchors).clamp(-FP16_MAX, FP16_MAX)",
        "k = k - anchors",
        OF_SDPA + "test_a_hidden_key_that_its_anchor_carries_beyond_fp16",
    ),
    mutant(
        "large values are not halved",
        SDPA,
        "> HALVED, 2.0, 1.0)",
        "> HALVED, 1.0, 1.0)",
        OF_SDPA + "test_a_kernel_that_rounds_up_to_infinity_gets_halved_values",
    ),
    mutant(
        "a NaN reaches every row of its head",
        SDPA,
        "if not bool(clean & out.isfinite().all()):",
        "if False:",
        OF_SDPA + "test_nan_and_infinity_reach_the_rows_that_see_them[device-limits0-nan]",
    ),
    mutant(
        "a NaN key of which the kernel makes nothing is lost",
        SDPA,
        "if not bool(clean & out.isfinite().all()):",
        "if not bool(out.isfinite().all()):",
        OF_SDPA + "test_a_single_nan_key_is_not_lost[device-1]",
    ),
    mutant(
        "keys before the causal square are left out",
        SDPA,
        "return ((out * share + before * rest) / (share + rest)).half(), total",
        "return out, total",
        DEFINITION,
    ),
    mutant(
        "a fully masked row keeps what the kernel made of it",
        SDPA,
        "return out.masked_fill_(empty.unsqueeze(-1), 0.0), lse.masked_fill_(empty, -torch.inf)",
        "return out, lse",
        DEFINITION,
    ),
    mutant(
        "AMD's devices, which torch calls cuda, count as NVIDIA's",
        DEVICES,
        'if device == "cuda" and torch.version.hip is not None:',
        'if device == "rocm":',
        OF_SDPA + "test_unknown_devices_get_fp32",
    ),
    mutant(
        "the scale does not take up the power of two that Q lost",
        NPU,
        "return q * 2.0**-exponent, scale * 2.0**exponent",
        "return q * 2.0**-exponent, scale",
        OF_NPU + "test_scores_beyond_fp16_are_scaled_down",
    ),
    mutant(
        "a 310P gets queries as they came",
        DEVICES,
        "if listed is ON_310P and not capturing(q):",
        "if False:",
        OF_NPU + "test_no_score_is_cut_off_on_a_310p_whose_products_are_fp16[1.0]",
    ),
    mutant(
        "a 310P gets a function that is not listed for it",
        DEVICES,
        'if device == "npu" and npu_chip().startswith(ASCEND_310P):',
        "if False:",
        OF_NPU + "test_a_310p_is_served_in_fp32[Ascend310P3]",
    ),
    mutant(
        "the power of two is rounded down",
        NPU,
        "math.ceil(math.log2(bound / LARGEST_PRODUCT))",
        "math.floor(math.log2(bound / LARGEST_PRODUCT))",
        OF_NPU + "test_no_product_passes_its_bound[65504.0]",
        OF_NPU + "test_no_product_passes_its_bound[300.0]",
    ),
    mutant(
        "without a mask, a row whose log-sum-exp is -inf counts as a row without keys",
        GUARD,
        "m_lse & ((b_lse > -INF) | (o_m + (keys - rows) + right < 0))",
        "m_lse & (b_lse < INF)",
        OF_GUARD + "test_without_a_mask_only_rows_before_the_first_key_have_none",
    ),
    mutant(
        "keys that no row sees enter the anchor of the Triton guard",
        GUARD,
        "tl.minimum(tl.arange(0, BLOCK), n - 1)) != 0)[:, None]",
        "tl.minimum(tl.arange(0, BLOCK), n - 1)) >= 0)[:, None]",
        BITS + "[True-40-512]",
    ),
    mutant(
        "the Triton guard anchors keys that differ by a factor of four",
        MATH,
        "far <= 3.0 * near",
        "far <= 4.0 * near",
        BITS + "[False-40-512]",
    ),
    mutant(
        "only the first block of keys enters the anchor",
        GUARD,
        "o_part = tl.minimum(start + tl.arange(0, PARTS), splits - 1)",
        "o_part = tl.minimum(start + tl.arange(0, PARTS), 0)",
        BITS + "[False-40-2049]",
    ),
    mutant(
        "a NaN key stays in K'",
        GUARD,
        "b_new = tl.where(is_finite(b_k), b_k - b_anchor[None, :], 0.0)",
        "b_new = (b_k - b_anchor[None, :])",
        BITS + "[False-40-512]",
    ),
    mutant(
        "a key that no row sees stays beyond FP16 in K'",
        GUARD,
        "b_new = tl.minimum(tl.maximum(b_new, -FP16_MAX), FP16_MAX).to",
        "b_new = b_new.to",
        BITS + "[True-40-512]",
    ),
    mutant(
        "the Triton guard leaves the log-sum-exp as the kernel computed it from K'",
        GUARD,
        "b_lse += tl.sum(b_q * b_anchor[None, :], 1) * scale",
        "b_lse += 0.0 * tl.sum(b_q * b_anchor[None, :], 1) * scale",
        OF_GUARD + "test_a_whole_call_gives_what_torch_operators_give[limits0]",
    ),
    mutant(
        "an output of large values is not looked at",
        GUARD,
        "(b_anchor == 0.0) & (b_top <= LARGE)",
        "(b_anchor == 0.0) & (b_top >= 0.0)",
        KEPT,
    ),
    mutant(
        "over few keys a large value is taken for a small one",
        GUARD,
        "tl.where(tl.abs(b_v) <= LARGE, 0, 1)",
        "tl.where(tl.abs(b_v) < INF, 0, 1)",
        OF_GUARD + "test_over_few_keys_values_tell_whether_outputs_can_be_wrong[40000.0]",
    ),
    mutant(
        "over few keys a log-sum-exp that is not finite is not looked at",
        GUARD,
        "wanted = tl.maximum(wanted, tl.max(tl.where(m_lses, 0, 1)))",
        "wanted += 0",
        OF_GUARD + "test_over_few_keys_values_tell_whether_outputs_can_be_wrong[40000.0]",
    ),
    mutant(
        "values that no row sees are not looked at",
        GUARD,
        "        b_high = tl.where(m_key, b_high, -INF)\n",
        "        b_high = tl.where(m_key, b_high, -INF)\n        b_top = tl.where(m_key, b_top, 0.0)\n",
        OF_GUARD + "test_a_value_that_no_row_sees_leaves_no_row_nan[dtype1-True-nan]",
    ),
    mutant(
        "a row whose log-sum-exp is -inf is not looked at",
        GUARD,
        "m_lses = m_lses & (b_lses > -INF)\n    elif",
        "m_lses = m_lses & (b_lses <= INF)\n    elif",
        KEPT,
    ),
    mutant(
        "a row without keys that follows others is not looked at",
        GUARD,
        "m_lses = m_lses & (b_empty == 0)",
        "m_lses = m_lses & (b_empty < 2)",
        OF_GUARD + "test_whatever_a_kernel_makes_of_rows_without_keys_they_get_0",
    ),
    mutant(
        "an output that is not finite is not looked at",
        GUARD,
        "wanted = tl.maximum(wanted, any_of(m_clean == 0))",
        "wanted = tl.maximum(wanted, any_of(m_clean == 0) - 1)",
        AGAIN,
    ),
    mutant(
        "an infinite output is kept",
        GUARD,
        "m_clean = is_finite(b_out)",
        "m_clean = b_out == b_out",
        AGAIN,
    ),
    mutant(
        "a NaN log-sum-exp is kept",
        GUARD,
        "broken = tl.where(m_clean & m_lse[:, None], 0, 1)",
        "broken = tl.where(m_clean, 0, 1)",
        KEPT,
    ),
    mutant(
        "a NaN query that the kernel hid stays hidden",
        GUARD,
        "m_clean = m_clean & is_finite(b_q)",
        "m_clean = m_clean & (b_q < INF)",
        OF_GUARD + "test_below_a_mask_a_query_that_the_kernel_hid_makes_its_row_nan",
    ),
    mutant(
        "a NaN key that the kernel hid stays hidden",
        GUARD,
        "suspect = tl.max(tl.where(b_anchor == b_anchor, 0, 1))",
        "suspect = tl.max(tl.where(b_anchor == b_anchor, 0, 0))",
        KEPT,
    ),
    mutant(
        "rows that see no NaN key are computed again",
        GUARD,
        "if tl.maximum(wrong, bad) > 0:",
        "if tl.maximum(wrong, bad) >= 0:",
        KEPT,
    ),
    mutant(
        "a row that is computed again forgets to rescale its sum",
        GUARD,
        "total = total * share + tl.sum(b_p, 0)",
        "total = total + tl.sum(b_p, 0)",
        AGAIN,
    ),
    mutant(
        "a row that is computed again sees keys before its window",
        GUARD,
        "m_seen = (o_n < end) & (o_n >= diagonal - left)",
        "m_seen = (o_n < end) & (o_n >= 0)",
        AGAIN,
    ),
    mutant(
        "a NaN in a float mask is lost",
        GUARD,
        "tl.max(tl.where(m_seen & (m_finite == 0), 1, 0), 0))",
        "tl.max(tl.where(m_seen & (m_finite == 0), 0, 0), 0))",
        OF_GUARD + "test_a_mask_that_is_not_finite_makes_the_rows_that_see_it_nan",
    ),
    mutant(
        "an infinite value gives an infinite output",
        GUARD,
        'b_v = tl.where(is_finite(b_v), b_v, float("nan"))',
        "b_v = b_v * 1.0",
        REACH,
    ),
    mutant(
        "a query that is not finite is lost",
        GUARD,
        "bad = tl.where(top > -INF, tl.maximum(bad, bad_query), bad)",
        "bad = tl.where(top > -INF, bad, bad)",
        REACH,
    ),
    mutant(
        "a row without keys is NaN because its query is",
        GUARD,
        "bad = tl.where(top > -INF, tl.maximum(bad, bad_query), bad)",
        "bad = tl.maximum(bad, bad_query)",
        OF_GUARD + "test_a_mask_that_is_not_finite_makes_the_rows_that_see_it_nan",
    ),
]
