"""List the devices of this machine, and why kernels can or cannot run on them; on demand, never at import."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pasa.ops import envs

TENSOR_CORES = (8, 0)  # Triton 3.6 compiles products for older GPUs (V100, T4) to scalar arithmetic


def device_types() -> tuple[str, ...]:
    """Return the types of the devices that torch can use on this machine."""
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    there = {"npu": npu is not None and npu.is_available(), "cuda": torch.cuda.is_available(), "cpu": True}
    return tuple(name for name, usable in there.items() if usable)


def triton_missing() -> str | None:
    """Return why Triton kernels cannot run on this machine; None when they can."""
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
        capability = torch.cuda.get_device_capability()
        if capability >= TENSOR_CORES:
            return None
        return f"Triton forms no tensor-core product for sm_{capability[0]}{capability[1]}, only from sm_80 on"
    return "torch finds neither a CUDA GPU nor an NPU (TRITON_INTERPRET=1 interprets the kernels on a CPU, slowly)"


def npu_missing() -> str | None:
    """Return why no NPU can be used on this machine; None when one can."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed (pip install '.[npu]')"
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    return None if npu is not None and npu.is_available() else "torch finds no NPU"


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the current device is that of x, because Triton launches on the current device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
