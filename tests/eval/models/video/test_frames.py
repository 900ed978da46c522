"""Measures of frames against values worked out by hand, and files that other programs can read."""

from __future__ import annotations

import imageio.v3 as imageio
import numpy as np
import pytest

from pasa.eval.models.video import frames


@pytest.fixture
def clip():
    """Three frames of 33 x 41, a size that no codec likes, values from 0.2 to 0.8."""
    return np.random.default_rng(0).uniform(0.2, 0.8, (3, 33, 41, 3)).astype(np.float32)


def test_psnr_and_rmse_of_a_constant_error(clip):
    """An error of 0.01 everywhere is 40 dB, and no flicker."""
    measured = frames.compare(clip + np.float32(0.01), clip)
    assert measured["psnr"] == pytest.approx([40.0] * 3, abs=1e-3)
    assert measured["rmse"] == pytest.approx(0.01, rel=1e-4)
    assert measured["temporal_rmse"] == pytest.approx(0, abs=1e-6)
    assert all(0.9 < value < 1 for value in measured["ssim"])


def test_flicker_is_seen_where_it_is(clip):
    """One frame 0.03 brighter: two changes of three frames are off by 0.03, so the RMSE is 0.03; the frame is 30 dB."""
    flickering = clip.copy()
    flickering[1] += np.float32(10**-1.5)
    measured = frames.compare(flickering, clip)
    assert measured["temporal_rmse"] == pytest.approx(10**-1.5, rel=1e-3)
    assert measured["psnr"] == [None, pytest.approx(30.0, abs=1e-2), None], "equal frames have no PSNR"
    assert measured["ssim"][0] == measured["ssim"][2] == pytest.approx(1)


def test_broken_frames_have_no_distance(clip):
    broken = clip.copy()
    broken[2, 5, 5, 0] = np.nan
    measured = frames.compare(broken, clip)
    assert measured["psnr"][2] is measured["ssim"][2] is measured["rmse"] is measured["temporal_rmse"] is None


def test_broken_and_black_frames_are_counted(clip):
    assert frames.describe_frames(clip) == {"nonfinite_share": 0.0, "nonfinite_frames": 0, "black_frames": 0}
    clip[0], clip[1] = np.nan, 1 / 255
    measured = frames.describe_frames(clip)
    assert (measured["nonfinite_frames"], measured["black_frames"]) == (1, 2)
    assert measured["nonfinite_share"] == pytest.approx(1 / 3)
    clip[1, 3, 3, 2], clip[2, 0, 0, 0] = 0.004, np.inf
    measured = frames.describe_frames(clip)
    assert (measured["nonfinite_frames"], measured["black_frames"]) == (2, 1), "one value above 1/255 is enough"


def test_images_keep_their_values_and_nan_is_black(clip):
    (image, *_) = frames.to_images(clip)
    assert np.abs(np.asarray(image) / 255 - clip[0]).max() <= 0.5 / 255 + 1e-6
    assert not np.asarray(frames.to_images(np.full_like(clip, np.nan))[0]).any()


def test_saved_clips_hold_every_frame_side_by_side(tmp_path):
    dark, bright = (np.full((3, 32, 40, 3), value, np.float32) for value in (np.nan, 0.9))
    frames.save({"one": bright, "two": dark}, "one", tmp_path / "deep", fps=7)
    video = imageio.imread(tmp_path / "deep" / "video.mp4", plugin="FFMPEG")
    assert video.shape == (3, 32, 80, 3)
    assert video[:, :, 44:].mean() < 20 < 200 < video[:, :, :36].mean()


def test_contact_sheet_amplifies_the_difference_of_the_last_clip(clip):
    broken = np.full_like(clip, np.nan)
    sheet = np.asarray(frames.contact_sheet({"one": clip, "two": broken, "three": clip + np.float32(0.01)}, "one"))
    row = 33 + frames.LABEL
    assert sheet[3 * row + frames.LABEL :, :41].mean() > 240, "0.01 everywhere, amplified to the full range"
    assert not sheet[row + frames.LABEL : 2 * row].any()
    for last in (clip, broken):
        assert not np.asarray(frames.contact_sheet({"one": clip, "last": last}, "one"))[2 * row + frames.LABEL :].any()
