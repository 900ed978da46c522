"""`attention` and `attention_varlen`: validate, normalise the layout, launch the operator, restore the layout."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from pasa import diagnostics
from pasa.config import PasaConfig
from pasa.ops import library, registry

HEADS_FIRST, HEADS_LAST = ("HND", "BNSD"), ("NHD", "BSND")  # the field's names and CANN's
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEFAULT = PasaConfig()


class BackendStatus(NamedTuple):
    """One line of `backends()`."""

    name: str
    available: bool
    reason: str


def backends() -> list[BackendStatus]:
    """Every backend, whether it can serve on this machine, and why (not), preferred ones first.

    Examples
    --------
    >>> [backend.name for backend in pasa.backends()]
    ['npu', 'triton', 'reference']
    >>> pasa.backends()[-1].available
    True
    """
    ordered = sorted(registry.BACKENDS.values(), key=lambda backend: -backend.priority)
    reasons = [b.missing() or b.replaced() for b in ordered]
    return [BackendStatus(b.name, why is None, why or b.label) for b, why in zip(ordered, reasons, strict=True)]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    tensor_layout: str = ...,
    return_lse: Literal[False] = ...,
    config: PasaConfig | None = ...,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    tensor_layout: str = ...,
    return_lse: Literal[True],
    config: PasaConfig | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    tensor_layout: str = "HND",
    return_lse: bool = False,
    config: PasaConfig | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention in FP16 that cannot overflow.

    Parameters
    ----------
    q : Tensor (B, Hq, Sq, D)
        FP16, BF16 or FP32; BF16 and FP32 are converted to FP16 inside.
    k, v : Tensor (B, Hkv, Skv, D)
        Same dtype and device as q; Hq a multiple of Hkv (grouped queries by shape).
    attn_mask : Tensor, optional
        Bool (True = keep), or FP16, BF16 or FP32 (added to the scaled scores), broadcastable to (B, Hq, Sq, Skv).
        A float mask keeps its tiles in FP32.
    is_causal : bool
        Bottom-right aligned: query i sees keys up to i + Skv - Sq. Combines with `attn_mask`.
    scale : float, optional
        2^-80 to 2^80; 1/sqrt(D) by default.
    tensor_layout : str
        "HND" or "BNSD" as above; "NHD" or "BSND" for (B, S, H, D), of the output too.
    return_lse : bool
        Also return the log-sum-exp of every row.
    config : PasaConfig, optional
        Arithmetic; the default is our exact recovery.
    backend : str, optional
        One of `backends()`; chosen by capability when None.

    Returns
    -------
    out : Tensor
        Shape, layout and dtype of q. A row that sees no key is 0.
    lse : Tensor (B, Hq, Sq), FP32, only with ``return_lse=True``
        Natural logarithm; -inf for a row that sees no key.

    Raises
    ------
    ValueError, TypeError
        For tensors that do not fit together, an empty sequence, a mask that does not broadcast, a finite BF16 or
        FP32 value beyond 65504: the message names the value.
    NotImplementedError
        If no backend can serve the call, with every backend's reason.

    Notes
    -----
    With the default config, finite inputs give a finite output that lies within [min, max] of its value column,
    up to rounding. A NaN or infinity in a key or value reaches the rows that see it, as NaN, and no other; a NaN or
    +inf in a float mask reaches its row.
    Gradients of q, k, v and a float mask, through both results, are those of exact attention at the FP16 inputs; there
    is no second derivative.
    Method: arXiv:2503.01873 and `pasa/ops/attention/README.md`.

    Examples
    --------
    >>> q, k = (torch.full((1, 8, 130, 64), 40, dtype=torch.float16) for _ in range(2))  # scores of 102400
    >>> v = torch.randn(1, 8, 130, 64).half()
    >>> out, lse = pasa.attention(q, k, v, is_causal=True, return_lse=True)
    >>> out.shape, bool(out.isfinite().all()), lse[0, 0, 0].item()  # one key: its score, over 8
    (torch.Size([1, 8, 130, 64]), True, 12800.0)
    """
    heads_last = _heads_last(tensor_layout)
    _check_switches(is_causal, backend)
    _check_tensors(q, k, v, rank=4)
    if heads_last:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    _check_shapes(q, k, v)
    _check_mask(attn_mask, q, k)
    options, diagnose = _checked_config(config).arguments, diagnostics.recording()
    scale = _checked_scale(scale, q.shape[-1])
    out, lse, counts = library.call(
        library.attention, q, k, v, attn_mask, is_causal, scale, *options, diagnose, backend
    )
    if diagnose:
        diagnostics.record(counts)
    out = out.transpose(1, 2) if heads_last else out
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    config: PasaConfig | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed sequences: tokens of sequence i are rows cu_seqlens[i] to cu_seqlens[i + 1].

    Parameters
    ----------
    q : Tensor (Tq, Hq, D)
    k, v : Tensor (Tk, Hkv, D)
    cu_seqlens_q, cu_seqlens_k : Tensor (N + 1,), int32 or int64
        Cumulative lengths from 0 to Tq and Tk. A sequence may be empty; one without keys gives 0 and LSE -inf.
    max_seqlen_q, max_seqlen_k : int
        Longest sequence; checked against the cumulative lengths.
    is_causal, scale, return_lse, config, backend
        As for `attention`.

    Returns
    -------
    out : Tensor (Tq, Hq, D)
    lse : Tensor (Tq, Hq), FP32, only with ``return_lse=True``

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As for `attention`, and for cumulative lengths that do not describe the tensors.

    Examples
    --------
    >>> q = k = v = torch.randn(7, 2, 16).half()  # sequences of 3 and 4 tokens
    >>> starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> out = pasa.attention_varlen(q, k, v, starts, starts, 4, 4, is_causal=True)
    >>> bool((out[3] == v[3]).all())  # a first token sees itself alone
    True
    """
    _check_tensors(q, k, v, rank=3)
    _check_shapes(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)))
    _check_lengths("q", cu_seqlens_q, max_seqlen_q)
    _check_lengths("k", cu_seqlens_k, max_seqlen_k)
    _check_switches(is_causal, backend)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(f"cu_seqlens_q has {len(cu_seqlens_q)} entries but cu_seqlens_k has {len(cu_seqlens_k)}")
    options, diagnose = _checked_config(config).arguments, diagnostics.recording()
    scale = _checked_scale(scale, q.shape[-1])
    lengths = (cu_seqlens_q, cu_seqlens_k)
    switches = (is_causal, scale, *options, diagnose, backend)
    out, lse, counts = library.call(library.attention_varlen, q, k, v, *lengths, *switches)
    if diagnose:
        diagnostics.record(counts)
    return (out, lse) if return_lse else out


def _heads_last(tensor_layout: str) -> bool:
    if tensor_layout not in (*HEADS_FIRST, *HEADS_LAST):
        raise ValueError(f"tensor_layout={tensor_layout!r} is not one of {(*HEADS_FIRST, *HEADS_LAST)}")
    return tensor_layout in HEADS_LAST


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, *, rank: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, not a Tensor")
        if x.dim() != rank:
            raise ValueError(f"{name} has {x.dim()} dimensions {tuple(x.shape)}, expected {rank}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}, expected one of {DTYPES}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} but q is {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Heads-first shapes (B, H, S, D)."""
    queries, keys, values = q.shape, k.shape, v.shape  # each look at `.shape` makes a new one
    if keys != values:
        raise ValueError(f"k and v differ in shape (B, H, S, D): {tuple(keys)} and {tuple(values)}")
    for name, axis in (("batch", 0), ("head dim", 3)):
        if queries[axis] != keys[axis]:
            raise ValueError(f"{name} of q is {queries[axis]} but that of k is {keys[axis]}")
    for name, shape in (("q", queries), ("k", keys)):
        if 0 in shape:
            raise ValueError(f"{name} is empty: (B, H, S, D) = {tuple(shape)}")
    if queries[1] % keys[1]:
        raise ValueError(f"{queries[1]} query heads are not a multiple of {keys[1]} key heads")


