"""The injection changes the scores by an exact constant, the function not at all, and FP16 attention fatally."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import pasa
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.ops.numerics.formats import FP16_MAX


@pytest.fixture
def exact():
    """Register FP64 attention as "fp64"; yields the unscaled scores (B, H, Lq, Lk) of every call, in order."""
    scores = []

    def attention(module, query, key, value, mask, scaling=None, **kwargs):
        q, k = query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores.append(q @ k.mT)
        out, _ = pasa.golden_attention(query, key, value, is_causal=True, scale=scaling)
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register("fp64", attention)
    AttentionMaskInterface.register("fp64", sdpa_mask)
    yield scores
    for interface in (AttentionInterface, AttentionMaskInterface):
        del interface._global_mapping["fp64"]


@torch.no_grad()
def logits(model, ids, attention):
    model.set_attn_implementation(attention)
    return model(ids).logits.float()


@pytest.mark.parametrize("offset", [131072, -131072, {0: 73728, 15: 819200, 29: 73728}], ids=str)
def test_the_function_is_preserved(base, ids, exact, offset):
    """FP64 attention on both sides leaves FP32 rounding elsewhere alone (rotary angles above all).

    Bound: 4 x the base's own distance between FP32 and FP64 attention. Measured: 1 to 2 x.
    """
    expected = logits(base, ids, "fp64")
    noise = (logits(base, ids, "eager") - expected).abs().max()
    wide, _ = inject_overflow(base, offset)
    assert (logits(wide, ids, "fp64") - expected).abs().max() <= 4 * noise


def test_scores_move_by_exactly_the_stated_constant(base, ids, exact):
    """S' = sqrt(2) S + offset for every query and key; FP32 holds q and k, so the sum is right to 2^-24 |q| |k|."""
    logits(base, ids, "fp64")
    before = torch.cat(exact)
    exact.clear()
    wide, info = inject_overflow(base, {0: 100_000})
    logits(wide, ids, "fp64")
    first = exact[0]
    assert info.offset[0] == 8 * info.bias[0] ** 2 == 8 * 112**2
    assert info.offset[1:] == (0,) * 29
    deviation = (first - math.sqrt(2) * before[:1] - info.offset[0]).abs().max()
    assert deviation <= 2e-4 * before[:1].abs().max()
    assert first.min() > FP16_MAX


def test_fp16_attention_fails_and_pasa_does_not(base, ids):
    """FP16 with PASA on the injected model is as near to FP32 as plain FP16 is on the model without injection.

    Bound: 2 x the error of that same-precision run.
    """
    expected = logits(base, ids, "eager")
    half, _ = inject_overflow(base)
    half = half.half()
    assert torch.isnan(logits(half, ids, "eager")).all()

    with torch.no_grad(), pasa.patch_pipeline(half), pasa.record_diagnostics() as records:
        rescued = half(ids).logits.float()
    assert len(records) == 30
    assert all(record.max_score_before.max() > FP16_MAX for record in records)
    assert all(record.max_score_after.max() < FP16_MAX / 10 for record in records)

    plain, _ = inject_overflow(base, 0)
    naive = (logits(plain.half(), ids, "eager") - expected).abs().max()
    assert (rescued - expected).abs().max() <= 2 * naive


def test_nearer_to_fp64_than_fp32_attention(base, ids, exact):
    """FP32 attention itself errs at offset 819,200, where scores have a spacing of 1/16; shifted scores do not."""
    wide, _ = inject_overflow(base, 819200)
    expected = logits(wide, ids, "fp64")
    sdpa = logits(wide, ids, "sdpa") - expected
    with torch.no_grad(), pasa.patch_pipeline(wide, backend="reference"):
        ours = wide(ids).logits - expected
    assert ours.square().mean() < 0.25 * sdpa.square().mean()
    assert ours.abs().max() < sdpa.abs().max()


def test_the_model_is_left_alone(tiny):
    before = {name: value.clone() for name, value in tiny.state_dict().items()}
    wide, info = inject_overflow(tiny, 5000, pairs=2)
    assert all(torch.equal(value, before[name]) for name, value in tiny.state_dict().items())
    assert wide.config.head_dim == 64 == info.head_dim
    assert info.as_dict() == {"head_dim": 64, "pairs": 2, "bias": (50, 50), "offset": (5000, 5000)}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"offset": {7: 1000}}, r"layers 0\.\.1, not \[7\]"),
        ({"offset": 10**8}, "beyond 2048"),
        ({"offset": 1}, "offset 1 is too small"),
        ({"pairs": 0}, r"pairs=0 is outside 1\.\.16"),
        ({"pairs": 17}, "pairs=17"),
    ],
)
def test_what_cannot_be_injected_is_refused(tiny, options, reason):
    with pytest.raises(ValueError, match=reason):
        inject_overflow(tiny, **options)


def test_other_models_are_refused(tiny, tiny_llama):
    with pytest.raises(TypeError, match="LlamaForCausalLM"):
        inject_overflow(tiny_llama)
    tiny.config.rope_parameters["rope_type"] = "linear"
    with pytest.raises(ValueError, match="rope_type='linear'"):
        inject_overflow(tiny)
