"""`pasa check-device`: what it says of a device, and with which exit status."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import pasa
from pasa.eval.check_device import hostile, run
from pasa.eval.commands import app
from pasa.ops.attention.sdpa import fused

ATTEND = pasa.attention


@pytest.fixture
def check(monkeypatch):
    """Run the command on two kinds of small inputs; return its exit status and its text, unwrapped."""
    monkeypatch.setattr(hostile, "SHAPES", ((1, 2, 1, 24, 80, 64),))
    monkeypatch.setattr(hostile, "KINDS", {name: hostile.KINDS[name] for name in ("scale 65504", "V 65504")})
    monkeypatch.setattr(run, "TIMED", ((1, 1, 8, 16), (1, 1, 16, 16)))
    monkeypatch.setenv("COLUMNS", "80")

    def checked(*arguments):
        done = CliRunner().invoke(app, ["check-device", *arguments])
        assert max(map(len, done.output.splitlines())) <= 80 or "-" in arguments
        return done.exit_code, " ".join(done.output.split()) if "-" not in arguments else done.output

    return checked


def test_a_listed_device(check):
    status, text = check("--device", "cpu")
    assert status == 0
    start = "cpu: class (a): torch's attention keeps scores in FP32. 2 backends right, 0 wrong; pasa serves `sdpa` at "
    assert text.startswith(start)
    assert "pasa lists class (a): torch's flash attention for CPUs keeps scores in FP32 (run here)." in text
    assert "The measurement agrees." in text
    assert "Next" not in text


def test_the_json_has_what_an_issue_needs(check):
    status, text = check("--json", "-")
    result = json.loads(text)
    assert status == 0
    assert {"torch", "processor", "pasa"} <= result["environment"].keys()
    assert result["devices"][0].keys() >= {"name", "class", "listed", "source", "probes", "refusal", "server"}
    assert {each["backend"] for each in result["records"]} == {"sdpa", "reference"}
    for record in result["records"]:
        assert record["calls"] == 2 * len(hostile.MASKS)
        assert [time["keys"] for time in record["times"]] == [8, 16]


@pytest.mark.parametrize("known", [fused.UNKNOWN, fused.ON_310P])
def test_a_device_that_is_not_listed(check, monkeypatch, known):
    monkeypatch.setitem(fused.FORMATS, "cpu", known)
    status, text = check()
    assert status == 0
    assert "2 backends right" in text
    assert "pasa does not list this device" in text
    assert text.endswith(run.NEXT)


def test_a_device_whose_class_is_not_the_listed_one(check, reduced):
    status, text = check()
    assert status == 0, "the backend does not call the kernel that keeps scores in FP16"
    assert text.startswith("cpu: class (c): torch's attention keeps scores in FP16.")
    assert "pasa lists class (a)" in text
    assert "The measurement DISAGREES." in text
    assert text.endswith(run.NEXT)


def test_a_wrong_backend(check, monkeypatch):
    def attention(*inputs, backend, **options):
        result = ATTEND(*inputs, backend=backend, **options)
        return (result[0] * torch.nan, result[1]) if backend == "sdpa" and options else result

    monkeypatch.setattr(pasa, "attention", attention)
    status, text = check()
    assert status == 1
    assert "1 backends right, 1 wrong" in text
    assert "WRONG: sdpa, " in text
    assert "faults" in text


def test_a_backend_that_raises(check, monkeypatch):
    def attention(*inputs, backend, **options):
        if backend == "reference":
            raise RuntimeError("the device\n is gone")
        return ATTEND(*inputs, backend=backend, **options)

    monkeypatch.setattr(pasa, "attention", attention)
    status, text = check()
    assert status == 1
    assert "WRONG: reference, RuntimeError: the device is gone; worst: ('scale 65504', 'none'" in text


def test_a_device_whose_attention_lacks_fp16(check, monkeypatch):
    def refuse(*inputs, **options):
        raise RuntimeError("no kernel for Half")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    status, text = check()
    assert status == 0
    line = f"cpu: torch {torch.__version__} refuses FP16 attention (no kernel for Half): install a newer torch."
    assert text.startswith(line)
    assert "2 backends right, 0 wrong; pasa serves `sdpa`." in text


def test_a_shape_that_torch_refuses_is_not_timed(check, monkeypatch):
    def refuse(*calls):
        raise RuntimeError("too little memory")

    monkeypatch.setattr(run, "added_cost", refuse)
    status, text = check("--json", "-")
    assert status == 0
    times = [time for record in json.loads(text)["records"] for time in record["times"]]
    assert [time["failure"] for time in times] == 4 * ["RuntimeError: too little memory"]
    assert run.report(json.loads(text))[1].rows[0][-1] == "-, -"


def test_a_stored_result_can_be_shown_again(check):
    _, text = check("--json", "-")
    table = run.report(json.loads(text))[1]
    assert [row[:2] for row in table.rows] == [["cpu", "sdpa"], ["cpu", "reference"]]