def _check_mask(attn_mask: Tensor | None, q: Tensor, k: Tensor) -> None:
    if attn_mask is None:
        return
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask is a {type(attn_mask).__name__}, not a Tensor")
    if attn_mask.dtype not in (torch.bool, *DTYPES):
        raise TypeError(f"attn_mask is {attn_mask.dtype}, expected bool (True = keep) or one of {DTYPES} (added)")
    if attn_mask.device != q.device:
        raise ValueError(f"attn_mask is on {attn_mask.device} but q is on {q.device}")
    target = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    given = tuple(attn_mask.shape)
    fits = len(given) <= 4 and all(a in (1, b) for a, b in zip(reversed(given), reversed(target), strict=False))
    if not fits:
        raise ValueError(f"attn_mask {given} does not broadcast to (B, Hq, Sq, Skv) = {target}")


def _check_lengths(name: str, cu_seqlens: Tensor, longest: int) -> None:
    """Form only: that they rise from 0 to the number of tokens is checked where their values are read."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        found = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens_{name} is {found}, not an int32 or int64 Tensor")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens_{name} has shape {tuple(cu_seqlens.shape)}, expected (sequences + 1,)")
    if isinstance(longest, bool) or not isinstance(longest, int):
        raise TypeError(f"max_seqlen_{name}={longest!r} is not an integer")
    if torch.compiler.is_compiling():
        return
    if int(cu_seqlens.diff().max()) > longest:
        raise ValueError(f"max_seqlen_{name}={longest} is below the longest sequence, {int(cu_seqlens.diff().max())}")


def _checked_scale(scale: float | None, head_dim: int) -> float:
    """|q.k| stays below 2^42, so a scale of at most 2^80 keeps scores within FP32, and its inverse keeps references."""
    if scale is None:
        return float(head_dim**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale={scale!r} is a {type(scale).__name__}, not a number")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale!r} is not a positive finite number")
    if not 2.0**-80 <= scale <= 2.0**80:
        raise ValueError(f"scale={scale!r} is outside 2^-80 to 2^80, where FP32 holds every score")
    return float(scale)


def _check_switches(is_causal: bool, backend: str | None) -> None:
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal={is_causal!r} is a {type(is_causal).__name__}, not a bool")
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend={backend!r} is a {type(backend).__name__}, not a name")


def _checked_config(config: PasaConfig | None) -> PasaConfig:
    if config is None:
        return DEFAULT
    if not isinstance(config, PasaConfig):
        raise TypeError(f"config is a {type(config).__name__}, not a PasaConfig")
    return config
