"""Whole tiny pipelines whose UNets, transformers and autoencoders overflow in FP16."""

import pytest
import torch
from PIL import Image
from torch import nn

import pasa
from pasa.eval.models.video.tiny import tiny_pipeline
from pasa.eval.models.zoo import pipelines
from tests.pasa.fp16.diffusion_models import BLOCK_OUTPUTS, RESNETS
from tests.pasa.fp16.planned import psnr

PIXELS = 32
PICTURE = Image.new("RGB", (PIXELS, PIXELS), "teal")
VIDEO = {"image": PICTURE, "height": PIXELS, "width": PIXELS, "num_frames": 2, "decode_chunk_size": 1}


def build(name):
    """Return a pipeline with large weights, and the arguments of its call."""
    if name == "StableVideoDiffusionPipeline":
        pipeline, call = tiny_pipeline(), VIDEO | {"num_inference_steps": 1, "output_type": "np"}
    else:
        pipeline, call = pipelines.build(name)
        call |= {"num_inference_steps": 1, "height": PIXELS, "width": PIXELS}
        call |= {"image": call["image"][..., :PIXELS, :PIXELS]} if "image" in call else {}
    with torch.no_grad():
        for part, factors in (("unet", RESNETS), ("vae", RESNETS), ("transformer", BLOCK_OUTPUTS)):
            model = getattr(pipeline, part, None)
            for parameter, value in model.named_parameters() if model is not None else ():
                for end, factor in factors.items():
                    value.mul_(factor if parameter.endswith(end) else 1)
    return pipeline, call


def run(pipeline, call):
    """Return the pictures or frames of a pipeline."""
    out = pipeline(**call, generator=torch.Generator().manual_seed(0))
    return torch.as_tensor(out.images if "images" in out else out.frames)


def models(pipeline):
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


NAMES = (
    "StableDiffusionPipeline",
    "StableDiffusionXLPipeline",
    "StableDiffusionControlNetPipeline",
    "StableVideoDiffusionPipeline",
    "FluxPipeline",
)


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_near_those_of_fp32(name):
    pipeline, call = build(name)
    upcast = pipeline.vae.config.force_upcast
    truth = run(pipeline, call)
    with pasa.to_fp16(pipeline, {**call, "generator": torch.Generator().manual_seed(0)}, keep_original="cpu") as handle:
        assert {part.dtype for part in models(pipeline).values()} == {torch.float16}
        result = run(pipeline, call)
        assert {part.dtype for part in models(pipeline).values()} == {torch.float16}, "the pipeline upcasts"
        assert psnr(result, truth) > 35
        report = handle.report()
        assert {each.module.split(".")[0] for each in report.modules if each.peak > 65504} >= {"vae"}
        assert not report.beyond
    assert pipeline.vae.config.force_upcast == upcast
    assert torch.equal(run(pipeline, call), truth)
