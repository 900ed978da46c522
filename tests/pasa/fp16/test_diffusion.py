"""Diffusion models whose residual streams pass 65504: the same function, and FP16 near FP32."""

import copy
import re

import pytest
import torch

import pasa
from tests.pasa.fp16.diffusion_models import FAMILIES
from tests.pasa.fp16.planned import planned, psnr, scale

BLOCK = re.compile("Resnet|ResBlock|TransformerBlock|CogVideoXBlock")


def block_peaks(model, run):
    """Return what `run` returns, and the largest magnitude of each residual block's result."""
    peaks = {}

    def note(name):
        def hook(module, args, output):
            leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            peaks[name] = max(leaf.abs().max().item() for leaf in leaves)

        return hook

    hooks = [
        module.register_forward_hook(note(name))
        for name, module in model.named_modules()
        if BLOCK.search(type(module).__name__)
    ]
    result = run(model)
    for hook in hooks:
        hook.remove()
    return result, peaks


@pytest.mark.parametrize("name", FAMILIES)
def test_scaling_changes_nothing_in_fp64(name):
    family = FAMILIES[name]
    model = family.model()
    plan = planned(model, family.run)
    assert len(plan.scales) > 9
    model = model.double()
    truth = family.run(model)
    scale(model, plan)
    for one, other in zip(family.run(model), truth, strict=True):
        assert (one - other).abs().max() <= family.tolerance * other.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_fp16_is_finite_and_near_fp32_where_plain_fp16_is_not(name):
    family = FAMILIES[name]
    model = family.model()
    (truth,), peaks = block_peaks(model, family.run)
    assert sum(peak > 4 * 65504 for peak in peaks.values()) * 3 >= len(peaks) > 0
    assert not family.run(copy.deepcopy(model).half())[0].isfinite().all(), "nothing overflows here"
    bfloat = psnr(family.run(copy.deepcopy(model).bfloat16())[0], truth)
    handle = pasa.to_fp16(model, family.run)
    (result,) = family.run(model)
    assert result.dtype == torch.float16
    assert result.isfinite().all()
    assert psnr(result, truth) > max(50, bfloat + 10)
    assert not handle.report().beyond
