"""Whole pipelines in small, patched: the pictures and clips are those of the FP32 pipeline within 1e-3.

Weights are random and FP32; text encoders, denoiser and autoencoder all run, for two steps. With FP64 attention in the
place of `pasa.attention` the outputs agree to 1e-4, so masks, scales and heads reach attention unchanged. With a
planted fault they differ by 5 % and more, so the outputs depend on attention.
"""

from __future__ import annotations

import diffusers
import pytest
import torch
import transformers as hf

import pasa
from pasa.eval.models.video.tiny import sample_image
from pasa.eval.models.zoo import pipelines
from pasa.eval.models.zoo.judging import exact_attention, faulty_attention

hf.logging.set_verbosity_error()
diffusers.logging.set_verbosity_error()
BOUND = 1e-3  # of the largest value
PLUMBING, SEEN = BOUND / 10, 50 * BOUND
NO_GUIDANCE = {"num_frames": 5, "guidance_scale": 1.0}
"""Guidance multiplies the difference of two predictions, and with it what FP16 rounds of queries, keys and values.

With random weights and the default of 5, this rounding alone moves Wan by 1.4e-3 and CogVideoX by 3.2e-3.
"""

CALLS = {
    "StableDiffusionXLPipeline": {},
    "StableDiffusion3Pipeline": {},
    "FluxPipeline": {},
    "WanPipeline": NO_GUIDANCE,
    "HunyuanVideoPipeline": {"num_frames": 5},
    "CogVideoXPipeline": NO_GUIDANCE,
}
ENCODERS = {
    "StableDiffusionXLPipeline": {"text_encoder", "text_encoder_2"},
    "StableDiffusion3Pipeline": {"text_encoder", "text_encoder_2", "text_encoder_3"},
    "FluxPipeline": {"text_encoder", "text_encoder_2"},
    "WanPipeline": {"text_encoder"},
    "HunyuanVideoPipeline": {"text_encoder", "text_encoder_2"},
    "CogVideoXPipeline": {"text_encoder"},
    "StableVideoDiffusionPipeline": {"image_encoder"},
}
SCHEDULER = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "timestep_spacing": "leading"}


def build(name, video):
    """Return a pipeline and a function that runs it; `video` is the small Stable Video Diffusion pipeline."""
    if name == "StableVideoDiffusionPipeline":
        size = {"height": 64, "width": 64, "num_frames": 3, "num_inference_steps": 2, "output_type": "np"}
        return video, lambda: video(sample_image(64, 64), generator=torch.Generator().manual_seed(0), **size).frames
    model, call = pipelines.build(name)
    if name == "StableDiffusionXLPipeline":
        model.scheduler = diffusers.EulerDiscreteScheduler(steps_offset=1, **SCHEDULER)  # its released one
    (case,) = pipelines.cases(model, call | CALLS[name])
    return model, lambda: case.call()[0]


@pytest.mark.parametrize("name", ENCODERS)
def test_a_pipeline_is_within_the_bound_of_fp32(pipeline, monkeypatch, name):
    model, call = build(name, pipeline)

    def run():
        with torch.no_grad():
            torch.manual_seed(0)
            return torch.as_tensor(call())

    def error():
        return float((run() - expected).abs().max() / expected.abs().max())

    expected = run()
    with pasa.patch_pipeline(model) as handle:
        report = handle.report()
        assert 0 < error() < BOUND
        for attention, least, most in ((exact_attention, 0, PLUMBING), (faulty_attention, SEEN, 10)):
            monkeypatch.setattr(pasa, "attention", attention)
            assert least <= error() < most
    assert torch.equal(run(), expected)
    parts = {module.split(".")[0] for module in report.patched}
    assert parts >= ENCODERS[name] | {"unet" if hasattr(model, "unet") else "transformer"}
    assert all("computes its attention itself" in why for _, why in report.skipped)
