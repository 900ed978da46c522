"""Backends as this machine has them for CPU tensors, a tile that is pinned, and memory that holds garbage."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from pasa.eval.random_calls.cases import AbsentError
from pasa.ops import devices, registry
from pasa.ops.attention.ascend import backend as npu_backend

REFERENCE, SDPA, TRITON, NPU = "reference", "sdpa", "triton", "npu"


def absent(name: str) -> str | None:
    """Return why a backend cannot take tensors of the CPU; None if it can."""
    if name in (REFERENCE, SDPA):
        return None
    if name == TRITON:
        return devices.triton_missing()
    if importlib.util.find_spec("torch_npu") is not None:
        return "this machine has torch_npu: its kernels do not run on the CPU twin"
    return npu_backend.library_error()


@contextmanager
def available(name: str) -> Iterator[None]:
    """Serve CPU tensors by a backend, if it can run here: Triton's interpreter, or Ascend C kernels on a CPU twin."""
    why = absent(name)
    if why is not None:
        raise AbsentError(f"{name}: {why}")
    if name != NPU:
        yield
        return
    record = dataclasses.replace(registry.BACKENDS[NPU], devices=("cpu",), missing=lambda: None)
    with mock.patch.dict(registry.BACKENDS, {NPU: record}):
        yield


@contextmanager
def pinned_tile(number: int) -> Iterator[None]:
    """Take this candidate, modulo their number, in place of the fastest: bits may not depend on what took how long."""
    from triton.runtime.errors import OutOfResources

    from pasa.ops.attention.triton.prefill import launch as prefill

    def pick(device: torch.device, variant: str, tiles: tuple[Any, ...], run: Callable[[Any], object]) -> Any:
        tile = tiles[number % len(tiles)]
        if tile is not tiles[0]:
            try:
                run(tile)
            except OutOfResources:
                return tiles[0]
        return tile

    with mock.patch.object(prefill, "best_tile", pick):
        yield


@contextmanager
def poison(active: bool) -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN: an output or a workspace that is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if active:  # `fill_uninitialized_memory` goes with it
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
