"""Describe every backend as data: what it can do, whether it runs here, and which one serves a call.

The choice of a backend, the reasons of a refusal, the support matrix of the README and the parameters
of the backend tests are all computed from these records.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch

from pasa.ops import notices
from pasa.ops.attention.options import CHOICES, AttentionOptions
from pasa.ops.devices import device_types, npu_missing, triton_missing

EMULATED = """pasa: {device} tensors are served by backend 'reference', an emulation: {why}. It rounds step by step as \
an NPU does and is made for checks, not for speed: on an H200 it takes over 100 times as long as SDPA \
(to silence: warnings.filterwarnings("ignore", "pasa: .* an emulation", UserWarning))"""
HEAD_DIMS = (1, 512)  # 512: the widest head in use (the VAE of diffusion pipelines), and the widest that is tested


@dataclass(frozen=True)
class Request:
    """State what a call needs from a backend."""

    device: str
    dtype: torch.dtype
    head_dim: int
    mask: str  # "none", "bool" or "float"
    varlen: bool
    diagnostics: bool
    paged: bool
    options: AttentionOptions


@dataclass(frozen=True, eq=False)
class Backend:
    """Describe one implementation of the attention operator; records compare by identity.

    Attributes
    ----------
    name : str
    module : str
        Imported on first use; defines `attend(call)`, and may define `gradients(call, grad_out, grad_lse)`.
    devices : tuple of str
        torch device types; empty means any.
    devices_by_name : tuple of str
        Further device types, which it serves only if the call names this backend.
    dtypes, masks : tuple
        Accepted values.
    accepts : dict, optional
        Maps fields of `AttentionOptions` to their accepted values; a value of None accepts any. A field that
        is missing is accepted with its default alone, so a new option or value is refused until a backend lists it.
        Without a dict all options are accepted.
    not_together : tuple of dict
        Combinations of option values that are refused, although each value alone is served.
    head_dims : (int, int)
        Smallest and largest head dimension.
    varlen, diagnostics : bool
    paged : dict, optional
        Options by name that a call over a paged cache must have; None if it serves no paged cache.
    missing : callable
        Returns the reason why the backend cannot run on this machine, or None; called on demand, never at import.
    functions : dict
        Maps device types to the names of functions that it offers in addition to attention; see `provider`.
    label : str
        How the backend computes, and where that has been run: on the device, emulated, or not at all.
    replaced : callable
        Returns the reason why a fallback runs in place of this backend here, or None; called on demand,
        never at import. A call that names the backend is then refused, because its caller asked for
        this implementation.
    """

    name: str
    module: str
    missing: Callable[[], str | None]
    label: str
    devices: tuple[str, ...] = ()
    devices_by_name: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
    masks: tuple[str, ...] = ("none", "bool", "float")
    accepts: Mapping[str, tuple[object, ...] | None] | None = None
    not_together: tuple[dict[str, str], ...] = ()
    head_dims: tuple[int, int] = HEAD_DIMS
    varlen: bool = True
    diagnostics: bool = True
    paged: dict[str, str] | None = field(default_factory=dict)
    replaced: Callable[[], str | None] = field(default=lambda: None)
    functions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    priority: int = field(default=0)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"backend name {self.name!r} is not an identifier")
        low, high = self.head_dims
        if not 1 <= low <= high:
            raise ValueError(f"head_dims {self.head_dims!r} of backend {self.name!r} is not a range")

    def values(self, option: str) -> tuple[object, ...] | None:
        """Return the accepted values of an option; None for any."""
        if self.accepts is None:
            return CHOICES.get(option)
        return self.accepts.get(option, (getattr(AttentionOptions, option),))

    def load(self) -> ModuleType:
        """Import the module that implements the backend."""
        return importlib.import_module(self.module)

    def described(self) -> str:
        """Return the backend's name; if a fallback runs in its place, say so and why."""
        why = self.replaced()
        return self.name if why is None else f"a fallback for {self.name} ({why})"

    def refusals(self, request: Request, *, by_name: bool = False) -> list[str]:
        """Return every reason why this backend cannot serve `request`; empty when it can."""
        options = request.options
        devices = self.devices + (self.devices_by_name if by_name else ())
        demands: list[tuple[str, object, tuple[object, ...] | None]] = [
            ("device", request.device, devices if self.devices else None),
            ("dtype", request.dtype, self.dtypes),
            ("mask", request.mask, self.masks),
            *((each.name, getattr(options, each.name), self.values(each.name)) for each in fields(options)),
        ]
        reasons = [
            f"{name} {value} is not among {', '.join(map(str, has))}"
            for name, value, has in demands
            if has is not None and value not in has
        ]
        for values in self.not_together:
            if all(getattr(options, name) == value for name, value in values.items()):
                reasons.append(" with ".join(f"{name} {value}" for name, value in values.items()) + " is not supported")
        if not self.head_dims[0] <= request.head_dim <= self.head_dims[1]:
            reasons.append(f"head dim {request.head_dim} is outside {self.head_dims[0]} to {self.head_dims[1]}")
        if request.varlen and not self.varlen:
            reasons.append("packed sequences are not supported")
        if request.diagnostics and not self.diagnostics:
            reasons.append("diagnostics are not supported")
        if request.paged:
            reasons += self._paged_refusals(options)
        absent = self.missing() or (self.replaced() if by_name else None)
        return reasons if absent is None else [absent, *reasons]

    def _paged_refusals(self, options: AttentionOptions) -> list[str]:
        if self.paged is None:
            return ["paged caches are not supported"]
        has = {name: getattr(options, name) for name in self.paged}
        return [f"a paged cache takes {n} {self.paged[n]}, not {has[n]}" for n in has if has[n] != self.paged[n]]


