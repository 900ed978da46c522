"""Check values where they are read, because a compiled or captured graph has no values to check beforehand."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FORMATS

FP16 = FORMATS["fp16"]


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
        With the number of such values and the largest.
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
            f"{name} has {int(lost.sum())} values beyond the FP16 range (largest {worst:g} > {FP16.max:g})"
        )
    return rounded


def edges(cu_seqlens: Tensor, name: str, x: Tensor) -> list[int]:
    """Return the cumulative lengths of packed tokens x (T, H, D) on the host.

    Raises
    ------
    ValueError
        Unless they rise from 0 to the number of tokens.
    """
    found: list[int] = cu_seqlens.tolist()
    if found[0] != 0 or found[-1] != x.shape[0] or any(a > b for a, b in pairwise(found)):
        raise ValueError(f"cu_seqlens_{name}={found} does not rise from 0 to the {x.shape[0]} tokens of {name}")
    return found
