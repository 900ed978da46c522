"""Hold one call of the operator as every backend gets it, and check values that backends read.

Shapes and dtypes are checked before a backend is chosen (ops/operands.py). Values are checked when a
backend runs, because tensors have no values yet while a graph is traced or captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pasa.ops.attention.options import AttentionOptions
from pasa.ops.numerics.formats import FP16_MAX

DEFAULT = AttentionOptions()
Results: TypeAlias = tuple[Tensor, Tensor, Tensor]  # output, log-sum-exp, counts of diagnostics


class Pages(NamedTuple):
    """Describe where a paged cache keeps the keys of each sequence; `pasa.attention_paged` documents the tensors."""

    block_table: Tensor
    seq_lens: Tensor
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    key_anchors: Tensor | None = None


@dataclass(slots=True, eq=False)
class Call:
    """Hold one call: dense, packed (with `cu_q` and `cu_k`), or over a paged cache (with `pages`).

    Attributes
    ----------
    q : Tensor (B, Hq, Sq, D), packed or paged (T, Hq, D)
    k, v : Tensor (B, Hkv, Skv, D), packed (T, Hkv, D), caches (pages, slots, Hkv, D)
    scale : float
        Positive; multiplies q.k.
    options : AttentionOptions
    is_causal : bool
        Bottom-right aligned.
    mask : Tensor, optional
        Bool (True = keep) or float (added), broadcastable to (B, Hq, Sq, Skv); for dense calls alone.
    cu_q, cu_k : Tensor (sequences + 1,), optional
        Cumulative lengths. A paged call may have `cu_q`; without it every sequence has one query.
    pages : Pages, optional
    diagnose : bool
        Also count extremes, overflow and rescued tiles of the scores (spec/diagnostics.py).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    options: AttentionOptions = DEFAULT
    is_causal: bool = False
    mask: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    pages: Pages | None = None
    diagnose: bool = False

    def edges(self) -> tuple[list[int], list[int]]:
        """Return both lists of cumulative lengths of a packed call, on the host.

        Raises
        ------
        ValueError
            If the call is not packed, or the lengths do not rise from 0 to the number of tokens.
        """
        if self.cu_q is None or self.cu_k is None:
            raise ValueError("the call has no cumulative lengths: it is not packed")
        return edges(self.cu_q, "q", self.q), edges(self.cu_k, "k", self.k)


def capturing(x: Tensor) -> bool:
    """Return whether a graph is being captured, during which nothing can be read back from the device."""
    if x.device.type == "npu":
        return bool(torch.npu.is_current_stream_capturing())  # type: ignore[attr-defined]
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def to_fp16(x: Tensor, name: str) -> Tensor:
    """Convert x to FP16; a finite value beyond 65504 is an error.

    While a graph is captured, such a value becomes an infinity, which attention turns into NaN.

    Raises
    ------
    ValueError
        If there are such values. The message has their number and the largest.
    """
    if x.dtype == torch.float16:
        return x
    rounded = x.to(torch.float16)
    if capturing(x):
        return rounded
    lost = torch.isinf(rounded) & torch.isfinite(x)
    if bool(lost.any()):
        worst = x.abs().where(lost, 0.0).max().item()
        raise ValueError(
            f"{name} has {int(lost.sum())} values beyond the FP16 range (largest {worst:g} > {FP16_MAX:g}): "
            f"divide {name} by a power of two, and multiply {'the output' if name == 'v' else 'scale'} by it"
        )
    return rounded


def edges(cu_seqlens: Tensor, name: str, x: Tensor) -> list[int]:
    """Return the cumulative lengths of packed tokens x (T, H, D) on the host.

    Raises
    ------
    ValueError
        If they do not rise from 0 to the number of tokens.
    """
    lengths: list[int] = cu_seqlens.tolist()
    if lengths[0] != 0 or lengths[-1] != x.shape[0] or any(a > b for a, b in pairwise(lengths)):
        raise ValueError(
            f"cu_seqlens_{name}={lengths} does not rise from 0 to the {x.shape[0]} tokens of {name}: "
            "pass 0, then the running sum of the sequence lengths"
        )
    return lengths