BACKENDS: dict[str, Backend] = {}


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
        If none can serve, with every backend's reasons.
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
    needs: tuple[str, torch.dtype, int, str, bool, bool, bool],
    arithmetic: tuple[Any, ...],
) -> tuple[ModuleType, AttentionOptions, str]:
    """Return the module that serves such calls, their options, and the backend's name.

    `needs` are the other fields of a `Request`. `registered` is part of the cache key, so that a
    newly registered backend is seen. A choice holds for the whole process, because the machine does
    not change under it. A refusal is not cached.
    """
    options = AttentionOptions(*arithmetic)
    request = Request(*needs, options)
    chosen = select(request, backend)
    if backend is None:
        warn_of_emulation(request, chosen)
    return chosen.load(), options, chosen.name


def provider(function: str, device: str, head_dim: int = 0) -> ModuleType | None:
    """Return the preferred backend's module that has this function for such a device, or None.

    Such functions are `write_pages` and `count_scores`. If the result is None, the caller uses the reference's.
    `head_dim` is held against what the backend attends to; leave it out for a function that serves all.
    """
    return _find_provider(tuple(BACKENDS.values()), function, device, head_dim)


@cache
def _find_provider(registered: tuple[Backend, ...], function: str, device: str, head_dim: int) -> ModuleType | None:
    for backend in sorted(registered, key=lambda each: -each.priority):
        offered = function in backend.functions.get(device, ()) and head_dim <= backend.head_dims[1]
        if offered and backend.missing() is None:
            return backend.load()
    return None


def warn_of_emulation(request: Request, serving: Backend) -> None:
    """Warn, once per cause, if the emulation serves a call although kernels for its device exist.

    The cause is then this machine or the head dimension of the call. Options that only the reference
    has are a request for the emulation, so they cause no warning.
    """
    if serving.name != "reference":
        return
    for backend in BACKENDS.values():
        able = replace(backend, missing=lambda: None, head_dims=HEAD_DIMS)
        if request.device in backend.devices and not able.refusals(request):
            why = "; ".join(backend.refusals(request))
            notices.warn_once(EMULATED.format(device=request.device, why=why))
            return


def server(device: str) -> Backend | None:
    """Return the backend of an FP16 call on `device` with head dimension 64 and default options, or None."""
    try:
        return select(Request(device, torch.float16, 64, "none", False, False, False, AttentionOptions()))
    except NotImplementedError:
        return None


def servers(
    calls: Iterable[tuple[torch.dtype, int]] = ((torch.float16, 64),),
    options: AttentionOptions | None = None,
    name: str | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return, by device type of this machine, which backend serves calls without a mask, and why no preferred one does.

    `calls` holds their dtypes and head dims; where their servers differ, each is listed with its calls. `name` is the
    backend that the calls name.
    """
    options, calls = options or AttentionOptions(), sorted(set(calls), key=lambda call: (str(call[0]), call[1]))
    rows = []
    for device in device_types():
        served: dict[str, list[str]] = {}
        for dtype, head_dim in calls:
            request = Request(device, dtype, head_dim, "none", False, False, False, options)
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
    preferred = [] if name else [b for b in BACKENDS.values() if request.device in b.devices]
    why = [f"{b.name}: {', '.join(b.refusals(request))}" for b in preferred if b.priority > serving.priority]
    return f"{serving.described()} ({'; '.join(why)})" if why else serving.described()


def npu_replaced() -> str | None:
    """Return why the Ascend C kernels cannot be called although an NPU may be present; None when they can."""
    reason: str | None = BACKENDS["npu"].load().library_error()
    return reason


register(
    Backend(
        name="reference",
        module="pasa.ops.attention.spec.attention",
        missing=lambda: None,
        label="emulates the NPU's arithmetic, on any device that torch runs on",
    )
)
register(
    Backend(
        name="triton",
        module="pasa.ops.attention.triton.backend",
        missing=triton_missing,
        label="Triton kernels for GPUs from sm_80 on; interpreted on a CPU; lowered, not run on an NPU",
        devices=("cuda", "npu"),
        devices_by_name=("cpu",),
        accepts={
            "precision": ("pasa", "fp32"),
            "recovery": ("exact", "paper"),
            "beta": None,
            "block_q": None,
            "accumulate": ("fp32", "fp16"),
            "softmax": ("safe", "unbiased"),
            "overflow": ("inf",),
            "block_k": (32, 64, 128),
        },
        not_together=({"softmax": "unbiased", "recovery": "paper", "accumulate": "fp16"},),
        head_dims=(1, 256),
        diagnostics=False,
        paged={"precision": "pasa", "recovery": "exact"},
        functions={"cuda": ("write_pages", "count_scores")},
        priority=1,
    )
)
register(
    Backend(
        name="npu",
        module="pasa.ops.attention.ascend.backend",
        missing=npu_missing,
        replaced=npu_replaced,
        label="Ascend C kernels for Atlas A2; run on a CPU twin of the device, not on an NPU",
        devices=("npu",),
        masks=("none",),
        accepts={
            "precision": ("pasa",),
            "recovery": ("exact", "paper"),
            "beta": None,
            "block_q": None,
            "overflow": ("inf", "saturate"),
            "softmax": ("safe", "unbiased"),
            "accumulate": ("fp32",),
            "block_k": (128,),
        },
        head_dims=(1, 256),
        diagnostics=False,
        paged=None,
        priority=2,
    )
)
