"""Repeat the launches of a call on tensors of the same geometry, with a fraction of the first call's work on the host.

Checks, the choice of a backend, tile sizes and compiled kernels depend on shapes, strides, dtypes and options, and not
on data. So the first call with a geometry records which memory it allocates and which kernels it launches. Later calls
allocate the same memory and launch the same kernels on the addresses of their tensors.

A call is recorded only if this is all that it does. The recorder is a torch mode, so it sees every torch operation.
Views are followed, allocations are counted, and any other operation, such as a conversion or a check that reads data,
makes the call one that is never repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from pasa.ops.devices import on_device, warm, without_autocast

# torch loads torch.distributed.nn with torch._dynamo, at the first torch mode, profiler or compilation. Its functions
# keep the process group of that moment as a default. destroy_process_group then cannot end gloo's threads, and a
# process that exits beside them may abort. Loaded here, before a program makes its group, they keep none.
if torch.distributed.is_available():
    import torch.distributed.nn

PLANS = 4096  # the most geometries that are kept; a decoded sequence adds one for every token, of a few kilobytes
ALIGNMENT = 256  # bytes: parts of the workspace are aligned as the allocator aligns tensors
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
REPEATED: dict[CustomOpDef, dict[str, Any]] = {}  # operators whose calls may have plans: the backends that may serve
_plans: dict[tuple[Any, ...], Plan | None] = {}  # None for calls that cannot be repeated
_missing: Any = object()
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
def recorded(repeatable: bool) -> Iterator[None]:
    """Record what is done within, if a recorder waits for it and the serving backend's calls can be repeated."""
    waiting = getattr(_state, "waiting", None)
    if waiting is None or not repeatable:
        yield
        return
    _state.waiting, waiting.entered = None, True
    with waiting:
        yield


def repeat_whole(function: Callable[..., Whole], *tensors: Tensor) -> Whole:
    """Return what `function` returns for these tensors, and let a plan call it again, in place of recorded launches.

    It returns the first results of the operator, and what it does must depend on the geometry of its inputs alone.
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


class Plan:
    """Hold the allocations and launches of all calls with one geometry."""

    def __init__(self, record: Recorder, results: Sequence[Tensor]) -> None:
        """Raise LookupError if the call does what a plan cannot repeat."""
        self.whole, self.empty = record.whole, (None,) * sum(x.numel() == 0 for x in results)
        self.used = [at for at in range(record.inputs) if record.owners[at] is not None]
        if self.whole is not None and not record.foreign and not record.steps:
            return
        made = [record.place(x) if x.numel() else None for x in results]
        if record.foreign or record.whole or not record.steps:
            raise LookupError(record.foreign or "a call without a launch, or with others beside it")
        owners, inputs = record.owners, record.inputs
        self.results: list[Callable[[], Tensor] | None] = []
        places: dict[int, tuple[int, int]] = {}  # source: base, and offset in bytes
        bases = inputs
        for x, place in zip(results, made, strict=True):
            if place is None:
                self.results.append(None)
                continue
            # On the host, this takes half of the time of torch.empty with a dtype and a device.
            self.results.append(partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device))
            source, offset = place
            owner = owners[source]
            whole = owner is not None and offset == 0 and x.nbytes == owner.nbytes and _is_dense(x)
            if source < inputs or source in places or not whole:
                raise LookupError("a result that is not an allocation of its own")
            places[source] = bases, 0
            bases += 1
        rest = [(at, x.nbytes) for at, x in enumerate(owners) if at >= inputs and at not in places and x is not None]
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for _, size in rest))
        places |= {at: (bases, start) for (at, _), start in zip(rest, [0, *ends], strict=False)}
        self.bytes = ends[-1] if ends else 0
        places |= {at: (at, 0) for at in range(inputs)}
        self._lay_out(record.steps, places)

    def _lay_out(self, steps: list[Step], places: dict[int, tuple[int, int]]) -> None:
        """List the distinct addresses and tensors that the launches need, and which of them each launch takes."""
        addresses: dict[Place, int] = {}
        tensors: dict[Operand, int] = {}
        chosen: list[list[int]] = []  # the n-th address as n, and the n-th tensor as -1 - n
        for step in steps:
            chosen.append([])
            for operand in step.operands:
                if operand is None:
                    continue
                source, offset, *_ = operand
                base, start = places[source]
                if isinstance(operand, Operand):
                    moved = operand._replace(source=base, offset=start + offset)
                    chosen[-1].append(-1 - tensors.setdefault(moved, len(tensors)))
                else:
                    chosen[-1].append(addresses.setdefault((base, start + offset), len(addresses)))
        self.addresses, self.tensors = list(addresses), list(tensors)
        self.steps = [
            (step.run, _pick(tuple([at if at >= 0 else len(addresses) - 1 - at for at in picked])))
            for step, picked in zip(steps, chosen, strict=True)
        ]

    def run(self, inputs: tuple[Tensor | None, ...]) -> Results:
        """Return the results of a call on these inputs; None stands for a result without elements."""
        first: Any = inputs[self.used[0]]
        if self.whole is not None:
            function, places = self.whole
            with on_device(first), without_autocast(first.device.type):
                return *function(*[inputs[place] for place in places]), *self.empty
        with on_device(first):
            results = tuple([make and make() for make in self.results])
            owners: list[Any] = [*inputs, *[x for x in results if x is not None]]
            if self.bytes:
                owners.append(first.new_empty(self.bytes, dtype=torch.uint8))
            bases = [0 if x is None else x.data_ptr() for x in owners]
            operands: list[Any] = [bases[base] + offset for base, offset in self.addresses]
            for operand in self.tensors:
                operands.append(operand.tensor(owners[operand.source]))
            for run, pick in self.steps:
                run(pick(operands))
        return results


def _is_dense(x: Tensor) -> bool:
    """Return whether a tensor is contiguous, (B, H, S, D) also in the memory order of (B, S, H, D)."""
    return x.is_contiguous() or (x.dim() == 4 and x.transpose(1, 2).is_contiguous())


def _pick(places: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks the elements at these places; `itemgetter` of one place returns no tuple."""
    if len(places) == 1:
        (place,) = places
        return lambda x: (x[place],)
    return itemgetter(*places)


