"""Launch the Triton attention kernels; arguments and results have the shapes of the reference's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from pasa.ops.attention.inputs import capturing, edges, to_fp16
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.spec import gradients as backward
from pasa.ops.attention.spec.masking import fitting_mask
from pasa.ops.attention.triton.anchors.launch import (
    KeyBlocks,
    Packing,
    find_anchors,
    pad_dim,
    shift_exact,
)
from pasa.ops.attention.triton.backward.launch import gradients
from pasa.ops.attention.triton.call import Call, dropped_bits, output_dtype, strides_of, visible_keys, work_of
from pasa.ops.attention.triton.decode.launch import decode
from pasa.ops.attention.triton.decode.paged_launch import paged_attention
from pasa.ops.attention.triton.launcher import DIRECT, launch
from pasa.ops.attention.triton.paper.launch import paper_attention
from pasa.ops.attention.triton.prefill.kernel import attention_kernel
from pasa.ops.attention.triton.prefill.mask_launch import MaskTiles
from pasa.ops.attention.triton.rounding_kernel import rounding_kernel
from pasa.ops.attention.triton.short.launch import is_short, short_attention
from pasa.ops.attention.triton.tiles import Tile, fit_ascend, processors, tiles_for
from pasa.ops.attention.triton.tuning import best_tile
from pasa.ops.packed import tile_table
from pasa.ops.paging import attend_gathered, check_spans

# What the Hopper kernel serves: head dimensions, and keys of an anchor block.
HOPPER_DIMS, HOPPER_BLOCK = (64, 128), 128
ROUNDED = 2048  # numbers of a tile when a separate launch rounds the output: what an NPU's unified buffer holds
CAREFUL_KEYS = 64  # the most keys in a tile of the exact pass


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    options: AttentionOptions,
    diagnose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as `reference.attention` does, but exact score tiles always stay in FP32 (see prefill/kernel.py).

    So accumulate="fp16" changes the published recovery alone. On Hopper, hopper/kernel.py serves the calls that it
    can.
    """
    with on_device(q):
        dropped = dropped_bits(options.softmax, q.dtype)
        out_dtype = output_dtype(dropped)
        call = Call(*_ready(q, k, v), _mask(attn_mask, q, k, scale), is_causal, scale, None, None, dropped, out_dtype)
        if _exact_on_gpu(call, options) and is_short(call):
            return _results(q, *short_attention(call))
        if _exact_on_gpu(call, options) and call.decodes:
            return _results(q, *decode(call))
        if hopper_serves(call, options):
            return _results(q, *_hopper()(call.q, call.k, call.v, is_causal, scale, call.dropped))
        return _results(q, *portable_attention(call, options))


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    scale: float,
    options: AttentionOptions,
    diagnose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as `reference.attention_varlen`; lengths are checked on the host unless a graph is being captured."""
    if not capturing(q):
        edges(cu_seqlens_q, "q", q)
        edges(cu_seqlens_k, "k", k)
    with on_device(q):
        dropped = dropped_bits(options.softmax, q.dtype)
        cu_q, cu_k = (x.to(q.device, torch.int32).contiguous() for x in (cu_seqlens_q, cu_seqlens_k))
        call = Call(*_ready(q, k, v), None, is_causal, scale, cu_q, cu_k, dropped, output_dtype(dropped))
        return _results(q, *portable_attention(call, options))


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    key_anchors: Tensor | None,
    is_causal: bool,
    scale: float,
    options: AttentionOptions,
    diagnose: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend as `reference.attention_paged`, without waiting for a GPU; caches of other dtypes become FP16 when read.

    Anchors are used for single queries of up to 16 heads that share a key head, head dimensions up to 128, and pages
    of a multiple of 16 slots. On an NPU, pages are gathered first for the packed kernel, and lengths are read back.
    """
    if q.device.type == "npu":
        attend = partial(attention_varlen, is_causal=is_causal, scale=scale, options=options, diagnose=diagnose)
        return attend_gathered(attend, q, (k_cache, v_cache), block_table, seq_lens, cu_seqlens_q)
    check_spans(k_cache, v_cache)
    with on_device(q):
        dropped = dropped_bits(options.softmax, q.dtype)
        half = to_fp16(q, "q") if q.device.type == "cpu" else q.half()
        half = half if half.stride(-1) == 1 else half.contiguous()
        k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        call = Call(half, k, v, None, is_causal, scale, cu_seqlens_q, None, dropped, output_dtype(dropped))
        return _results(q, *paged_attention(call, block_table, seq_lens, max_seqlen_q, max_seqlen_k, key_anchors))


def attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients as `backward.attention_backward` does, with FP16 products summed in FP32."""
    if q.device.type == "npu":
        return backward.attention_backward(grad_out, grad_lse, q, k, v, attn_mask, is_causal, scale)
    with on_device(q):
        call = Call(*_ready(q.half(), k.half(), v.half()), _mask(attn_mask, q, k, scale), is_causal, scale)
        out = torch.zeros_like(call.q) if grad_out is None else grad_out
        out = out if out.stride(-1) == 1 else out.contiguous()
        lse = None if grad_lse is None else grad_lse.float().contiguous()
        return gradients(call, out, lse, visible_keys(call), q.dtype)


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the current device is that of x, because Triton launches on the current device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def hopper_serves(call: Call, options: AttentionOptions) -> bool:
    """Return whether hopper/kernel.py, which needs one version of Triton, serves this call."""
    plain = options.precision == "pasa" and options.recovery == "exact" and options.block_k == HOPPER_BLOCK
    return plain and call.mask is None and call.q.shape[-1] in HOPPER_DIMS and _is_hopper(call.q.device)


@cache
def _hopper() -> Callable[..., tuple[Tensor, Tensor]]:
    from pasa.ops.attention.triton.hopper.launch import hopper_attention  # Gluon, which other versions of Triton lack

    return hopper_attention


@cache
def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return DIRECT  # Gluon is experimental and differs between versions of Triton


def _exact_on_gpu(call: Call, options: AttentionOptions) -> bool:
    """Return whether the GPU kernels for short calls and decoding may serve the call.

    An NPU has one kernel for calls of all sizes, because it cannot branch on data around a product.
    """
    return options.precision == "pasa" and options.recovery == "exact" and call.q.device.type != "npu"


def _mask(attn_mask: Tensor | None, q: Tensor, k: Tensor, scale: float) -> Tensor | None:
    """Return the mask as bytes or floats, expanded to (B, Hq, Sq, Skv), or None."""
    if attn_mask is None:
        return None
    mask = attn_mask.view(torch.uint8) if attn_mask.dtype == torch.bool else fitting_mask(attn_mask, scale)
    return mask.expand(*q.shape[:3], k.shape[2])


def _ready(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in FP16, with a last stride of 1."""
    half = (to_fp16(q, "q"), to_fp16(k, "k"), to_fp16(v, "v"))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in half)
    return q, k, v


