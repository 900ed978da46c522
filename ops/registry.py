"""Choose the backend that serves a call. The choice is made only here.

It is made from the records in `ops/backends.py`, and among backends that give one guarantee from measured times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import torch

from pasa.ops import measured, notices
from pasa.ops.attention.call import FEATURES, Call, Results, capturing
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.backends import ASCEND_C, HEAD_DIMS, REFERENCE, SDPA, TRITON, Backend, Request
from pasa.ops.devices import capability, device_types

EMULATED = """pasa: {device} tensors are served by backend 'reference', an emulation: {why}. It rounds step by step as \
an NPU does and is made for checks, not for speed: on an H200 it takes over 100 times as long as SDPA \
(to silence: warnings.filterwarnings("ignore", "pasa: .* an emulation", UserWarning))"""
SLOWER = "pasa: backend {name!r} is slower here than it could be: {why}"
FALLBACK = "pasa: {device} tensors are served by backend {name!r} ({label}): {why}"
UNASKED = tuple(feature for feature in FEATURES if feature != "diagnostics")  # a call may have them unknowingly
BACKENDS: dict[str, Backend] = {each.name: each for each in (ASCEND_C, TRITON, SDPA, REFERENCE)}


def register(backend: Backend) -> None:
    """Add a backend; raises ValueError if the name is taken."""
    if backend.name in BACKENDS:
        raise ValueError(f"backend {backend.name!r} is already registered")
    BACKENDS[backend.name] = backend


def select(request: Request, name: str | None = None) -> Backend:
    """Return the backend called `name`, or the one of highest priority that can serve the request.

    Raises
    ------
    ValueError
        If no backend has that name.
    NotImplementedError
        If no backend can serve the request; the message has the reasons of each.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend={name!r} is not registered; registered: {sorted(BACKENDS)}")
    candidates = [BACKENDS[name]] if name else sorted(BACKENDS.values(), key=lambda b: -b.priority)
    refused = {}
    for backend in candidates:
        reasons = backend.refusals(request, by_name=name is not None)
        if not reasons:
            return backend
        refused[backend.name] = "; ".join(reasons)
    reasons_by_name = " | ".join(f"{backend}: {why}" for backend, why in refused.items())
    raise NotImplementedError(f"no backend can serve this call: {reasons_by_name}")


@cache
def choose(
    registered: tuple[Backend, ...],
    backend: str | None,
    needs: tuple[str, torch.dtype, int, str, tuple[str, ...]],
    arithmetic: tuple[Any, ...],
) -> tuple[ModuleType, AttentionOptions, str]:
    """Return the module that serves a kind of call, the call's options, and the backend's name.

    `arithmetic` are the fields of the call's `AttentionOptions`, `needs` the other fields of its `Request`.
    `registered` is only part of the cache key, so that a newly registered backend is considered. A choice is cached for
    the whole process, because the machine does not change. A refusal is not cached.
    """
    options = AttentionOptions(*arithmetic)
    request = Request(*needs, options)
    chosen = select(request, backend)
    if backend is None:
        warn_of_fallback(request, chosen)
    if (slower := chosen.slower()) is not None:
        notices.warn_once(SLOWER.format(name=chosen.name, why=slower))
    faster = [] if backend else _faster(request, chosen)
    return ByShape(chosen, faster) if faster else chosen.load(), options, chosen.name


class ByShape(ModuleType):
    """Serve each call by the backend that was measured to be faster for its shape, or else by the preferred one.

    It takes the place of the module of the preferred backend, by which calls are differentiated.
    """

    def __init__(self, preferred: Backend, faster: Iterable[Backend]) -> None:
        super().__init__(preferred.module)
        self.preferred, self.faster = preferred, {each.name: each for each in faster}
        self.backend_of = lru_cache(maxsize=measured.SHAPES)(self._backend_of)

    def attend(self, call: Call) -> Results:
        """Attend by the backend for the shape of the call, a dense one without features."""
        mask = "none" if call.mask is None else "bool" if call.mask.dtype == torch.bool else "float"
        device, captured = call.q.device, capturing(call.q)
        eager, in_graph = (
            self.backend_of(device, call.q.shape, call.k.shape, call.is_causal, mask, each) for each in (False, True)
        )
        chosen = in_graph if captured else eager
        if captured and chosen is not self.preferred and not chosen.load().is_warm(device):
            chosen = self.preferred
        for each in {eager, in_graph} - {self.preferred}:
            if not captured:  # a graph may follow
                each.load().warm_up(device)
        results: Results = chosen.load().attend(call)
        return results

    def _backend_of(
        self, device: torch.device, q_shape: torch.Size, k_shape: torch.Size, is_causal: bool, mask: str, captured: bool
    ) -> Backend:
        (batch, heads, rows, dim), (_, kv_heads, keys, _) = q_shape, k_shape
        shape = measured.Shape(dim, is_causal, mask, batch * heads, batch * kv_heads, rows, keys)
        return self.faster.get(measured.chosen(_capability(device), shape, captured), self.preferred)


@cache
def _capability(device: torch.device) -> str:
    return capability(device)


