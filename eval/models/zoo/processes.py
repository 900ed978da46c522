"""Runs each architecture in a forked process of its own: none can stop the run, or leave anything behind in it."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

SECONDS = 90
GIGABYTES = 12
Record = dict[str, Any]


@dataclass(frozen=True)
class Child:
    """One architecture on its way."""

    item: Any
    process: ForkProcess
    answer: Connection
    ends: float


def run_all(
    items: Sequence[Any], work: Callable[[Any], Record], jobs: int, seconds: float = SECONDS
) -> Iterator[tuple[Any, Record]]:
    """Yield each item with its record as it is done; one that crashes or takes too long has a record that says so.

    `work` takes an item and returns what can be pickled; it runs in a child. There are so many `jobs` at once.
    """
    waiting, running = list(items), list[Child]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(waiting.pop(0), work, seconds))
        soonest = min(child.ends for child in running) - time.monotonic()
        ready = wait([child.answer for child in running], max(0.0, soonest))
        for child in [each for each in running if each.answer in ready or each.ends <= time.monotonic()]:
            running.remove(child)
            yield child.item, _end(child, f"not done after {seconds:.0f} s")


def _start(item: Any, work: Callable[[Any], Record], seconds: float) -> Child:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(item, work, sender))
    process.start()
    sender.close()
    return Child(item, process, receiver, time.monotonic() + seconds)


def _end(child: Child, why: str) -> Record:
    """Return the answer of a child, or how it ended."""
    try:
        return child.answer.recv() if child.answer.poll() else {"verdict": "crashed", "why": why}
    except EOFError:
        child.process.join()
        return {"verdict": "crashed", "why": f"its process ended with {child.process.exitcode}"}
    finally:
        child.process.kill()
        child.process.join()
        child.answer.close()


def _work(item: Any, work: Callable[[Any], Record], answer: Connection) -> None:
    """Run in the child: quiet, and with a limit on memory."""
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30,) * 2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    started = time.process_time()
    record = work(item)
    answer.send(record | {"seconds": round(time.process_time() - started, 1)})
