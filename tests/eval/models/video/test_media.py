"""Files can be read back, by other programs than those that wrote them."""

from __future__ import annotations

import imageio.v3 as imageio
import numpy as np
import pytest

from pasa.eval.models.video import media


@pytest.fixture
def clips():
    """Three clips of 3 frames, 33 x 41, a size that no codec likes; the second broken."""
    frames = np.random.default_rng(0).uniform(0, 1, (3, 33, 41, 3)).astype(np.float32)
    return {"one": frames, "two": np.full_like(frames, np.nan), "three": frames + np.float32(0.01)}


def test_images_keep_their_values_and_nan_is_black(clips):
    (image, *_) = media.to_images(clips["one"])
    assert np.abs(np.asarray(image) / 255 - clips["one"][0]).max() <= 0.5 / 255 + 1e-6
    assert not np.asarray(media.to_images(clips["two"])[0]).any()


def test_saved_clips_hold_every_frame_side_by_side(tmp_path):
    dark, bright = (np.full((3, 32, 40, 3), value, np.float32) for value in (np.nan, 0.9))
    media.save({"one": bright, "two": dark}, "one", tmp_path / "deep", fps=7)
    video = imageio.imread(tmp_path / "deep" / "video.mp4", plugin="FFMPEG")
    assert video.shape == (3, 32, 80, 3)
    assert video[:, :, 44:].mean() < 20 < 200 < video[:, :, :36].mean()


def test_contact_sheet_amplifies_the_difference_of_the_last_clip(clips):
    sheet = np.asarray(media.contact_sheet(clips, "one"))
    row = 33 + media.LABEL
    difference = sheet[3 * row + media.LABEL :, :41]
    assert difference.mean() > 240, "0.01 everywhere, amplified to the full range"
    assert not sheet[row + media.LABEL : 2 * row].any()


def test_contact_sheet_of_equal_and_of_broken_clips(clips):
    same = {"one": clips["one"], "again": clips["one"]}
    assert not np.asarray(media.contact_sheet(same, "one"))[2 * 51 + media.LABEL :].any()
    broken = {"one": clips["one"], "two": clips["two"]}
    assert not np.asarray(media.contact_sheet(broken, "one"))[2 * 51 + media.LABEL :].any()
