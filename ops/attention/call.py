"""Hold one call of the operator as every backend gets it, and check values that backends read.

Shapes and dtypes are checked before a backend is chosen (ops/operands.py). Values are checked when a
backend runs, because tensors have no values yet while a graph is traced or captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pasa.ops.attention.options import AttentionOptions
from pasa.ops.numerics.formats import FP16_MAX

DEFAULT = AttentionOptions()
FEATURES = (
    "packed sequences",
    "paged caches",
    "windows",
    "sinks",
    "soft caps",
    "max logits",
    "diagnostics",
)
"""Properties of calls that a backend may lack; `Call.features` names those of one call."""
PACKED, PAGED = FEATURES[:1], FEATURES[1:2]
NO_WINDOW = (-1, -1)


class Results(NamedTuple):
    """Hold what a backend returns for a call.

    Attributes
    ----------
    out : Tensor, shape and dtype of q
    lse : Tensor, shape of q without D, FP32
    max_logits : Tensor (sequences, Hq), FP32, if the call asks for it
    counts : Tensor (B, Hq, 7), FP64, if the call asks for diagnostics
    """

    out: Tensor
    lse: Tensor
    max_logits: Tensor | None = None
    counts: Tensor | None = None


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
    window : (int, int)
        How many keys to the left and to the right of its aligned key a row sees; -1 is unlimited. The last row is
        aligned with the last key. With `is_causal` the second number is -1, because the causal band limits that side.
    softcap : float
        A scaled score s becomes softcap * tanh(s / softcap) before the mask is added; 0 is no cap.
    sinks : Tensor (Hq,), optional
        One more score of every row of a head, whose value is 0.
    max_logits : bool
        Also return the largest score (scaled, capped, masked) of each sequence and head.
    longest : (int or None, int or None)
        Bounds of the queries and of the keys of a packed sequence, as far as the caller gives them. They choose a
        kernel, and change results by no more than rounding.
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
    window: tuple[int, int] = NO_WINDOW
    softcap: float = 0.0
    sinks: Tensor | None = None
    max_logits: bool = False
    longest: tuple[int | None, int | None] = (None, None)

    def laid_out(self, out: Tensor) -> Tensor:
        """Return the output in the memory order of q; it is copied if it has the other one."""
        return out.transpose(1, 2).contiguous().transpose(1, 2) if is_tokens_first(self.q) else out.contiguous()

    @property
    def features(self) -> tuple[str, ...]:
        """Return which of `FEATURES` the call has."""
        windowed, sunk, capped = self.window != NO_WINDOW, self.sinks is not None, self.softcap > 0
        if not (windowed or sunk or capped or self.max_logits or self.diagnose):
            return () if self.q.dim() == 4 else PACKED if self.pages is None else PAGED
        packed, paged = self.q.dim() == 3 and self.pages is None, self.pages is not None
        has = packed, paged, windowed, sunk, capped, self.max_logits, self.diagnose
        return tuple([name for name, used in zip(FEATURES, has, strict=True) if used])

    @property
    def sequences(self) -> int:
        """Return the number of sequences: batch entries, packed sequences, or rows of the block table."""
        if self.pages is not None:
            return self.pages.seq_lens.shape[0]
        return self.q.shape[0] if self.cu_q is None else self.cu_q.shape[0] - 1

    def narrowed(self) -> Call:
        """Return a call with the same result and no limit that hides no key.

        Keys before the first row's window are cut off, so a single row needs no window. A window without keys to the
        right is a causal band.
        """
        left, right = self.window
        if left < 0 and right < 0:
            return self
        is_causal, right = self.is_causal or right == 0, -1 if self.is_causal else right or -1
        if self.cu_q is not None or self.pages is not None:
            return replace(self, is_causal=is_causal, window=(left, right))
        rows, keys = self.q.shape[2], self.k.shape[2]
        first = max(0, keys - rows - left) if left >= 0 else 0
        left = -1 if left >= keys - first - 1 else left
        right = -1 if right >= rows - 1 else right
        mask = self.mask if self.mask is None or self.mask.shape[-1:] != (keys,) else self.mask[..., first:]
        return replace(
            self, k=self.k[:, :, first:], v=self.v[:, :, first:], mask=mask, is_causal=is_causal, window=(left, right)
        )

    def band(self, rows: int, keys: int) -> tuple[int | None, int | None]:
        """Return (lower, upper): row i of a sequence sees keys i + lower to i + upper; None is unlimited."""
        left, right = self.window
        shift = keys - rows
        upper = shift if self.is_causal else shift + right if right >= 0 else None
        return (shift - left if left >= 0 else None), upper

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


def is_tokens_first(q: Tensor) -> bool:
    """Return whether q (B, Hq, Sq, D) has the memory order of (B, Sq, Hq, D), as models make it.

    The output has the same order, so that a model which transposes it back copies nothing.
    """
    return q.dim() == 4 and q.stride(1) < q.stride(2)


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
