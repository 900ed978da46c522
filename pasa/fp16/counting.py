"""Counters in a scaled model, which never wait for the device: values beyond the margin, and infinities."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pasa.fp16.containers import float_leaves
from pasa.fp16.editing import Models, module_at
from pasa.fp16.guards import Entered
from pasa.fp16.planning import LARGEST
from pasa.patching.copying import UncopiedHook

EVERY = 16
"""Values are compared with the margin in one forward pass of this many; infinities are looked for in each."""


class _Counts:
    """Largest values and counts on one device, with a copy on the host that arrives without a synchronisation.

    A copy may be one forward pass late, and a part of it later still; the device's own numbers are never late.
    """

    def __init__(self, watched: int, entries: int, limit: float, device: torch.device) -> None:
        self.limit: float | Tensor = limit
        self._watched = watched
        self.totals = torch.zeros(2, watched + entries, device=device)  # largest value, and passes beyond the limit
        self._largest, self._counts = self.totals
        self._largest[watched:] = torch.inf  # an output counts if it is not finite
        self._latest = torch.zeros(watched + entries, device=device)
        # Views are kept, because making one takes as much host time as a launch.
        self._latest_of, self._count_of = self._latest.unbind(), self._counts.unbind()
        self._looked = False
        self.host: Tensor | None = self.totals
        if device.type != "cpu":
            try:
                self.host = torch.zeros(2, watched + entries, pin_memory=True)
            except RuntimeError:  # no pinned memory on this device: a copy would wait, so only the report tells
                self.host = None

    def look(self, index: int, values: Tensor) -> None:
        """Take the largest magnitude of a watched result, in one pass over it and without a copy."""
        low, high = torch.aminmax(values)
        latest = self._latest_of[index]
        torch.maximum(latest, torch.maximum(high, -low).float(), out=latest)
        self._looked = True

    def check(self, index: int, values: Tensor) -> None:
        """Count a forward pass that returns an infinity or NaN, in five launches."""
        low, high = torch.aminmax(values)
        either = torch.sub(high, low, alpha=0)  # NaN if low is not finite; high - low could leave the range
        self._count_of[index].add_(either.sub_(either) != 0)  # inf - inf is NaN

    def start(self) -> None:
        """Forget what was counted on the sample; what it reached in FP16 is within the limit."""
        self.limit = self._largest.clamp(min=self.limit)
        self.totals.zero_()
        self._largest[self._watched :] = torch.inf

    def add(self) -> None:
        """Add the values of a forward pass that compared them to the totals."""
        if self._looked:
            torch.maximum(self._largest, self._latest, out=self._largest)
            self._counts += ~(self._latest <= self.limit)  # so that NaN counts
            self._latest.zero_()
            self._looked = False

    def send(self) -> None:
        """Begin to copy the totals to the host."""
        if self.host is not None and self.host is not self.totals:
            self.host.copy_(self.totals, non_blocking=True)


class _Thread(threading.local):
    """State of a thread; each replica of nn.DataParallel runs in one of its own."""

    def __init__(self) -> None:
        self.looks = False  # whether the running forward pass compares values with the margin
        self.handles: list[Any] = []  # of the hooks that do so


class Counters:
    """Counts values of scaled modules that pass the planned limit, and outputs that are not finite.

    The limit was planned in BF16, and FP16 rounds otherwise. So a run of the sample in FP16 comes first, until
    :meth:`start`: a module that passes the limit there has its largest value as its limit.

    Watched modules are hooked only while a pass compares: a hook that does nothing costs a step of decoding 5 us.

    Nothing here waits for the device. In a CUDA graph that was captured with these hooks, outputs that are not finite
    are counted at each replay, and the report shows them. Code that torch.compile compiles counts nothing.

    Parameters
    ----------
    models : mapping of str to torch.nn.Module
    watched : list of str
        Paths of modules whose results are compared with the limit, none of them an outermost one.
    entries : list of str
        Paths of outermost modules, whose results are checked for infinities.
    margin : float
        The planned limit is 65504 / margin.
    entered : Entered
        Tells which outermost modules are running. One within another one is not counted.
    """

    def __init__(self, models: Models, watched: list[str], entries: list[str], margin: float, entered: Entered) -> None:
        self.names = [*watched, *entries]
        self.margin, self.limit = margin, LARGEST / margin
        self._entered = entered
        self._calls = dict.fromkeys(entries, 0)
        self._thread = _Thread()
        self._warned: set[str] = set()
        self._started = False
        self._handles: list[Any] = []
        devices = {parameter.device for model in models.values() for parameter in model.parameters()}
        self._new_counts = partial(_Counts, len(watched), len(entries), self.limit)
        self._counts = {device: self._new_counts(device) for device in devices}
        self._watched = [
            (module_at(models, name), UncopiedHook(self._watching(index))) for index, name in enumerate(watched)
        ]
        for index, name in enumerate(entries, start=len(watched)):
            module = module_at(models, name)
            begin, end = UncopiedHook(self._entering(name)), UncopiedHook(self._leaving(index))
            self._handles.append(module.register_forward_pre_hook(begin))
            self._handles.append(module.register_forward_hook(end, always_call=True))

    def start(self) -> None:
        """Begin to count, after a run of the sample in FP16."""
        self._started, self._calls = True, dict.fromkeys(self._calls, 0)
        for counts in self._counts.values():
            counts.start()

    def remove(self) -> None:
        """Take all hooks out."""
        self._attend(looks=False)
        for handle in self._handles:
            handle.remove()

    def _attend(self, *, looks: bool) -> None:
        """Begin or end to compare in this thread, where an interrupted call may have left hooks behind."""
        self._thread.looks = looks
        while self._thread.handles:
            self._thread.handles.pop().remove()
        if looks:
            self._thread.handles += [module.register_forward_hook(hook) for module, hook in self._watched]

    def _watching(self, index: int) -> Callable[..., None]:
        def look(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and self._thread.looks:
                self._see(index, output, _Counts.look)

        return look

    def _entering(self, name: str) -> Callable[..., None]:
        def begin(module: torch.nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling() or self._entered.depth > 1:
                return
            self._attend(looks=not self._started or (self._calls[name] % EVERY == 0 and not _capturing()))
            self._calls[name] += 1

        return begin

    def _leaving(self, index: int) -> Callable[..., None]:
        def end(module: torch.nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or self._entered.depth:
                return
            self._attend(looks=False)
            self._see(index, output, _Counts.check)
            for counts in list(self._counts.values()):
                self._add(counts)

        return end

    def _see(self, index: int, output: Any, see: Callable[[_Counts, int, Tensor], None]) -> None:
        leaf = _first(output)
        if leaf is None or not leaf.numel():
            return
        counts = self._counts.get(leaf.device)
        if counts is None:
            if _capturing():  # memory of a graph would be cleared by each replay
                return
            counts = self._counts[leaf.device] = self._new_counts(leaf.device)
        see(counts, index, leaf.detach())

    def _add(self, counts: _Counts) -> None:
        """Add a forward pass, report what has arrived from the one before, and send the new totals."""
        counts.add()
        if not self._started or _capturing():
            return
        if counts.host is not None:
            self._warn(counts.host)
        counts.send()

    def _warn(self, host: Tensor) -> None:
        for name, (value, _) in self._beyond(host).items():
            if math.isfinite(value):
                what = f"reached {value:.4g}, {value / self.limit:.3g} times the planned 65504 / {self.margin:g}"
            else:
                what = "returned infinity or NaN"
            self._warn_once(
                name,
                f"to_fp16: {name or 'the model'} {what}: convert the original again, with this input as its sample",
            )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=3)

    def beyond(self) -> dict[str, tuple[float, int]]:
        """Return the modules that passed their limit, each with its largest value and a count; waits for the device."""
        found: dict[str, tuple[float, int]] = {}
        for counts in list(self._counts.values()):
            for name, (value, count) in self._beyond(counts.totals.cpu()).items():
                before = found.get(name, (0.0, 0))
                found[name] = value if not value <= before[0] else before[0], count + before[1]
        return found

    def _beyond(self, host: Tensor) -> dict[str, tuple[float, int]]:
        values, counts = host.tolist()
        return {self.names[index]: (values[index], int(count)) for index, count in enumerate(counts) if count}


def _first(output: Any) -> Tensor | None:
    """Return the first floating-point tensor of a result."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    return next((leaf for _, leaf in float_leaves(output)), None)


def _capturing() -> bool:
    """Return whether a CUDA graph is being captured, when nothing may be asked of the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
