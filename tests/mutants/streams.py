"""Mutants of the bounds and the peaks of residual streams and MLPs."""

from tests.mutants.kernels import mutant

BRANCHES = "pasa/prediction/branches.py"
BOUNDS = "pasa/prediction/streams.py"
PEAKS = "eval/models/diagnose/streams.py"

OF_BOUNDS = "tests/pasa/prediction/test_streams.py::"
OF_PEAKS = "tests/eval/models/diagnose/test_streams.py::"

STREAMS = [
    mutant(
        "the bound on a stream forgets the stream before the MLP",
        BOUNDS,
        "stream = branches.stored(middle + added)",
        "stream = branches.stored(added)",
        OF_BOUNDS + "test_bounds_are_met_by_an_adversary",
    ),
    mutant(
        "gate and up are taken to be orthogonal",
        BRANCHES,
        "(gate.matrix * up.matrix).sum(1).abs()",
        "torch.zeros(len(rows))",
        OF_BOUNDS + "test_bounds_are_met_by_an_adversary",
    ),
    mutant(
        "experts share the mean of their bounds",
        BRANCHES,
        "torch.stack(rows).amax(0)",
        "torch.stack(rows).mean(0)",
        OF_BOUNDS + "test_bounds_are_met_by_an_adversary",
    ),
    mutant(
        "values of the first key head serve all queries",
        BRANCHES,
        "own = slice(head // (heads // kv_heads) * dim, (head // (heads // kv_heads) + 1) * dim)",
        "own = slice(0, dim)",
        OF_BOUNDS + "test_each_head_reads_its_own_values",
    ),
    mutant(
        "roundings to FP16 are left out of the bounds",
        BRANCHES,
        "return values * (1.0 + FP16_UNIT) + FP16_HALF_STEP",
        "return values",
        OF_BOUNDS + "test_roundings_of_subnormal_numbers_are_in_the_bounds",
    ),
    mutant(
        "a module beside attention and MLP is ignored",
        BOUNDS,
        'return f"{min(others)} is not understood" if others else ""',
        'return ""',
        OF_BOUNDS + "test_what_is_not_understood_has_no_bound",
    ),
    mutant(
        "the stream between attention and MLP is not seen",
        PEAKS,
        "for norm in filter(_is_norm, block.children()):",
        "for norm in []:",
        OF_PEAKS + "test_peaks_are_those_of_the_norms_inputs_and_of_the_down_projections",
    ),
    mutant(
        "products within attention count as the MLP's",
        PEAKS,
        "self._around(None, module)",
        "pass",
        OF_PEAKS + "test_peaks_are_those_of_the_norms_inputs_and_of_the_down_projections",
    ),
    mutant(
        "experts' gathered weights count as activations",
        PEAKS,
        "min(pair, key=torch.numel)",
        "max(pair, key=torch.numel)",
        OF_PEAKS + "test_fused_experts_show_their_product_however_it_is_computed",
    ),
    mutant(
        "a model that breaks in FP16 is not measured in FP32",
        "eval/models/diagnose/run.py",
        'if own["first_nonfinite"]:',
        'if own["first_nonfinite"] and False:',
        OF_PEAKS + "test_a_model_in_fp16_is_measured_in_fp32",
    ),
]
