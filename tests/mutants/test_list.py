"""The list of mutants fits the sources; `python -m tests.mutants.run` runs the tests that notice them."""

from collections import Counter

import pytest

from tests.mutants.kernels import UNNOTICED
from tests.mutants.mutant import ROOT
from tests.mutants.run import ALL

LEAST = 60
"""The fewest mutants that the list must have."""


@pytest.mark.parametrize("mutant", [*ALL, *UNNOTICED], ids=lambda x: x.what)
def test_the_text_of_a_mutant_stands_in_its_file_once(mutant):
    """The text of each mutant occurs in its file exactly once.

    Otherwise the source has changed: give the mutant the current text, or remove it from the list.
    """
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, mutant.old
    assert mutant.old != mutant.new
    assert mutant.tests
    for test in mutant.tests:
        path, _, function = test.partition("::")
        assert not test.endswith("::"), test
        assert function.partition("[")[0] in (ROOT / path).read_text(encoding="utf-8"), test


def test_mutants_have_names_of_their_own_and_every_kernel_has_some():
    assert len(ALL) >= LEAST
    assert max(Counter(mutant.what for mutant in ALL).values()) == 1
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "ops").rglob("*kernel.py")}
    kernels |= {"ops/attention/triton/tile_math.py"}
    assert kernels <= {mutant.file for mutant in ALL}
