"""Convert a `Call` into a `KernelCall`, which the Triton launchers take: FP16 tensors and an expanded mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pasa.ops.attention.call import Call, is_tokens_first, to_fp16
from pasa.ops.attention.spec.masking import dense_mask, fitting_mask, hidden_keys
from pasa.ops.numerics.formats import FORMATS, get_format
from pasa.ops.packed import largest_by_sequence, tile_table

DECODE_ROWS = 16  # query rows of one head; more rows than this keep the matrix engine busy without splitting the keys
FULL = 2**10  # rows of a call that no tile is cut for
DECODE_TILE = 128  # the most query rows of all heads that share a key head
PAGE_SPAN = 2**31  # kernels count the elements of a page with signed 32-bit integers
STEP = 8  # FP16 numbers in the 16 bytes that a thread loads at a time
SEEN = 16  # Triton sees by itself which numbers are multiples of 16
WIDEST = 2**29  # keys on an unlimited side of a window: kernels add both sides to key numbers with 32 bits
LOW_CAP = 1024.0  # the largest cap that can lose 2^-23 of itself: 2^-13 nats, a quarter of an FP16 weight's rounding
LARGEST_RATIO = 2.0**64  # the least product of FP16 numbers other than 0 is 2^-48, so its tanh is 1 already


class Packing(NamedTuple):
    """Describe the key blocks of packed sequences.

    Attributes
    ----------
    table, first : Tensor
        `pasa.ops.packed.tile_table` of the keys.
    cu_seqlens : Tensor (sequences + 1,), INT32
    """

    table: Tensor
    first: Tensor
    cu_seqlens: Tensor


@dataclass(slots=True, eq=False)
class KernelCall(Call):
    """Hold one call as the kernels read it: q in FP16 with last stride 1, and k and v too unless they are caches.

    The mask is bytes or floats, expanded to (B, Hq, Sq, Skv). Cumulative lengths are INT32. Caches
    are views (pages, Hkv, slots, D).

    Attributes
    ----------
    sinks : Tensor (Hq,), optional
        In FP32, contiguous.
    dropped : int
        Low FP32 bits that unbiased rounding of the output drops: 13 to FP16, 16 to BF16. 0 means
        round to nearest.
    out_dtype : torch.dtype
        The dtype in which a kernel writes its output.
    """

    dropped: int = 0
    out_dtype: torch.dtype = torch.float16

    @classmethod
    def of(cls, call: Call) -> KernelCall:
        """Convert a call.

        Raises
        ------
        ValueError
            If a finite value of a BF16 or FP32 tensor does not fit into FP16.
        NotImplementedError
            If a page of a cache spans 2^31 elements or more.
        """
        q, k, v, mask, cu_q, cu_k = call.q, call.k, call.v, call.mask, call.cu_q, call.cu_k
        dropped = dropped_bits(call.options.softmax, q.dtype)
        if call.pages is None:
            half = _half(q, "q"), _half(k, "k"), _half(v, "v")
        else:
            check_spans(k, v)
            # On a GPU a value beyond FP16 becomes an infinity, because a call over pages never waits.
            half = (
                _half(q, "q") if q.device.type == "cpu" else _dense_rows(q.half()),
                k.transpose(1, 2),
                v.transpose(1, 2),
            )
        if mask is not None:
            mask = mask.view(torch.uint8) if mask.dtype == torch.bool else fitting_mask(mask, call.scale)
            mask = mask.expand(*q.shape[:3], k.shape[2])
        if cu_q is not None and cu_k is not None:
            cu_q, cu_k = (x.to(q.device, torch.int32).contiguous() for x in (cu_q, cu_k))
        sinks = None if call.sinks is None else call.sinks.to(q.device, torch.float32).contiguous()
        return cls(
            *half, call.scale, call.options, call.is_causal, mask, cu_q, cu_k, call.pages,
            window=call.window, softcap=call.softcap, sinks=sinks, max_logits=call.max_logits, dropped=dropped,
            out_dtype=output_dtype(dropped),
        )  # fmt: skip

    @property
    def decodes(self) -> bool:
        """Return whether the call has so few query rows that its keys are split among programs."""
        if self.cu_q is not None or self.q.shape[2] > DECODE_ROWS:
            return False
        return self.q.shape[2] * self.group <= DECODE_TILE

    @property
    def rows(self) -> int:
        """Return the query rows of a sequence, or of all packed ones."""
        return self.q.shape[2 if self.cu_q is None else 0]

    @property
    def rows_of_tiles(self) -> int:
        """Return the rows that tiles are chosen for: a full tile where `rows` depends on other sequences but must not.

        A tile is cut to fewer rows, and another tile adds up a row's scores and weights in another order.
        """
        return FULL if self.options.batch_invariant and self.cu_q is not None else self.rows

    @property
    def keys(self) -> int:
        """Return the keys of a sequence, or of all packed ones."""
        return self.k.shape[2 if self.cu_k is None else 0]

    @property
    def variant(self) -> str:
        """Return the key under which tuning.py stores the fastest tile; sizes enter it as powers of two."""
        kind = "packed" if self.cu_q is not None else "causal" if self.is_causal else "full"
        if self.has_window:
            kind += f" window ~2^{self.limits[1].bit_length()}"
        if self.softcap:
            kind += f" {self.cap_kind} cap"
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
    def has_window(self) -> bool:
        """Return whether a window limits the keys of a row on some side."""
        return self.window != (-1, -1)

    @property
    def banded(self) -> bool:
        """Return whether the keys of a row end at a diagonal; a window without a limit to the right ends far away."""
        return self.is_causal or self.has_window

    @property
    def limits(self) -> tuple[int, int]:
        """Return (right, span): row i of a window sees the span + 1 keys up to key i + Skv - Sq + right."""
        if not self.has_window:
            return 0, 0
        left, right = (WIDEST if side < 0 else min(side, WIDEST) for side in self.window)
        right = 0 if self.is_causal else right
        return right, left + right

    @property
    def cap_kind(self) -> str:
        """Return the kind of the soft cap, as the kernels name it."""
        return "none" if not self.softcap else "low" if self.softcap <= LOW_CAP else "high"

    @property
    def unit(self) -> float:
        """Return the nats in a unit of a kernel's scores: those of q.k, or of its tanh."""
        return self.softcap or self.scale

    @property
    def ratio(self) -> float:
        """Return the factor of q.k within the tanh of a soft cap."""
        return min(self.scale / self.unit, LARGEST_RATIO)

    @property
    def flags(self) -> dict[str, Any]:
        """Return the compile-time constants of the features that change score tiles."""
        return {"WINDOW": self.has_window, "CAP": self.cap_kind}

    @property
    def mask_strides(self) -> tuple[int, ...]:
        """Return the mask's strides of batch, head, row and key."""
        return (0, 0, 0, 0) if self.mask is None else self.mask.stride()

    def with_queries(self, q: Tensor) -> KernelCall:
        """Return the same call with other queries (B, Hq, Sq, D), not packed."""
        return replace(self, q=q, cu_q=None)

    def outputs(self, *, strided: bool = True) -> tuple[Tensor, Tensor]:
        """Allocate the output and log-sum-exp, uninitialised; a `strided` output has the memory order of q."""
        lse = torch.empty(self.q.shape[:-1], dtype=torch.float32, device=self.q.device)
        if strided and is_tokens_first(self.q):
            out = torch.empty(self.q.transpose(1, 2).shape, dtype=self.out_dtype, device=self.q.device).transpose(1, 2)
        else:
            out = torch.empty(self.q.shape, dtype=self.out_dtype, device=self.q.device)
        return out, lse

    def row_maxima(self, lse: Tensor) -> Tensor | None:
        """Allocate the largest score of each row, uninitialised, if the call asks for largest scores."""
        return torch.empty_like(lse) if self.max_logits else None

    def of_heads(self, top: Tensor | None) -> Tensor | None:
        """Return the largest scores (sequences, Hq) from those of all rows; NaN if one is NaN."""
        if top is None or self.q.dim() == 4:
            return top if top is None else top.amax(-1)
        if self.cu_q is None:
            return top  # a row for each sequence
        return largest_by_sequence(top, self.cu_q)


