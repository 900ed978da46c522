"""torch.ops.pasa.*: schemas, fake kernels, dispatch to a backend of the registry.

The operators are functional and take plain arguments, so that they trace, compile and serialise; validation and
layouts are the caller's (`pasa.attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._library.autograd import make_autograd_impl
from torch._library.custom_ops import CustomOpDef
from torch.library import Library

from pasa.ops import registry
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.registry import Backend, Request, select

LIBRARY = Library("pasa", "FRAGMENT")


def mask_kind(attn_mask: Tensor | None) -> str:
    """ "none", "bool" or "float"."""
    if attn_mask is None:
        return "none"
    return "bool" if attn_mask.dtype == torch.bool else "float"


@cache
def _resolve(
    registered: tuple[Backend, ...],
    backend: str | None,
    needs: tuple[str, torch.dtype, int, str, bool, bool],
    arithmetic: tuple[Any, ...],
) -> tuple[ModuleType, AttentionOptions]:
    """The module that serves such calls, and their options; `registered` is here so that a change of it is seen.

    A choice holds for the process: the machine does not change under it. A refusal is not remembered.
    """
    options = AttentionOptions(*arithmetic)
    return select(Request(*needs, options), backend).load(), options


def _serve(
    q: Tensor, mask: str, varlen: bool, diagnose: bool, backend: str | None, *arithmetic: Any
) -> tuple[ModuleType, AttentionOptions]:
    needs = (q.device.type, q.dtype, q.shape[-1], mask, varlen, diagnose)
    return _resolve(tuple(registry.BACKENDS.values()), backend, needs, arithmetic)


def _without_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast would change the arithmetic that the options state; it is rarely on, and turning it off is not free."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _shorten(op: CustomOpDef, device: str) -> None:
    """Let plain calls on `device` reach the implementation from the autograd key at once.

    torch's autograd kernel of a custom operator keeps books and dispatches anew for every call, a third of the host's
    time above a launch. It still serves what needs it: a gradient (refused in the backward pass), and whatever stands
    between autograd and the device: a mode, a subclass, a transform, a fake tensor.
    """
    implementation: Callable[..., object] = op._init_fn
    usual = make_autograd_impl(op._opoverload, op)
    last = getattr(torch._C.DispatchKey, device)

    @_disable_dynamo  # it looks at every Python frame, even below an operator
    def enter(keys: Any, *arguments: Any) -> object:
        plain = (keys & torch._C._after_autograd_keyset).highestPriorityTypeId() == last
        if not plain or (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)):
            return usual(keys, *arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return implementation(*arguments)

    LIBRARY.impl(op._name, enter, f"Autograd{device}", with_keyset=True)


@torch.library.custom_op("pasa::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    precision: str = "pasa",
    recovery: str = "exact",
    beta: float | None = None,
    block_q: int = 128,
    block_k: int = 128,
    softmax: str = "safe",
    overflow: str = "inf",
    accumulate: str = "fp32",
    diagnose: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out (B, Hq, Sq, D), lse (B, Hq, Sq), counts (B, Hq, 6) or empty) of heads-first tensors; see the reference."""
    arithmetic = (precision, recovery, beta, block_q, block_k, softmax, overflow, accumulate)
    kernel, options = _serve(q, mask_kind(attn_mask), False, diagnose, backend, *arithmetic)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with _without_autocast(q.device.type):
        out, lse, counts = kernel.attention(q, k, v, attn_mask, is_causal, scale, options, diagnose)
    return out.contiguous(), lse.contiguous(), counts


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    precision: str = "pasa",
    recovery: str = "exact",
    beta: float | None = None,
    block_q: int = 128,
    block_k: int = 128,
    softmax: str = "safe",
    overflow: str = "inf",
    accumulate: str = "fp32",
    diagnose: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    counts = q.new_empty((*q.shape[:2], 6) if diagnose else (0,), dtype=torch.float64)
    return q.new_empty(q.shape), lse, counts


@torch.library.custom_op("pasa::attention_varlen", mutates_args=())
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    precision: str = "pasa",
    recovery: str = "exact",
    beta: float | None = None,
    block_q: int = 128,
    block_k: int = 128,
    softmax: str = "safe",
    overflow: str = "inf",
    accumulate: str = "fp32",
    diagnose: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out (T, Hq, D), lse (T, Hq), counts (1, Hq, 6) or empty) of packed sequences; see the reference."""
    arithmetic = (precision, recovery, beta, block_q, block_k, softmax, overflow, accumulate)
    kernel, options = _serve(q, "none", True, diagnose, backend, *arithmetic)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    arguments = (cu_seqlens_q, cu_seqlens_k, is_causal, scale, options, diagnose)
    with _without_autocast(q.device.type):
        out, lse, counts = kernel.attention_varlen(q, k, v, *arguments)
    return out.contiguous(), lse.contiguous(), counts


@attention_varlen.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    precision: str = "pasa",
    recovery: str = "exact",
    beta: float | None = None,
    block_q: int = 128,
    block_k: int = 128,
    softmax: str = "safe",
    overflow: str = "inf",
    accumulate: str = "fp32",
    diagnose: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    counts = q.new_empty((1, q.shape[1], 6) if diagnose else (0,), dtype=torch.float64)
    return q.new_empty(q.shape), lse, counts


for _device in ("CPU", "CUDA", "PrivateUse1"):  # torch's dispatch keys; the last is the NPU's
    _shorten(attention, _device)
    _shorten(attention_varlen, _device)
