"""Inputs are what their case says."""

import json

import pytest
import torch

from pasa.eval.accuracy.gradients.cases import CASES, make_inputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inputs_have_the_shapes_and_types_of_their_case(case):
    given = make_inputs(case, 0)
    (heads, kv_heads), (rows, keys) = case.heads, case.lengths
    assert given.q.shape == given.grad.shape == (2, heads, rows, case.dim)
    assert given.k.shape == given.v.shape == (2, kv_heads, keys, case.dim)
    assert {x.dtype for x in (given.q, given.k, given.v, given.grad)} == {case.dtype}
    assert (given.grad_lse is not None) == case.lse
    assert all(x.isfinite().all() for x in (given.q, given.k, given.v, given.grad))
    kinds = {"none": None, "bool": torch.bool, "float": torch.float32}
    assert (given.mask if given.mask is None else given.mask.dtype) == kinds[case.mask]
    json.dumps(case.describe())


def test_seeds_decide_and_nothing_else():
    assert torch.equal(make_inputs(CASES[0], 3).q, make_inputs(CASES[0], 3).q)
    assert not torch.equal(make_inputs(CASES[0], 3).q, make_inputs(CASES[0], 4).q)


def test_scores_share_131072():
    """All of them, but for the first key in the case that says so."""
    for name, kept in (("scores of 131072", 0), ("one key without the bias", 1)):
        (case,) = [case for case in CASES if case.name == name]
        given = make_inputs(case, 0)
        scores = given.q.float() @ given.k.float().repeat_interleave(2, 1).mT / 8
        assert scores[..., kept:].min() > 131_000
        assert bool((scores[..., 0] < 1000).all()) == bool(kept)
        assert case.kernels_judged == (not kept)
