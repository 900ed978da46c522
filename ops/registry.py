"""Describe every backend as data: what it can do, whether it runs here, and which one serves a call.

The records are executable. Backend selection, refusals, the support matrix of the README and the
parameters of the backend tests all read them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch

from pasa.ops import envs, notices
from pasa.ops.attention.options import ACCUMULATES, OVERFLOWS, PRECISIONS, RECOVERIES, SOFTMAXES, AttentionOptions

TENSOR_CORES = (8, 0)  # Triton 3.6 compiles products for older GPUs (V100, T4) to scalar arithmetic
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
    options: AttentionOptions
    paged: bool = False


@dataclass(frozen=True, eq=False)
class Backend:
    """Describe one implementation of the attention operator; a record is equal only to itself.

    Attributes
    ----------
    name : str
    module : str
        Imported on first use; defines `attention` and `attention_varlen` with the reference's
        signatures.
    devices : tuple of str
        torch device types; empty means any.
    devices_by_name : tuple of str
        Device types that it serves only when a call names it.
    dtypes, masks, precisions, recoveries, softmaxes, accumulates, overflows : tuple
        Accepted values.
    not_together : tuple of dict
        Sets of options by name. Each value is served, but not all of a set in one call.
    head_dims : (int, int)
        Smallest and largest head dimension.
    block_ks : tuple of int
        Accepted keys per block; empty means any.
    varlen, diagnostics : bool
    paged : dict, optional
        Options by name that a call over a paged cache must have; None if it serves no paged cache.
    missing : callable
        Returns why it cannot run on this machine, or None; called on demand, never at import.
    label : str
        What a result of this backend is: measured on the device, emulated, modelled.
    replaced : callable
        Returns why another implementation would serve in its place here, or None; called on demand,
        never at import. A call that names the backend is then refused, because its caller wants
        this backend and no other.
    """

    name: str
    module: str
    missing: Callable[[], str | None]
    label: str
    devices: tuple[str, ...] = ()
    devices_by_name: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
    masks: tuple[str, ...] = ("none", "bool", "float")
    precisions: tuple[str, ...] = PRECISIONS
    recoveries: tuple[str, ...] = RECOVERIES
    softmaxes: tuple[str, ...] = SOFTMAXES
    accumulates: tuple[str, ...] = ACCUMULATES
    overflows: tuple[str, ...] = OVERFLOWS
    not_together: tuple[dict[str, str], ...] = ()
    head_dims: tuple[int, int] = HEAD_DIMS
    block_ks: tuple[int, ...] = ()
    varlen: bool = True
    diagnostics: bool = True
    paged: dict[str, str] | None = field(default_factory=dict)
    replaced: Callable[[], str | None] = field(default=lambda: None)
    priority: int = field(default=0)

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"backend name {self.name!r} is not an identifier")
        low, high = self.head_dims
        if not 1 <= low <= high:
            raise ValueError(f"head_dims {self.head_dims!r} of backend {self.name!r} is not a range")

    def load(self) -> ModuleType:
        """Import the module that implements the backend."""
        return importlib.import_module(self.module)

    def described(self) -> str:
        """Return the backend's name, or why another one serves in its place."""
        why = self.replaced()
        return self.name if why is None else f"a stand-in for {self.name} ({why})"

    def refusals(self, request: Request, *, by_name: bool = False) -> list[str]:
        """Return every reason why this backend cannot serve `request`; empty when it can."""
        options = request.options
        devices = self.devices + (self.devices_by_name if by_name else ())
        wanted: list[tuple[str, object, tuple[object, ...]]] = [
            ("dtype", request.dtype, self.dtypes),
            ("mask", request.mask, self.masks),
            ("precision", options.precision, self.precisions),
            ("recovery", options.recovery, self.recoveries),
            ("softmax", options.softmax, self.softmaxes),
            ("accumulate", options.accumulate, self.accumulates),
            ("overflow", options.overflow, self.overflows),
        ]
        if self.devices:
            wanted.insert(0, ("device", request.device, devices))
        if self.block_ks:
            wanted.append(("block_k", options.block_k, self.block_ks))
        lacking = [(name, value, ", ".join(map(str, has))) for name, value, has in wanted if value not in has]
        reasons = [f"{name} {value} is not among {has}" for name, value, has in lacking]
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
    told = " | ".join(f"{backend}: {why}" for backend, why in refused.items())
    raise NotImplementedError(f"no backend can serve this call: {told}")


