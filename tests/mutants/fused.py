"""Mutants of backend `sdpa`, which guards the attention of a device."""

from tests.mutants.kernels import mutant

ANCHORS = "ops/attention/sdpa/anchors.py"
SDPA = "ops/attention/sdpa/backend.py"
DEVICES = "ops/attention/sdpa/fused.py"
NPU = "ops/attention/sdpa/npu.py"

OF_ANCHORS = "tests/ops/attention/sdpa/test_anchors.py::"
OF_SDPA = "tests/ops/attention/sdpa/test_backend.py::"
OF_NPU = "tests/ops/attention/sdpa/test_npu.py::"

DEFINITION = OF_SDPA + "test_results_are_those_of_the_definition[device-True-((4, 2), (50, 300), 32, 2)]"

FUSED = [
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
        "return out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -torch.inf)",
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
        "q, scale = q * 2.0**-exponent, scale * 2.0**exponent",
        "q, scale = q * 2.0**-exponent, scale",
        OF_NPU + "test_scores_beyond_fp16_are_scaled_down",
    ),
    mutant(
        "the power of two is rounded down",
        NPU,
        "math.ceil(math.log2(bound / LARGEST_PRODUCT))",
        "math.floor(math.log2(bound / LARGEST_PRODUCT))",
        OF_NPU + "test_no_product_passes_its_bound[65504.0]",
        OF_NPU + "test_no_product_passes_its_bound[300.0]",
    ),
]
