"""Norms that read fixed statistics, and norms of weights; islands around attention that cannot be patched."""

import copy

import pytest
import torch
from torch import nn

import pasa
from tests.pasa.fp16.models import FAMILIES, large, outputs
from tests.pasa.fp16.planned import distance, largest_distance, planned, scale

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """A residual network of ResNet's blocks, whose stream passes 65504."""

    def __init__(self, wrap=lambda layer: layer, norm=nn.BatchNorm2d):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(norm(8) for _ in range(4))
        self.convolutions = nn.ModuleList(wrap(nn.Conv2d(8, 8, 3, padding=1)) for _ in range(4))
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 5)
        with torch.no_grad():
            for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                if "running" in name:
                    tensor.uniform_(0.5, 2)
                elif tensor.ndim == 1:
                    tensor.add_(0.3 * torch.randn_like(tensor))
            for each in list(self.norms)[1::2]:
                each.weight.mul_(1e6)
        self.eval()

    def forward(self, x):
        x = self.stem(x)
        for first, second, *norms in zip(
            self.convolutions[::2], self.convolutions[1::2], self.norms[::2], self.norms[1::2], strict=True
        ):
            x = torch.relu(x + norms[1](second(torch.relu(norms[0](first(x))))))
        return self.head(self.last(x.mean((-2, -1))))


def instance(width):
    return nn.InstanceNorm2d(width, affine=True)


VARIANTS = {
    "fixed statistics": Residual,
    "statistics of the instance": lambda: Residual(norm=instance),
    "normalised weights": lambda: Residual(nn.utils.parametrizations.weight_norm),
    "normalised weights with a hook": lambda: Residual(nn.utils.weight_norm),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("name", VARIANTS)
def test_residual_networks_of_images(name):
    """Story: an operator of batch norm had no rule, so that the stream before it could not be scaled."""
    model = VARIANTS[name]()
    with torch.no_grad():
        truth = model.double()(IMAGE.double())
        model.float()
        plan = planned(model, lambda each: each(IMAGE.to(each.stem.weight.dtype)))
        assert plan.scales
        assert not plan.islands
        twin = copy.deepcopy(model).double()
        scale(twin, plan)
        assert distance(twin(IMAGE.double()), truth) < 1e-12
        assert not copy.deepcopy(model).half()(IMAGE.half()).isfinite().all(), "nothing overflows here"
        with pasa.to_fp16(model, {"x": IMAGE}, keep_original="cpu"):
            assert distance(model(IMAGE.half()), truth) < 1e-2
        assert distance(model(IMAGE), truth) < 1e-4


@pytest.mark.parametrize("family", ["long_t5", "long_t5_global"])
def test_attention_that_cannot_be_patched_stays_in_fp32_if_its_scores_are_large(family):
    """Story: LongT5's masks of -1e10 became infinite in FP16, and the message asked to report the model."""
    model = large(family)
    handle = pasa.to_fp16(model, lambda each: outputs(each, family))
    islands = {name: why for name, why in handle.report().fp32 if "attention scores" in why}
    assert {name.rpartition(".")[2] for name in islands} <= {"LocalSelfAttention", "TransientGlobalSelfAttention"}
    assert len(islands) == 2
    for name in islands:
        assert {each.dtype for each in model.get_submodule(name).parameters()} == {torch.float32}


@pytest.mark.parametrize("family", ["siglip_vision", "siglip2_vision"])
@pytest.mark.parametrize("factor", [7e2, 1e4])
def test_a_pooling_head_with_large_scores_attends_in_fp32(family, factor):
    """Story: padding was attended to in an FP32 module, because scores passed -65504, the lowest number of its mask.

    In the scores that SigLIP 2's head computes and masks at once, the mask hid how large they are.
    """
    model = large(family)
    with torch.no_grad():
        model.head.attention.in_proj_weight.mul_(factor)
    truth = outputs(model, family)
    handle = pasa.to_fp16(model, lambda each: outputs(each, family))
    assert [name for name, _ in handle.report().fp32] == ["head.attention"]
    result = outputs(model, family)
    assert result["['pooler_output']"].dtype == torch.float32
    assert largest_distance(result, truth) < 5e-3


def test_the_activation_of_a_pooling_head_stays_in_fp32_if_its_input_is_large():
    """GELU follows no power of two; what the head's MLP returns does."""
    model = large("siglip_vision")
    with torch.no_grad():
        model.head.mlp.fc1.weight.mul_(1e6)
        model.head.mlp.fc2.weight.mul_(1e-6)
    truth = outputs(model, "siglip_vision")
    handle = pasa.to_fp16(model, lambda each: outputs(each, "siglip_vision"))
    assert [name for name, _ in handle.report().fp32] == ["head.mlp"]
    assert largest_distance(outputs(model, "siglip_vision"), truth) < 5e-3


def test_attention_within_a_module_that_stays_in_fp32_is_not_patched():
    """Story: in an FP32 module, patched attention refused values beyond FP16's range."""

    model = large("qwen2")
    layer = model.model.layers[1].self_attn
    with torch.no_grad():
        layer.v_proj.weight.mul_(3e5)
        layer.o_proj.weight.mul_(1e-6)
    project = layer.v_proj.forward
    layer.v_proj.forward = lambda x: torch.atan(project(x) * 1e-6) * 1e6
    with torch.no_grad():
        inputs = FAMILIES["qwen2"].inputs()
        truth = model(**inputs).logits
        handle = pasa.to_fp16(model, inputs)
        assert distance(model(**inputs).logits, truth) < 1e-2
    assert "model.layers.1.self_attn" in dict(handle.report().fp32)
    assert "patched  model.layers.0.self_attn" in handle.report().attention
    assert "patched  model.layers.1.self_attn" not in handle.report().attention


def test_a_module_that_stores_large_scores_and_is_the_model_itself_is_refused():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.rest = nn.Linear(8, 8), large("qwen2").model

        def forward(self, x, ids):
            query = self.query(x)
            with_scores = (query @ query.transpose(-1, -2)).softmax(-1) @ x
            return with_scores, self.rest(ids).last_hidden_state

    model = Attention().eval()
    with torch.no_grad():
        model.query.weight.mul_(1e3)
    sample = {"x": torch.randn(1, 4, 8), "ids": torch.arange(20)[None]}
    with pytest.raises(NotImplementedError, match=r"the model stores attention scores up to .* cannot be patched"):
        pasa.to_fp16(model, sample)
