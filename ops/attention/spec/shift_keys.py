"""Make the shifted keys K' of one block as the NPU's cube unit does (paper, Eq. 10 to 12).

`shift_paper` is the published batched GEMM with the rounded shifting matrix. `shift_exact` subtracts an
*anchor*: the block mean on a grid coarse enough that the subtraction loses nothing, column by column.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FP16, Overflow, round_to


class ShiftedBlock(NamedTuple):
    """Hold the keys of one block in the exact variant: ``keys / unit + anchor`` equals the input keys bit for bit.

    Attributes
    ----------
    keys : Tensor (B, Hkv, n, D)
        K' = (K - anchor) * unit, every value representable in FP16.
    anchor : Tensor (B, Hkv, 1, D)
        The column's mean on the grid of its largest key. It is 0 where subtracting it would round a
        key, or where some key is less than a third of it.
    mean_residual : Tensor (B, Hkv, 1, D)
        fl16(mean - anchor), the mean of K' that q sees; only used to guess where the scores lie.
    unit : Tensor (B, Hkv, 1, 1)
        A power of two, the share of the softmax scale that fits into K' without rounding.
    """

    keys: Tensor
    anchor: Tensor
    mean_residual: Tensor
    unit: Tensor


def whole_blocks(k: Tensor, block: int) -> Tensor:
    """Fill a ragged last block by repeating the last keys in order; if there is no whole block, with zeros.

    The authors of the published algorithm do the same. Every block has one M, and the mean of a
    filled block includes the filling. No query sees the filling.

    Parameters
    ----------
    k : Tensor (..., S, D)
    block : int
        Keys in a block.
    """
    keys, missing = k.shape[-2], -k.shape[-2] % block
    if missing == 0:
        return k
    if keys < block:
        return torch.nn.functional.pad(k, (0, 0, 0, missing))
    return torch.cat([k, k[..., keys - missing :, :]], -2)


def shift_paper(k: Tensor, matrix: Tensor, overflow: Overflow) -> Tensor:
    """Compute K'^T = K^T M as the cube does, with FP32 accumulation and one rounding to FP16 (Eq. 11).

    Parameters
    ----------
    k : Tensor (B, Hkv, n, D), FP32 with FP16 values
    matrix : Tensor (n, n)
        The rounded shifting matrix, 1/alpha included; symmetric.
    overflow : "inf" or "saturate"
    """
    return round_to(matrix.to(k) @ k, FP16, overflow=overflow)


def shift_exact(k: Tensor, unit: float) -> ShiftedBlock:
    """Subtract the block mean where that is exact for every key, and multiply by `unit` where that is exact.

    A column's anchor lies on the grid of the largest |k| in the column, so a column whose keys
    share a bias loses no bit (Sterbenz). A column keeps anchor 0 where some key would be rounded,
    or is less than a third of the anchor. The scores then differ from q.k by q.anchor alone, and no
    rounding of K' enters them. FP32 sums of q.k' are at most twice those of q.k for any key,
    whichever keys of the block a row sees.

    Parameters
    ----------
    k : Tensor (B, Hkv, n, D), FP32 with finite FP16 values
    unit : float
        Power of two, at most 1.
    """
    mean = k.mean(-2, keepdim=True)
    anchor = anchor_near(mean, k.abs().amax(-2, keepdim=True))
    anchor = torch.where(can_shift(k, anchor).all(-2, keepdim=True), anchor, 0.0)
    shifted = k - anchor
    fits = _is_fp16(shifted * unit).all(-1, keepdim=True).all(-2, keepdim=True)
    # torch.where() of two scalars would take the default dtype.
    units = torch.where(fits, k.new_tensor(unit), k.new_tensor(1.0))
    return ShiftedBlock(shifted * units, anchor, round_to(mean - anchor, FP16, overflow="saturate"), units)


def anchor_near(mean: Tensor, largest: Tensor) -> Tensor:
    """Round means of columns to the grid that FP16 has at each column's largest |k|; FP16 numbers, in FP32."""
    exponent = torch.frexp(largest).exponent - 1  # largest |k| in [2^e, 2^(e+1))
    grid = torch.exp2((exponent - FP16.mantissa_bits).float()).clamp(min=FP16.min_subnormal)
    return torch.round(mean / grid) * grid


def shifts_exactly(k: Tensor, anchor: Tensor) -> Tensor:
    """Return where k - anchor is an FP16 number and nothing is lost, for FP32 tensors with finite FP16 values.

    Adding the anchor back shows what FP32 lost in the difference: 2^-24 - 60000 is -60000 in FP32,
    which is an FP16 number.
    """
    return _is_fp16(k - anchor) & ((k - anchor) + anchor == k)


def can_shift(k: Tensor, anchor: Tensor) -> Tensor:
    """Return where k may lose the anchor, because k - anchor is exact and at most twice as long as k.

    That is the case where k is at least a third of the anchor, in its direction. So a row that sees
    only k loses no accuracy to the shift.
    """
    return shifts_exactly(k, anchor) & (anchor * (3 * k - anchor) >= 0)


def _is_fp16(x: Tensor) -> Tensor:
    return round_to(x, FP16) == x
