"""Residual streams and MLPs in a diagnosis: their peaks, block by block, and what the texts make of them."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch

from pasa.eval.kit.stored import ROOT
from pasa.eval.models.diagnose import report, run
from pasa.eval.models.diagnose.streams import StreamPeaks, blocks, in_fp32
from pasa.eval.models.video.tiny import tiny_pipeline
from tests.eval.models.diagnose.conftest import PROMPT, make_language_model
from tests.pasa.fp16.models import FAMILIES
from tests.pasa.prediction.conftest import IDS

IN_RANGE = "Residual streams and MLPs stay within FP16"


@pytest.fixture
def overflowing(monkeypatch, folder):
    """A function from factors of the second MLP's weights, by name, to a diagnosis of a model that is healthy else."""
    tokenizer = run.subjects.load_folder(str(folder), torch.float32)[1]

    @torch.no_grad()
    def look(dtype="float32", **factors):
        model = make_language_model()
        for name, factor in factors.items():
            model.get_parameter(f"model.layers.1.mlp.{name}.weight").mul_(factor)
        monkeypatch.setattr(run.subjects, "load_folder", lambda path, dtype: (model.to(dtype), tokenizer))
        return run.look(str(folder), prompt=PROMPT, dtype=dtype)

    return look


def by_hand(model, ids):
    """Return for each layer what its norms read, its result and what down_proj reads, by hooks on these modules."""
    seen = {}

    def keep(index, part, value):
        seen[index, part] = max(seen.get((index, part), 0.0), float(value.abs().max()))

    hooks = []
    for index, layer in enumerate(model.model.layers):
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            hooks.append(norm.register_forward_pre_hook(lambda _, args, i=index: keep(i, "residual", args[0])))
        hooks.append(layer.register_forward_hook(lambda _, args, out, i=index: keep(i, "residual", out)))
        down = layer.mlp.down_proj
        hooks.append(down.register_forward_pre_hook(lambda _, args, i=index: keep(i, "mlp", args[0])))
        for first in (layer.mlp.gate_proj, layer.mlp.up_proj):
            hooks.append(first.register_forward_pre_hook(lambda _, args, i=index: keep(i, "mlp", args[0])))
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def test_peaks_are_those_of_the_norms_inputs_and_of_the_down_projections():
    """The stream between attention and MLP counts too: the block's result may be smaller."""
    model = make_language_model()
    model.model.layers[0].self_attn.o_proj.weight.mul_(1e4)
    with StreamPeaks({"": model}) as streams:
        model(input_ids=IDS)
    expected = by_hand(model, IDS)
    assert list(streams.layers) == ["model.layers.0", "model.layers.1"]
    for index, record in enumerate(streams.layers.values()):
        assert {part: record[part] for part in ("residual", "mlp")} == {
            part: expected[index, part] for part in ("residual", "mlp")
        }
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_record_for_each_block(name):
    """The largest result of a block is in its record, and blocks with an MLP have its peak."""
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    with StreamPeaks({"m": model}) as streams:
        model(**inputs)
    assert len(streams.layers) >= 2
    assert max(each["residual"] for each in streams.layers.values()) > 65504
    assert any(each["mlp"] for each in streams.layers.values())
    for path, record in streams.layers.items():
        block, returned = model.get_submodule(path.removeprefix("m.")), []
        hook = block.register_forward_hook(lambda _, args, out, to=returned: to.append(out))
        model(**inputs)
        hook.remove()
        outputs = [out if isinstance(out, torch.Tensor) else out[0] for out in returned]
        assert record["residual"] >= max(float(out.abs().max()) for out in outputs)
        attention_alone = "layer." in path and not path.endswith(("layer.1", "layer.2"))
        assert (record["mlp"] is None) == (attention_alone or ("decoder.block" in path and path.endswith("layer.1")))


@torch.no_grad()
@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm"])
def test_fused_experts_show_their_product_however_it_is_computed(way):
    """Experts are one tensor without a module for each projection, so hooks on projections would see nothing."""
    model, inputs = FAMILIES["qwen3_moe"].build(), FAMILIES["qwen3_moe"].inputs()
    found = []
    for each in ("eager", way):
        model.config._experts_implementation = each
        with StreamPeaks({"": model}) as streams:
            model(**inputs)
        found.append([record["mlp"] for record in streams.layers.values()])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][0] > 30, "the product, and not the norm's result, which reaches 5"


