"""Launch the kernels for whole sequences: the exact recovery, and plain flash attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pasa.ops.attention.triton.anchor_launch import Centred, centre_keys, find_anchors, shift_exact
from pasa.ops.attention.triton.kernel_call import KernelCall, Packing, step_of, strides_of, visible_keys, work_of
from pasa.ops.attention.triton.launcher import launch
from pasa.ops.attention.triton.prefill.kernel import attention_kernel
from pasa.ops.attention.triton.prefill.mask_launch import MaskTiles
from pasa.ops.attention.triton.tiles import Tile, fit_ascend, pad_dim, processors, tiles_for
from pasa.ops.attention.triton.tuning import best_tile

EXACT_KEYS = 64  # the most keys in a tile of the exact pass


def prefill_attention(call: KernelCall, packing: Packing | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return output, log-sum-exp and row maxima: exact recovery, or plain flash attention for precision="fp32".

    A soft cap needs the true scores in FP32, so it is served by plain flash attention, too.
    """
    options = call.options
    out, lse = call.outputs()
    top = call.row_maxima(lse)
    results = out, lse, lse if top is None else top
    tiles = tiles_for(call.q.device, pad_dim(call.q.shape[-1]), options.block_k, call.rows_of_tiles)
    if options.batch_invariant:
        tiles = tiles[:1]  # the fastest tile depends on the batch, and so does the time at which it is measured
    if options.precision == "fp32" or call.softcap:
        fast = Pass(call, call.k, packing, options.block_k, *results, fast=True)
        fast.run(best_tile(call.q.device, fast.variant, tiles, fast.run))
        return out, lse, top
    if call.q.device.type == "npu":  # K' computed in the loop would not leave enough room in its unified buffer
        keys, anchors = shift_exact(call.k, options.block_k, visible=visible_keys(call), packing=packing)
        tile = fit_ascend(tiles[0], call.mask_kind, call.banded)
        Pass(call, keys, packing, options.block_k, *results, shift="before", anchors=anchors).run(tile)
        return out, lse, top
    # The second pass reads one mark per query tile of the first, so it must keep block_m. Its keys pass through
    # registers, so it has one stage.
    listed, visible = None, None
    if call.mask is not None:  # its tiles are sorted once, for both passes
        tall, wide = tiles[0].block_m, min(tiles[0].block_n, EXACT_KEYS)
        tiles = tuple(replace(tile, block_n=wide) for tile in tiles if tile.block_m == tall)
        listed = MaskTiles.of(call, tall, wide)
        visible = listed.visible
    centred = centre_keys(call.k, options.block_k, visible=visible, packing=packing)
    either = Pass(call, call.k, packing, options.block_k, *results, listed, centred=centred)
    fast = replace(either, fast=True)
    tile = best_tile(call.q.device, fast.variant, tiles, fast.run)
    fast.run(tile)
    found = find_anchors(call.k, call.v, options.block_k, visible=visible, packing=packing, marked=centred.marked)
    exact = replace(either, shift="here", anchors=found.anchors)
    exact.run(Tile(tile.block_m, min(tile.block_n, EXACT_KEYS), tile.warps, 1))
    return out, lse, top


@dataclass(frozen=True)
class Pass:
    """Describe one launch of the attention kernel, except for its tile.

    Attributes
    ----------
    keys : Tensor
        The keys of the call, or K'.
    lse : Tensor
        Also passed for pointers that a variant does not read.
    top : Tensor
        The largest score of each row, or `lse` if nobody asks for it.
    listed : MaskTiles, optional
        The tiles of a masked call, made for the tile size that it is run with.
    centred : Centred, optional
        Of the keys: the pass is one of two.
    anchors : Tensor, optional
        Of key blocks, for a pass that shifts keys.
    shift, fast
        As in `attention_kernel`.
    """

    call: KernelCall
    keys: Tensor
    packing: Packing | None
    block: int
    out: Tensor
    lse: Tensor
    top: Tensor
    listed: MaskTiles | None = None
    centred: Centred | None = None
    anchors: Tensor | None = None
    shift: str = "none"
    fast: bool = False

    @property
    def guarded(self) -> bool:
        """Return whether the pass leaves tiles to another one, or computes those."""
        return self.centred is not None

    @property
    def variant(self) -> str:
        """Return the key under which tuning.py stores the fastest tile; sizes enter it as powers of two."""
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
        call, keys, values, unused = self.call, self.keys, self.call.v, self.lse
        anchors = unused if self.anchors is None else self.anchors
        shifted, shared, norms, marked, part = self.centred or Centred(call.k, unused, unused, unused, self.block)
        mask, strides = call.mask, call.mask_strides
        if self.listed is not None:
            mask, strides = self.listed.mask, self.listed.mask.stride()
        heads, dim, pad = call.q.shape[1], call.q.shape[-1], pad_dim(call.q.shape[-1])
        tiles, work, tables = work_of(call, tile.block_m, self.packing, self.lse)
        blocks = 0 if self.anchors is None else self.anchors.shape[2]
        second = self.guarded and not self.fast  # mostly nothing to do: a few programs go through all tiles
        loop = second or call.q.device.type == "npu"
        descriptors = tile.descriptors and self.describable
        if descriptors:
            keys, values, shifted = (_descriptor(x, tile.block_n) for x in (keys, values, shifted))
        launch(
            attention_kernel, (min(work, 2 * processors(call.q.device)) if loop else work, 1, 1),
            (call.q, keys, values, self.out, self.lse, anchors, shifted, shared, norms, marked,
             self.lse if mask is None else mask, self.lse if call.sinks is None else call.sinks, self.top,
             *((self.lse, self.lse) if self.listed is None else (self.listed.order, self.listed.counts)), *tables),
            (*strides_of(call.q), *strides_of(self.keys), *strides_of(call.v), *strides_of(self.out),
             *strides_of(self.lse.unsqueeze(-1)), *strides,
             *((0, 0) if self.listed is None else self.listed.strides()),
             heads, call.group, tiles, work, call.rows, call.keys, blocks, norms.shape[-1], *call.limits, call.unit,
             call.ratio),
            {"SHIFT": self.shift, "MASK": call.mask_kind, "CAUSAL": call.banded, "VARLEN": self.packing is not None,
             "D": dim, "D_PAD": pad, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "ANCHOR_BLOCK": self.block,
             "PART": part, "FAST": self.fast, "GUARDED": self.guarded, "CLEAN": call.q.device.type == "npu",
             "DESCRIPTORS": descriptors, "OVERLAP": self.fast and tile.overlap,
             "LISTED": self.listed is not None, "LOOP": loop, "DROPPED": call.dropped,
             **call.flags, "SINKS": call.sinks is not None, "MAXIMA": call.max_logits,
             "STEP": step_of(call.q, self.keys, call.v, self.out)},
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def _describable(*tensors: Tensor) -> bool:
    """Return whether tensor descriptors can describe these: rows aligned to 16 bytes, no stride of 0."""
    return all(x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in x.stride()[:-1]) for x in tensors)


def _descriptor(x: Tensor, block: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # triton-ascend does not have it

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, block, x.shape[-1]])
