"""The experiment of the issue, run once: the tiny pipeline, 4 frames of 128 x 128, as `pasa eval video` does it."""

from __future__ import annotations

import pytest
import transformers

from pasa.eval.models.video import run

transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def experiment():
    """(result, clips, lines of progress)."""
    lines = []
    result, clips = run.run_video(progress=lines.append)
    return result, clips, lines
