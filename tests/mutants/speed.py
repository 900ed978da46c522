"""Mutants of the gates of `pasa bench speed --random`."""

from tests.mutants.kernels import mutant

RANDOM = "eval/speed/random_run.py"
OF_RANDOM = "tests/eval/speed/test_random.py::"

SPEED = [
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
