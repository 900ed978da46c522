"""Record what a call does: which memory it allocates, and which kernels it launches on which addresses.

The recorder is a torch mode, so it sees every torch operation. Views are followed, allocations are counted, and any
other operation, such as a conversion or a check that reads data, makes the call one that is never repeated
(ops/plans.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

# torch loads torch.distributed.nn with torch._dynamo, at the first torch mode, profiler or compilation. Its functions
# keep the process group of that moment as a default. destroy_process_group then cannot end gloo's threads, and a
# process that exits beside them may abort. Loaded here, before a program makes its group, they keep none.
if torch.distributed.is_available():
    import torch.distributed.nn

ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
Place: TypeAlias = tuple[int, int]  # tensor and offset, as in `Operand`
Results = tuple[Tensor | None, ...]
Whole = TypeVar("Whole", bound=tuple[Tensor, ...])
_state = threading.local()


class Operand(NamedTuple):
    """Describe memory that a kernel reads or writes: a place in a tensor of the call.

    Attributes
    ----------
    source : int
        The tensor, counted over the inputs and then over the allocations.
    offset : int
        In bytes.
    dtype, size, stride
        Those of the tensor that was passed to the kernel.
    wrap : callable, optional
        Makes the kernel's argument of such a tensor.
    """

    source: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    wrap: Callable[[Tensor], Any] | None = None

    def tensor(self, source: Tensor) -> Any:
        """Return the kernel's argument, in the memory of its source."""
        start = (source.data_ptr() - source.untyped_storage().data_ptr() + self.offset) // self.dtype.itemsize
        view = torch.empty(0, dtype=self.dtype, device=source.device)
        view.set_(source.untyped_storage(), start, self.size, self.stride)
        return view if self.wrap is None else self.wrap(view)


class Step(NamedTuple):
    """Hold one launch: its operands, a `Place` for each that is passed as an address, and a function that launches."""

    operands: tuple[Place | Operand | None, ...]
    run: Callable[[Sequence[Any]], None]


class Recorder(TorchDispatchMode):
    """Record the allocations and launches of one call.

    Attributes
    ----------
    foreign : str
        The first thing that the call does beside, which cannot be repeated; empty if there is none.
    entered : bool
        Whether the backend that serves the call lets it be recorded.
    whole : (callable, tuple of int), optional
        What `repeat_whole` was called with.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = len(inputs)
        self.owners: list[Tensor | None] = list(inputs)
        self.sources: dict[int, int] = {id(x): at for at, x in enumerate(inputs) if x is not None}
        self.views: list[Tensor] = []  # kept, so that an id stays that of its tensor
        self.steps: list[Step] = []
        self.foreign, self.entered = "", False
        self.whole: tuple[Callable[..., Results], tuple[int, ...]] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not load torch._dynamo to keep it from tracing this mode.

        That takes seconds of the first call, and nothing is traced here: only calls that are not compiled are recorded.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self.sources[id(made)] = len(self.owners)
            self.owners.append(made)
        elif _is_view(func) and _share_memory(made, args[0]):
            if id(args[0]) in self.sources:
                self.views.append(made)
                self.sources[id(made)] = self.sources[id(args[0])]
        else:
            self.foreign = self.foreign or str(func)
        return made

    def place(self, x: Tensor, offset: int = 0) -> Place | None:
        """Return where memory lies that begins so many bytes into a tensor, or None if the call does not own it."""
        source = self.sources.get(id(x))
        owner = None if source is None else self.owners[source]
        if source is None or owner is None:
            self.foreign = self.foreign or "a tensor that is neither an input nor an allocation"
            return None
        return source, x.data_ptr() - owner.data_ptr() + offset

    def operand(self, x: Tensor) -> Operand | None:
        """Return where a tensor lies and what it is, or None for memory that the call does not own."""
        found = self.place(x)
        return found and Operand(*found, x.dtype, tuple(x.shape), x.stride())

    def input_of(self, x: Tensor) -> int | None:
        """Return which input a tensor is, or None if it is none as a whole."""
        source, offset = self.place(x) or (None, 0)
        owner = None if source is None else self.owners[source]
        if source is None or owner is None or source >= self.inputs or offset:
            return None
        same = (x.dtype, x.shape, x.stride()) == (owner.dtype, owner.shape, owner.stride())
        return source if same else None


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operation returns views of its first argument, and changes nothing."""
    aliases = [each.alias_info for each in (*func._schema.returns, *func._schema.arguments)]
    return func._schema.returns[0].alias_info is not None and not any(each and each.is_write for each in aliases)


def _share_memory(view: object, source: Tensor) -> bool:
    """Return whether a view is one: `contiguous` and `reshape`, which inference mode does not decompose, may copy."""
    return isinstance(view, Tensor) and view.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def recorder() -> Recorder | None:
    """Return the recorder of the call that this thread is in, or None."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Recorder) else None


@contextmanager
def waiting(record: Recorder) -> Iterator[None]:
    """Let a recorder wait for the call within, in this thread."""
    _state.waiting = record
    try:
        yield
    finally:
        _state.waiting = None


@contextmanager
def recorded(repeatable: bool) -> Iterator[None]:
    """Record what is done within, if a recorder waits for it and the serving backend's calls can be repeated."""
    record = getattr(_state, "waiting", None)
    if record is None or not repeatable:
        yield
        return
    _state.waiting, record.entered = None, True
    with record:
        yield


def repeat_whole(function: Callable[..., Whole], *tensors: Tensor) -> Whole:
    """Return what `function` returns for these tensors, and let a plan call it again, in place of recorded launches.

    It returns the first results of the operator, and what it does must depend on the geometry of its inputs alone. A
    plan may call it with `alone`, and then needs the first result only.
    """
    if (record := recorder()) is None:
        return function(*tensors)
    places = [record.input_of(x) for x in tensors]
    if None in places:
        record.foreign = record.foreign or "a part of an input"
    else:
        record.whole = function, tuple([place for place in places if place is not None])
    with unrecorded():
        return function(*tensors)


def unrecorded() -> Any:
    """Return a context for work that no later call has to repeat, such as measurements."""
    return _disable_current_modes()
