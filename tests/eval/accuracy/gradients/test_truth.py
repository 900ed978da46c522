"""Both yardsticks are gradients of the golden attention."""

import dataclasses

import pytest
import torch

import pasa
from pasa.eval.accuracy.gradients import truth
from pasa.eval.accuracy.gradients.cases import GradientCase, make_inputs

SMALL = {
    "plain": GradientCase("plain", (2, 2), (5, 7), 8),
    "grouped": GradientCase("grouped", (4, 2), (5, 7), 8, causal=True, lse=True),
    "bool": GradientCase("bool", (4, 2), (5, 40), 8, mask="bool", lse=True),
    "float": GradientCase("float", (2, 1), (5, 40), 8, mask="float"),
}
by_case = pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)


@by_case
def test_exact_gradients_are_those_of_the_golden_attention(case):
    inputs = make_inputs(case, 0)
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = pasa.golden_attention(*leaves, attn_mask=inputs.mask, is_causal=inputs.causal)
    total = (out * inputs.grad.double()).sum()
    if inputs.grad_lse is not None:
        total = total + (lse * inputs.grad_lse.double()).sum()
    for x, expected in zip(truth.exact_gradients(inputs), torch.autograd.grad(total, leaves), strict=True):
        assert torch.allclose(x, expected, rtol=1e-12, atol=1e-13)


@by_case
def test_plain_gradients_have_one_rounding_each(case):
    inputs = make_inputs(case, 0)
    for x, true in zip(truth.plain_gradients(inputs), truth.exact_gradients(inputs), strict=True):
        assert x.dtype == torch.float16
        assert (x.double() - true).norm() <= 2.0**-11 * true.norm()


def test_rows_that_see_nothing_get_and_give_nothing():
    """Seven rows over four keys, causal: the first three see none. Their gradients may be anything."""
    inputs = make_inputs(GradientCase("few keys", (2, 1), (7, 4), 8, causal=True, lse=True), 0)
    other = dataclasses.replace(inputs, grad=inputs.grad.clone())
    other.grad[:, :, :3] = 7.0
    for function in (truth.exact_gradients, truth.plain_gradients):
        dq, dk, dv = function(inputs)
        assert not dq[:, :, :3].any()
        assert dq[:, :, 3:].any()
        assert all(torch.equal(x, y) for x, y in zip((dq, dk, dv), function(other), strict=True))


def test_plain_gradients_lose_what_scores_of_131072_lose():
    inputs = make_inputs(GradientCase("large", (2, 2), (20, 30), 64, change="shared"), 0)
    for x, true in zip(truth.plain_gradients(inputs), truth.exact_gradients(inputs), strict=True):
        assert (x.double() - true).norm() > 0.01 * true.norm()
