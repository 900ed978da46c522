"""transformers older than the oldest supported version is refused; setup.py and the scripts name that same version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pasa
from pasa.patching.versions import OLDEST

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("version", ["4.51.3", "4.53.3", "4.54.0", "4.54.1", "4.57.6", "5.0.0rc1", "6.1"])
def test_older_versions_are_refused_by_name(tiny, monkeypatch, version):
    """An older transformers is refused with its version.

    Story: 4.51 failed with "No module named 'transformers.masking_utils'".
    """
    model = tiny("qwen2")
    monkeypatch.setattr("transformers.__version__", version)  # by name: importing a model replaces the module
    if version < "4.54.1":
        message = rf"needs transformers 4\.54\.1 or newer, and {re.escape(version)} is installed: pip install 'trans"
        with pytest.raises(ImportError, match=message):
            pasa.patch_pipeline(model)
    else:
        pasa.patch_pipeline(model).unpatch()


def test_setup_asks_for_the_oldest_version_that_is_served():
    asked = re.findall(r'^TRANSFORMERS = .*"transformers>=([\d.]+)"', (ROOT / "setup.py").read_text("utf-8"), re.M)
    assert asked == [".".join(map(str, OLDEST))]


def test_the_versions_are_tested_by_the_long_suite():
    script = (ROOT / "scripts" / "test.sh").read_text("utf-8")
    assert "test_transformers.sh" in script
    assert "test_transformers_suite.sh" in script
