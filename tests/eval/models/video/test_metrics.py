"""Metrics against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pasa.eval.models.video import metrics


@pytest.fixture
def clip():
    """Three frames of 16 x 16, values from 0.2 to 0.8."""
    return np.random.default_rng(0).uniform(0.2, 0.8, (3, 16, 16, 3)).astype(np.float32)


def test_psnr_and_rmse_of_a_constant_error(clip):
    """An error of 0.01 everywhere is 40 dB, and no flicker."""
    measured = metrics.compare(clip + np.float32(0.01), clip)
    assert measured["psnr"] == pytest.approx([40.0] * 3, abs=1e-3)
    assert measured["rmse"] == pytest.approx(0.01, rel=1e-4)
    assert measured["temporal_rmse"] == pytest.approx(0, abs=1e-6)
    assert all(0.9 < value < 1 for value in measured["ssim"])


def test_flicker_is_seen_where_it_is(clip):
    """One frame 0.03 brighter: two changes of three frames are off by 0.03, so the RMSE is 0.03; the frame is 30 dB."""
    flickering = clip.copy()
    flickering[1] += np.float32(10**-1.5)
    measured = metrics.compare(flickering, clip)
    assert measured["temporal_rmse"] == pytest.approx(10**-1.5, rel=1e-3)
    assert measured["psnr"] == [None, pytest.approx(30.0, abs=1e-2), None], "equal frames have no PSNR"
    assert measured["ssim"][0] == measured["ssim"][2] == pytest.approx(1)


def test_broken_frames_have_no_distance(clip):
    broken = clip.copy()
    broken[2, 5, 5, 0] = np.nan
    measured = metrics.compare(broken, clip)
    assert measured["psnr"][2] is measured["ssim"][2] is measured["rmse"] is measured["temporal_rmse"] is None


def test_describe(clip):
    assert metrics.describe_frames(clip) == {
        "nonfinite_share": 0.0,
        "nonfinite_frames": 0,
        "black_frames": 0,
    }
    clip[0] = np.nan
    clip[1] = 1 / 255
    measured = metrics.describe_frames(clip)
    assert (measured["nonfinite_frames"], measured["black_frames"]) == (1, 2)
    assert measured["nonfinite_share"] == pytest.approx(1 / 3)
    clip[1, 3, 3, 2] = 0.004
    assert metrics.describe_frames(clip)["black_frames"] == 1, "one value above 1/255 is enough"
    clip[2, 0, 0, 0] = np.inf
    assert metrics.describe_frames(clip)["nonfinite_frames"] == 2


def test_clips_of_different_shape_are_refused(clip):
    with pytest.raises(ValueError, match=r"\(2, 16, 16, 3\) and \(3, 16, 16, 3\)"):
        metrics.compare(clip[:2], clip)
