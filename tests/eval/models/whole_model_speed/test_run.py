"""Whole models in small: fixtures that overflow, ways to run them, their times and the gate."""

import copy
import dataclasses
import json
import math
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from pasa.eval.kit import output
from pasa.eval.models.whole_model_speed import arms, measuring, run, subjects
from pasa.eval.models.whole_model_speed.report import verdict
from pasa.fp16 import counting
from tests.eval.speed.fakes import FakeClock

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}
VAE = {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1}
T5 = {"vocab_size": 128, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 3, "num_heads": 2}
TINY = {
    "gemma-3-4b": subjects.gemma("tiny Gemma", {**SIZES, "head_dim": 32, "sliding_window": 16}, tokens=24),
    "qwen2-7b": subjects.qwen2("tiny Qwen2", SIZES, tokens=24),
    "t5-xxl": subjects.t5("tiny T5", {**T5, "feed_forward_proj": "gated-gelu"}, rows=4, tokens=128),
    "svd-vae": subjects.video_vae("tiny VAE", VAE, (2, 8, 8)),
}
CPU = torch.device("cpu")


class Spied(NamedTuple):
    """Hold the stored result of a tiny model, and the inputs on which it was converted and timed."""

    result: dict[str, Any]
    record: dict[str, Any]
    ways: dict[str, Any]
    samples: list[torch.Tensor]
    timed: list[torch.Tensor]


@pytest.fixture(scope="module")
def measured():
    """Return a function that measures a tiny model, each of them once."""
    return cache(measure)


def measure(name):
    subject, samples, timed = TINY[name], [], []

    def sample(inputs):
        samples.append(inputs)
        return subject.sample(inputs)

    def called(model, inputs, kept):
        timed.append(inputs)
        return subject.run(model, inputs, kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "CudaClock", FakeClock)
        patch.setattr(run, "SUBJECTS", {name: dataclasses.replace(subject, sample=sample, run=called)})
        patch.setattr(run, "MOST_TIME", math.inf)  # so small a model pays more
        result = json.loads(output.to_json(run.run_whole_model_speed(subjects=[name], turns=1)))
    (record,) = result["records"]
    return Spied(result, record, {each["arm"]: each for each in record["arms"]}, samples, timed)


@pytest.mark.parametrize("name", list(TINY))
def test_a_model_that_overflows_runs_in_fp16_after_conversion(name, measured):
    result, _, ways, _, _ = measured(name)
    assert result["gate"]["passed"], result["gate"]
    assert ways["to-fp16"]["error"] < ways["bf16"]["error"] / 2
    assert ways["fp32"]["error"] == 0
    phases = ["prompt", "step"] if name in ("gemma-3-4b", "qwen2-7b") else ["encode" if name == "t5-xxl" else "decode"]
    for each in ways.values():
        assert [phase["phase"] for phase in each["phases"]] == (phases if arms.ARMS[each["arm"]].timed else [])
        assert all(phase["wall_ms"] > 0 for phase in each["phases"])
    markdown = run.EXPERIMENT.markdown(result)
    assert "FP16, pasa.to_fp16" in markdown
    assert "All checks hold." in verdict(result)


@pytest.mark.parametrize("name", list(TINY))
def test_a_model_is_timed_on_another_input_than_it_was_converted_on(name, measured):
    """Story: both were the same input, on which a value can hardly pass the margin that was measured there."""
    _, record, _, (sample,), timed = measured(name)
    assert record["conversion"]["parameters"] > 0
    assert all(inputs.shape == sample.shape and not torch.equal(inputs, sample) for inputs in timed)
    assert timed


def test_frames_of_an_autoencoder_are_black_without_conversion(measured):
    """The converted one is within 40 dB of FP32; converting it to FP32 for each run is the remedy of diffusers."""
    ways = measured("svd-vae").ways
    assert ways["fp16"]["nonfinite"] == ways["fp16-patched"]["nonfinite"] == 1
    assert ways["to-fp16"]["psnr"] > 50
    assert ways["upcast"]["nonfinite"] == 0


def test_an_encoder_runs_as_transformers_keeps_it(measured):
    """It clamps infinities, so plain FP16 is finite and wrong. With ``wo`` in FP32 it is right, as after `to_fp16`."""
    ways = measured("t5-xxl").ways
    assert ways["fp16"]["nonfinite"] == 0
    assert ways["fp16"]["error"] > 0.1
    assert ways["fp16-wo"]["error"] < 0.01


def test_an_upcast_leaves_the_model_as_it_was():
    subject = TINY["svd-vae"]
    model = arms.cast(subject.build(), torch.float16)
    before = copy.deepcopy(model.state_dict())
    (frames,) = dict(arms.upcast(subject.run, model, subject.inputs(model, 0), 1)).values()
    assert frames.dtype == torch.float32
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.dtype == torch.float16


