"""List the devices of this machine, and why kernels can or cannot run on them; on demand, never at import."""

from __future__ import annotations

import importlib.util

import torch

from pasa.ops import envs

TENSOR_CORES = (8, 0)  # Triton 3.6 compiles products for older GPUs (V100, T4) to scalar arithmetic
ASCEND_310P = "Ascend310P"  # begins the names of the chips of the Atlas 300I Duo and its kin: docs/ascend/310p.md


def device_types() -> tuple[str, ...]:
    """Return the types of the devices that torch can use on this machine."""
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    there = {"npu": npu is not None and npu.is_available(), "cuda": torch.cuda.is_available(), "cpu": True}
    return tuple(name for name, usable in there.items() if usable)


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


def npu_chip() -> str:
    """Return the name of this machine's NPU, such as Ascend910B3 or Ascend310P3; empty if there is none."""
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    return str(npu.get_device_name()) if npu is not None and npu.is_available() else ""
