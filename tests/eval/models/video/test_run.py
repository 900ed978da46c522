"""The regression from end to end, on the tiny pipeline and on a folder in the form of a checkpoint."""

import copy
from importlib import metadata

import pytest
import torch
import transformers

from pasa.eval.models.video import clip, run
from pasa.eval.models.video.tiny import sample_image, tiny_pipeline

SMALL = {"height": 64, "width": 64, "frames": 2, "steps": 1}
transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Run the tiny pipeline as `pasa eval video` does; return the result, the clips by title and their folder."""
    clips, folder, save = {}, tmp_path_factory.mktemp("clips"), run.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "save", lambda shown, *rest: (clips.update(shown), save(shown, *rest)))
        return run.run_video(folder=folder), clips, folder


def test_fp16_scores_break_every_frame_and_the_module_is_named(experiment):
    failing = experiment[0]["runs"]["fp16"]
    assert failing["nonfinite_frames"] == failing["black_frames"] == 4
    assert failing["psnr"] == failing["ssim"] == [None] * 4
    module = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1"
    assert failing["first_nonfinite"] == {"module": module, "kind": "Attention", "call": 1, "origin": True}


def test_pasa_is_finite_and_near_fp32(experiment):
    """The bounds of the task; without attention in the UNet the frames would be 23 dB from FP32."""
    result = experiment[0]
    assert result["gate"]["passed"]
    assert (run.MIN_PSNR, run.MIN_SSIM) == (45, 0.995)
    assert result["scores"]["max_score_before"] > 131_044 - 10_000
    assert result["scores"]["max_score_after"] < 1000


def test_the_bias_changes_no_function(experiment):
    """FP32 with scores near 131,072 is off by their rounding; PASA, which takes the bias away, is nearer."""
    runs, clips = experiment[0]["runs"], experiment[1]
    assert 0 < runs["fp32"]["rmse"] < 2e-4
    assert runs["pasa"]["rmse_to_no_bias"] < runs["fp32"]["rmse_to_no_bias"]
    assert 0.01 < clips["FP32"].std() < 0.5, "frames without content would agree with anything"
    assert abs(runs["pasa_base"]["rmse"] / runs["fp16_base"]["rmse"] - 1) <= 0.1, "without it both are equally far off"
    assert runs["fp16_base"]["first_nonfinite"] is None


def test_the_clips_and_the_report_are_written(experiment):
    result, clips, folder = experiment
    assert {path.name for path in folder.iterdir()} == {"video.mp4", "video.png"}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
    assert list(clips) == ["FP32", "FP16 scores", "PASA"]
    text = run.EXPERIMENT.markdown(result)
    for part in ("emulated", "| FP16 scores | 4 | 4 | not finite |", "All checks hold.", "131,044", "0.attn1, call 1"):
        assert part in text


def test_every_check_can_fail(experiment):
    runs = experiment[0]["runs"]

    def failed(**changes):
        altered = copy.deepcopy(runs)
        for name, change in changes.items():
            altered[name] |= change
        return [name for name, passed in run.judge(altered, tiny=True)["checks"].items() if not passed]

    assert failed() == []
    assert failed(pasa={"nonfinite_share": 0.1}) == ["pasa_finite"]
    assert failed(pasa={"first_nonfinite": {"module": "unet"}}) == ["pasa_finite"]
    assert failed(pasa={"black_frames": 1}) == ["pasa_not_black"]
    assert failed(fp16={"nonfinite_frames": 0, "black_frames": 0}) == ["fp16_breaks"]
    assert failed(pasa={"psnr": [90.0, 44.9]}) == failed(pasa={"psnr": [None]}) == ["psnr"]
    assert failed(pasa={"ssim": [0.994]}) == ["ssim"]
    assert failed(pasa_base={"rmse": runs["fp16_base"]["rmse"] * 1.11}) == ["no_farther_without_bias"]


def test_a_checkpoint_is_measured_as_it_is(tmp_path):
    """A folder written by diffusers, a user's picture, and the settings of the paper's script."""
    tiny_pipeline(seed=3).save_pretrained(tmp_path / "svd")
    picture = tmp_path / "picture.png"
    sample_image(90, 50).save(picture)
    result = run.run_video(str(tmp_path / "svd"), image=str(picture), offload=True, **SMALL)
    assert list(result["runs"]) == ["fp32", "fp16", "pasa"]
    assert result["fixture"] is None
    assert list(result["gate"]["checks"]) == ["pasa_finite", "pasa_not_black"]
    assert result["gate"]["passed"]
    assert 0 < result["runs"]["pasa"]["rmse"] < 1e-3
    other = run.run_video(str(tmp_path / "svd"), **SMALL)
    assert other["runs"]["pasa"]["rmse"] != result["runs"]["pasa"]["rmse"], "the picture must matter"


def test_half_precision_models(tmp_path):
    """All of the pipeline in FP16, as on a GPU: smaller than anywhere else, because a CPU is slow at it."""
    result = run.run_video(dtype="float16", **SMALL | {"height": 32, "width": 32})
    assert result["settings"]["model_dtype"] == "float16"
    assert result["gate"]["checks"]["pasa_finite"]
    assert result["gate"]["checks"]["fp16_breaks"]
    assert 1e-5 < result["runs"]["pasa"]["rmse"] < 5e-3, "FP16 convolutions are in it now"


@pytest.mark.parametrize(("options", "reason"), [({"frames": 1}, "frames=1"), ({"image": "no.png"}, "no.png")])
def test_bad_input_is_named_before_anything_runs(options, reason):
    with pytest.raises((ValueError, FileNotFoundError), match=reason):
        run.run_video(**options, progress=lambda *each: pytest.fail("ran"))


def test_missing_packages_are_named_before_anything_runs(monkeypatch):
    """Story: after six clips of the tiny pipeline, the command said that scikit-image was not installed."""
    found = metadata.distributions
    monkeypatch.setattr(metadata, "distributions", lambda name: [] if name == "scikit-image" else found(name=name))
    monkeypatch.setattr(run, "tiny_pipeline", lambda: pytest.fail("a pipeline was made"))
    with pytest.raises(FileNotFoundError, match=r"^not installed: scikit-image; run, .*pip install '\.\[video\]'$"):
        run.run_video()
    with pytest.raises(FileNotFoundError, match="'nowhere' is not a folder"):
        run.run_video("nowhere", image=None)


def test_defaults_are_the_papers_for_a_checkpoint():
    assert [paper for _, paper in clip.SIZES.values()] == [576, 1024, 25, 25]
    assert (clip.SEED, run.FPS) == (42, 7)
    assert clip.pick_dtype(None, torch.device("cuda")) == torch.float16
