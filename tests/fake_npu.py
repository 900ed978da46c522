"""An NPU that is not here: torch_npu can be imported, torch finds a chip, and tensors stay on the CPU."""

import importlib.machinery
import sys
import types

import pytest
import torch


def install(monkeypatch: pytest.MonkeyPatch, chip: str = "Ascend910B3") -> types.ModuleType:
    """Fake torch_npu, and one chip of this name; return the module."""
    module = types.ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    module.npu = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, get_device_name=lambda device=None: chip
    )
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(torch, "npu", module.npu, raising=False)
    return module
