"""Mutants of `pasa.to_fp16`, which scales whole models by powers of two."""

from tests.mutants.kernels import mutant

RULES = "pasa/fp16/rules.py"
TRACING = "pasa/fp16/tracing.py"
EXPONENTS = "pasa/fp16/exponents.py"
PLANNING = "pasa/fp16/planning.py"
EDITING = "pasa/fp16/editing.py"
CONVERSION = "pasa/fp16/conversion.py"

OF_RULES = "tests/pasa/fp16/test_rules.py::"
OF_MODELS = "tests/pasa/fp16/test_to_fp16.py::"
OF_FAMILIES = "tests/pasa/fp16/test_families.py::"

FP16 = [
    mutant(
        "a sum of tensors with different powers of two",
        RULES,
        'tracer.equate(forms[0], form, f"{operation.name} needs one power of two")',
        "pass",
        OF_RULES + "test_what_is_not_homogeneous_keeps_its_operands_unscaled[a sum with its square]",
    ),
    mutant(
        "a number is added to a scaled tensor",
        RULES,
        'tracer.add_number(number, forms[0], f"{operation.name} with the number {number:g}")',
        "pass",
        OF_RULES + "test_what_is_not_homogeneous_keeps_its_operands_unscaled[a number added]",
    ),
    mutant(
        "an operator without a rule takes scaled operands",
        RULES,
        'tracer.pin(tracer.track(tensor), f"feeds {operation.name}")',
        "pass",
        OF_RULES + "test_what_is_not_homogeneous_keeps_its_operands_unscaled[an operator without a rule]",
    ),
    mutant(
        "memory that is filled keeps the exponents of zeros",
        TRACING,
        "tracks[0].forms = tracks[0].forms if zeros else ({},)",
        "tracks[0].forms = tracks[0].forms",
        OF_RULES + "test_what_is_not_homogeneous_keeps_its_operands_unscaled[memory filled through a view]",
    ),
    mutant(
        "the epsilon of a norm is not scaled",
        EDITING,
        "* 2.0 ** (power if back else -power)",
        "* 2.0 ** (0 if back else 0)",
        OF_FAMILIES + "test_scaling_changes_nothing_in_fp64[qwen2]",
    ),
    mutant(
        "a weight to which the model adds 1 is scaled like any other",
        EDITING,
        "wide = (tensor.double() + number) * 2.0**-power - number",
        "wide = tensor.double() * 2.0**-power",
        OF_FAMILIES + "test_a_model_that_overflows_runs_in_fp16[gemma3]",
    ),
    mutant(
        "peaks are allowed to come too near to 65504",
        PLANNING,
        "return math.ceil(math.log2(self.value * self.margin / LARGEST))",
        "return math.ceil(math.log2(self.value * self.margin / LARGEST)) - 4",
        OF_FAMILIES + "test_a_model_that_overflows_runs_in_fp16[qwen2]",
    ),
    mutant(
        "an equation is solved for the wrong sign",
        EXPONENTS,
        "self.solved[last] = multiply(difference, -1 / coefficient)",
        "self.solved[last] = multiply(difference, 1 / coefficient)",
        OF_FAMILIES + "test_scaling_changes_nothing_in_fp64[gpt2]",
    ),
    mutant(
        "undo forgets the epsilons",
        CONVERSION,
        "editing.scale_constants(self.models, self.plan, back=True)",
        "pass",
        OF_MODELS + "test_undo_restores_every_bit[qwen2]",
    ),
]
