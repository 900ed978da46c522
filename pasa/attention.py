"""`attention`, `attention_varlen` and `backends`.

The attention functions validate their arguments, bring tensors to heads-first layout, call the operator, and restore
the layout.
"""

from __future__ import annotations

from types import NoneType
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from pasa import diagnostics
from pasa.checks import (
    check_longest,
    check_optional,
    check_switches,
    check_tensor,
    checked_config,
    checked_limits,
    heads_first,
)
from pasa.config import PasaConfig
from pasa.keywords import hint_at_arguments
from pasa.ops import devices, dispatch, operators, registry
from pasa.ops.attention.call import NO_WINDOW

DEFAULTS = checked_config(None).arguments


class BackendStatus(NamedTuple):
    """One line of `backends()`: whether a backend can run on this machine, and why (not).

    `serves` holds the device types of this machine whose calls the backend gets if they name no backend.
    """

    name: str
    available: bool
    reason: str
    serves: tuple[str, ...] = ()


def backends() -> list[BackendStatus]:
    """Return every backend, preferred ones first: whether it can run here, why (not), and which devices it serves.

    Examples
    --------
    >>> pasa.backends()[-1].name, pasa.backends()[-1].available
    ('reference', True)
    """
    preferred = {device: registry.server(device) for device in devices.device_types()}
    lines = []
    for backend in sorted(registry.BACKENDS.values(), key=lambda each: -each.priority):
        missing = backend.missing()
        serves = tuple(device for device, best in preferred.items() if best is backend)
        lines.append(BackendStatus(backend.name, missing is None, missing or registry.state(backend), serves))
    return lines


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = ...,
    is_causal: bool = ...,
    window: tuple[int, int] | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    tensor_layout: str = ...,
    return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
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
    window: tuple[int, int] | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    tensor_layout: str = ...,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = ...,
    config: PasaConfig | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = ...,
    is_causal: bool = ...,
    window: tuple[int, int] | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    tensor_layout: str = ...,
    return_lse: bool = ...,
    return_max_logits: Literal[True],
    config: PasaConfig | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, ...]: ...


