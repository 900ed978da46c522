"""Inputs are what their case says."""

import dataclasses
import json

import pytest
import torch

from pasa.eval.accuracy.gradients.cases import CASES, make_inputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inputs_have_the_shapes_and_types_of_their_case(case):
    inputs = make_inputs(case, 0)
    (heads, kv_heads), (rows, keys) = case.heads, case.lengths
    assert inputs.q.shape == inputs.grad.shape == (2, heads, rows, case.dim)
    assert inputs.k.shape == inputs.v.shape == (2, kv_heads, keys, case.dim)
    assert {x.dtype for x in (inputs.q, inputs.k, inputs.v, inputs.grad)} == {getattr(torch, case.dtype)}
    assert (inputs.grad_lse is not None) == case.lse
    assert all(x.isfinite().all() for x in (inputs.q, inputs.k, inputs.v, inputs.grad))
    kinds = {"none": None, "bool": torch.bool, "float": torch.float32}
    assert (inputs.mask if inputs.mask is None else inputs.mask.dtype) == kinds[case.mask]
    json.dumps(dataclasses.asdict(case))
    assert torch.equal(make_inputs(case, 0).q, inputs.q)
    assert not torch.equal(make_inputs(case, 1).q, inputs.q)


def test_scores_share_131072():
    """All of them, but for the first key in the case that says so, which is the only one that is not judged."""
    assert [case.name for case in CASES if not case.kernels_judged] == ["one key without the bias"]
    for name, kept in (("scores of 131072", 0), ("one key without the bias", 1)):
        (case,) = [case for case in CASES if case.name == name]
        inputs = make_inputs(case, 0)
        scores = inputs.q.float() @ inputs.k.float().repeat_interleave(2, 1).mT / 8
        assert scores[..., kept:].min() > 131_000
        assert bool((scores[..., 0] < 1000).all()) == bool(kept)
