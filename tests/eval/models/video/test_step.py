"""A denoising step in small, on a clock without a device: real models, real FP16 attention, made-up times."""

import copy
import json
import math

import pytest
import torch

from pasa.eval.kit.output import to_json
from pasa.eval.kit.stored import pick
from pasa.eval.models.video import step
from pasa.eval.models.video.step import EAGER, PASA, SDPA
from pasa.eval.speed.implementations import FLASH
from tests.eval.speed.fakes import FakeClock
from tests.inputs import reference_serves

SMALL = {
    "frames": 2, "height": 8, "width": 8, "decoded": 2,
    "unet": {
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal",), "layers_per_block": 1, "num_attention_heads": (1,),
        "up_block_types": ("CrossAttnUpBlockSpatioTemporal",), "block_out_channels": (64,), "cross_attention_dim": 32,
        "addition_time_embed_dim": 32, "projection_class_embeddings_input_dim": 96,
    },
    "vae": {"down_block_types": ("DownEncoderBlock2D",) * 2, "block_out_channels": (32, 32), "layers_per_block": 2},
}  # fmt: skip


class IdleClock(FakeClock):
    """FP16 convolutions take a CPU seconds: a call that is timed does not run."""

    def times(self, call, count, cold):
        return [1.0] * count


@pytest.fixture(scope="module")
def result():
    with torch.inference_mode(), reference_serves():  # short sequences have no anchors in torch's own attention
        return step.measure(IdleClock(), SMALL, 1, 1e12, lambda line: None)


def by_way(result, model, offset=0):
    return {each["way"]: each for each in pick(result["records"], model=model, offset=offset)}


def test_pasa_is_as_near_to_fp32_as_sdpa(result):
    for model in ("UNet", "VAE"):
        records = by_way(result, model)
        assert set(records) == set(step.WAYS)
        assert 0 < records[PASA]["rmse"] <= 1.1 * records[SDPA]["rmse"]


def test_eager_fp16_attention_overflows_for_real_and_pasa_does_not_notice(result):
    """Nothing is emulated here: diffusers' own processor stores scaled scores of 102,000 in FP16."""
    plain, biased = by_way(result, "UNet"), by_way(result, "UNet", 905**2)
    assert plain[EAGER]["nonfinite_share"] == 0
    assert biased[EAGER]["nonfinite_share"] == 1
    assert math.isnan(biased[EAGER]["rmse"])
    assert biased[PASA]["rmse"] <= 1.01 * plain[PASA]["rmse"]
    text = step.EXPERIMENT.markdown(json.loads(to_json(result)))
    assert "| UNet, scores + 819,025 | eager | 1.0 | 1.00 | 0.0 | NaN | NaN |" in text


def test_shapes_are_those_of_the_step(result):
    """Two clips of two frames: spatial and temporal attention, each over itself and over one token."""
    shapes = {each["shape"]: each["calls"] for each in result["shapes"]}
    assert shapes["(4, 1, 64, 64) full"] == shapes["(128, 1, 2, 64) full"] == 4
    assert shapes["(4, 1, 64 x 1, 64) full"] == shapes["(128, 1, 2 x 1, 64) full"] == 4
    assert sum(shapes.values()) == 16


def test_real_size_asks_for_the_attention_of_the_real_model():
    """The full UNet without weights asks for 25 frames of 1024 x 576 twice, heads of 64."""
    from diffusers import UNetSpatioTemporalConditionModel
    from diffusers.models.attention_processor import Attention

    with torch.device("meta"):
        unet = UNetSpatioTemporalConditionModel(**step.FULL["unet"])
    assert sum(x.numel() for x in unet.parameters()) == 1_524_623_082
    assert {m.inner_dim // m.heads for m in unet.modules() if isinstance(m, Attention)} == {64}


@pytest.mark.parametrize(
    ("way", "biased", "field", "value", "failed"),
    [
        (PASA, False, "to_flash", 1.0, set()),
        (PASA, False, "to_flash", 0.999, {"not_slower_than_flash"}),
        (PASA, False, "rmse", 1.099, set()),
        (PASA, False, "rmse", 1.101, {"error"}),
        (PASA, False, "rmse", math.nan, {"error"}),
        (PASA, False, "nonfinite_share", 1e-9, {"finite"}),
        (PASA, True, "nonfinite_share", 1e-9, {"finite"}),
        *((way, biased, "status", "not run", {"finite", "error", "not_slower_than_flash"})
          for way, biased in ((PASA, False), (PASA, True), (FLASH, False))),
    ],
)  # fmt: skip
def test_slower_or_farther_fails_the_gate(result, way, biased, field, value, failed):
    """RMSEs are in those of SDPA flash: PASA may be a tenth farther from FP32."""
    assert result["gate"]["passed"]
    records = copy.deepcopy(result["records"])
    unet = {(each["way"], bool(each["offset"])): each for each in pick(records, model="UNet")}
    unet[FLASH, False]["rmse"] = 1.0
    unet[PASA, False]["rmse"] = 1.0
    unet[way, biased][field] = value
    checks = step.judge(records)["checks"]
    assert {name for name, passed in checks.items() if not passed} == failed


def test_a_way_that_cannot_run_says_why(monkeypatch):
    """Flash has no head dimension of 512 on a GPU, and eager scores may not fit."""

    class Refusing(torch.nn.Linear):
        def forward(self, x):
            if torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled():
                raise RuntimeError("no kernel")
            return super().forward(x)

    model = Refusing(2, 2)
    work = step.Work("model", model, lambda: model(torch.ones(1, 2)))
    monkeypatch.setattr(step, "WAYS", {SDPA: "", FLASH: ""})
    with torch.inference_mode():
        records = {each["way"]: each for each in step.compare(work, work.run(), FakeClock(), 1)}
    assert records[FLASH]["status"] == "not run"
    assert "no kernel" in records[FLASH]["why"]
    assert records[SDPA]["to_flash"] is None
    assert records[SDPA]["max_error"] == 0
