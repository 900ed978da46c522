"""`attention` and `attention_varlen`: validate, normalise the layout, launch the operator, restore the layout."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

from torch import Tensor

from pasa import diagnostics
from pasa.checks import (
    check_lengths,
    check_mask,
    check_switches,
    check_tensors,
    checked_config,
    checked_scale,
    heads_last,
)
from pasa.config import PasaConfig
from pasa.ops import dispatch, library, registry


class BackendStatus(NamedTuple):
    """One line of `backends()`; `serves`: types of this machine's devices whose calls it gets if they name none."""

    name: str
    available: bool
    reason: str
    serves: tuple[str, ...] = ()


def backends() -> list[BackendStatus]:
    """Every backend, whether it can serve on this machine, why (not), and what it serves, preferred ones first.

    Examples
    --------
    >>> [backend.name for backend in pasa.backends()]
    ['npu', 'triton', 'reference']
    >>> pasa.backends()[-1].available
    True
    """
    ordered = sorted(registry.BACKENDS.values(), key=lambda backend: -backend.priority)
    reasons = [b.missing() or b.replaced() for b in ordered]
    served = {device: registry.server(device) for device in registry.device_types()}
    return [
        BackendStatus(b.name, why is None, why or b.label, tuple(d for d, found in served.items() if found is b))
        for b, why in zip(ordered, reasons, strict=True)
    ]


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
        A float mask keeps its tiles in FP32. At scales above 2^57 its finite elements are clamped to FP32's largest
        number less 2^46 times the scale, so that a sum with a score is finite.
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
        FP32 value beyond 65504: the message names the value. For a scale that FP16 does not hold in the shifting matrix
        of recovery="paper".
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
    last = heads_last(tensor_layout)
    check_switches(is_causal, return_lse, backend)
    check_tensors(q, k, v, rank=4)
    if last:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    check_mask(attn_mask)
    options, diagnose = checked_config(config).arguments, diagnostics.recording()
    scale = checked_scale(scale, q.shape[-1])
    out, lse, counts = dispatch.call(
        library.attention, q, k, v, attn_mask, is_causal, scale, *options, diagnose, backend
    )
    if diagnose:
        diagnostics.record(counts)
    out = out.transpose(1, 2) if last else out
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
    check_tensors(q, k, v, rank=3)
    check_lengths("q", cu_seqlens_q, max_seqlen_q, q)
    check_lengths("k", cu_seqlens_k, max_seqlen_k, q)
    check_switches(is_causal, return_lse, backend)
    options, diagnose = checked_config(config).arguments, diagnostics.recording()
    scale = checked_scale(scale, q.shape[-1])
    lengths = (cu_seqlens_q, cu_seqlens_k)
    switches = (is_causal, scale, *options, diagnose, backend)
    out, lse, counts = dispatch.call(library.attention_varlen, q, k, v, *lengths, *switches)
    if diagnose:
        diagnostics.record(counts)
    return (out, lse) if return_lse else out
