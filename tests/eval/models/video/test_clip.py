"""Clips: settings, pictures and noise."""

from types import SimpleNamespace

import torch

from pasa.eval.models.video import clip


def recording_pipeline(dtype, calls):
    class Pipeline:
        vae_scale_factor = 8
        unet = SimpleNamespace(dtype=dtype)
        vae = SimpleNamespace(config=SimpleNamespace(latent_channels=4))

        def __call__(self, image, **options):
            calls.append(options)
            return SimpleNamespace(frames=[torch.zeros(2, 3, 16, 24)])

    return Pipeline()


def test_noise_is_the_same_in_every_dtype():
    """Story: on a GPU with torch 2.11, where models run in FP16, all clips were 20 dB from FP32's with any attention;
    on a CPU with torch 2.13 FP16 models reach 61 dB. The pipeline draws its noise in the dtype of its models, and
    nothing promises that numbers drawn in FP16 are those of FP32, rounded."""
    calls = []
    settings = clip.make_settings({"height": 16, "width": 24, "frames": 2, "steps": 1}, tiny=True)
    for dtype in (torch.float32, torch.float16):
        clip.make_frames(recording_pipeline(dtype, calls), settings)
    wide, half = (options["latents"] for options in calls)
    assert wide.shape == (1, 2, 4, 2, 3)
    assert half.dtype == torch.float16
    assert torch.equal(wide.half(), half)


def test_picture_noise_follows_that_of_the_clip():
    """One generator draws both: two of the same seed would give the picture the clip's numbers."""
    calls = []
    settings = clip.make_settings({"height": 16, "width": 24, "frames": 2, "steps": 1}, tiny=True)
    clip.make_frames(recording_pipeline(torch.float32, calls), settings)
    drawn = torch.randn(calls[0]["latents"].shape, generator=calls[0]["generator"])
    assert not torch.equal(drawn, calls[0]["latents"])