def _faster(request: Request, preferred: Backend) -> list[Backend]:
    """Return the backends that were measured to be faster than the preferred one for some shapes of such calls.

    FP16 calls with default options were measured, whose guarantee is the same on all backends that serve them.
    """
    plain = request.dtype == torch.float16 and not request.features and request.options == AttentionOptions()
    if request.device != "cuda" or not plain:
        return []
    names = measured.rivals(capability(), request.head_dim, request.mask) - {preferred.name}
    return [BACKENDS[name] for name in sorted(names & BACKENDS.keys()) if not BACKENDS[name].refusals(request)]


def state(backend: Backend) -> str:
    """Return how a backend computes, and what is special on this machine: slow paths, and shapes that it takes over."""
    text = backend.state()
    preferred = server("cuda") if "cuda" in device_types() else None
    if preferred is None or backend is preferred:
        return text
    here = [each for each in measured.table() if each.capability == capability()]
    taken = [each for each in here if backend.name in (each.best(False), each.best(True))]
    dims = ", ".join(map(str, sorted({each.shape.dim for each in taken})))
    like = f"{len(taken)} of {len(here)} shapes measured on such a GPU (head dim {dims})"
    graphs = sum(each.best(False) != backend.name for each in taken)
    alone = f", in {graphs} of them in a CUDA graph alone" if graphs else ""
    return (
        f"{text}; serves calls like {like}, because it is faster there than {preferred.name}{alone}" if taken else text
    )


def provider(function: str, device: str, head_dim: int = 0) -> ModuleType | None:
    """Return the module of the preferred backend that offers `function` for a device type, or None.

    Functions are `write_pages` and `count_scores`. If the result is None, the caller uses the reference's function.
    A backend is skipped if `head_dim` exceeds its largest; leave `head_dim` out if the function does not depend on it.
    """
    return _find_provider(tuple(BACKENDS.values()), function, device, head_dim)


@cache
def _find_provider(registered: tuple[Backend, ...], function: str, device: str, head_dim: int) -> ModuleType | None:
    for backend in sorted(registered, key=lambda each: -each.priority):
        offered = function in backend.functions.get(device, ()) and head_dim <= backend.head_dims[1]
        if offered and backend.missing() is None:
            return backend.load()
    return None


def warn_of_fallback(request: Request, serving: Backend) -> None:
    """Warn, once per cause, if the reference serves a call that did not ask for it, or an NPU lacks our kernels.

    Options that no better backend has, and diagnostics, are a request for the reference.
    """
    emulated = serving.name == "reference"
    causes = []
    for backend in sorted(BACKENDS.values(), key=lambda each: -each.priority):
        ideal = replace(backend, missing=lambda: None, head_dims=HEAD_DIMS)
        ideal = replace(ideal, features=UNASKED) if emulated else ideal
        serves_device = not backend.devices or request.device in backend.devices
        concerns = serves_device and backend.priority > serving.priority and (emulated or backend.name == "npu")
        if concerns and not ideal.refusals(request):
            causes.append(f"{backend.name}: {'; '.join(backend.refusals(request))}")
    if causes:
        text = EMULATED if emulated else FALLBACK
        why = " | ".join(causes)
        notices.warn_once(text.format(device=request.device, name=serving.name, label=serving.label, why=why))


def server(device: str) -> Backend | None:
    """Return the backend that serves an FP16 call with head dimension 64 and default options on `device`, or None."""
    try:
        return select(Request(device, torch.float16, 64, "none"))
    except NotImplementedError:
        return None


def servers(
    calls: Iterable[tuple[torch.dtype, int]] = ((torch.float16, 64),),
    options: AttentionOptions | None = None,
    name: str | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return (device type, text) for each device of this machine: which backend serves calls without a mask, and why.

    `calls` are pairs of dtype and head dimension. If different backends serve them, the text lists each with its calls.
    `name` is the backend that the calls request by name.
    """
    options, calls = options or AttentionOptions(), sorted(set(calls), key=lambda call: (str(call[0]), call[1]))
    rows = []
    for device in device_types():
        served: dict[str, list[str]] = {}
        for dtype, head_dim in calls:
            request = Request(device, dtype, head_dim, "none", (), options)
            call = f"{str(dtype).removeprefix('torch.')}, head dim {head_dim}"
            served.setdefault(_who_serves(request, name), []).append(call)
        texts = [who if len(served) == 1 else f"{who} for {' and '.join(which)}" for who, which in served.items()]
        rows.append((device, "; ".join(texts)))
    return tuple(rows)


def _who_serves(request: Request, name: str | None) -> str:
    """Return the backend that serves a call and, in brackets, why the backends of higher priority do not."""
    try:
        serving = select(request, name)
    except NotImplementedError as refusal:
        return f"nobody ({refusal})"
    preferred = [] if name else [b for b in BACKENDS.values() if not b.devices or request.device in b.devices]
    why = [f"{b.name}: {', '.join(b.refusals(request))}" for b in preferred if b.priority > serving.priority]
    faster = [] if name else _faster(request, serving)
    who = " or ".join([serving.name, *(f"{each.name} where it was measured to be faster" for each in faster)])
    return f"{who} ({'; '.join(why)})" if why else who
