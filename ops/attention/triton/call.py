"""Describe one call in the form that the Triton launchers use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from pasa.ops.attention.spec.masking import dense_mask, hidden_keys
from pasa.ops.attention.triton.anchors.launch import Packing
from pasa.ops.numerics.formats import FORMATS, get_format
from pasa.ops.packed import tile_table

DECODE_ROWS = 16  # query rows of one head; more rows than this keep the matrix engine busy without splitting the keys
DECODE_TILE = 128  # the most query rows of all heads that share a key head


@dataclass(frozen=True)
class Call:
    """Hold one call as the kernels read it: FP16, last stride 1, dense or packed.

    Attributes
    ----------
    q, k, v : Tensor (B, H, S, D), or packed (T, H, D)
    mask : Tensor (B, Hq, Sq, Skv), bytes or floats, expanded; optional
    is_causal : bool
    scale : float
    cu_q, cu_k : Tensor (sequences + 1,), INT32, for packed tensors
    dropped : int
        Low FP32 bits that unbiased rounding of the output drops: 13 to FP16, 16 to BF16. 0 means
        round to nearest.
    out_dtype : torch.dtype
        The dtype in which a kernel writes its output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    dropped: int = 0
    out_dtype: torch.dtype = torch.float16

    @property
    def decodes(self) -> bool:
        """Return whether the call has so few query rows that the keys are split instead."""
        if self.cu_q is not None or self.q.shape[2] > DECODE_ROWS:
            return False
        return self.q.shape[2] * self.group <= DECODE_TILE

    @property
    def rows(self) -> int:
        """Return the query rows of a sequence, or of all packed ones."""
        return self.q.shape[2 if self.cu_q is None else 0]

    @property
    def keys(self) -> int:
        """Return the keys of a sequence, or of all packed ones."""
        return self.k.shape[2 if self.cu_k is None else 0]

    @property
    def variant(self) -> str:
        """Return a key of what the time of a tile depends on, with sizes in powers of two."""
        kind = "packed" if self.cu_q is not None else "causal" if self.is_causal else "full"
        sizes = f"B*H ~2^{(self.q.shape[0] * self.q.shape[1]).bit_length()}, S ~2^{self.keys.bit_length()}"
        return f"D {self.q.shape[-1]}, {kind}, mask {self.mask_kind}, drops {self.dropped}, {sizes}"

    @property
    def group(self) -> int:
        """Return the number of query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def mask_kind(self) -> str:
        """Return the kind of the mask, as the kernels name it."""
        return "none" if self.mask is None else "bool" if self.mask.dtype == torch.uint8 else "float"

    @property
    def mask_strides(self) -> tuple[int, ...]:
        """Return the mask's strides of batch, head, row and key."""
        return (0, 0, 0, 0) if self.mask is None else self.mask.stride()

    def with_queries(self, q: Tensor) -> Call:
        """Return the same call with other queries (B, Hq, Sq, D), not packed."""
        return replace(self, q=q, cu_q=None)

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Allocate the output and log-sum-exp, uninitialised."""
        lse = torch.empty(self.q.shape[:-1], dtype=torch.float32, device=self.q.device)
        return torch.empty(self.q.shape, dtype=self.out_dtype, device=self.q.device), lse


def dropped_bits(softmax: str, dtype: torch.dtype) -> int:
    """Return `Call.dropped` for queries of a dtype; rows that end as BF16 are rounded to BF16 directly."""
    if softmax != "unbiased":
        return 0
    target = get_format(dtype if dtype == torch.bfloat16 else torch.float16)
    return FORMATS["fp32"].mantissa_bits - target.mantissa_bits


@cache
def output_dtype(dropped: int) -> torch.dtype:
    """Return the dtype in which a kernel writes its output."""
    return torch.bfloat16 if dropped == dropped_bits("unbiased", torch.bfloat16) else torch.float16


def strides_of(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, head and token; packed tensors have their tokens first."""
    if x.dim() == 3:
        return 0, x.stride(1), x.stride(0)
    return x.stride(0), x.stride(1), x.stride(2)


def visible_keys(call: Call) -> Tensor | None:
    """Return which keys (B, Skv) some query sees, or None without a mask.

    The last row of a causal band sees all keys. So a mask that is the same for all rows decides
    alone, and any other mask is joined with the band first.
    """
    if call.mask is None:
        return None
    mask = call.mask.view(torch.bool) if call.mask_kind == "bool" else call.mask
    alike = mask.stride(2) == 0
    return ~hidden_keys(mask[:, :, -1:] if alike else dense_mask(mask, call.is_causal, call.q, call.k), call.k)


def work_of(
    call: Call, block_m: int, packing: Packing | None, unused: Tensor
) -> tuple[int, int, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the number of tiles of query rows, the units of work, and the tables that packed sequences need."""
    heads = call.q.shape[1]
    if call.cu_q is None or packing is None:
        tiles = -(-call.q.shape[2] // block_m)
        return tiles, tiles * heads * call.q.shape[0], (unused, unused, unused, unused)
    table, _ = tile_table(call.cu_q, block_m, call.q.shape[0])
    return table.shape[0], table.shape[0] * heads, (table, call.cu_q, packing.cu_seqlens, packing.first)