def tell_of_emulation(request: Request, found: Backend) -> None:
    """Warn, once per cause, if a device's own kernels do not serve a call because of the machine or its head dimension.

    Options that only the reference has are a request for the emulation, so they cause no warning.
    """
    if found.name != "reference":
        return
    for backend in BACKENDS.values():
        able = replace(backend, missing=lambda: None, head_dims=HEAD_DIMS)
        if request.device in backend.devices and not able.refusals(request):
            why = "; ".join(backend.refusals(request))
            notices.warn_once(EMULATED.format(device=request.device, why=why))
            return


def device_types() -> tuple[str, ...]:
    """Return the types of the devices that torch can use on this machine."""
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    there = {"npu": npu is not None and npu.is_available(), "cuda": torch.cuda.is_available(), "cpu": True}
    return tuple(name for name, usable in there.items() if usable)


def server(device: str) -> Backend | None:
    """Return the backend of an FP16 call on `device` with head dimension 64 and default options, or None."""
    try:
        return select(Request(device, torch.float16, 64, "none", False, False, AttentionOptions()))
    except NotImplementedError:
        return None


def servers(
    calls: Iterable[tuple[torch.dtype, int]] = ((torch.float16, 64),),
    options: AttentionOptions | None = None,
    name: str | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return, by device type of this machine, which backend serves calls without a mask, and why no preferred one does.

    Parameters
    ----------
    calls : iterable of (torch.dtype, int)
        Dtypes and head dims of the calls. Where their servers differ, each is listed with its calls.
    options : AttentionOptions, optional
    name : str, optional
        The backend that the calls name.
    """
    options, calls = options or AttentionOptions(), sorted(set(calls), key=lambda call: (str(call[0]), call[1]))
    found = []
    for device in device_types():
        served: dict[str, list[str]] = {}
        for dtype, head_dim in calls:
            request = Request(device, dtype, head_dim, "none", False, False, options)
            call = f"{str(dtype).removeprefix('torch.')}, head dim {head_dim}"
            served.setdefault(_who_serves(request, name), []).append(call)
        texts = [who if len(served) == 1 else f"{who} for {' and '.join(which)}" for who, which in served.items()]
        found.append((device, "; ".join(texts)))
    return tuple(found)


def _who_serves(request: Request, name: str | None) -> str:
    """Return the backend that serves a call and, in brackets, why the backends of higher priority do not."""
    try:
        found = select(request, name)
    except NotImplementedError as refusal:
        return f"nobody ({refusal})"
    preferred = [] if name else [b for b in BACKENDS.values() if request.device in b.devices]
    why = [f"{b.name}: {', '.join(b.refusals(request))}" for b in preferred if b.priority > found.priority]
    return f"{found.described()} ({'; '.join(why)})" if why else found.described()


def triton_missing() -> str | None:
    """Return why Triton kernels cannot run on this machine; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install '.[triton]')"
    if envs.read("TRITON_INTERPRET"):
        return None
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    if npu is not None and npu.is_available():
        return None
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability >= TENSOR_CORES:
            return None
        return f"Triton forms no tensor-core product for sm_{capability[0]}{capability[1]}, only from sm_80 on"
    return "torch finds neither a CUDA GPU nor an NPU (TRITON_INTERPRET=1 interprets the kernels on a CPU, slowly)"


def npu_missing() -> str | None:
    """Return why no NPU can be used on this machine; None when one can."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed (pip install '.[npu]')"
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    return None if npu is not None and npu.is_available() else "torch finds no NPU"


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
        precisions=("pasa", "fp32"),
        softmaxes=("safe", "unbiased"),
        not_together=({"softmax": "unbiased", "recovery": "paper", "accumulate": "fp16"},),
        overflows=("inf",),
        head_dims=(1, 256),
        block_ks=(32, 64, 128),
        diagnostics=False,
        paged={"precision": "pasa", "recovery": "exact"},
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
        precisions=("pasa",),
        softmaxes=("safe", "unbiased"),
        accumulates=("fp32",),
        head_dims=(1, 256),
        block_ks=(128,),
        diagnostics=False,
        paged=None,
        priority=2,
    )
)
