"""Mutants of plans, of the choice by measurement, and of the gates of `pasa bench speed --random`."""

from tests.mutants.kernels import mutant

PLANS, MEMORY = "ops/plans.py", "ops/memory.py"
OF_MEMORY = "tests/ops/test_memory.py::"
CHOICE = "eval/speed/choice.py"
RANDOM = "eval/speed/random_run.py"
OWN_PLAN = "tests/ops/test_plans.py::test_a_call_that_differs_has_a_plan_of_its_own"
OF_CHOICE = "tests/eval/speed/test_choice.py::test_the_attention_that_a_caller_had_counts_first"
MEASURED, OF_MEASURED = "ops/measured.py", "tests/ops/test_measured.py::"
OF_RANDOM = "tests/eval/speed/test_random.py::"
GEOMETRY = "x.shape", "x.stride()", "x.dtype", "x.device", "x.data_ptr() % 16"

SPEED = [
    *(
        mutant(
            f"calls of another {name} follow the same plan",
            PLANS,
            "(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)",
            "(" + ", ".join(each for each in GEOMETRY if each != kept_out) + ")",
            f"{OWN_PLAN}[{name}]",
        )
        for name, kept_out in (("strides", "x.stride()"), ("dtype", "x.dtype"), ("alignment", "x.data_ptr() % 16"))
    ),
    mutant(
        "a graph uses the memory of eager calls",
        MEMORY,
        "x.is_cuda and not torch.cuda.is_current_stream_capturing()",
        "x.is_cuda",
        OF_MEMORY + "test_graphs_streams_and_devices_are_told_apart",
    ),
    mutant(
        "all streams share memory",
        MEMORY,
        "(index, torch._C._cuda_getCurrentRawStream(index)) if",
        "(index, 0) if",
        OF_MEMORY + "test_graphs_streams_and_devices_are_told_apart",
    ),
    mutant(
        "all threads share memory",
        MEMORY,
        "class _OfThread(threading.local)",
        "class _OfThread",
        OF_MEMORY + "test_each_thread_and_stream_has_its_own",
    ),
    mutant(
        "measured shapes count by the inverse square of their distance",
        MEASURED,
        "distance**-3",
        "distance**-2",
        OF_MEASURED + "test_similar_measurements_count_by_the_inverse_cube_of_their_distance",
    ),
    mutant(
        "neighbours outweigh what was measured of a shape",
        MEASURED,
        "[1.0] * len(same) or [distance**-3",
        "[(distance + 0.1) ** -3",
        OF_MEASURED + "test_what_was_measured_of_a_shape_decides_alone",
    ),
    mutant(
        "all measured shapes of a kind count",
        MEASURED,
        "heapq.nsmallest(NEIGHBOURS, ",
        "heapq.nsmallest(len(known), ",
        OF_MEASURED + "test_only_the_most_similar_measurements_count",
    ),
    mutant(
        "a result that nobody needs lies in the workspace",
        PLANS,
        "initial=self.bytes))",
        "initial=0))",
        OF_MEMORY + "test_results_that_nobody_needs_lie_behind_the_workspace",
    ),
    mutant(
        "a result is left out that a kernel takes as a tensor",
        PLANS,
        "alone and self.keeps and self.separable and",
        "alone and self.keeps and",
        OF_MEMORY + "test_a_result_that_a_kernel_takes_as_a_tensor_is_one",
    ),
    mutant(
        "captured calls follow the plans of others",
        PLANS,
        "*REPEATED[op].values(), captured",
        "*REPEATED[op].values()",
        "tests/ops/test_plans.py::test_a_captured_call_has_a_plan_of_its_own",
    ),
    mutant(
        "a backend that is slower than SDPA on some data is chosen where it is fast on other data",
        CHOICE,
        "if behind is not None:\n        preferred",
        "if behind is None:\n        preferred",
        f"{OF_CHOICE}[triton0-sdpa0-sdpa]",
    ),
    mutant(
        "the gate of the 1st percentile looks at the median",
        RANDOM,
        '"percentile": quantile(ratios, 0.01)',
        '"percentile": quantile(ratios, 0.5)',
        OF_RANDOM + "test_each_gate_of_the_ratios_fails_alone",
    ),
    mutant(
        "the gate of the host time looks at the first case alone",
        RANDOM,
        'each.get("added_host_us", 0.0) <= MOST_HOST_US for each in records)',
        'each.get("added_host_us", 0.0) <= MOST_HOST_US for each in records[:1])',
        OF_RANDOM + "test_host_time_of_a_single_case_fails_alone",
    ),
]
