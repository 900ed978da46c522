"""What a call finds around it: a tile that is given, and memory that holds garbage."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def pinned_tile(number: int) -> Iterator[None]:
    """Take this candidate, modulo their number, in place of the fastest: bits may not depend on what took how long."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
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
def poison(wanted: bool) -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN: an output or a workspace that is read before it is written shows."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # `fill_uninitialized_memory` goes with it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
