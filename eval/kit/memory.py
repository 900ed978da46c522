"""Peak memory between two points in time: of the device, or of the process where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

CLEAR_PEAK = "5"  # tells Linux to forget the peak of the resident set (proc_pid_clear_refs(5))


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type != "cpu":
        getattr(torch, device.type).reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # not Linux, or not allowed: the peak is then that of the process so far
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak since :func:`reset_peak` of the device, or of the process on a CPU; None if it is not known."""
    if device.type != "cpu":
        return int(getattr(torch, device.type).max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    peaks = [line.split() for line in lines if line.startswith("VmHWM:")]
    return int(peaks[0][1]) * 1024 if peaks else None


def held_bytes(device: torch.device) -> int | None:
    """Return the bytes that are allocated on a GPU now; None elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


@dataclass
class Added:
    """The most bytes that a block allocated beyond what was held before it, known at its end; None without a GPU."""

    bytes: int | None = None


@contextmanager
def added_peak(device: torch.device) -> Iterator[Added]:
    """Measure the memory of a block."""
    added, before = Added(), held_bytes(device)
    if before is not None:
        torch.cuda.reset_peak_memory_stats(device)
    yield added
    if before is not None:
        added.bytes = torch.cuda.max_memory_allocated(device) - before
