"""The experiment of the issue, run once: the tiny pipeline, 4 frames of 128 x 128, as `pasa eval video` does it."""

from __future__ import annotations

import pytest
import transformers

from pasa.eval.models.video import run

transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def experiment(tmp_path_factory):
    """Return (result, clips by title, lines of progress, folder with the clips)."""
    lines, clips, folder = [], {}, tmp_path_factory.mktemp("clips")
    with pytest.MonkeyPatch.context() as patch:
        saved = run.save
        patch.setattr(run, "save", lambda shown, *rest: (clips.update(shown), saved(shown, *rest)))
        result = run.run_video(folder=folder, progress=lambda done, total, label: lines.append(label))
    return result, clips, lines, folder
