"""Mutants of `pasa.to_fp16`, which scales whole models by powers of two."""

from tests.mutants.kernels import mutant

RULES = "pasa/fp16/rules.py"
OPERANDS = "pasa/fp16/operands.py"
NORMS = "pasa/fp16/norms.py"
OFFLOADING = "pasa/fp16/offloading.py"
FACTORS = "pasa/fp16/factors.py"
TRACING = "pasa/fp16/tracing.py"
EXPONENTS = "pasa/fp16/exponents.py"
PLANNING = "pasa/fp16/planning.py"
EDITING = "pasa/fp16/editing.py"
CONVERSION = "pasa/fp16/conversion.py"
CONFIRMING = "pasa/fp16/confirming.py"
TRACKS = "pasa/fp16/tracks.py"
PATHS = "pasa/fp16/paths.py"
GUARDS = "pasa/fp16/guards.py"
RUNNING = "pasa/fp16/running.py"
COUNTING = "pasa/fp16/counting.py"
LOGITS = "pasa/fp16/logits.py"
EPSILONS = "pasa/fp16/epsilons.py"
CHECKPOINT = "pasa/fp16/checkpoint.py"
WRITING = "pasa/fp16/writing.py"

OF_RULES = "tests/pasa/fp16/test_rules.py::"
OF_PROGRAMS = "tests/pasa/fp16/test_random_programs.py::test_what_the_equations_leave_free_changes_nothing_in_fp64"
OF_MODELS = "tests/pasa/fp16/test_to_fp16.py::"
OF_FAMILIES = "tests/pasa/fp16/test_families.py::"
OF_EPSILONS = "tests/pasa/fp16/test_epsilons.py::"
OF_STORIES = "tests/pasa/fp16/test_stories.py::"
OF_DIFFUSION = "tests/pasa/fp16/test_diffusion_stories.py::"
OF_ODD_MODELS = "tests/pasa/fp16/test_odd_models.py::"
OF_CALLS = "tests/pasa/fp16/test_calls.py::"
OF_RUNNING = "tests/pasa/fp16/test_running.py::"
OF_FOLDERS = "tests/eval/models/to_fp16/test_to_fp16_folder.py::"

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
        OPERANDS,
        'tracer.pin(tracer.track(tensor), f"feeds {operation.name}")',
        "pass",
        OF_RULES + "test_what_is_not_homogeneous_keeps_its_operands_unscaled[an operator without a rule]",
    ),
    mutant(
        "a factor before a module is forgotten",
        FACTORS,
        "return leaf * self.factor if path == self.path else leaf",
        "return leaf * 1.0 if path == self.path else leaf",
        OF_EPSILONS + "test_a_norm_whose_epsilon_is_in_its_code_reads_the_stream_as_it_was",
    ),
    mutant(
        "the exponent of a divisor is added",
        RULES,
        "add(above, below or {}, -1)",
        "add(above, below or {})",
        OF_PROGRAMS,
    ),
    mutant(
        "views of a product do not see what is written to its memory",
        RULES,
        "if written.forms is None or (whole and shared):",
        "if written.forms is None or whole:",
        OF_RULES + "test_what_is_not_homogeneous_keeps_its_operands_unscaled[a product in place, through a view]",
    ),
    mutant(
        "an inverse root is a root",
        RULES,
        '"rsqrt": Fraction(-1, 2)',
        '"rsqrt": Fraction(1, 2)',
        OF_PROGRAMS,
    ),
    mutant(
        "queries and keys take any powers of two",
        RULES,
        'tracer.equate(add(query or {}, key or {}), {}, "attention scores")',
        "pass",
        OF_PROGRAMS,
    ),
    mutant(
        "an epsilon is scaled although a tensor that is not scaled needs it too",
        TRACING,
        'self.add_number(number, {}, "adds it to a constant")',
        "pass",
        OF_EPSILONS + "test_an_epsilon_is_one_number_for_all_that_reads_it[constant]",
    ),
    mutant(
        "a running mean is not scaled with what it is subtracted from",
        NORMS,
        'tracer.equate(image, mean, "subtracts a running mean")',
        "pass",
        "tests/pasa/fp16/test_norms.py::test_residual_networks_of_images[fixed statistics]",
    ),
    mutant(
        "tied weights that are offloaded are scaled apart",
        OFFLOADING,
        "(module, hook, {name: _identity(hook, name) for",
        "(module, hook, {name: (id(module), name) for",
        "tests/pasa/fp16/test_offloading.py::test_host_memory_holds_fp16_alone",
    ),
    mutant(
        "a move of the model to its device reads all parameters",
        OFFLOADING,
        'vars(module)["to"] = hidden(module.to)',
        "pass",
        "tests/pasa/fp16/test_offloading.py::test_pictures_of_an_offloaded_pipeline",
    ),
    mutant(
        "attention that is not patched stores scores of any size in FP16",
        PLANNING,
        "if not LARGEST < value * margin < INFINITE:",
        "if True:",
        "tests/pasa/fp16/test_norms.py::"
        "test_attention_that_cannot_be_patched_stays_in_fp32_if_its_scores_are_large[long_t5]",
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
    mutant(
        "a quotient that is rounded keeps its exponent",
        RULES,
        'if kwargs.get("rounding_mode"):',
        "if False:",
        OF_RULES + "test_what_is_not_homogeneous_keeps_its_operands_unscaled[a rounded quotient]",
    ),
    mutant(
        "an index that reorders columns keeps their parts",
        RULES,
        "if not keeps_places(track, operation.name, args):",
        "if False:",
        OF_RULES + "test_a_view_has_the_parts_of_a_fused_tensor_only_where_they_stay_in_their_places",
    ),
    mutant(
        "parts of rows are looked for among columns",
        TRACKS,
        "tensor.transpose(self.dim, -1)[..., slice(*cut)]",
        "tensor[..., slice(*cut)]",
        OF_STORIES + "test_gathered_weights_keep_their_parts",
    ),
    mutant(
        "a module whose path begins like another's lies within that",
        PATHS,
        'path.startswith(f"{outer}.")',
        "path.startswith(outer)",
        "tests/pasa/fp16/test_paths.py::test_a_path_lies_within_a_module_only_behind_a_dot[layers.1-layers.10-False]",
    ),
    mutant(
        "of two epsilons of one value the first is scaled",
        TRACING,
        "if len(names) != 1:",
        "if not names:",
        OF_EPSILONS + "test_of_two_epsilons_of_one_value_none_is_scaled",
    ),
    mutant(
        "a factor behind a module that adds constants is forgotten",
        FACTORS,
        "tracer.tracks[leaf] = Track((add(form, epilogue),), producer=track.producer)",
        "tracer.tracks[leaf] = Track((form,), producer=track.producer)",
        OF_STORIES + "test_experts_whose_siblings_are_scaled_behind_them_are_refused",
    ),
    mutant(
        "a square root takes an odd power",
        PLANNING,
        "steps[unknown] = math.lcm(steps.get(unknown, 1), coefficient.denominator)",
        "pass",
        OF_EPSILONS + "test_what_a_square_root_reads_takes_an_even_power",
    ),
    mutant(
        "an epsilon that the norm does not read is not noticed",
        CONFIRMING,
        "plan.constants.keys() & (tracer.constants.keys() - scaled.constants.keys())",
        "()",
        OF_EPSILONS + "test_an_epsilon_that_is_not_read_anew_is_refused",
    ),
    mutant(
        "peaks that do not follow are not noticed",
        CONFIRMING,
        "if not abs(measured - expected) <= tolerance * expected:",
        "if False:",
        OF_EPSILONS + "test_a_model_that_branches_on_its_values_does_not_follow_the_powers_of_two",
    ),
    mutant(
        "a pipeline converts the scaled autoencoder to FP32",
        CONVERSION,
        "model.register_to_config(force_upcast=value)",
        "pass",
        OF_DIFFUSION + "test_pipelines_no_longer_convert_a_scaled_autoencoder_to_fp32",
    ),
    mutant(
        "a parameter that the sample did not read is kept unscaled",
        CONVERSION,
        "torch.full_like(data, math.nan, dtype=torch.float16)",
        "data.half()",
        OF_ODD_MODELS + "test_a_parameter_that_the_sample_did_not_read_gives_no_wrong_number",
    ),
    mutant(
        "the sample changes buffers",
        EDITING,
        "buffer.data = kept[name].clone()",
        "buffer.data = kept[name]",
        OF_ODD_MODELS + "test_state_that_a_forward_pass_writes_is_not_that_of_the_sample",
    ),
    mutant(
        "a layer of a scaled model may be called on its own",
        GUARDS,
        "if self.entered.idle and not torch.compiler.is_compiling():",
        "if False:",
        OF_CALLS + "test_a_module_within_a_scaled_model_refuses_calls_on_its_own[model.layers.1]",
    ),
    mutant(
        "an interrupted call counts as running",
        GUARDS,
        "while running and not (running[-1] != name and contains(running[-1], name)):",
        "while False:",
        OF_CALLS + "test_an_interrupted_call_leaves_nothing_behind",
    ),
    mutant(
        "a sibling's powers are copied without the factor behind it",
        GUARDS,
        "alike and not followed and",
        "alike and",
        OF_STORIES + "test_experts_whose_siblings_are_scaled_behind_them_are_refused",
    ),
    mutant(
        "inputs are not scaled",
        RUNNING,
        "leaf = leaf * 2.0**-power if power else leaf",
        "leaf = leaf",
        OF_CALLS + "test_embeddings_of_the_original_model_are_scaled_where_they_enter[dtype0-qwen2]",
    ),
    mutant(
        "hidden states leave the model scaled",
        RUNNING,
        "return leaf.float() * 2.0**power if power else leaf",
        "return leaf",
        OF_STORIES + "test_hidden_states_that_leave_a_model_are_true[qwen2]",
    ),
    mutant(
        "an input that the sample did not hold is taken",
        RUNNING,
        "if leaf not in self.known and not harmless:",
        "if False:",
        OF_CALLS + "test_embeddings_that_the_sample_did_not_hold_are_refused",
    ),
    mutant(
        "a watched NaN is not counted",
        COUNTING,
        "~(self._latest <= self.limit)",
        "self._latest > self.limit",
        "tests/pasa/fp16/test_counting.py::test_a_watched_value_beyond_the_limit_counts_once_a_pass",
    ),
    mutant(
        "negative infinity among an output's values is not counted",
        COUNTING,
        "torch.sub(high, low, alpha=0)",
        "high.clone()",
        "tests/pasa/fp16/test_counting.py::test_an_output_that_is_not_finite_is_counted",
    ),
    mutant(
        "the largest finite outputs are counted as infinite",
        COUNTING,
        "torch.sub(high, low, alpha=0)",
        "torch.sub(high, low)",
        "tests/pasa/fp16/test_counting.py::test_the_largest_finite_outputs_are_not_counted",
    ),
    mutant(
        "values are compared with the margin in the wrong forward passes",
        COUNTING,
        "self._calls[name] % EVERY == 0",
        "self._calls[name] % EVERY == 1",
        OF_RUNNING + "test_a_value_beyond_the_margin_is_counted_and_reported_once",
    ),
    mutant(
        "logits in FP32 lose their bias",
        LOGITS,
        "result = product if bias is None else product + bias.float()",
        "result = product",
        "tests/pasa/fp16/test_logits.py::test_near_logits_stay_apart",
    ),
    mutant(
        "epsilons of one entry of config.json get powers of their own",
        EPSILONS,
        "tracer.equations.equate(tracer.constants[place], other, f\"{'.'.join(entry)} of config.json is one number\")",
        "pass",
        OF_FOLDERS + "test_a_written_checkpoint_computes_the_same_and_stays_finite[gemma3]",
    ),
    mutant(
        "a written weight is scaled without the number that the model adds",
        CHECKPOINT,
        "return ((tensor.double() + number) * factor.double() - number).float()",
        "return (tensor.double() * factor.double()).float()",
        OF_FOLDERS + "test_a_written_checkpoint_computes_the_same_and_stays_finite[gemma3]",
    ),
    mutant(
        "tensors that the model does not load are copied",
        CHECKPOINT,
        "if not name.endswith(IGNORED):",
        "if False:",
        "tests/eval/models/to_fp16/test_refused_folders.py::"
        "test_folders_that_cannot_be_converted_are_refused_in_one_line[strange-mtp.0.weight]",
    ),
    mutant(
        "shards of another conversion are kept",
        WRITING,
        'same = not before.get("complete") and before.get("settings") == self.settings',
        'same = not before.get("complete")',
        OF_FOLDERS + "test_an_interrupted_run_goes_on",
    ),
]
