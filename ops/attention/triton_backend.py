"""Launches the Triton kernels: the operator's arguments in, tensors of the same shapes as the reference's out."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pasa.ops.attention.decode_launch import decode
from pasa.ops.attention.inputs import capturing, edges, to_fp16
from pasa.ops.attention.masking import dense_mask, hidden_keys
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.paper_kernel import paper_kernel
from pasa.ops.attention.scores import paper_beta
from pasa.ops.attention.tiles import choose, processors
from pasa.ops.attention.triton_call import Call, strides_of
from pasa.ops.attention.triton_kernel import attention_kernel
from pasa.ops.numerics.shifting import shifting_matrix
from pasa.ops.packed import tile_table
from pasa.ops.shift_keys.triton_backend import Anchors, Packing, find_anchors, pad_dim, shift_exact, shift_paper


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
    """As `reference.attention`; exact score tiles stay in FP32 (see triton_kernel.py)."""
    mask = None
    if attn_mask is not None:
        mask = attn_mask.view(torch.uint8) if attn_mask.dtype == torch.bool else attn_mask
        mask = mask.expand(*q.shape[:3], k.shape[2])
    call = Call(*_ready(q, k, v), mask, is_causal, scale)
    if options.precision == "pasa" and options.recovery == "exact" and call.decodes and q.device.type != "npu":
        return _results(q, *decode(call))
    visible = None if attn_mask is None else ~_hidden(attn_mask, is_causal, q, k)
    return _results(q, *_forward(call, visible, options))


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
    """As `reference.attention_varlen`. Lengths are checked on the host, unless a CUDA graph is being captured."""
    if not capturing(q):
        edges(cu_seqlens_q, "q", q)
        edges(cu_seqlens_k, "k", k)
    call = Call(*_ready(q, k, v), None, is_causal, scale, cu_seqlens_q.int(), cu_seqlens_k.int())
    return _results(q, *_forward(call, None, options))


def _ready(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FP16, unit last stride."""
    half = (to_fp16(q, "q"), to_fp16(k, "k"), to_fp16(v, "v"))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in half)
    return q, k, v


