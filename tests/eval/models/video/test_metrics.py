"""Metrics against values worked out by hand."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from pasa.eval.models.video import metrics


@pytest.fixture
def clip():
    """Three frames of 16 x 16, values from 0.2 to 0.8."""
    return np.random.default_rng(0).uniform(0.2, 0.8, (3, 16, 16, 3)).astype(np.float32)


def test_psnr_and_rmse_of_a_constant_error(clip):
    """An error of 0.01 everywhere is 40 dB, and no flicker."""
    found = metrics.compare(clip + np.float32(0.01), clip)
    assert found["psnr"] == pytest.approx([40.0] * 3, abs=1e-3)
    assert found["rmse"] == pytest.approx(0.01, rel=1e-4)
    assert found["temporal_rmse"] == pytest.approx(0, abs=1e-6)
    assert all(0.9 < value < 1 for value in found["ssim"])


def test_flicker_is_seen_where_it_is(clip):
    """One frame 0.03 brighter: two changes of three frames are off by 0.03, so the RMSE is 0.03; the frame is 30 dB."""
    flickering = clip.copy()
    flickering[1] += np.float32(10**-1.5)
    found = metrics.compare(flickering, clip)
    assert found["temporal_rmse"] == pytest.approx(10**-1.5, rel=1e-3)
    assert found["psnr"] == [None, pytest.approx(30.0, abs=1e-2), None], "equal frames have no PSNR"
    assert found["ssim"][0] == found["ssim"][2] == pytest.approx(1)


def test_broken_frames_have_no_distance(clip):
    broken = clip.copy()
    broken[2, 5, 5, 0] = np.nan
    found = metrics.compare(broken, clip)
    assert found["psnr"][2] is found["ssim"][2] is found["rmse"] is found["temporal_rmse"] is None


def test_describe(clip):
    assert metrics.describe(clip) == {
        "nonfinite_share": 0.0,
        "nonfinite_frames": 0,
        "black_frames": 0,
        "temporal_difference": pytest.approx(0.2, abs=0.02),  # of two uniform numbers: a third of the width, 0.6
    }
    clip[0] = np.nan
    clip[1] = 1 / 255
    found = metrics.describe(clip)
    assert (found["nonfinite_frames"], found["black_frames"]) == (1, 2)
    assert found["nonfinite_share"] == pytest.approx(1 / 3)
    assert found["temporal_difference"] is None
    clip[1, 3, 3, 2] = 0.004
    assert metrics.describe(clip)["black_frames"] == 1, "one value above 1/255 is enough"
    clip[2, 0, 0, 0] = np.inf
    assert metrics.describe(clip)["nonfinite_frames"] == 2


def test_one_frame_has_no_motion(clip):
    assert metrics.describe(clip[:1])["temporal_difference"] is None
    assert metrics.compare(clip[:1], clip[:1])["temporal_rmse"] is None


def test_clips_of_different_shape_are_refused(clip):
    with pytest.raises(ValueError, match=r"\(2, 16, 16, 3\) and \(3, 16, 16, 3\)"):
        metrics.compare(clip[:2], clip)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """torch's hub folder, empty, with packages that stand in for `lpips` and torchvision."""

    class Distance(torch.nn.Module):
        def __init__(self, net, verbose):
            super().__init__()
            assert (net, verbose) == ("alex", False)

        def forward(self, x, y):
            assert x.shape[1] == 3
            assert -1 <= float(x.min()) < -0.5
            assert 0.5 < float(x.max()) <= 1
            return (x - y).abs().mean((1, 2, 3), keepdim=True)

    for name in ("lpips", "torchvision"):
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace()
        module.LPIPS = Distance
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    return tmp_path / "checkpoints"


def test_lpips_is_not_downloaded(clip, hub):
    assert metrics.lpips(clip, clip) == (
        None,
        f"{metrics.LPIPS_WEIGHTS} is not in torch's hub folder, and nothing is downloaded",
    )


def test_lpips_gets_frames_from_minus_1_to_1(clip, hub):
    hub.mkdir()
    (hub / metrics.LPIPS_WEIGHTS).touch()
    values, missing = metrics.lpips(np.array([clip[0] * 0, clip[1] * 0 + 1]), np.array([clip[0] * 0, clip[1] * 0]))
    assert values == pytest.approx([0, 2])
    assert missing is None


def test_lpips_says_which_package_is_missing(clip, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert metrics.compare(clip, clip)["lpips_missing"] == "lpips is not installed"
