"""The class of an attention is measured: by torch's own on the CPU, and by emulations of what other devices may do."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pasa.eval.check_device.score_format import PROBES, PRODUCTS, measure_format


def emulated(store_product=False, store_scores=False, limit=torch.inf):
    """Return an attention that rounds q.k, or the scaled scores, to FP16, saturating at `limit`."""

    def attention(q, k, v, scale):
        scores = q.float() @ k.float().mT
        scores = scores.clamp(-limit, limit).half().float() if store_product else scores
        scores = scores * scale
        scores = scores.clamp(-limit, limit).half().float() if store_scores else scores
        return torch.softmax(scores, -1).half() @ v

    return attention


@pytest.mark.parametrize("limit", [torch.inf, 65504.0], ids=["infinite", "saturated"])
@pytest.mark.parametrize(
    ("stores", "expected"),
    [
        ({}, "a"),
        ({"store_product": True}, "b"),
        ({"store_scores": True}, "c"),
        ({"store_product": True, "store_scores": True}, "c"),
    ],
)
def test_emulations(stores, expected, limit):
    assert measure_format("cpu", emulated(**stores, limit=limit))["class"] == expected


def test_fp32_softmax_of_fp16_products_fails_at_the_products_alone():
    probes = measure_format("cpu", emulated(store_product=True))["probes"]
    assert tuple(name for name, right in probes.items() if not right) == PRODUCTS


def test_torch_on_a_cpu_by_its_default_kernel_and_by_its_math_path():
    assert measure_format("cpu") == {"class": "a", "probes": dict.fromkeys(PROBES, True), "refusal": None}
    with sdpa_kernel(SDPBackend.MATH):
        assert measure_format("cpu")["class"] == "a"


def test_math_path_with_reduced_precision(reduced):
    """torch's math path multiplies q and k by the root of the scale each, so q.k alone may pass 65504 there."""
    measured = measure_format("cpu")
    assert measured["class"] == "c"
    assert measured["probes"]["q.k beyond 65504"]
    assert not measured["probes"]["the same, Q scaled down"]


def test_an_attention_that_refuses_fp16():
    def attention(*inputs, scale):
        raise RuntimeError('"softmax" not implemented\n for Half')

    measured = measure_format("cpu", attention)
    assert measured == {"class": "c", "probes": {}, "refusal": '"softmax" not implemented for Half'}
