"""Tests of predictions for UNets and autoencoders: bounded attention layers, numbers of heads, and valid bounds."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file, save_file

from pasa.eval.models.predict.run import observe
from pasa.eval.models.video.overflow import bias_scores
from pasa.eval.models.video.tiny import tiny_pipeline, tiny_unet
from pasa.prediction import predict_overflow
from tests.pasa.prediction.conftest import randomise


@pytest.fixture
def unet():
    torch.manual_seed(0)
    return randomise(tiny_unet())


@torch.no_grad()
def forward(unet):
    generator = torch.Generator().manual_seed(2)
    sample = torch.randn(1, 3, 8, 8, 8, generator=generator)
    states = torch.randn(1, 1, 32, generator=generator)
    unet(sample, torch.tensor(5), states, added_time_ids=torch.ones(1, 3))


def test_no_score_exceeds_its_proven_bound(unet):
    rows = {(row.module, row.head): row for row in predict_overflow(unet).rows}
    observed = observe(unet, lambda: forward(unet))
    bounded = {where: score for where, score in observed.items() if where in rows}
    assert len(bounded) == 6 + 4  # spatial and temporal: 3 x 2 modules of one head, 2 of two
    for where, score in bounded.items():
        assert score <= rows[where].proven
        assert score >= 1e-2 * rows[where].proven


def test_attention_to_encoder_states_is_unknown(unet):
    prediction = predict_overflow(unet)
    assert all(name.endswith("attn2") for name in prediction.modules("unknown"))
    assert len(prediction.modules("unknown")) == 8
    assert "encoder states" in prediction.rows[0].note


def test_injected_layers_are_ranked_first():
    torch.manual_seed(0)
    unet = tiny_unet()
    bias_scores(unet)
    certain = predict_overflow(unet).modules("certain")
    assert len(certain) == 4
    assert all(name.endswith(".transformer_blocks.0.attn1") and "temporal" not in name for name in certain)
    assert predict_overflow(unet).rows[0].module in certain


def test_a_pipeline_by_its_parts(tmp_path):
    pipeline = tiny_pipeline()
    prediction = predict_overflow(pipeline)
    assert {row.module.partition(".")[0] for row in prediction.rows} == {"unet", "vae", "image_encoder"}
    assert any("positions" in row.note for row in prediction.rows if row.module.startswith("vae."))
    pipeline.save_pretrained(tmp_path)
    assert predict_overflow(tmp_path).rows == prediction.rows


def test_heads_come_by_block():
    """Heads are counted by block: down 0 and up 1 have the first count of heads, the middle block the last."""
    heads = {}
    torch.manual_seed(0)
    for row in predict_overflow(tiny_unet()).rows:
        if row.head is not None:
            heads[row.module.partition(".attentions")[0]] = max(row.head, heads.get(row.module, 0)) + 1
    assert heads == {"down_blocks.0": 1, "mid_block": 2, "up_blocks.1": 1}


def test_heads_of_a_two_dimensional_unet_are_those_of_its_modules():
    """A 2D UNet's `attention_head_dim` is read as its number of heads: 2 and 4, in reverse order in the up blocks."""
    torch.manual_seed(0)
    sizes = {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "attention_head_dim": (2, 4),
        "cross_attention_dim": 16,
        "norm_num_groups": 8,
    }
    unet = UNet2DConditionModel(**sizes)
    heads = {}
    for row in predict_overflow(unet).rows:
        if row.head is not None:
            heads[row.module] = max(row.head + 1, heads.get(row.module, 0))
    assert heads == {name: unet.get_submodule(name).heads for name in heads}
    assert set(heads.values()) == {2, 4}
    assert predict_overflow(unet).settings["parts"][""]["seq_len"] == 256
    crossed = UNet2DConditionModel(**sizes, only_cross_attention=(True, False))
    assert set(predict_overflow(crossed).modules("unknown")) == set(predict_overflow(crossed).modules())


def test_attention_in_an_unknown_place_is_unknown():
    """Attention in an unknown place gets the verdict "unknown".

    Story: blocks with attention but without a transformer were left out of the prediction.
    """
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("AttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        cross_attention_dim=16,
        norm_num_groups=8,
        layers_per_block=1,
    )
    prediction = predict_overflow(unet)
    assert "down_blocks.0.attentions.0" in prediction.modules("unknown")
    assert "down_blocks.1.attentions.0.transformer_blocks.0.attn1" not in prediction.modules("unknown")
    attentions = {name for name, module in unet.named_modules() if hasattr(module, "to_q")}
    assert set(prediction.modules()) == attentions


def test_the_names_of_the_first_autoencoders(tmp_path):
    """Projections named `query` and `key` are found, as in the published autoencoders of Stable Diffusion."""
    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, sample_size=8)
    expected = predict_overflow(vae)
    assert expected.modules() == ("decoder.mid_block.attentions.0", "encoder.mid_block.attentions.0")
    vae.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    save_file({k.replace("to_q.", "query.").replace("to_k.", "key."): v for k, v in tensors.items()}, path)
    assert predict_overflow(tmp_path).rows == expected.rows
