"""Calls are served with any Triton, and the list of backends says what a version lacks."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import triton

import pasa
from pasa.ops import devices, notices, registry
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.sdpa import backend as sdpa

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hopper(monkeypatch):
    """Simulate a machine with an H100; a test sets Triton's version."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    caches = registry.choose, notices.warn_once, sdpa._triton_guard
    for each in caches:
        each.cache_clear()
    yield monkeypatch
    for each in caches:
        each.cache_clear()


def serve():
    needs = ("cuda", torch.float16, 64, "none", ())
    return registry.choose(tuple(registry.BACKENDS.values()), None, needs, AttentionOptions().arguments)[2]


def status(name):
    return next(line for line in pasa.backends() if line.name == name)


@pytest.mark.parametrize("version", ["3.5.1", "3.2.0", "2.3.1"])
def test_an_old_triton_leaves_calls_to_the_fused_attention(hopper, version):
    """A Triton older than 3.6 is never loaded: the device's own attention serves, guarded by torch operators.

    Story: with Triton 3.3 the backend was chosen, and its import ended in an AttributeError.
    """
    hopper.setattr(triton, "__version__", version)
    assert serve() == "sdpa"
    assert not status("triton").available
    assert f"Triton {version[:3]} is too old" in status("triton").reason
    assert "triton>=3.6" in status("triton").reason
    assert status("sdpa").serves == ("cuda", "cpu")
    assert sdpa._triton_guard(torch.device("cuda", 0)) is None
    with pytest.raises(NotImplementedError, match="is too old"):
        registry.select(registry.Request("cuda", torch.float16, 64, "none"), "triton")


def test_a_new_triton_is_said_to_be_slower_once(hopper):
    """Kernels serve with a Triton that is not known, and one warning says what is off, why, and what to install.

    Story: with Triton 3.8 the Hopper kernel disappeared, and nobody was told.
    """
    hopper.setattr(triton, "__version__", "3.10.0+git")
    with pytest.warns(UserWarning, match="kernels for Hopper are off") as caught:
        assert serve() == "triton"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.choose.cache_clear()
        assert serve() == "triton"
    for text in (str(caught[0].message), status("triton").reason):
        assert "Triton 3.10" in text
        assert "pip install 'triton>=3.6,<3.10'" in text
    assert status("triton").available
    hopper.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    assert "Hopper" not in status("triton").reason  # such a GPU has no use for them


def test_a_triton_that_cannot_read_anchors_of_pages_is_said_to_be_slower(hopper):
    """Triton 3.7 fails to compile the kernel that reads pages with anchors; a call leaves them aside."""
    hopper.setattr(triton, "__version__", "3.7.1")
    with pytest.warns(UserWarning, match="anchors of pages are not read, as the compiler of Triton 3.7 fails"):
        assert serve() == "triton"
    assert "pip install 'triton>=3.6,<3.10,!=3.7.*'" in status("triton").reason


@pytest.mark.parametrize("version", [each for each in devices.TRITON_VERSIONS if each not in devices.NO_PAGE_ANCHORS])
def test_a_known_triton_is_not_mentioned(hopper, version):
    hopper.setattr(triton, "__version__", f"{version}.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serve() == "triton"
    assert status("triton").reason == registry.BACKENDS["triton"].label


@pytest.mark.parametrize(("version", "who"), [("3.6.0", "sdpa"), ("3.7.1", "sdpa"), ("3.8.0", "triton")])
def test_a_triton_that_does_not_compile_for_a_gpu_leaves_calls_to_the_fused_attention(hopper, version, who):
    """Triton 3.6 and 3.7 fail to compile the kernels of prefill for a B200."""
    hopper.setattr(torch.cuda, "get_device_capability", lambda *device: (10, 0))
    hopper.setattr(triton, "__version__", version)
    assert serve() == who
    refused = f"Triton {version[:3]} does not compile the kernels for sm_100 (pip install 'triton>=3.8,<3.10')"
    assert (status("triton").reason == refused) == (who == "sdpa")


def test_versions_are_compared_as_numbers(hopper):
    """Triton 3.10 is newer than 3.9, although its text comes before."""
    hopper.setattr(triton, "__version__", "3.10.0")
    assert devices.triton_too_old() is None
    assert registry.BACKENDS["triton"].missing() is None


def test_setup_asks_for_the_oldest_version_that_is_served():
    asked = re.findall(r'^TRITON = \["triton>=([\d.]+)"\]', (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE)
    assert asked == [devices.TRITON_VERSIONS[0]]


def test_the_versions_are_tested_by_the_long_suite():
    assert "test_triton.sh" in (ROOT / "scripts" / "test.sh").read_text("utf-8")