def _results(q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of an operator, without counts, because the kernels do not count."""
    return out if out.dtype == q.dtype else out.to(q.dtype), lse, _no_counts(lse.device).detach()


@cache
def _no_counts(device: torch.device) -> Tensor:
    """Return one empty tensor for a device: an alias of it costs the host less than a new tensor."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.float64, device=device)


def portable_attention(call: Call, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Run the kernels that go through all keys: exact recovery, published recovery, or plain flash attention."""
    if call.dropped and call.q.device.type == "npu":
        return rounded_after(call, options)
    packing = None
    if call.cu_k is not None:
        packing = Packing(*tile_table(call.cu_k, options.block_k, call.k.shape[0]), call.cu_k)
    if options.precision == "pasa" and options.recovery == "paper":
        return paper_attention(call, packing, options)
    out, lse = call.outputs()
    tiles = tiles_for(call.q.device, pad_dim(call.q.shape[-1]), options.block_k, call.rows)
    if options.precision == "fp32":
        unused = KeyBlocks(lse, lse, lse)
        fast = Pass(call, call.k, unused, packing, options.block_k, out, lse, fast=True)
        fast.run(best_tile(call.q.device, fast.variant, tiles, fast.run))
        return out, lse
    if call.q.device.type == "npu":  # K' computed in the loop would not leave enough room in its unified buffer
        keys, anchors = shift_exact(call.k, options.block_k, visible=visible_keys(call), packing=packing)
        found = KeyBlocks(lse, anchors, lse)
        tile = fit_ascend(tiles[0], call.mask_kind, call.is_causal)
        Pass(call, keys, found, packing, options.block_k, out, lse, shift="before").run(tile)
        return out, lse
    # The second pass reads one mark per query tile of the first, so it must keep block_m. Its keys pass through
    # registers, so it has one stage.
    listed, visible = None, None
    if call.mask is not None:  # its tiles are sorted once, for both passes
        tall, wide = tiles[0].block_m, min(tiles[0].block_n, CAREFUL_KEYS)
        tiles = tuple(replace(tile, block_n=wide) for tile in tiles if tile.block_m == tall)
        listed = MaskTiles.of(call, tall, wide)
        visible = listed.visible
    found = find_anchors(call.k, call.v, options.block_k, visible=visible, packing=packing)
    # Key norms bound q.k, but not what a float mask adds.
    tile, bounded = tiles[0], call.mask_kind != "float"
    if bounded:
        fast = Pass(call, call.k, found, packing, options.block_k, out, lse, listed, fast=True, guarded=True)
        tile = best_tile(call.q.device, fast.variant, tiles, fast.run)
        fast.run(tile)
    careful = Tile(tile.block_m, min(tile.block_n, CAREFUL_KEYS), tile.warps, 1)
    Pass(call, call.k, found, packing, options.block_k, out, lse, listed, shift="here", guarded=bounded).run(careful)
    return out, lse


def rounded_after(call: Call, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Run `portable_attention` with FP32 output, and round the output in a separate launch."""
    wide, lse = portable_attention(replace(call, dropped=0, out_dtype=torch.float32), options)
    out = torch.empty_like(wide, dtype=call.out_dtype)
    dim, pad, rows = wide.shape[-1], pad_dim(wide.shape[-1]), lse.numel()
    block = min(16, ROUNDED // pad)
    launch(
        rounding_kernel, (min(-(-rows // block), 2 * processors(wide.device)), 1, 1), (wide, out), (rows,),
        {"D": dim, "D_PAD": pad, "BLOCK_M": block, "DROPPED": call.dropped},
    )  # fmt: skip
    return out, lse


@dataclass(frozen=True)
class Pass:
    """Describe one launch of the attention kernel, except for its tile.

    Attributes
    ----------
    keys : Tensor
        The keys of the call, or K'.
    lse : Tensor
        Also passed for pointers that a variant does not read.
    listed : MaskTiles, optional
        The tiles of a masked call, made for the tile size that it is run with.
    shift, fast, guarded
        As in `attention_kernel`.
    """

    call: Call
    keys: Tensor
    found: KeyBlocks
    packing: Packing | None
    block: int
    out: Tensor
    lse: Tensor
    listed: MaskTiles | None = None
    shift: str = "none"
    fast: bool = False
    guarded: bool = False

    @property
    def variant(self) -> str:
        """Return a key of what the time of a tile depends on, with sizes in powers of two."""
        rows = f"rows ~2^{self.call.rows.bit_length()}"
        how = f"{'guarded' if self.guarded else 'unguarded'}, {'descriptors' if self.describable else 'pointers'}"
        return f"{self.call.variant}, {rows}, blocks of {self.block}, {how}"

    @property
    def describable(self) -> bool:
        """Return whether tensor descriptors can describe keys and values without a copy."""
        dim = self.call.q.shape[-1]
        return self.fast and self.packing is None and dim == pad_dim(dim) and _describable(self.keys, self.call.v)

    def run(self, tile: Tile) -> None:
        """Launch the kernel with this tile."""
        call, keys, values, anchors = self.call, self.keys, self.call.v, self.found.anchors
        heads, dim, pad = call.q.shape[1], call.q.shape[-1], pad_dim(call.q.shape[-1])
        tiles, work, tables = work_of(call, tile.block_m, self.packing, self.lse)
        blocks = anchors.shape[2] if anchors.dim() == 4 else 0  # plain flash attention has no anchors
        second = self.guarded and not self.fast  # mostly nothing to do: a few programs go through all tiles
        few = second or call.q.device.type == "npu"
        descriptors = tile.descriptors and self.describable
        if descriptors:
            keys, values = (_descriptor(x, tile.block_n) for x in (keys, values))
        launch(
            attention_kernel, (min(work, 2 * processors(call.q.device)) if few else work, 1, 1),
            (call.q, keys, values, self.out, self.lse, anchors, self.found.norms, self.found.marked,
             self.lse if call.mask is None else call.mask,
             *((self.lse, self.lse) if self.listed is None else (self.listed.order, self.listed.counts)), *tables),
            (*strides_of(call.q), *strides_of(self.keys), *strides_of(call.v), *strides_of(self.out),
             *strides_of(self.lse.unsqueeze(-1)), *call.mask_strides,
             *((0, 0) if self.listed is None else self.listed.strides()),
             heads, call.group, tiles, work, call.rows, call.keys, blocks, call.scale),
            {"SHIFT": self.shift, "MASK": call.mask_kind, "CAUSAL": call.is_causal, "VARLEN": self.packing is not None,
             "D": dim, "D_PAD": pad, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "ANCHOR_BLOCK": self.block,
             "FAST": self.fast, "GUARDED": self.guarded, "CLEAN": call.q.device.type == "npu",
             "DESCRIPTORS": descriptors, "OVERLAP": self.fast and tile.overlap,
             "LISTED": self.listed is not None, "LOOP": few, "DROPPED": call.dropped},
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def _describable(*tensors: Tensor) -> bool:
    """Return whether tensor descriptors can describe these: rows aligned to 16 bytes, no stride of 0."""
    return all(x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in x.stride()[:-1]) for x in tensors)


def _descriptor(x: Tensor, block: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # triton-ascend does not have it

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, block, x.shape[-1]])
