"""Stories of models that are hard to scale: tied heads, post-norms, fused tensors, routers, experts."""

import pytest
import torch
from torch import nn

import pasa
from pasa.fp16.conversion import Conversion
from tests.pasa.fp16.models import FAMILIES, IDS, large, outputs
from tests.pasa.fp16.planned import distance, largest_distance, planned


def plan_of(model, family):
    """Return the powers of two for a model of a family, which is left as it was."""
    return planned(model, lambda each: outputs(each, family))


def powers_of(plan, name):
    """Return the exponents of a parameter by part; the whole parameter is the part None."""
    return {cut: power for _, cut, power in plan.scales.get(name, [])}


def test_a_tied_head_is_undone_by_the_last_norm():
    """The embedding starts the stream, so the head that shares it is scaled too; the last norm takes 2**s."""
    plan = plan_of(large("qwen2_tied"), "qwen2_tied")
    stream = powers_of(plan, "model.embed_tokens.weight")[None]
    assert stream > 0
    assert powers_of(plan, "model.norm.weight") == {None: -stream}
    gpt2 = plan_of(large("gpt2"), "gpt2")
    stream = powers_of(gpt2, "transformer.wte.weight")[None]
    assert powers_of(gpt2, "transformer.ln_f.weight") == powers_of(gpt2, "transformer.ln_f.bias") == {None: -stream}
    assert powers_of(gpt2, "transformer.wpe.weight") == {None: stream}


def test_an_untied_head_and_its_norm_stay():
    plan = plan_of(large("qwen2"), "qwen2")
    assert not powers_of(plan, "model.norm.weight")
    assert not powers_of(plan, "lm_head.weight")


def test_writers_are_scaled_with_their_biases():
    plan = plan_of(large("llama"), "llama")
    stream = powers_of(plan, "model.embed_tokens.weight")[None]
    for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
        assert powers_of(plan, f"model.layers.1.{name}") == {None: stream}


def test_epsilons_of_readers_take_twice_the_exponent():
    plan = plan_of(large("llama"), "llama")
    stream = powers_of(plan, "model.embed_tokens.weight")[None]
    scaled = {place.module: power for place, power in plan.constants.items()}
    assert scaled["model.layers.1.input_layernorm"] == scaled["model.norm"] == 2 * stream


def test_a_post_norm_model_keeps_its_stream_and_scales_within_blocks():
    """OPT-350m norms after each sum, so no hidden state is large: only sums between two norms are."""
    plan = plan_of(large("opt_post_norm"), "opt_post_norm")
    assert not any(plan.outputs[""].values())
    assert powers_of(plan, "model.decoder.layers.1.fc2.bias")[None] > 0


@pytest.mark.parametrize("family", ["glm4", "phi3", "glm"])
def test_of_a_fused_gate_and_up_projection_only_up_is_scaled(family):
    """The gate goes through SiLU, which is not homogeneous."""
    model = large(family)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate_up_proj.weight[64:] *= 1e5
            layer.mlp.down_proj.weight *= 1 if family == "glm4" else 1e-5
    truth = outputs(model, family)
    plan = plan_of(model, family)
    powers = powers_of(plan, "model.layers.0.mlp.gate_up_proj.weight")
    assert powers.get((0, 64, 1), 0) == 0
    assert powers[64, 128, 1] > 0
    pasa.to_fp16(model, lambda each: outputs(each, family))
    assert largest_distance(outputs(model, family), truth) < 1e-2