def _half(x: Tensor, name: str) -> Tensor:
    return _dense_rows(to_fp16(x, name))


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def check_spans(*caches: Tensor) -> None:
    """Check that kernels can count the elements of a page with 32 bits.

    Raises
    ------
    NotImplementedError
        If a page spans 2^31 elements or more.
    """
    for cache_tensor in caches:
        span = cache_tensor.shape[1] * cache_tensor.stride(1)
        if span >= PAGE_SPAN:
            raise NotImplementedError(
                f"a page of the cache spans {span} elements (strides {cache_tensor.stride()}), 2^31 or more: "
                "lay the cache out with pages of fewer elements"
            )


def dropped_bits(softmax: str, dtype: torch.dtype) -> int:
    """Return `KernelCall.dropped` for queries of a dtype; BF16 outputs are rounded from FP32, not from FP16."""
    if softmax != "unbiased":
        return 0
    target = get_format(dtype if dtype == torch.bfloat16 else torch.float16)
    return FORMATS["fp32"].mantissa_bits - target.mantissa_bits


@cache
def output_dtype(dropped: int) -> torch.dtype:
    """Return the dtype in which a kernel writes an output that drops these bits: BF16 for 16, otherwise FP16."""
    return torch.bfloat16 if dropped == dropped_bits("unbiased", torch.bfloat16) else torch.float16


def strides_of(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, head and token; packed tensors have their tokens first."""
    if x.dim() == 3:
        return 0, x.stride(1), x.stride(0)
    return x.stride(0), x.stride(1), x.stride(2)


def step_of(*tensors: Tensor) -> int:
    """Return the STEP of kernels that read or write these tensors: a number that divides all strides but the last.

    It is 1 as well where all are multiples of 16, which Triton sees by itself.
    """
    if tensors[0].device.type == "npu":
        return 1
    steps = [stride for x in tensors for stride in x.stride()[:-1]]
    seen = all(step % SEEN == 0 for step in steps)
    return STEP if not seen and all(step % STEP == 0 for step in steps) else 1


def visible_keys(call: KernelCall) -> Tensor | None:
    """Return which keys (B, Skv) some query sees, or None without a mask.

    The last row of a causal band sees all keys. So a mask that is the same for all rows needs
    no band, and any other mask is combined with the band first.
    """
    if call.mask is None:
        return None
    mask = call.mask.view(torch.bool) if call.mask_kind == "bool" else call.mask
    rows_equal = mask.stride(2) == 0
    return ~hidden_keys(mask[:, :, -1:] if rows_equal else dense_mask(call, mask), call.k)


def work_of(
    call: KernelCall, block_m: int, packing: Packing | None, unused: Tensor
) -> tuple[int, int, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the number of row tiles, that of units of work (a tile of one head), and the tables of packed sequences.

    `unused` takes the place of each table if the call is not packed.
    """
    heads = call.q.shape[1]
    if call.cu_q is None or packing is None:
        tiles = -(-call.q.shape[2] // block_m)
        return tiles, tiles * heads * call.q.shape[0], (unused, unused, unused, unused)
    table, _ = tile_table(call.cu_q, block_m, call.q.shape[0])
    return table.shape[0], table.shape[0] * heads, (table, call.cu_q, packing.cu_seqlens, packing.first)