def test_blocks_of_a_pipeline():
    """Blocks of a UNet that are in blocks count by themselves; a video's temporal ones too."""
    pipeline = tiny_pipeline()
    models = {"unet": pipeline.unet, "vae": pipeline.vae}
    names = {f"{prefix}.{path}" for prefix, model in models.items() for path in blocks(model)}
    assert "unet.down_blocks.0.attentions.0.transformer_blocks.0" in names
    assert "unet.down_blocks.0.attentions.0.temporal_transformer_blocks.0" in names
    assert "unet.down_blocks.0.resnets.0" in names
    assert "vae.decoder.mid_block.resnets.0" in names
    assert not any(name.endswith(("down_blocks.0", "mid_block", ".net.0")) for name in names)


def test_attention_is_safe_and_a_residual_stream_is_not(overflowing):
    result, maps = overflowing(down_proj=1e9)
    text, page = report.verdict(result), run.render_page(result, maps)
    assert text.startswith("No score of 8 heads in 2 layers leaves FP16")
    first = r"FP16 cannot hold the residual stream of 1 of 2 layers \(first model\.layers\.1; up to "
    assert re.search(first + r"[\d,]+, [\d.,]+ times", text)
    assert "run `pasa to-fp16 FOLDER OUT` or `pasa.to_fp16(model)`" in text
    assert "and the MLP" not in text
    assert IN_RANGE not in text
    assert "pasa to-fp16 FOLDER OUT" in page
    assert "pasa.patch_pipeline(model)" not in page
    assert 'class="verdict bad"' in page
    assert result["gate"]["passed"]


def test_an_mlp_beyond_fp16_is_called_one(overflowing):
    result, _ = overflowing(up_proj=1e7, down_proj=1e-7)
    assert "FP16 cannot hold the MLP of 1 of 2 layers (first model.layers.1" in report.verdict(result)
    assert "residual" not in report.verdict(result)


def test_both_are_named(overflowing):
    text = report.verdict(overflowing(up_proj=1e7, down_proj=1e3)[0])
    assert re.search(r"the residual stream of 1 of 2 layers \(.*?\) and the MLP of 1 of 2 layers \(", text)


def test_a_model_in_fp16_is_measured_in_fp32(overflowing):
    """Story: a model that broke in FP16 had no finite value beyond 65504, so nothing named its residual stream."""
    result, _ = overflowing("float16", up_proj=1e5, down_proj=1e4)
    wide, _ = overflowing("float32", up_proj=1e5, down_proj=1e4)
    assert result["runs"]["own"]["first_nonfinite"]["module"].startswith("model.layers.1")
    peaks, expected = ([each["residual"] for each in one["streams"]] for one in (result, wide))
    assert peaks == pytest.approx(expected, rel=1e-2)
    assert max(peaks) > 65504
    assert "FP16 cannot hold the residual stream of 1 of 2 layers" in report.verdict(result)


def test_weights_come_back_from_fp32_bit_for_bit():
    model = make_language_model().half()
    before = copy.deepcopy(model.state_dict())
    with in_fp32({"": model}):
        assert {each.dtype for each in model.parameters()} == {torch.float32}
    after = model.state_dict()
    assert all(after[name].dtype == each.dtype and torch.equal(after[name], each) for name, each in before.items())


def test_a_model_in_range_says_how_near_it_comes(text_diagnosis):
    result, maps = copy.deepcopy(text_diagnosis)
    worst = max(result["streams"], key=lambda each: max(each["residual"], each["mlp"]))
    assert f"{IN_RANGE}: at most " in report.verdict(result)
    assert report.verdict(result).endswith(f"largest number ({worst['layer']}).")
    page = run.render_page(result, maps)
    assert "pasa to-fp16" not in page
    assert 'id="streams"' in page
    assert 'id="smaller"' not in page, "two layers need no fold"
    result["streams"] *= 4
    page = run.render_page(result, maps)
    assert "3 more layers" in page
    assert page.index('id="streams"') < page.index('id="smaller"') < page.index('id="matrices"')
    table = report.stream_table(result)
    assert len(table.rows) == 5
    assert table.note.endswith("3 more in the JSON.")


def test_ratio_and_margin_are_of_the_larger_peak():
    result = {"streams": [{"layer": "a", "residual": 65504.0 / 4, "mlp": 131008.0}, {"layer": "b", "residual": 16.0}]}
    result["streams"][1]["mlp"] = None
    rows = report.stream_table(result).rows
    assert rows[0] == ["a", "16,380", "131,000", "2.00", "0.5"]
    assert rows[1] == ["b", "16", "–", "< 0.001", "4,094"]


@pytest.mark.parametrize("name", ["tiny", "published", "embedded"])
def test_results_stored_before_streams_were_recorded_can_be_shown(name):
    path = ROOT / "eval/models/diagnose/results" / name / "diagnose.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    result.pop("streams", None)
    assert report.stream_table(result) is None
    assert IN_RANGE not in report.verdict(result)
    page = run.render_page(result, [])
    assert 'id="streams"' not in page
    assert 'id="method"' in page
