"""List the devices of this machine, and why kernels can or cannot run on them; on demand, never at import."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pasa.ops import envs

TENSOR_CORES = (8, 0)  # Triton 3.6 compiles products for older GPUs (V100, T4) to scalar arithmetic
# Versions of Triton for which the kernels are compiled in scripts/test_triton.sh, Gluon's included, and whose C
# launcher ops/attention/triton/c_launcher.py calls. Older ones are refused, newer ones launch the kernels themselves.
TRITON_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
NO_PAGE_ANCHORS = ("3.7",)  # versions whose compiler fails on the kernel that reads the anchors of pages
HOPPER = (9, 0)
SM_100_SINCE = "3.8"  # the first version that compiles the kernels of prefill for sm_100 (B200)
ASCEND_310P = "Ascend310P"  # begins the names of the chips of the Atlas 300I Duo and its kin: docs/ascend/310p.md


class _OfThread(threading.local):
    devices: frozenset[torch.device] = frozenset()


warm = _OfThread()
"""Holds for which `devices` this thread has warmed up what a CUDA graph can only capture then. Plans of calls depend on
it, because what a warm thread does may invalidate the capture of a cold one."""


def device_types() -> tuple[str, ...]:
    """Return the types of the devices that torch can use on this machine."""
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    there = {"npu": npu is not None and npu.is_available(), "cuda": torch.cuda.is_available(), "cpu": True}
    return tuple(name for name, usable in there.items() if usable)


def capability(*device: torch.device) -> str:
    """Return the compute capability of a CUDA device, such as "9.0"; of the current one if none is named."""
    return ".".join(map(str, torch.cuda.get_device_capability(*device)))


def triton_missing() -> str | None:
    """Return why Triton kernels cannot run on this machine; None when they can."""
    chip = npu_chip()
    if chip.startswith(ASCEND_310P) and not envs.read("TRITON_INTERPRET"):
        return f"Triton has no path to an {chip}"
    if importlib.util.find_spec("triton") is None:
        on_npu = npu_missing() is None
        return "triton-ascend is not installed" if on_npu else "triton is not installed (pip install '.[triton]')"
    if envs.read("TRITON_INTERPRET"):
        return None
    if npu_missing() is None:
        if importlib.util.find_spec("triton.backends.ascend") is not None:
            return None
        return "the installed triton has no backend for an NPU: install triton-ascend"
    if torch.cuda.is_available():
        if (too_old := triton_too_old()) is not None:
            return too_old
        capability = torch.cuda.get_device_capability()
        if capability[0] == 10 and _number(triton_version()) < _number(SM_100_SINCE):
            known = _known_triton().replace(TRITON_VERSIONS[0], SM_100_SINCE)
            return f"Triton {triton_version()} does not compile the kernels for sm_100 (pip install '{known}')"
        if capability >= TENSOR_CORES:
            return None
        return f"Triton forms no tensor-core product for sm_{capability[0]}{capability[1]}, only from sm_80 on"
    return "torch finds neither a CUDA GPU nor an NPU (TRITON_INTERPRET=1 interprets the kernels on a CPU, slowly)"


def triton_too_old() -> str | None:
    """Return that the installed Triton is older than the oldest for which kernels are tested, or None."""
    version, oldest = triton_version(), TRITON_VERSIONS[0]
    if _number(version) >= _number(oldest):
        return None
    return f"Triton {version} is too old, the kernels need {oldest} or newer (pip install '{_known_triton()}')"


def triton_slower() -> str | None:
    """Return which fast paths of the Triton kernels are off on this machine, and why; None if none is."""
    if triton_missing() is not None or envs.read("TRITON_INTERPRET") or npu_missing() is None:
        return None
    version = triton_version()
    if version in NO_PAGE_ANCHORS:
        return (
            f"anchors of pages are not read, as the compiler of Triton {version} fails on the kernel that does, so "
            "decoding from pages takes longer where the bias of keys changes along a sequence "
            f"(pip install '{_known_triton()},!={version}.*')"
        )
    if version in TRITON_VERSIONS:
        return None
    off = "the kernels for Hopper are off, and " if torch.cuda.get_device_capability() == HOPPER else ""
    return (
        f"{off}calls take more time on the host: of Triton {version} neither Gluon nor the C launcher is known "
        f"(pip install '{_known_triton()}')"
    )


def triton_version() -> str:
    """Return the major and minor version of the installed Triton, which is imported for that."""
    version: str = importlib.import_module("triton").__version__
    return ".".join(version.split(".")[:2])


def _known_triton() -> str:
    """Return what pip takes for a version of Triton without slow paths."""
    major, minor = _number(TRITON_VERSIONS[-1])
    return f"triton>={TRITON_VERSIONS[0]},<{major}.{minor + 1}"


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def npu_missing() -> str | None:
    """Return why no NPU can be used on this machine; None when one can."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed (pip install '.[npu]')"
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    return None if npu is not None and npu.is_available() else "torch finds no NPU"


def is_current(x: Tensor) -> bool:
    """Return whether Triton, which launches on the current device, would launch on that of x."""
    return not x.is_cuda or x.device.index == torch._C._cuda_getDevice()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the current device is that of x, because Triton launches on the current device."""
    return nullcontext() if is_current(x) else torch.cuda.device(x.device)


def npu_chip() -> str:
    """Return the name of this machine's NPU, such as Ascend910B3 or Ascend310P3; empty if there is none."""
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    return str(npu.get_device_name()) if npu is not None and npu.is_available() else ""


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Return a context without autocast, which would change the arithmetic that the options state.

    Autocast is rarely on and turning it off takes time, so the context is empty where it is off.
    """
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
