"""Backends as this machine has them: Triton's interpreter, and the Ascend C kernels on their CPU twin."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from pasa.eval.random_calls.fuzz.cases import AbsentError
from pasa.ops import devices, registry
from pasa.ops.attention.ascend import backend as npu_backend

REFERENCE, TRITON, NPU = "reference", "triton", "npu"


def absent(name: str) -> str | None:
    """Why tensors of the CPU cannot be given to it; None if they can."""
    if name == REFERENCE:
        return None
    if name == TRITON:
        return devices.triton_missing()
    if importlib.util.find_spec("torch_npu") is not None:
        return "this machine has torch_npu: its kernels do not run on the CPU twin"
    return npu_backend.library_error()


@contextmanager
def available(name: str) -> Iterator[None]:
    """Serve CPU tensors by it.

    Raises
    ------
    AbsentError
        If it cannot run here.
    """
    why = absent(name)
    if why is not None:
        raise AbsentError(f"{name}: {why}")
    if name != NPU:
        yield
        return
    record = dataclasses.replace(registry.BACKENDS[NPU], devices=("cpu",), missing=lambda: None)
    with mock.patch.dict(registry.BACKENDS, {NPU: record}):
        yield
