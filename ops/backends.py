"""Describe each backend as data: its devices, dtypes and options, and how to find out why it cannot run here.

The choice of a backend, the reasons of a refusal, the support matrix of the documents and the parameters
of the backend tests are all computed from these records. `ops/registry.py` chooses among them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from types import ModuleType

import torch

from pasa.ops.attention.call import FEATURES
from pasa.ops.attention.options import CHOICES, AttentionOptions
from pasa.ops.devices import npu_missing, triton_missing, triton_slower

HEAD_DIMS = (1, 512)  # 512: the widest head in use (the VAE of diffusion pipelines), and the widest that is tested


@dataclass(frozen=True)
class Request:
    """State what a call needs from a backend: its device type, its options and its properties."""

    device: str
    dtype: torch.dtype
    head_dim: int
    mask: str  # "none", "bool" or "float"
    features: tuple[str, ...] = ()  # of pasa.ops.attention.call.FEATURES
    options: AttentionOptions = field(default_factory=AttentionOptions)


@dataclass(frozen=True, eq=False)
class Backend:
    """Describe one implementation of the attention operator; records compare by identity.

    Attributes
    ----------
    name : str
        The value of the argument `backend` that selects it.
    module : str
        Imported on first use; defines `attend(call)`, and may define `gradients(call, grad_out, grad_lse)`. One that
        serves calls because it is faster also defines `warm_up(device)` and `is_warm(device)`: whether a CUDA graph may
        capture its calls.
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
    features : collection of str
        Which of `pasa.ops.attention.call.FEATURES` it serves.
    feature_options : dict
        Maps a feature, or "masks", to the option values that it is served with, where these are fewer than `accepts`
        has.
    missing : callable
        Returns the reason why the backend cannot run on this machine, or None; called on demand, never at import.
    slower : callable
        Returns which fast paths of the backend are off on this machine, and why, or None; called on demand.
    limits : callable
        Returns why the device of this machine, one of several kinds, cannot serve a request; called on demand.
    functions : dict
        Maps device types to the names of functions that it offers in addition to attention; see `provider`.
    label : str
        How the backend computes, and where that has been run: on the device, emulated, or not at all.
    repeatable : bool
        Whether a later call on tensors of the same geometry may repeat the launches of a call (`ops/plans.py`).
    priority : int
        Of the backends that can serve a call, the one of highest priority does.
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
    features: Collection[str] = ()
    feature_options: Mapping[str, Mapping[str, tuple[object, ...]]] = field(default_factory=dict)
    functions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slower: Callable[[], str | None] = lambda: None
    limits: Callable[[Request], list[str]] = lambda request: []
    repeatable: bool = False
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

    def state(self) -> str:
        """Return the label, and which fast paths are off on this machine."""
        slower = self.slower()
        return self.label if slower is None else f"{self.label}; slower here than it could be: {slower}"

    def load(self) -> ModuleType:
        """Import the module that implements the backend."""
        return importlib.import_module(self.module)

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
            f"{name} {value} is not among {', '.join(map(str, accepted))}"
            for name, value, accepted in demands
            if accepted is not None and value not in accepted
        ]
        for values in self.not_together:
            if all(getattr(options, name) == value for name, value in values.items()):
                reasons.append(" with ".join(f"{name} {value}" for name, value in values.items()) + " is not supported")
        if not self.head_dims[0] <= request.head_dim <= self.head_dims[1]:
            reasons.append(f"head dim {request.head_dim} is outside {self.head_dims[0]} to {self.head_dims[1]}")
        for feature in request.features:
            reasons += self.feature_refusals(feature, options)
        if request.mask != "none":
            reasons += self._refused_options("masks", options)
        absent = self.missing()
        return reasons + self.limits(request) if absent is None else [absent, *reasons]

    def feature_refusals(self, feature: str, options: AttentionOptions) -> list[str]:
        """Return every reason why this backend cannot serve one feature of a call with these options."""
        if feature not in self.features:
            return [f"{feature} are not supported"]
        return self._refused_options(feature, options)

    def _refused_options(self, feature: str, options: AttentionOptions) -> list[str]:
        return [
            f"{feature} are served with {name} {' or '.join(map(str, accepted))}, not {getattr(options, name)}"
            for name, accepted in self.feature_options.get(feature, {}).items()
            if getattr(options, name) not in accepted
        ]


EXACT = {"precision": ("pasa",), "recovery": ("exact",)}

REFERENCE = Backend(
    name="reference",
    module="pasa.ops.attention.spec.attention",
    missing=lambda: None,
    label="emulates the NPU's arithmetic, on any device that torch runs on",
    features=FEATURES,
    # A cap needs the true score, which no other arithmetic forms.
    feature_options={"soft caps": {"precision": ("pasa", "fp32"), "recovery": ("exact",)}},
)
TRITON = Backend(
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
        "batch_invariant": (False, True),
    },
    not_together=({"softmax": "unbiased", "recovery": "paper", "accumulate": "fp16"},),
    head_dims=(1, 256),
    features=tuple(name for name in FEATURES if name != "diagnostics"),
    feature_options={
        "paged caches": EXACT,
        **{name: {"recovery": ("exact",)} for name in ("windows", "sinks", "max logits")},
        "soft caps": {"precision": ("pasa", "fp32"), "recovery": ("exact",)},
    },
    functions={"cuda": ("write_pages", "count_scores")},
    slower=triton_slower,
    repeatable=True,
    priority=2,
)
ASCEND_C: Backend = Backend(
    name="npu",
    module="pasa.ops.attention.ascend.backend",
    missing=lambda: npu_missing() or ASCEND_C.load().library_error(),
    limits=lambda request: ASCEND_C.load().limits(request),
    label="Ascend C kernels for Atlas A2 or the Ascend 310P; run on a CPU twin of either, not on an NPU",
    devices=("npu",),
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
    features=tuple(name for name in FEATURES if name != "soft caps"),
    feature_options={
        name: {"recovery": ("exact",)} for name in ("masks", "windows", "sinks", "max logits", "diagnostics")
    },
    priority=3,
)
SDPA = Backend(
    name="sdpa",
    module="pasa.ops.attention.sdpa.backend",
    missing=lambda: None,
    label="the device's own fused attention, guarded; in FP32 where its scores may be FP16",
    accepts={
        "precision": ("pasa",),
        "recovery": ("exact",),
        "block_q": None,
        "block_k": None,
        "overflow": ("inf",),
        "softmax": ("safe",),
        "accumulate": ("fp32",),
        "batch_invariant": (False, True),
    },
    features=("packed sequences", "paged caches", "windows", "sinks", "max logits"),
    repeatable=True,
    priority=1,
)
