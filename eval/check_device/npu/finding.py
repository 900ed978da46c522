"""The result of a probe, and comparisons of bits that give one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Finding:
    """State what a probe found.

    Attributes
    ----------
    deviates : bool
        Whether the device does otherwise than the kernels assume.
    detail : str
        What it does.
    harmless : bool
        Whether the results of the kernels keep their bounds in spite of it.
    """

    deviates: bool
    detail: str
    harmless: bool = False


def same_bits(found: Tensor, expected: Tensor) -> Finding:
    """Find numbers whose bits differ from the expected ones."""
    integers = {2: torch.int16, 4: torch.int32}[found.element_size()]
    wrong = int((found.contiguous().view(integers) != expected.contiguous().view(integers)).sum())
    return Finding(wrong > 0, f"{wrong} of {found.numel()} results differ")


def in_ulps(found: Tensor, expected: Tensor) -> Finding:
    """Find FP32 numbers that differ from the expected ones.

    One unit in the last place does no harm, and neither does 0 in place of a subnormal number.
    """
    tiny = torch.finfo(torch.float32).tiny
    flushed = (expected.abs() < tiny) & (expected != 0) & (found == 0)
    steps = (found.view(torch.int32).long() - expected.view(torch.int32).long()).abs().masked_fill(flushed, 0)
    off, most = int((steps > 0).sum()), int(steps.max())
    detail = f"{off} of {len(found)} results differ, by at most {most} ulp"
    detail += f"; {int(flushed.sum())} subnormal results are 0" if flushed.any() else ""
    return Finding(off > 0 or bool(flushed.any()), detail, harmless=most <= 1)
