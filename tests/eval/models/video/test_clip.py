"""Clips: settings, pictures and noise."""

from types import SimpleNamespace

import torch

from pasa.eval.models.video import clip


def options_of_call(dtype):
    """Return what a pipeline of models of this dtype is called with."""
    calls = []

    class Pipeline:
        vae_scale_factor = 8
        unet = SimpleNamespace(dtype=dtype)
        vae = SimpleNamespace(config=SimpleNamespace(latent_channels=4))

        def __call__(self, image, **options):
            calls.append(options)
            return SimpleNamespace(frames=[torch.zeros(2, 3, 16, 24)])

    sizes = {"height": 16, "width": 24, "frames": 2, "steps": 1}
    clip.make_frames(Pipeline(), clip.make_settings(sizes, tiny=True))
    return calls[0]


def test_noise_is_the_same_in_every_dtype():
    """Story: on a GPU with torch 2.11, where models run in FP16, all clips were 20 dB from FP32's with any attention.

    The pipeline draws its noise in the dtype of its models, and nothing promises that numbers drawn in FP16 are those
    of FP32, rounded.
    """
    wide, half = (options_of_call(dtype)["latents"] for dtype in (torch.float32, torch.float16))
    assert wide.shape == (1, 2, 4, 2, 3)
    assert half.dtype == torch.float16
    assert torch.equal(wide.half(), half)


def test_picture_noise_follows_that_of_the_clip():
    """One generator draws both: two of the same seed would give the picture the clip's numbers."""
    options = options_of_call(torch.float32)
    drawn = torch.randn(options["latents"].shape, generator=options["generator"])
    assert not torch.equal(drawn, options["latents"])
