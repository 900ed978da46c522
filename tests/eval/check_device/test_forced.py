"""`pasa eval hostile`: its settings reach the backend, its inputs are hostile, and a wrong result fails it."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.attention import SDPBackend
from typer.testing import CliRunner

import pasa
from pasa.eval.check_device import forced, hostile
from pasa.eval.commands import app
from pasa.ops.attention.sdpa import fused

ATTEND = pasa.attention
SHAPE = (1, 2, 1, 24, 80, 64)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(hostile, "MORE_SHAPES", (SHAPE, (1, 2, 1, 17, 600, 64)))
    kinds = ("scale 30000", "queries 0, V 65504")
    monkeypatch.setattr(hostile, "MORE_KINDS", {name: hostile.MORE_KINDS[name] for name in kinds})


def test_every_call_is_judged_with_every_setting(small, tmp_path):
    done = CliRunner().invoke(app, ["eval", "hostile", "--device", "cpu", "--output-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "hostile.json").read_text("utf-8"))
    assert {each["setting"] for each in result["records"]} == {"default", "unlisted"}
    assert sum(each["calls"] for each in result["records"]) == 2 * len(hostile.more_cases())
    assert "All checks hold." in (tmp_path / "hostile.md").read_text("utf-8")


@pytest.mark.parametrize(
    "change",
    [
        lambda out, lse: (out.masked_fill(out == out.max(), torch.nan), lse),
        lambda out, lse: (out - 1, lse),
        lambda out, lse: (out, lse + 1),
    ],
)
def test_a_wrong_result_fails(small, monkeypatch, change):
    monkeypatch.setattr(pasa, "attention", lambda *inputs, **options: change(*ATTEND(*inputs, **options)))
    result = forced.EXPERIMENT.measure()
    assert not result["gate"]["passed"]
    assert "FAILED: default, unlisted." in forced.EXPERIMENT.markdown(result)


def test_a_device_that_is_not_here_is_refused():
    done = CliRunner().invoke(app, ["eval", "hostile", "--device", "xpu"])
    assert done.exit_code
    assert "device='xpu' is not here: choose among cpu" in str(done.exception)


def test_settings_are_set_and_restored():
    with forced.SETTINGS["unlisted"]():
        assert fused.score_format("cpu").kind == "c"
    assert fused.score_format("cpu").kind == "a"
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed
    with forced.SETTINGS["math, reduced"]():
        assert allowed()
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert not allowed()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert SDPBackend.CUDNN_ATTENTION in forced.SETTINGS["cuDNN"].args


@pytest.mark.parametrize("name", hostile.MORE_MASKS)
def test_what_a_view_says_is_in_the_call(name):
    view = hostile.MORE_MASKS[name]
    call, truth, _ = hostile.prepare_case(("equal keys, scale 30000", name, SHAPE))
    assert (call.mask is None, call.causal, call.sinks is None) == (view.mask == "none", view.causal, not view.sinks)
    assert call.window == (None if view.window is None else list(view.window))
    assert truth.fully_masked.any() == (view.mask == "bool")
    assert call.k.isfinite().all()
    assert call.k.abs().max() > 40_000
