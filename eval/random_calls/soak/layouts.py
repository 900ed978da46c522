"""How tensors lie in memory, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]
HEADS_LAST = "heads last"


def contiguous(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """As they are."""
    return q, k, v


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """(B, S, H, D)."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return q, k, v


def sliced(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """Rows twice as far apart as they are long."""
    q, k, v = (torch.cat([x, x], -1)[..., : x.shape[-1]] for x in (q, k, v))
    return q, k, v


def turned(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """The last stride is not 1."""
    q, k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v))
    return q, k, v


def offset(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """The first element lies one element after an aligned address."""
    q, k, v = (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (q, k, v))
    return q, k, v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """Keys and values are two halves of one projection (B, S, 2, H, D)."""
    both = torch.stack([k.transpose(1, 2), v.transpose(1, 2)], 2)
    return q, both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)


def expanded(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """One head of keys, repeated by a stride of 0."""
    return q, k[:, :1].expand(k.shape), v[:, :1].expand(v.shape)


LAYOUTS: dict[str, Callable[[Tensor, Tensor, Tensor], Three]] = {
    "contiguous": contiguous,
    HEADS_LAST: heads_last,
    "sliced": sliced,
    "turned": turned,
    "offset": offset,
    "fused": fused,
    "expanded": expanded,
}
