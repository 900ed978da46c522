"""Inputs and error measures that several tests share."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pasa
from pasa.ops import plans, registry
from pasa.ops.attention.triton import backend as triton_backend
from pasa.ops.attention.triton.short import launch as short_launch

PROMPT_KEYS = short_launch.PROMPT_KEYS
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the device of the Triton kernels: a GPU, or the interpreter
ODD_LENGTHS = [(1, 1), (1, 63), (63, 127), (127, 129), (129, 63), (5, 300), (200, 257)]  # (Sq, Skv)


class Mode(NamedTuple):
    """A way to run attention: a backend, one of its kernels, and an arithmetic."""

    backend: str
    config: pasa.PasaConfig
    portable: bool = False  # on Hopper, use the kernel that other devices run, not Hopper's own

    def __str__(self) -> str:
        kernel = "portable" if self.portable else self.backend
        return f"{kernel}-{self.config.overflow}-{self.config.accumulate}"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, **how: Any
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp on the CPU; the Triton kernels run on `DEVICE`."""
        device = "cpu" if self.backend == "reference" else DEVICE
        q, k, v = q.to(device), k.to(device), v.to(device)
        mask = None if attn_mask is None else attn_mask.to(device)
        how = {"config": self.config, "backend": self.backend, "return_lse": True} | how
        with portable_kernel() if self.portable else nullcontext():
            out, lse = pasa.attention(q, k, v, attn_mask=mask, **how)
        return out.cpu(), lse.cpu()

    def out(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        """Return the output alone."""
        return self.attend(q, k, v, **how)[0]


@contextmanager
def portable_kernel() -> Iterator[None]:
    """Let the portable kernel serve prompts, and neither Hopper's own nor that of few keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "hopper_serves", lambda *_: False)
        with short_prompts(False):
            yield


@contextmanager
def short_prompts(served: bool) -> Iterator[None]:
    """Let the kernel of few keys serve prompts of up to `PROMPT_KEYS`, as on a large GPU, or none of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_launch, "PROMPT_KEYS", PROMPT_KEYS if served else 0)
        if served:
            patch.setattr(short_launch, "processors", lambda _: 132)
        patch.setattr(plans, "_plans", {})  # those of the calls before may launch another kernel
        yield


@contextmanager
def reference_serves() -> Iterator[None]:
    """Let the reference serve CPU tensors of calls that name no backend, by taking the backend before it away."""
    absent = dataclasses.replace(registry.BACKENDS["sdpa"], missing=lambda: "left out by this test", priority=-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.BACKENDS, "sdpa", absent)
        yield


HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
REFERENCE_MODES = [
    Mode("reference", pasa.PasaConfig(overflow=mode, accumulate=a))
    for mode in ("inf", "saturate")
    for a in ("fp32", "fp16")
]
KERNEL_MODES = [Mode("triton", pasa.PasaConfig(accumulate=a)) for a in ("fp32", "fp16")]
KERNEL_MODES += [Mode("triton", pasa.PasaConfig(), portable=True)] * HOPPER
MODES = [*REFERENCE_MODES, *KERNEL_MODES, Mode("sdpa", pasa.PasaConfig())]
# Kernels sum weights before FP16 rounds them, so an output may leave the range of its values by this share of it.
KERNEL_SLACK = 2.0**-11


def normal_qkv(
    heads: tuple[int, int], lengths: tuple[int, int], dim: int, seed: int = 0, batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return N(0, 1) queries (B, Hq, Sq, D) and keys, values (B, Hkv, Skv, D) in FP16."""
    g = torch.Generator().manual_seed(seed)
    shapes = (heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1])
    q, k, v = (torch.randn(batch, h, s, dim, generator=g).half() for h, s in shapes)
    return q, k, v


def biased_qkv(bias: float, seed: int, length: int = 1280, heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return N(0, 1) tensors plus a constant on 16 of 128 dimensions of q and k.

    Scores share an offset of 16 bias^2.
    """
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, length, 128, generator=g) for _ in range(3))
    q[..., :16] += bias
    k[..., :16] += bias
    return q.half(), k.half(), v.half()


def rmse(out: Tensor, golden: Tensor) -> float:
    """Return ||out - golden|| / ||golden||  (paper, Eq. 19)."""
    return float((out.double() - golden).norm() / golden.norm())


def part_blocks(q: Tensor, k: Tensor, query: float, size: float) -> None:
    """Fill columns 1 and 2 so that no anchor serves two neighbouring blocks of keys, although no score changes.

    Otherwise what all keys of a head share is subtracted before, and anchors of blocks are not needed.
    """
    sizes = size * (1 + torch.arange(k.shape[-2]) // 128 % 2)
    q[..., 1:3] = query
    k[..., 1], k[..., 2] = sizes, -sizes


def max_error(out: Tensor, golden: Tensor) -> float:
    """Return the largest absolute error."""
    return float((out.double() - golden).abs().max())


def fp16_naive_error(q: Tensor, k: Tensor, v: Tensor, golden: Tensor, **how: object) -> float:
    """Return the largest error of the same-precision naive attention (Q K^T stored in FP16 before scaling)."""
    naive = pasa.attention(q, k, v, config=pasa.PasaConfig(precision="partial"), **how)  # type: ignore[call-overload]
    return max_error(naive, golden)


def pairwise(first: Sequence[Any], middle: tuple[Any, Any], last: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Return half of all combinations, in which any two values of different choices still meet.

    `middle` alternates like a chessboard. Both other choices have at least two values.
    """
    return [(a, middle[(i + j) % 2], b) for i, a in enumerate(first) for j, b in enumerate(last)]
