"""Run processes that form a process group on the CPU; see `run`.

They are forked from a server that has imported torch once, and meet through a file, so no port can be in use.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 60  # a group in which one rank waits forever must fail, not hang


def run(task: Callable[..., Any], ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """Return what `task(rank, *arguments)`, a module-level function, returned in each of `ranks` gloo processes."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "pasa", "tests.ranks"])
    every = [
        context.Process(target=_rank, args=(task, rank, ranks, str(folder), arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in every:
        process.start()
    until = time.monotonic() + SECONDS
    for process in every:
        process.join(max(0.0, until - time.monotonic()))
    hung = [rank for rank, process in enumerate(every) if process.is_alive()]
    for process in every:
        process.kill()
    told = "\n".join(path.read_text() for path in sorted(folder.glob("error.*")))
    if hung or told or any(process.exitcode for process in every):
        pytest.fail(f"ranks still running after {SECONDS} s: {hung}\n{told}")
    return [torch.load(folder / f"result.{rank}") for rank in range(ranks)]


def _rank(task: Callable[..., Any], rank: int, ranks: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        torch.save(task(rank, *arguments), f"{folder}/result.{rank}")
        dist.barrier()  # no rank leaves while another one still reads
        dist.destroy_process_group()
    except Exception:
        Path(f"{folder}/error.{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        sys.exit(1)
