"""All environment variables come from one table."""

from pathlib import Path

import pytest

from pasa.ops import envs


def test_default_and_override(monkeypatch):
    monkeypatch.delenv("PASA_CACHE_DIR", raising=False)
    assert envs.cache_dir() == Path("~/.cache/pasa").expanduser()
    monkeypatch.setenv("PASA_CACHE_DIR", "")
    assert envs.cache_dir() == Path("~/.cache/pasa").expanduser()
    monkeypatch.setenv("PASA_CACHE_DIR", "~/elsewhere")
    assert envs.cache_dir() == Path("~/elsewhere").expanduser()


def test_a_name_outside_the_table():
    with pytest.raises(KeyError, match="PASA_NONSENSE"):
        envs.read("PASA_NONSENSE")
