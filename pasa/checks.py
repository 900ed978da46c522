"""Argument checks that public functions share; an error names the argument that is wrong.

These functions check Python types and layouts. Shapes, dtypes and devices of tensors are checked by the operators
(`pasa/ops/operands.py`), because a compiled program calls the operators without these functions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pasa.config import PasaConfig
from pasa.ops import operands

HEADS_FIRST, HEADS_LAST = ("HND", "BNSD"), ("NHD", "BSND")  # the usual name, then CANN's name
DEFAULT = PasaConfig()


def heads_last(tensor_layout: str) -> bool:
    """Return whether a layout of this name has tokens before heads; refuse unknown names."""
    if tensor_layout not in (*HEADS_FIRST, *HEADS_LAST):
        raise ValueError(f"tensor_layout={tensor_layout!r} is not one of {(*HEADS_FIRST, *HEADS_LAST)}")
    return tensor_layout in HEADS_LAST


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, rank: int) -> None:
    """Check that q, k and v are tensors of `rank` dimensions and of one dtype and device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, not a Tensor")
    operands.check_forms(q, k, v, rank)


def check_mask(attn_mask: Tensor | None) -> None:
    """Check the mask's type only; the operator checks the rest, once the layout is known."""
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask is a {type(attn_mask).__name__}, not a Tensor")


def check_lengths(name: str, cu_seqlens: Tensor, longest: int, q: Tensor) -> None:
    """Check dtype, shape and device of cumulative lengths, and that no sequence exceeds `longest`.

    The operator checks that they rise from 0 to the number of tokens. While torch compiles, and on meta, their values
    are not read here.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        found = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens_{name} is {found}, not an int32 or int64 Tensor")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens_{name} has shape {tuple(cu_seqlens.shape)}, expected (sequences + 1,)")
    if isinstance(longest, bool) or not isinstance(longest, int):
        raise TypeError(f"max_seqlen_{name}={longest!r} is not an integer")
    if cu_seqlens.is_meta and not q.is_meta:
        raise ValueError(f"cu_seqlens_{name} is on meta but q is on {q.device}")
    if torch.compiler.is_compiling() or cu_seqlens.is_meta:
        return
    if int(cu_seqlens.diff().max()) > longest:
        raise ValueError(f"max_seqlen_{name}={longest} is below the longest sequence, {int(cu_seqlens.diff().max())}")


def checked_scale(scale: float | None, head_dim: int) -> float:
    """Return the scale as a float, 1/sqrt(head_dim) for None; refuse a scale outside 2^-80 to 2^80.

    |q.k| stays below 2^42, so a scale of at most 2^80 keeps scores within FP32. Its inverse, of at most 2^80 too, keeps
    the references within FP32.
    """
    if scale is None:
        return float(head_dim**-0.5) if head_dim else 1.0  # the operator refuses a head dimension of 0
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale={scale!r} is a {type(scale).__name__}, not a number")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale!r} is not a positive finite number")
    if not 2.0**-80 <= scale <= 2.0**80:
        raise ValueError(f"scale={scale!r} is outside 2^-80 to 2^80, where FP32 holds every score")
    return float(scale)


def check_switches(is_causal: bool, return_lse: bool, backend: str | None) -> None:
    """Check the types of these arguments; the registry checks later that the backend exists."""
    for name, value in (("is_causal", is_causal), ("return_lse", return_lse)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a bool")
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend={backend!r} is a {type(backend).__name__}, not a name")


def checked_config(config: PasaConfig | None) -> PasaConfig:
    """Return the config, or the default for None; refuse any other type."""
    if config is None:
        return DEFAULT
    if not isinstance(config, PasaConfig):
        raise TypeError(f"config is a {type(config).__name__}, not a PasaConfig")
    return config
