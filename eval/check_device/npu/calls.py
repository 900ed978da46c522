"""Calls that probes make of the library, on the chip that it was built for, and their inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pasa.eval.kit.error_metrics import generator
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import on_310p

EXP, LN, DIV, HALF_PRODUCT, INTEGERS, SELECT, SUM = range(7)  # VectorProbe of ascend_c/kernel/vector_probes.h
NUMBERS, COLUMNS = 4096, 64  # of a vector probe, and of one of its repeats


class Operators(NamedTuple):
    """Hold the probes of the library: of a vector unit, of a cube unit, and of the chip's name and cores."""

    vector: Any
    product: Any
    chip: Any


def operators() -> Operators:
    """Return the operators of the library; NotImplementedError says why there are none."""
    if (why := npu_backend.library_error()) is not None:
        raise NotImplementedError(why)
    kernels, prefix = torch.ops.pasa, "npu_310p_probe" if is_310p() else "npu_probe"
    return Operators(*(getattr(kernels, f"{prefix}_{name}") for name in Operators._fields))


def is_310p() -> bool:
    """Return whether the library, built or not, is that of an Ascend 310P."""
    return npu_backend.architecture() == on_310p.ARCHITECTURE


def vector(probe: int, x: Tensor, y: Tensor, device: str, saturate: bool = False) -> Tensor:
    """Return what a `VectorProbe` makes of x and y; a 310P saturates in either case."""
    z: Tensor = operators().vector(x.to(device), y.to(device), probe, saturate)
    return z.cpu()


def product(a: Tensor, b: Tensor, device: str, stale: float = 0.0) -> Tensor:
    """Return A B^T three times, (3, m, n).

    The second one is stored in halves, or on a 310P of an A that the vector unit lays out; the third one has the
    product with a constant added.
    """
    before = torch.full((128, a.shape[1]), stale).half()
    c: Tensor = operators().product(*(x.to(device) for x in (a, b, before)))
    return c.cpu()[:, : a.shape[0], : b.shape[0]]


def normal(name: str, *shape: int) -> Tensor:
    """Return N(0, 1) numbers, the same for a name."""
    return torch.randn(shape, generator=generator(0, name))


def small_integers(name: str, rows: int, columns: int) -> Tensor:
    """Return FP16 integers whose products FP32 sums exactly in any order."""
    return torch.randint(-32, 33, (rows, columns), generator=generator(0, name)).half()


def attention_inputs(name: str, rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q of two heads, and k and v of one, all of 64 columns."""
    source = generator(0, name)
    q, k, v = (
        torch.randn(1, heads, length, 64, generator=source).half()
        for heads, length in ((2, rows), (1, keys), (1, keys))
    )
    return q, k, v