def _results(q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What an operator returns; the kernels count nothing."""
    return out.to(q.dtype), lse, lse.new_empty(0, dtype=torch.float64)


def _hidden(attn_mask: Tensor, is_causal: bool, q: Tensor, k: Tensor) -> Tensor:
    """Keys (B, Skv) that no query sees. The last row of a causal band sees all, so a mask alike for all rows decides
    alone; another one is joined with the band first."""
    alike = attn_mask.dim() < 2 or attn_mask.shape[-2] == 1
    return hidden_keys(attn_mask if alike else dense_mask(attn_mask, is_causal, q, k), k)


def _forward(call: Call, visible: Tensor | None, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """The kernels that go through all keys: exact recovery, published recovery, plain flash attention."""
    packing = None
    if call.cu_k is not None:
        packing = Packing(*tile_table(call.cu_k, options.block_k, call.k.shape[0]), call.cu_k)
    if options.precision == "pasa" and options.recovery == "paper":
        return _paper(call, visible, packing, options)
    out, lse = call.outputs()
    if options.precision == "fp32":
        _launch(call, call.k, Anchors(lse, lse), packing, options, out, lse, fast=True)
    elif call.q.device.type == "npu":  # K' made in the loop would crowd its unified buffer
        keys, anchor = shift_exact(call.k, options.block_k, visible=visible, packing=packing)
        _launch(call, keys, Anchors(anchor, lse), packing, options, out, lse, shift="before")
    else:
        anchors = find_anchors(call.k, call.v, options.block_k, visible=visible, packing=packing)
        bounded = call.mask_kind != "float"  # what a float mask adds is not
        if bounded:
            _launch(call, call.k, anchors, packing, options, out, lse, fast=True, guarded=True)
        _launch(call, call.k, anchors, packing, options, out, lse, shift="here", guarded=bounded)
    return out, lse


def _launch(
    call: Call,
    keys: Tensor,
    anchors: Anchors,
    packing: Packing | None,
    options: AttentionOptions,
    out: Tensor,
    lse: Tensor,
    *,
    shift: str = "none",
    fast: bool = False,
    guarded: bool = False,
) -> None:
    """One pass of the attention kernel. `lse` stands for pointers that a variant does not read."""
    rows, heads, dim = call.q.shape[-3 if packing else -2], call.q.shape[1], call.q.shape[-1]
    tile = choose(call.q.device, pad_dim(dim), options.block_k, rows)
    tiles, work, tables = _work(call, tile.block_m, packing, lse)
    second = guarded and not fast  # mostly nothing to do: few programs look through all tiles
    grid = min(work, 2 * processors(call.q.device)) if second or call.q.device.type == "npu" else work
    own_keys, own_values = keys, call.v
    descriptors = fast and packing is None and tile.descriptors and pad_dim(dim) == dim
    if descriptors:
        own_keys, own_values = (_descriptor(x, tile.block_n) for x in (keys, call.v))
    attention_kernel[(grid,)](
        call.q, own_keys, own_values, out, lse, anchors.anchor, anchors.stats,
        lse if call.mask is None else call.mask, *tables,
        *strides_of(call.q), *strides_of(keys), *strides_of(call.v),
        *strides_of(out), *strides_of(lse.unsqueeze(-1)), *call.mask_strides,
        heads, call.group, tiles, work, rows, call.k.shape[-3 if packing else -2],
        anchors.anchor.shape[2] if guarded or shift != "none" else 1, call.scale,
        SHIFT=shift, MASK=call.mask_kind, CAUSAL=call.is_causal, VARLEN=packing is not None,
        D=dim, D_PAD=pad_dim(dim), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, ANCHOR_BLOCK=options.block_k,
        FAST=fast, GUARDED=guarded, DESCRIPTORS=descriptors, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _descriptor(x: Tensor, block: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, block, x.shape[-1]])


def _paper(
    call: Call, visible: Tensor | None, packing: Packing | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: K' from the shifting matrix, then the kernel."""
    matrix, factor = _paper_tables(call, options)
    keys = shift_paper(call.k, matrix, options.block_k, visible=visible, packing=packing)
    out, lse = call.outputs()
    rows, heads, dim = call.q.shape[-3 if packing else -2], call.q.shape[1], call.q.shape[-1]
    tile = choose(call.q.device, pad_dim(dim), options.block_k, rows)
    tiles, work, tables = _work(call, tile.block_m, packing, lse)
    paper_kernel[(work,)](
        call.q, keys, call.v, out, lse, lse if call.mask is None else call.mask, *tables[:3], factor,
        *strides_of(call.q), *strides_of(keys), *strides_of(call.v), *strides_of(out), *strides_of(lse.unsqueeze(-1)),
        *call.mask_strides, heads, call.group, tiles, work, rows, keys.shape[-3 if packing else -2],
        MASK=call.mask_kind, CAUSAL=call.is_causal, VARLEN=packing is not None,
        ROUND=options.accumulate == "fp16", CLEAN=call.q.device.type == "npu",
        D=dim, D_PAD=pad_dim(dim), BLOCK_M=tile.block_m, BLOCK_N=options.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def _paper_tables(call: Call, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Entries of M (block + 1, 2) and invariance (block + 1,) for the block sizes that occur; FP32 on the device."""
    block = options.block_k
    if call.cu_k is None:
        sizes = {min(block, call.k.shape[2]), call.k.shape[2] % block}
    else:
        lengths = call.cu_k.diff().tolist()
        sizes = {size for length in lengths for size in (min(block, length), length % block)}
    return _tables_on(call.q.device, block, tuple(sorted(sizes - {0})), call.scale, options.beta)


@cache
def _tables_on(
    device: torch.device, block: int, sizes: tuple[int, ...], scale: float, beta: float | None
) -> tuple[Tensor, Tensor]:
    matrix, factor = torch.zeros(block + 1, 2), torch.zeros(block + 1)
    for n in sizes:
        solved, factor[n] = paper_beta(beta, n, scale)
        entries = shifting_matrix(n, solved, scale=scale).float()
        matrix[n, 0] = entries[0, 0]
        matrix[n, 1] = -entries[0, 1] if n > 1 else 0.0
    return matrix.to(device), factor.to(device)


def _work(
    call: Call, block_m: int, packing: Packing | None, unused: Tensor
) -> tuple[int, int, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Tiles of query rows, units of work, and the tables that packed sequences need."""
    heads = call.q.shape[1]
    if call.cu_q is None or packing is None:
        tiles = -(-call.q.shape[2] // block_m)
        return tiles, tiles * heads * call.q.shape[0], (unused, unused, unused, unused)
    table, _ = tile_table(call.cu_q, block_m, call.q.shape[0])
    return table.shape[0], table.shape[0] * heads, (table, call.cu_q, packing.cu_seqlens, packing.first)
