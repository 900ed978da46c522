"""Cases come from the seed and the index alone, and cover what they should."""

import collections

import pytest
import torch

from pasa.eval.random_calls.soak.cases import draw_case, make_inputs
from pasa.eval.random_calls.soak.data import LARGEST, SCORES, VALUES
from pasa.eval.random_calls.soak.families import DIMS, GROUPS, MASKS, draw_families
from pasa.eval.random_calls.soak.layouts import LAYOUTS
from pasa.eval.random_calls.soak.masks import seen_rows
from pasa.eval.random_calls.soak.truth import plain

CPU = torch.device("cpu")
CASES = [draw_case(0, index) for index in range(2000)]


def tensors(inputs):
    return [x for x in vars(inputs).values() if x is not None]


@pytest.mark.parametrize("index", range(0, 60, 7))
def test_a_case_is_the_same_every_time(index):
    first, second = draw_case(3, index, small=True), draw_case(3, index, small=True)
    assert first == second
    for a, b in zip(tensors(make_inputs(first, CPU)), tensors(make_inputs(second, CPU)), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        assert a.stride() == b.stride()


def test_other_seeds_and_indices_give_other_cases():
    assert len({str(case.describe()) for case in CASES}) == len(CASES)
    assert draw_case(1, 5) != draw_case(0, 5)
    assert draw_families(0) != draw_families(1)


def test_everything_occurs():
    for name, kinds in (("data", SCORES), ("values", VALUES)):
        assert {getattr(case, name) for case in CASES} == set(kinds)
    families = {case.family for case in CASES}
    assert families == set(draw_families(0))
    assert {family.group for family in families} == set(GROUPS)
    assert {family.mask for family in families} == {"none", *MASKS}
    assert {family.layout for family in families} == set(LAYOUTS)
    assert {family.dim for family in families} == set(DIMS)
    assert {family.dtype for family in families} == {"float16", "bfloat16", "float32"}
    garbage = collections.Counter(case.garbage for case in CASES)
    assert set(garbage) == {"none", "query", "key", "value", "mask"}
    assert 0.05 < 1 - garbage["none"] / len(CASES) < 0.15
    assert sum(case.family.dtype == "float16" for case in CASES) / len(CASES) > 0.5
    assert max(max(case.keys) for case in CASES) > 9000


def test_published_recovery_is_asked_for_ordinary_data_alone():
    paper = [case for case in CASES if case.family.recovery == "paper"]
    assert {(case.data, case.values, case.scale, case.garbage, case.emulated) for case in paper} == {
        ("randn", "randn", None, "none", True)
    }


def test_inputs_are_finite_in_fp16_unless_garbage_was_planted():
    for index in range(120):
        case = draw_case(0, index, small=True)
        call = plain(case, make_inputs(case, CPU))
        spoilt = [not torch.isfinite(x).all() for x in (call.q, call.k, call.v)]
        assert spoilt == [case.garbage == name for name in ("query", "key", "value")]
        assert all(x.abs().nan_to_num(0.0, 0.0).max() <= max(LARGEST.values()) for x in (call.q, call.k, call.v))


def test_layouts_hold_the_same_numbers():
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    for name, lay in LAYOUTS.items():
        if name == "expanded":
            k, v = (x[:, :1].expand(x.shape).clone() for x in (k, v))
        found = lay(q, k, v)
        found = [x.transpose(1, 2) for x in found] if name == "heads last" else found
        assert all(torch.equal(a, b) for a, b in zip(found, (q, k, v), strict=True))


def test_seen_rows_counts_over_heads_masks_and_the_causal_band():
    q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8)
    assert seen_rows(None, True, q, k).tolist() == [[12, 12, 12, 8, 4]] * 2
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., :2] = False
    assert seen_rows(mask, False, q, k).tolist() == [[12] * 5, [0, 0, 12, 12, 12]]
