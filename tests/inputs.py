"""Inputs and error measures that several tests share."""

import torch
from torch import Tensor

import pasa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the Triton kernels: a GPU, or the interpreter
ODD_LENGTHS = [(1, 1), (1, 63), (63, 127), (127, 129), (129, 63), (5, 300), (200, 257)]  # (Sq, Skv)


def normal_qkv(
    heads: tuple[int, int], lengths: tuple[int, int], dim: int, seed: int = 0, batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1) queries (B, Hq, Sq, D) and keys, values (B, Hkv, Skv, D) in FP16."""
    g = torch.Generator().manual_seed(seed)
    shapes = (heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1])
    q, k, v = (torch.randn(batch, h, s, dim, generator=g).half() for h, s in shapes)
    return q, k, v


def biased_qkv(bias: float, seed: int, length: int = 1280, heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1), plus a constant on 16 of 128 dimensions of q and k: scores share an offset of 16 bias^2."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, length, 128, generator=g) for _ in range(3))
    q[..., :16] += bias
    k[..., :16] += bias
    return q.half(), k.half(), v.half()


def rmse(out: Tensor, golden: Tensor) -> float:
    """||out - golden|| / ||golden||  (paper, Eq. 19)."""
    return float((out.double() - golden).norm() / golden.norm())


def max_error(out: Tensor, golden: Tensor) -> float:
    """Largest absolute error."""
    return float((out.double() - golden).abs().max())


def fp16_naive_error(q: Tensor, k: Tensor, v: Tensor, golden: Tensor, **how: object) -> float:
    """Largest error of the same-precision naive attention (Q K^T stored in FP16 before scaling)."""
    naive = pasa.attention(q, k, v, config=pasa.PasaConfig(precision="partial"), **how)  # type: ignore[call-overload]
    return max_error(naive, golden)
