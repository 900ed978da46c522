"""Repeat the launches of a call on tensors of the same geometry, with a fraction of the first call's work on the host.

Checks, the choice of a backend, tile sizes and compiled kernels depend on shapes, strides, dtypes and options, and not
on data. So the first call with a geometry records which memory it allocates and which kernels it launches. Later calls
allocate the same memory and launch the same kernels on the addresses of their tensors.

A call is recorded (ops/recording.py) only if this is all that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from pasa.ops.devices import is_current, on_device, warm, without_autocast
from pasa.ops.memory import MOST_BYTES, kept_memory, may_keep
from pasa.ops.recording import Operand, Place, Recorder, Results, Step, waiting

PLANS = 4096  # the most geometries that are kept; a decoded sequence adds one for every token, of a few kilobytes
ALIGNMENT = 256  # bytes: parts of the workspace are aligned as the allocator aligns tensors
REPEATED: dict[CustomOpDef, dict[str, Any]] = {}  # operators whose calls may have plans: the backends that may serve
_plans: dict[tuple[Any, ...], Plan | None] = {}  # None for calls that cannot be repeated
_missing: Any = object()


class Plan:
    """Hold the allocations and launches of all calls with one geometry."""

    def __init__(self, record: Recorder, results: Sequence[Tensor]) -> None:
        """Raise LookupError if the call does what a plan cannot repeat."""
        self.whole, self.empty = record.whole, (None,) * sum(x.numel() == 0 for x in results)
        self.used = [at for at in range(record.inputs) if record.owners[at] is not None]
        first: Any = record.owners[self.used[0]]
        self.keeps = may_keep(first)
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
        self._set_apart([x.nbytes if place else 0 for x, place in zip(results, made, strict=True)][1:])
        places |= {at: (at, 0) for at in range(inputs)}
        self._lay_out(record.steps, places, inputs)

    def _set_apart(self, sizes: list[int]) -> None:
        """Find places behind the workspace for all results but the first; `sizes` are theirs in bytes."""
        ends = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=self.bytes))
        self.missing = (None,) * len(sizes)
        self.apart = [start for start, size in zip(ends, sizes, strict=False) if size]
        self.bytes_alone = ends[-1]

    def _lay_out(self, steps: list[Step], places: dict[int, tuple[int, int]], inputs: int) -> None:
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
        results = sum(each is not None for each in self.results)
        apart = range(inputs + 1, inputs + results)  # the bases of all results but the first
        self.separable = self.results[0] is not None and not any(each.source in apart for each in self.tensors)
        self.steps = [
            (step.run, _pick(tuple([at if at >= 0 else len(addresses) - 1 - at for at in picked])))
            for step, picked in zip(steps, chosen, strict=True)
        ]

    def run(self, inputs: tuple[Tensor | None, ...], *, alone: bool = False) -> Results:
        """Return the results of a call on these inputs; None stands for a result without elements.

        With `alone`, None may stand for every result but the first.
        """
        first: Any = inputs[self.used[0]]
        if not is_current(first):
            with on_device(first):
                return self.run(inputs, alone=alone)
        if self.whole is not None:
            function, places = self.whole
            with without_autocast(first.device.type):
                return *function(*[inputs[place] for place in places], alone=alone), *self.empty
        alone = alone and self.keeps and self.separable and self.bytes_alone <= MOST_BYTES
        makers = (self.results[0], *self.missing) if alone else self.results
        results = tuple([make and make() for make in makers])
        owners: list[Any] = [*inputs, *[x for x in results if x is not None]]
        bases = [0 if x is None else x.data_ptr() for x in owners]
        if size := self.bytes_alone if alone else self.bytes:
            keeps = self.keeps and size <= MOST_BYTES
            memory = kept_memory(first, size) if keeps else first.new_empty(size, dtype=torch.uint8)
            start = memory.data_ptr()
            apart = self.apart if alone else []
            bases += [*[start + offset for offset in apart], start]
            owners += [*[None for _ in apart], memory]
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
    if op not in REPEATED:
        return op._init_fn(*arguments)
    key = _key(op, _places(op, False)(arguments), tensors)
    plan = _plans.get((*key, warm.devices), _missing)
    if plan is _missing:
        return _run_first(op, key, arguments)
    return op._init_fn(*arguments) if plan is None else plan.run(tensors)


def known(op: CustomOpDef, others: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> Plan | None:
    """Return the plan of a call, if there is one, by the arguments of an operator that are no tensors, and the others.

    An earlier call with equal arguments, and tensors of the same geometry, has passed all checks.
    """
    try:
        return _plans.get((*_key(op, others, tensors), warm.devices))
    except RuntimeError:  # sparse and nested tensors have no strides
        return None


def _key(op: CustomOpDef, others: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Return what calls have in common that have the same plan, in threads that are alike."""
    geometry = [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors]
    q = tensors[0] if tensors[0] is not None else tensors[2]  # behind the gradients, which may be missing
    captured = q is not None and q.is_cuda and torch.cuda.is_current_stream_capturing()
    return op, others, *geometry, *REPEATED[op].values(), captured


def _run_first(op: CustomOpDef, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """Run a call, and keep a plan of it if it can be repeated."""
    # One tensor may be passed twice, as k and v. Its aliases tell which of the two a kernel reads.
    aliases = tuple([x.detach() if isinstance(x, Tensor) else x for x in arguments])
    record = Recorder(tensors_of(op)(aliases))
    with waiting(record):
        results = op._init_fn(*aliases)
    try:
        plan = Plan(record, results) if record.entered else None
    except LookupError:
        plan = None
    if len(_plans) >= PLANS:
        _plans.clear()
    key = (*key, warm.devices)  # threads that are cold do not find what a warm one does
    _plans[key] = plan
    return results