@cache
def _places(op: CustomOpDef, tensors: bool) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    schema = enumerate(op._opoverload._schema.arguments)
    return itemgetter(*(place for place, argument in schema if ("Tensor" in str(argument.type)) is tensors))


def tensors_of(op: CustomOpDef) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that picks the tensors from all arguments of an operator, with None for omitted ones."""
    return _places(op, True)


def run(op: CustomOpDef, arguments: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> Any:
    """Return what the implementation of an operator returns, except that None may stand for an empty tensor.

    `tensors` are those among the arguments. The caller has checked that no mode, subclass or autograd has to see the
    call.
    """
    backends = REPEATED.get(op)
    if backends is None:
        return op._init_fn(*arguments)
    geometry = [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors]
    q = tensors[0] if tensors[0] is not None else tensors[2]  # behind the gradients, which may be missing
    captured = q is not None and q.is_cuda and torch.cuda.is_current_stream_capturing()
    key = (op, _places(op, False)(arguments), *geometry, *backends.values(), captured)
    plan = _plans.get((*key, warm.devices), _missing)
    if plan is _missing:
        return _run_first(op, key, arguments)
    return op._init_fn(*arguments) if plan is None else plan.run(tensors)


def _run_first(op: CustomOpDef, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """Run a call, and keep a plan of it if it can be repeated."""
    # One tensor may be passed twice, as k and v. Its aliases tell which of the two a kernel reads.
    aliases = tuple([x.detach() if isinstance(x, Tensor) else x for x in arguments])
    _state.waiting = record = Recorder(tensors_of(op)(aliases))
    try:
        results = op._init_fn(*aliases)
    finally:
        _state.waiting = None
    try:
        plan = Plan(record, results) if record.entered else None
    except LookupError:
        plan = None
    if len(_plans) >= PLANS:
        _plans.clear()
    _plans[(*key, warm.devices)] = plan  # threads that are cold do not find what a warm one does
    return results