@hint_at_arguments
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tensor_layout: str = "HND",
    return_lse: bool = False,
    return_max_logits: bool = False,
    config: PasaConfig | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Compute scaled dot-product attention in FP16 that cannot overflow.

    Parameters
    ----------
    q : Tensor (B, Hq, Sq, D)
        FP16, BF16 or FP32; BF16 and FP32 are converted to FP16 inside.
    k, v : Tensor (B, Hkv, Skv, D)
        Same dtype and device as q. Hq is a multiple of Hkv (grouped-query attention).
    attn_mask : Tensor, optional
        Bool (True = keep), or FP16, BF16 or FP32 (added to the scaled scores), broadcastable to (B, Hq, Sq, Skv).
        Tiles with a float mask are kept in FP32. At scales above 2^57, finite elements of the mask are clamped to
        FP32's largest number less 2^46 times the scale, so that their sum with a score is finite.
    is_causal : bool
        Causal mask, aligned bottom-right: query i sees keys up to i + Skv - Sq. It can be combined with `attn_mask`.
    window : (int, int), optional
        Sliding window (left, right): query i sees keys i + Skv - Sq - left to i + Skv - Sq + right; -1 is unlimited.
        It can be combined with `is_causal` and `attn_mask`. Keys outside of the window cost no time.
    scale : float, optional
        Factor of the scores, 2^-80 to 2^80; 1/sqrt(D) by default.
    softcap : float, optional
        A scaled score s becomes softcap * tanh(s / softcap) before the mask is added (Gemma 2), 2^-20 to 2^20.
    sinks : Tensor (Hq,), FP16, BF16 or FP32, optional
        One more score of every row of a head, which takes a share of the weights and has the value 0 (gpt-oss).
    tensor_layout : str
        "HND" or "BNSD": shapes as above. "NHD" or "BSND": inputs and output are (B, S, H, D).
    return_lse : bool
        Also return the log-sum-exp of every row.
    return_max_logits : bool
        Also return the largest score of every head, for QK-clipping.
    config : PasaConfig, optional
        Arithmetic; by default the exact recovery.
    backend : str, optional
        Name of one of `backends()`. When None, the preferred backend that can serve the call is chosen.

    Returns
    -------
    out : Tensor
        Shape, layout and dtype of q. A row that sees no key is 0.
    lse : Tensor (B, Hq, Sq), FP32, only with ``return_lse=True``
        Log-sum-exp in natural logarithm, sinks included; -inf for a row that sees no key and has no sink.
    max_logits : Tensor (B, Hq), FP32, only with ``return_max_logits=True``
        Largest scaled, capped and masked score of each head over all rows and keys, without sinks; it has no gradient.

    Raises
    ------
    ValueError, TypeError
        Tensors do not fit together; a sequence is empty; a mask does not broadcast; a finite BF16 or FP32 value is
        beyond 65504; a keyword is unknown; or FP16 cannot hold the scale in the shifting matrix of recovery="paper".
        The message names the value, and says what to pass instead.
    NotImplementedError
        No backend can serve the call. The message gives the reason of every backend.

    Warns
    -----
    UserWarning
        Once, if tensors that are read as (B, H, S, D) are very likely (B, S, H, D): q and k have equally many heads,
        more than 128, of at most 128 tokens.

    Notes
    -----
    With the default config, finite inputs give a finite output. Up to rounding, each element lies between the smallest
    and the largest value of its value column. A NaN or infinity in a key or value makes the rows that see it NaN, and
    no other row. A NaN or +inf in a float mask makes its row NaN.
    Gradients of q, k, v, a float mask and sinks, through both results, are those of exact attention at the FP16 inputs.
    Second derivatives are not supported.
    Method: arXiv:2503.01873 and `pasa/ops/attention/README.md`.

    Examples
    --------
    >>> q, k = (torch.full((1, 8, 130, 64), 40, dtype=torch.float16) for _ in range(2))  # scores of 102400
    >>> v = torch.randn(1, 8, 130, 64).half()
    >>> out, lse = pasa.attention(q, k, v, is_causal=True, return_lse=True)
    >>> out.shape, bool(out.isfinite().all()), lse[0, 0, 0].item()  # one key: its score, over 8
    (torch.Size([1, 8, 130, 64]), True, 12800.0)
    """
    if (
        window is None
        and softcap is None
        and sinks is None
        and config is None
        and tensor_layout == "HND"
        and return_max_logits is False
        and type(is_causal) is type(return_lse) is bool
        and type(scale) in (float, NoneType)
        and type(backend) in (str, NoneType)
        and not diagnostics.recording()
    ):  # a call like an earlier one, which has passed the checks, is repeated at once
        limits = is_causal, scale, *NO_WINDOW, 0.0, False
        again = dispatch.repeat(
            operators.attention, (q, k, v, attn_mask, None), *limits, *DEFAULTS, False, backend, alone=not return_lse
        )
        if again is not None:
            out, lse, *_ = again
            return (out, lse) if return_lse else out
    check_switches(backend, is_causal, return_lse, return_max_logits)
    q, k, v, last = heads_first(q, k, v, tensor_layout)
    check_optional("attn_mask", attn_mask)
    if sinks is not None:
        check_tensor("sinks", sinks)
    limits = checked_limits(is_causal, scale, window, softcap, return_max_logits)
    options, diagnose = checked_config(config).arguments, diagnostics.recording()
    out, lse, max_logits, counts = dispatch.call(
        operators.attention, q, k, v, attn_mask, sinks, *limits, *options, diagnose, backend
    )
    if diagnose:
        diagnostics.record(counts)
    return results(out.transpose(1, 2) if last else out, lse, max_logits, return_lse, return_max_logits)


def results(
    out: Tensor, lse: Tensor, max_logits: Tensor, return_lse: bool, return_max_logits: bool
) -> Tensor | tuple[Tensor, ...]:
    """Return the output, alone or with what the caller asked for beside it."""
    if return_max_logits:
        return (out, lse, max_logits) if return_lse else (out, max_logits)
    return (out, lse) if return_lse else out


@hint_at_arguments
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
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    config: PasaConfig | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Compute attention of packed sequences: tokens of sequence i are rows cu_seqlens[i] to cu_seqlens[i + 1] - 1.

    Parameters
    ----------
    q : Tensor (Tq, Hq, D)
    k, v : Tensor (Tk, Hkv, D)
    cu_seqlens_q, cu_seqlens_k : Tensor (N + 1,), int32 or int64
        Cumulative lengths from 0 to Tq and Tk. A sequence may be empty. Queries of a sequence without keys give 0 and
        log-sum-exp -inf.
    max_seqlen_q, max_seqlen_k : int
        Length of the longest sequence, or more; checked against the cumulative lengths, but not on an NPU. There they
        choose a kernel, and change results by no more than rounding. A compiled graph does not use them.
    is_causal, window, scale, softcap, sinks, return_lse, return_max_logits, config, backend
        As for `attention`; rows and keys are counted within each sequence.

    Returns
    -------
    out : Tensor (Tq, Hq, D)
    lse : Tensor (Tq, Hq), FP32, only with ``return_lse=True``
    max_logits : Tensor (N, Hq), FP32, only with ``return_max_logits=True``

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As for `attention`, or the cumulative lengths do not fit the tensors.

    Examples
    --------
    >>> q = k = v = torch.randn(7, 2, 16).half()  # sequences of 3 and 4 tokens
    >>> starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> out = pasa.attention_varlen(q, k, v, starts, starts, 4, 4, is_causal=True)
    >>> bool((out[3] == v[3]).all())  # a first token sees itself alone
    True
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    check_longest("q", cu_seqlens_q, max_seqlen_q)
    check_longest("k", cu_seqlens_k, max_seqlen_k)
    check_switches(backend, is_causal, return_lse, return_max_logits)
    if sinks is not None:
        check_tensor("sinks", sinks)
    limits = checked_limits(is_causal, scale, window, softcap, return_max_logits)
    options, diagnose = checked_config(config).arguments, diagnostics.recording()
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k, sinks
    # A compiled or exported graph serves other lengths, too.
    longest = (None, None) if torch.compiler.is_compiling() else (max_seqlen_q or None, max_seqlen_k or None)
    out, lse, max_logits, counts = dispatch.call(
        operators.attention_varlen, *tensors, *limits, *options, diagnose, backend, *longest
    )
    if diagnose:
        diagnostics.record(counts)
    return results(out, lse, max_logits, return_lse, return_max_logits)
