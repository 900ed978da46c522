"""Skip tests that the installed transformers is too old for."""

from __future__ import annotations

import re

import pytest
import transformers

WRITTEN_FOR = (5, 23)
"""The version that the tests were written for; only an older version may lack an architecture."""

INSTALLED = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))


def since(version: str, why: str) -> pytest.MarkDecorator:
    """Skip the test with an older transformers, and say why."""
    needed = tuple(map(int, version.split(".")))
    return pytest.mark.skipif(needed > INSTALLED, reason=f"transformers {transformers.__version__}: {why}")


def skip_unless_known(name: str) -> None:
    """Skip the test if the installed transformers is too old to have this class."""
    if INSTALLED < WRITTEN_FOR and not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


def skip_diffusers() -> None:
    """Skip the test if the installed diffusers cannot be imported beside an older transformers."""
    if INSTALLED < (5, 0):
        pytest.skip(f"the installed diffusers needs a newer transformers than {transformers.__version__}")
