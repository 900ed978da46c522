"""Profiles of one decoding step: kernels of the device by name, time of the host by function."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from pasa.eval.kit.timing import now
from pasa.eval.models.generation.runs import Marks, Prompts, Run

FIRST = 2  # the first step that is watched: the prompt is step 0, and step 1 allocates what later ones reuse


@dataclass(frozen=True)
class Entry:
    """A kernel or a function: the microseconds that it takes itself in a step, and how often it is called in one."""

    name: str
    us: float
    calls: float


def kernels(run: Run, prompts: Prompts, new_tokens: int) -> list[Entry]:
    """Let a run generate; return the kernels of a decoding step, the longest first, by torch's profiler.

    Without a GPU they are torch's operators.
    """
    on_gpu = prompts.ids.device.type == "cuda"
    profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
    steps = _watch(run, prompts, new_tokens, profiler.start, profiler.stop)
    entries = [
        Entry(
            each.key, (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / steps, each.count / steps
        )
        for each in profiler.key_averages()
        if on_gpu == (each.device_type.name == "CUDA")
    ]
    return sorted(entries, key=lambda each: -each.us)


def functions(run: Run, prompts: Prompts, new_tokens: int) -> list[Entry]:
    """Let a run generate; return the functions that the host calls in a decoding step, the longest first.

    Python's profiler makes calls of Python functions slower, so shares are too large where there are many short calls.
    """
    profiler = cProfile.Profile()
    steps = _watch(run, prompts, new_tokens, profiler.enable, profiler.disable)
    entries = [
        Entry(_function_name(*place), 1e6 * own / steps, calls / steps)
        for place, (_, calls, own, *_) in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(entries, key=lambda each: -each.us)


def _function_name(file: str, line: int, name: str) -> str:
    """Return such as ``sdpa.py:12 attend``; built-in functions have no file."""
    return name if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"


def _watch(run: Run, prompts: Prompts, new_tokens: int, start: Callable[[], object], stop: Callable[[], object]) -> int:
    """Let a run generate, between `start` and `stop` from step `FIRST` to the last; return the number of steps."""
    device: torch.device = prompts.ids.device

    def on_step(step: int) -> None:
        now(device)
        if step == FIRST - 1:
            start()
        if step == new_tokens - 1:
            stop()

    run.generate(prompts, new_tokens, Marks(device, on_step))
    return new_tokens - FIRST
