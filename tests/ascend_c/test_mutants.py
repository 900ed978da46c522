"""Every flag, barrier and buffer of the kernels is needed, and the twin notices when one is missing.

A mutant is caught if a launch ends in a fault or gives other bits than the kernel as it is written.
"""

import pytest
import torch

from tests.ascend_c.kernel_runs import Call, launch_attention, launch_shift, shifted_by_reference
from tests.ascend_c.mutants import write_mutants
from tests.ascend_c.twin_build import FAST, PROGRAMS, Program, build

LEAST = 40  # how many there are to be


def random_call(batch, heads, kv_heads, rows, keys, dim, seed=0, spread=1.0, **how):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, n, s, dim, generator=g) for n, s in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    )
    return Call((q * spread).half(), (k * spread + 3).half(), v.half(), **how)


# Two lanes, several tasks for a group, tiles in FP32 and in FP16, rows that see nothing, a head dimension in two parts.
CALLS = [
    random_call(1, 2, 1, 300, 300, 64, causal=True),
    random_call(1, 2, 1, 256, 300, 128, spread=3.0),
    random_call(1, 2, 1, 256, 257, 128, exact=False, causal=True),
    random_call(1, 1, 1, 129, 640, 256),
    random_call(1, 1, 1, 40, 140, 80, scale=1e-4),
    random_call(2, 2, 2, 130, 255, 64, causal=True, exact=False),
]
LAUNCHES = [("eager", 0), ("eager", 1), ("deferred", 0), ("deferred", 1), ("deferred", 2), ("deferred", 3)]


@pytest.fixture
def mutated(twin_folder, tmp_path):
    folder = tmp_path / "mutants"
    mutants = write_mutants(folder)
    path = build(
        PROGRAMS / "kernels.cpp", tmp_path, optimise=FAST, include=[folder], define=["PASA_CPU_TWIN", "PASA_MUTANTS"]
    )
    return Program(path, tmp_path), mutants


def results(program, x, **options):
    """Bits of both kernels, or None where one ended in a fault or not at all."""
    try:
        shift = launch_shift(program, x, cores=2, **options)
        found = launch_attention(program, x, shifted_by_reference(x), groups=1, **options)
    except AssertionError:  # the process died
        return None
    if not (shift.report["ok"] and found.report["ok"]):
        return None
    if any([*shift.report["undefined"].values(), *found.report["undefined"].values()]):
        return None
    return [*shift.arrays.values(), found["out"], found["lse"]]


def is_caught(program, number, expected):
    for mode, seed in LAUNCHES:
        for x, right in zip(CALLS, expected, strict=True):
            found = results(program, x, mode=mode, seed=seed, mutant=number)
            if found is None or not all(torch.equal(a, b) for a, b in zip(found, right, strict=True)):
                return True
    return False


def test_every_mutant_is_caught(mutated):
    program, mutants = mutated
    assert len(mutants) >= LEAST
    expected = [results(program, x, mutant=0) for x in CALLS]
    assert None not in expected
    survivors = [str(m) for m in mutants if not is_caught(program, m.number, expected)]
    assert not survivors, "\n".join(survivors)