def test_t5_streams_that_share_an_embedding_have_one_power():
    """The position bias is added to attention scores and stays."""
    plan = plan_of(large("t5"), "t5")
    stream = powers_of(plan, "shared.weight")[None]
    assert stream > 0
    for side, index in (("encoder", 1), ("decoder", 2)):
        for name in ("0.SelfAttention.o", f"{index}.DenseReluDense.wo"):
            assert powers_of(plan, f"{side}.block.1.layer.{name}.weight") == {None: stream}
        assert not powers_of(plan, f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    assert powers_of(plan, "decoder.final_layer_norm.weight") == {None: -stream}, "the head is the embedding"


@pytest.mark.parametrize("family", ["qwen2", "clip_text", "siglip_vision"])
def test_hidden_states_that_leave_a_model_are_true(family):
    """Pipelines read hidden_states[-2]; FP16 cannot hold it, so it leaves in FP32."""
    model = large(family)
    state = f"['hidden_states'][{len(outputs(model, family)) - (3 if family == 'qwen2' else 4)}]"
    truth = outputs(model, family)[state]
    assert truth.abs().max() > 65504
    pasa.to_fp16(model, lambda each: outputs(each, family))
    hidden = outputs(model, family)[state]
    assert hidden.dtype == torch.float32
    torch.testing.assert_close(hidden, truth, rtol=0, atol=5e-3 * truth.abs().max().item())


def test_features_of_images_are_true_where_the_sample_asks_for_them():
    """`get_image_features` returns the residual stream of SigLIP's pooling head; SigLIP itself norms it."""
    model, inputs = large("siglip"), FAMILIES["siglip"].inputs()

    def features(each):
        images = inputs["pixel_values"].to(each.logit_scale.dtype)
        with torch.no_grad():
            each(**{**inputs, "pixel_values": images})
            return each.get_image_features(images).pooler_output

    truth = features(model)
    assert truth.abs().max() > 65504
    other = large("siglip")
    pasa.to_fp16(other, inputs)
    with pytest.raises(RuntimeError, match=r"vision_model is scaled .* inside of SiglipModel"):
        features(other)
    pasa.to_fp16(model, features)
    result = features(model)
    assert result.dtype == torch.float32
    assert distance(result, truth) < 5e-3


def test_gemma_norms_keep_one_plus_weight_in_fp32():
    model = large("gemma3")
    plan = plan_of(model, "gemma3")
    assert plan.offsets["model.layers.0.post_feedforward_layernorm.weight"][0] > 0
    pasa.to_fp16(model, lambda each: outputs(each, "gemma3"))
    assert model.model.layers[0].post_feedforward_layernorm.weight.dtype == torch.float32


def test_clip_embeddings_stay_and_their_norm_is_scaled():
    """The stream of CLIP's image encoder begins behind pre_layrnorm."""
    plan = plan_of(large("clip_vision"), "clip_vision")
    name = "vision_model.pre_layrnorm"
    assert powers_of(plan, f"{name}.weight")[None] == powers_of(plan, f"{name}.bias")[None] > 0
    assert not any(place.module == name for place in plan.constants)
    assert not any("embedding" in each for each in plan.scales)


@pytest.mark.parametrize(
    ("family", "router"), [("qwen2_moe", "mlp.gate"), ("qwen3_moe", "mlp.gate"), ("gpt_oss", "mlp.router")]
)
def test_routers_read_a_norm_and_stay(family, router):
    plan = plan_of(large(family), family)
    assert not any(f"{router}." in name or "_gate." in name for name in plan.scales)
    assert any("down_proj" in name for name in plan.scales)


class Experts(nn.Module):
    """Residual layers of experts in a list, of which each token uses one, as in older models."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(experts)
        )
        self.extra = nn.Linear(8, 8)
        self.last = nn.LayerNorm(8)

    def forward(self, input_ids, extra=False):
        stream = self.embedding(input_ids)
        normed = self.norm(stream)
        for index in input_ids.unique().tolist():
            chosen = input_ids == index
            stream = stream.index_put((chosen,), stream[chosen] + self.experts[index % 4](normed[chosen]))
        if extra:
            stream = stream + self.extra(normed)
        return self.last(stream)


def convert(model, run):
    """Convert a model that has no attention to patch."""
    conversion = Conversion({"": model}, run, 4.0)
    conversion.plan_and_convert()
    conversion.run_in_fp16()


def experts():
    """Return a model whose experts write up to 1e6."""
    torch.manual_seed(0)
    model = Experts().eval()
    with torch.no_grad():
        for each in model.experts:
            each[2].weight.mul_(1e6)
            each[2].bias.mul_(1e6)
    return model


def test_experts_that_the_sample_does_not_reach_are_scaled_like_their_siblings():
    model, ids = experts(), torch.arange(4)[None]
    with torch.no_grad():
        truth = model(ids)
        convert(model, lambda: model(ids[:, :2]))
        torch.testing.assert_close(model(ids).float(), truth, rtol=0, atol=5e-3)


class Norm(nn.Module):
    """A norm without parameters, whose epsilon matters."""

    def __init__(self):
        super().__init__()
        self.eps = 1e10

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Stages(nn.Module):
    """Adds a stage of a list, chosen by the caller, to a stream that reaches 1e6."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.norm = nn.Linear(8, 8), nn.Linear(8, 4), Norm()
        self.stages = nn.ModuleList(nn.Sequential(Norm(), nn.Linear(8, 8)) for _ in range(3))
        with torch.no_grad():
            for each in (self.first, *(stage[1] for stage in self.stages)):
                each.weight.mul_(5e5)
        for stage in self.stages:
            stage.register_buffer("shift", torch.randn(8) * 3e4)

    def forward(self, x, stage):
        chosen, stream = self.stages[stage], self.first(x)
        return self.head(self.norm(stream + chosen(stream) + chosen.shift))


def test_buffers_and_epsilons_of_modules_that_the_sample_does_not_reach():
    """Story: parameters alone took the powers of their siblings, and outputs were wrong by their own size."""
    model, x = Stages(), torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        truth = [model(x, stage) for stage in range(3)]
        pasa.to_fp16(model, {"x": x, "stage": 0})
        for stage in range(3):
            torch.testing.assert_close(model(x, stage).float(), truth[stage], rtol=0, atol=5e-3)


def test_modules_without_siblings_that_the_sample_does_not_reach_are_refused():
    model, ids = experts(), torch.arange(4)[None]
    convert(model, lambda: model(ids))
    with torch.no_grad(), pytest.raises(RuntimeError, match="the sample did not reach extra"):
        model(ids, extra=True)


class Shifted(nn.Sequential):
    """Adds numbers that no parameter holds."""

    def forward(self, x):
        return super().forward(x) + torch.arange(8, dtype=x.dtype)


def test_experts_whose_siblings_are_scaled_behind_them_are_refused():
    """The factor behind a sibling belongs to that module alone."""
    model, ids = experts(), torch.arange(4)[None]
    for each in model.experts:
        each.__class__ = Shifted
    with torch.no_grad():
        truth = model(ids[:, :2])
        convert(model, lambda: model(ids[:, :2]))
        torch.testing.assert_close(model(ids[:, :2]).float(), truth, rtol=0, atol=5e-3)
        with pytest.raises(RuntimeError, match=r"the sample did not reach experts\.2"):
            model(ids)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "gpt_oss"])
