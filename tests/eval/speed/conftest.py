"""A whole run of the benchmark, without a device."""

from typing import Any

import pytest

from pasa.eval.speed import run, targets
from tests.eval.speed.fakes import BANDWIDTH, ENTRANTS, TINY, TINY_BIASED, TINY_DECODE, FakeClock


@pytest.fixture(scope="session")
def result() -> dict[str, Any]:
    """Run everything on the CPU, with a target of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(targets.TARGETS, ("tiny", "eager"), (1.0, 1.5, 2.0, None))
        patch.setitem(targets.TARGETS, ("decode", "eager"), (None, None, None, 1.15))
        patch.setitem(targets.PORTABLE, ("tiny", "eager"), (1.0, None, 1.3, None))
        return run.measure((TINY, TINY_DECODE, TINY_BIASED), ENTRANTS, FakeClock(), BANDWIDTH, rounds=3)