def test_frequencies_of_rotary_embeddings_keep_their_precision():
    """Story: `half()` rounds them as well, which `from_pretrained` does not, so that BF16 looked worse than it is."""
    model = arms.cast(TINY["qwen2-7b"].build(), torch.bfloat16)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_stream_passes_its_limit_in_a_third_of_the_blocks():
    subject = TINY["gemma-3-4b"]
    model = subject.build().eval()
    ids = subject.inputs(model, 0)
    fixture = subjects.overflow(subject, model, ids)
    with subjects.residual_peaks(subject.blocks(model)) as peaks, torch.no_grad():
        list(subject.run(model, ids, 1))
    assert fixture["peaks"] == peaks
    assert fixture["blocks_beyond"] == sum(peak >= 4 * 65504 for peak in peaks) >= 2
    assert fixture["power"] > 0


def test_psnr_is_that_of_the_worst_frame():
    golden = torch.zeros(3, 1, 2, 2)
    golden[0, 0, 0, 0], golden[0, 0, 0, 1] = -2.0, 2.0
    frames = golden.clone()
    frames[1] += 0.04
    frames[2] += 0.004
    assert subjects.psnr(frames, golden)["psnr"] == pytest.approx(40.0, abs=1e-4)
    assert subjects.psnr(golden, golden) == {"psnr": None}


def test_errors_of_results_with_nan_are_none():
    golden = torch.ones(4, 8)
    broken = golden.clone()
    broken[0, :2] = torch.nan
    assert measuring.errors(broken, golden, TINY["t5-xxl"]) == {"nonfinite": 1 / 16, "error": None}
    assert measuring.errors(1.5 * golden, golden, TINY["t5-xxl"]) == {"nonfinite": 0.0, "error": 0.5}


def test_counts_of_every_pass_and_of_none():
    with arms.counting_every(1):
        assert counting.EVERY == 1
    assert counting.EVERY == 16


def test_a_turn_counts_the_median_of_its_steps():
    """A step that the host held up does not count, nor does it change the number of turns."""
    assert measuring.middle([(1.0, 2.0), (9.0, 3.0), (2.0, 8.0)]) == (2.0, 3.0)
    assert measuring.middle([(1.0, None), (3.0, None)]) == (2.0, None)
    subject = TINY["qwen2-7b"]
    model = subject.build().eval()
    with torch.no_grad():
        runs = {"sound": measuring.Run(arms.ARMS["sound"], subject, model, subject.inputs(model, 0))}
        times = measuring.take_turns(runs, 3, CPU)
    assert {phase: len(pairs) for phase, pairs in times["sound"].items()} == {"prompt": 3, "step": 3}


def test_overheads_weigh_the_pass_that_counts():
    times = {
        "sound-patched": {"encode": [(10.0, None), (20.0, None)]},
        "to-fp16": {"encode": [(10.0, None), (20.0, None)]},
        "to-fp16-counting": {"encode": [(26.0, None), (52.0, None)]},
    }
    (record,) = measuring.overheads(times)
    assert record["still"]["median"] == 1
    assert record["counting"]["median"] == pytest.approx(2.6)
    assert record["amortised"]["median"] == pytest.approx(1.1)


GOOD = {
    "fp32": {"error": 0.0, "psnr": None},
    "bf16": {"error": 1e-2, "psnr": 45.0},
    "fp16": {"error": None, "nonfinite": 1.0},
    "fp16-patched": {"error": 0.5},
    "sound-patched": {"error": None, "bytes": 100},
    "to-fp16": {"error": 1e-3, "psnr": 60.0, "bytes": 102},
}


def judged(arm="fp32", time=1.02, beyond=(), blocks=2, **changes):
    """Return the names of the checks that fail when one thing about a good record is another."""
    ways = {name: {"arm": name, "nonfinite": 0.0, "bytes": 90, **GOOD[name]} for name in GOOD}
    ways[arm] |= changes
    record = {
        "subject": "vae",
        "fixture": {"blocks_beyond": blocks, "peaks": [3e5] * 6},
        "conversion": {"beyond": list(beyond)},
        "arms": list(ways.values()),
        "overheads": [{"amortised": {"median": time}}, {"amortised": {"median": 0.9}}],
    }
    return [name for name, passed in run.judge([record])["checks"].items() if not passed]


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, []),
        ({"time": 1.021}, ["vae_time"]),
        ({"beyond": ["decoder"]}, ["vae_finite"]),
        ({"blocks": 1}, ["vae_fixture"]),
        ({"arm": "fp32", "nonfinite": 0.1}, ["vae_fp32_finite"]),
        ({"arm": "fp16", "error": 9e-3, "nonfinite": 0.0}, ["vae_fp16_fails"]),
        ({"arm": "fp16-patched", "error": 9e-3}, ["vae_fp16_fails"]),
        ({"arm": "to-fp16", "error": 2e-2}, ["vae_error_below_bf16"]),
        ({"arm": "to-fp16", "psnr": 39.9}, ["vae_psnr"]),
        ({"arm": "to-fp16", "bytes": 103}, ["vae_memory"]),
    ],
)
def test_each_check_fails_for_its_own_reason(changes, failing):
    assert judged(**changes) == failing