def test_experts_in_one_tensor_have_one_power_whether_reached_or_not(family):
    """The sample holds two tokens, so that some experts are not reached; other tokens reach them."""
    model = large(family)
    truth = outputs(model, family)
    pasa.to_fp16(model, {"input_ids": IDS[:, :2], "use_cache": False, "output_hidden_states": True})
    assert largest_distance(outputs(model, family), truth) < 2e-2


class Gathered(nn.Module):
    """Experts in one tensor, each with a gate above an up projection, of which every token gathers its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(8), nn.Linear(32, 8)
        self.gate_up = nn.Parameter(torch.randn(4, 64, 8) / 4)

    def forward(self, x):
        weights = self.gate_up[torch.arange(len(x)) % 4]
        gate, up = (self.norm(x)[:, None] @ weights.transpose(1, 2))[:, 0].chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


def test_gathered_weights_keep_their_parts():
    """Story: parts of rows were looked for among the columns of gathered weights, of which there were too few."""
    torch.manual_seed(0)
    model, x = Gathered().eval(), torch.randn(6, 8)
    with torch.no_grad():
        model.gate_up[:, 32:].mul_(1e6)
        model.down.weight.mul_(1e-6)
        truth = model(x)
        handle = pasa.to_fp16(model, x)
        assert not handle.report().fp32
        torch.testing.assert_close(model(x.half()).float(), truth, rtol=0, atol=5e-3)


def test_what_is_large_between_two_norms_does_not_scale_the_stream():
    """Story: OLMo 2 norms what its blocks write, and these read the stream without a norm.

    One power of two for the embedding fitted all tensors at once, and was chosen, although the stream needed a much
    smaller one. Embeddings became subnormal in FP16, and logits much less accurate.
    """
    model = large("olmo2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e8)
            layer.mlp.down_proj.weight.mul_(1e8)
    truth = outputs(model, "olmo2")
    plan = plan_of(model, "olmo2")
    stream = powers_of(plan, "model.embed_tokens.weight")[None]
    assert 0 < stream < 6
    assert powers_of(plan, "model.layers.1.mlp.down_proj.weight")[None] > 10
    handle = pasa.to_fp16(model, lambda each: outputs(each, "olmo2"))
    assert handle.report().underflow < 0.01
    assert largest_distance(outputs(model, "olmo2"), truth) < 1e-2
