"""Triggers for stochastic rounding."""

import torch

from pasa.eval.accuracy.rounding_bias import cases
from pasa.eval.research.rounding_triggers import run


def test_triggers_are_ordered_by_what_they_see():
    """32 columns flag fewer rows than 64, which flag nearly all, and none draws more than 1 % of random ones."""
    tied = run.compare_triggers("bf16", cases.Case("two", "smaller"), 256, torch.Generator().manual_seed(0))
    drawn = {each["trigger"]: each["drawn"] for each in tied}
    few, chosen, _ = (share for name, share in drawn.items() if name.startswith("leaning"))
    assert few < chosen
    assert chosen > 0.98
    assert (drawn["never"], drawn["always"], drawn["two scores within 1e-3"]) == (0, 1, 1)
    single = run.compare_triggers("bf16", cases.Case("random", "same"), 1024, torch.Generator().manual_seed(0))
    assert all(each["drawn"] <= 0.01 for each in single if each["trigger"] != "always")
