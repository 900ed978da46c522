"""Inputs built against one step of the guarantee."""

from __future__ import annotations

import torch
from torch import Tensor

GAP = 17.0  # nats: a weight of 2^-24.5, which a sum of 1 in FP32 does not take up, and one of 65504 rounds to an ulp
FAR = 30.0  # nats: no weight in FP16 beside the first key of a block


def stalled(blocks: int, block_k: int, dim: int = 1, value: float = 65504.0) -> tuple[Tensor, Tensor, Tensor]:
    """One row whose sums of weights and of weighted values are rounded to different sides, once a block; scale 1.

    With l = 1 and O = 65504 a weight w from 2^-25 to 2^-24 leaves l, and takes O to the next FP32 number. So O / l
    grows by 2^-24 of itself with every block, and is past 65520 after 4,096.

    Parameters
    ----------
    blocks, block_k : int
        Skv is their product.
    dim : int
        D; the first column makes the scores.
    value : float
        All of V.
    """
    q, k = (torch.zeros(1, 1, n, dim, dtype=torch.float16) for n in (1, blocks * block_k))
    q[..., 0] = 1.0
    k[..., 0] = -FAR
    k[:, :, ::block_k, 0] = -GAP
    k[:, :, 0, 0] = 0.0
    return q, k, torch.full_like(k, value)


def spikes(keys: int, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Three rows with two scores near 2,000,000 units, 16,000 apart, among small ones: the mean is within FP16's range.

    A column is subnormal, so that no power of two of the scale can be folded in.
    """
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, dim, generator=source) for n in (3, keys, keys))
    q[..., 0] = torch.tensor([1000.0, 990.0, 980.0])
    k[..., 0], k[..., 1] = 0.0, 2.0**-24
    k[:, :, 3, 0], k[:, :, 50, 0] = 2000.0, 2016.0
    return q.half(), k.half(), v.half()


def specks(keys: int, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of 2^-20 or so: their products are zero in FP16, and not after a large scale."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, dim, generator=source) for n in (3, keys, keys))
    return (q * 2.0**-20).half(), (k * 2.0**-20).half(), v.half()


def sunken(block_k: int, dim: int = 16, rows: int = 1, blocks: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Equal scores in all blocks, all 2,000,000 units below those of the blocks' anchors; values 1, then 0.

    Of three columns each key has one a spacing of FP16 lower. Columns have fewer than half of these, so that the mean
    on FP16's grid is the upper number. A reference of two FP16 numbers does not reach down to the scores.
    """
    q, k, v = (torch.zeros(1, 1, n, dim, dtype=torch.float16) for n in (rows, blocks * block_k, blocks * block_k))
    q[..., :3], k[..., :3] = 65504.0, 40032.0
    keys = torch.arange(blocks * block_k)
    k[:, :, keys, keys % 3] = 40000.0
    v[:, :, :block_k] = 1.0
    return q, k, v
