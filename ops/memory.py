"""Keep memory between calls, for what the launches of one call leave to each other.

To allocate takes the host as long as a launch. Launches on a stream run one after another, so all calls of a thread on
a stream can use the same memory.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

MOST_BYTES = 2**25  # a call that needs more allocates it; it takes long enough to hide that
STREAMS = 64  # of a thread, with memory: torch itself has 32 of each priority


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[int, int], Tensor] = {}


_kept = _OfThread()


def may_keep(x: Tensor) -> bool:
    """Return whether calls on x may use kept memory: on CUDA, but not in a graph, which owns its memory."""
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()


def kept_memory(x: Tensor, size: int) -> Tensor:
    """Return at least `size` bytes on the device of x, for launches on the current stream of a call that may keep them.

    What is in them may change with the next call.
    """
    place = _place(x)
    buffer = _kept.buffers.get(place)
    if buffer is None or buffer.numel() < size:
        if buffer is not None:  # calls of a growing cache need a little more each time
            size = max(size, min(2 * buffer.numel(), MOST_BYTES))
        if len(_kept.buffers) >= STREAMS:
            _kept.buffers.clear()
        buffer = _kept.buffers[place] = _allocate(x, size)
    return buffer


def _allocate(x: Tensor, size: int) -> Tensor:
    """Return memory for launches on the current stream, from torch's general pool, whatever the mode of this thread.

    A thread may be told to allocate from another pool. torch.compile does so before it captures a graph, and fails if
    that memory is kept. It is told to one thread, so that memory comes from a new one.
    """
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None

    def allocate() -> Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.uint8, device=x.device)

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(allocate).result()


def _place(x: Tensor) -> tuple[int, int]:
    index = x.device.index
    return (index, torch._C._cuda_getCurrentRawStream(index)) if x.is_cuda else (-1, 0)


def release_memory() -> None:
    """Free what this thread keeps, for measurements of a call's memory."""
    _kept.buffers.clear()
