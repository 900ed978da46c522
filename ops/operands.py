"""Check the operands of torch.ops.pasa.* inside the operator, before a kernel reads memory by them.

Only shapes, dtypes and devices are checked here; values are checked where they are read on the
host. `pasa.attention` and its siblings leave these checks to the operator, and check Python types
and layouts. An exported or compiled program calls the operators directly, as any user may. A check
costs the host about a microsecond, so each tensor attribute is read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.attention.call import Pages
from pasa.ops.registry import BACKENDS

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)
# The least and the largest scale. |q.k| is below 2^42, so FP32 holds every score (q.k times the scale)
# and every reference (a score divided by the scale).
SCALES = (2.0**-80, 2.0**80)
SOFTCAPS = (2.0**-20, 2.0**20)  # FP32 holds a capped score, and the derivative of the cap, with all digits


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, sinks: Tensor | None = None
) -> None:
    """Check operands without packing, q (B, Hq, Sq, D) and k, v (B, Hkv, Skv, D), a mask, and sinks.

    Raises
    ------
    ValueError, TypeError
        Naming the argument and its value.
    """
    _check_agreement(q, k, v, 4)
    queries, keys = q.shape, k.shape
    if queries[0] != keys[0]:
        raise ValueError(f"batch of q is {queries[0]} but that of k is {keys[0]}: expand the smaller one")
    _check_heads(queries[1], keys[1], ", or pass tensor_layout='NHD' if tensors are (B, S, H, D)")
    _check_sinks(sinks, q)
    if attn_mask is not None:
        _check_mask(attn_mask, q, (queries[0], queries[1], queries[2], keys[2]))


def check_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    longest: tuple[int | None, int | None] = (None, None), sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Check packed operands: q (Tq, Hq, D), k and v (Tk, Hkv, D), cumulative lengths, bounds of lengths, and sinks.

    Raises
    ------
    ValueError, TypeError
        Naming the argument and its value.
    """
    _check_agreement(q, k, v, 3)
    _check_heads(q.shape[1], k.shape[1])
    _check_sinks(sinks, q)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x.dtype not in INTEGERS:
            raise TypeError(f"{name} is {x.dtype}, not an int32 or int64 Tensor: call .int()")
        if x.dim() != 1 or x.shape[0] < 2:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (sequences + 1,): begin it with 0")
        if x.is_meta and not q.is_meta:
            raise _on_other_device(name, x, "q", q)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        entries = f"cu_seqlens_q has {len(cu_seqlens_q)} entries but cu_seqlens_k has {len(cu_seqlens_k)}"
        raise ValueError(f"{entries}: give each one entry more than there are sequences")
    _check_longest(*longest)


def check_gradients(grad_out: Tensor | None, grad_lse: Tensor | None, q: Tensor, backend: str) -> None:
    """Check the gradients of an output of q's shape and of a log-sum-exp, and the backend that is to use them.

    Raises
    ------
    ValueError, TypeError
        Naming the argument and its value.
    """
    if grad_out is None and grad_lse is None:
        raise ValueError("grad_out and grad_lse are both None: there is nothing to take a gradient of")
    for name, x, shape in (("grad_out", grad_out, tuple(q.shape)), ("grad_lse", grad_lse, tuple(q.shape[:-1]))):
        if x is None:
            continue
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {shape}")
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name} is {x.dtype}, expected a float type: call .float()")
        _check_device(name, x, q)
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not registered; registered: {sorted(BACKENDS)}")


def check_watch(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, totals: Tensor, walked: Tensor, scale: float,
    left: int = -1, right: int = -1, softcap: float = 0.0,
) -> None:  # fmt: skip
    """Check the arguments of `watch_scores`: operands of attention without values, and its two counters.

    Raises
    ------
    ValueError, TypeError
        Naming the argument and its value.
    """
    check_attention(q, k, k, attn_mask)
    check_limits(scale, left, right, softcap)
    for name, x, size in (("totals", totals, 5), ("walked", walked, 1)):
        if x.dtype != torch.int64:
            raise TypeError(f"{name} is {x.dtype}, expected int64")
        if tuple(x.shape) != (size,) or not x.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and strides {x.stride()}, expected ({size},), contiguous"
            )
    _check_device("totals", totals, q)
    if walked.device.type != "cpu" and not q.is_meta:
        raise ValueError(f"walked is on {walked.device}, expected cpu")


def check_paged(
    q: Tensor, caches: tuple[Tensor, Tensor], pages: Pages, cu_seqlens_q: Tensor | None, sinks: Tensor | None = None
) -> None:
    """Check queries (T, Hq, D), both caches and their tables, and sinks.

    Raises
    ------
    ValueError, TypeError
        Naming the argument and its value.
    """
    k_cache = caches[0]
    block_table, seq_lens, *longest, key_anchors = pages
    _check_caches(*caches)
    _check_like("q", q, "k_cache", k_cache, 3)
    queries, cache = q.shape, k_cache.shape
    if queries[0] == 0 or queries[1] == 0 or queries[2] != cache[3]:
        raise ValueError(
            f"q {tuple(queries)} is empty, or not of the cache's head dim {cache[3]}: leave out calls without queries, "
            "and pass the cache of this layer"
        )
    _check_heads(queries[1], cache[2])
    _check_sinks(sinks, q)
    _check_table("block_table", block_table, k_cache, 2)
    _check_table("seq_lens", seq_lens, k_cache, 1)
    _check_anchors(key_anchors, k_cache)
    batch, table = seq_lens.shape[0], block_table.shape
    if batch == 0 or table[0] != batch or table[1] == 0:
        raise ValueError(f"block_table {tuple(table)} does not fit {batch} seq_lens: give each sequence a row of pages")
    if cu_seqlens_q is not None:
        _check_table("cu_seqlens_q", cu_seqlens_q, k_cache, 1)
        entries = cu_seqlens_q.shape[0]
        if entries != batch + 1:
            raise ValueError(f"cu_seqlens_q has {entries} entries for {batch} sequences, expected {batch + 1}")
    elif queries[0] != batch:
        raise ValueError(f"q has {queries[0]} rows for {batch} sequences; give cu_seqlens_q unless each has one query")
    _check_longest(*longest)


def check_writes(
    k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], slot_mapping: Tensor, key_anchors: Tensor | None
) -> None:
    """Check keys and values (T, Hkv, D), the caches that receive them, and the slot of each.

    Raises
    ------
    ValueError, TypeError
        Naming the argument and its value.
    """
    k_cache = caches[0]
    _check_caches(*caches)
    heads = k_cache.shape[2:]
    for name, x in (("k", k), ("v", v)):
        _check_like(name, x, "k_cache", k_cache, 3)
        if x.shape[1:] != heads:
            raise ValueError(
                f"{name} {tuple(x.shape)} does not fit the cache's heads {tuple(heads)}: pass (tokens, Hkv, D)"
            )
    _check_table("slot_mapping", slot_mapping, k_cache, 1)
    _check_anchors(key_anchors, k_cache)
    if not k.shape[0] == v.shape[0] == slot_mapping.shape[0]:
        slots = f"{len(slot_mapping)} slots, but {len(k)} keys and {len(v)} values"
        raise ValueError(f"{slots}: pass one slot, key and value a token")


def check_scale(scale: float | None) -> None:
    """Check that FP32 holds every score at this scale; None stands for 1/sqrt(D).

    Raises
    ------
    ValueError
        Naming the value.
    """
    if scale is not None and not SCALES[0] <= scale <= SCALES[1]:
        hint = "leave it out for 1/sqrt(D)"
        raise ValueError(f"scale={scale!r} is outside 2^-80 to 2^80, where FP32 holds every score: {hint}")


def check_limits(scale: float | None, left: int, right: int, softcap: float) -> None:
    """Check the numbers that change or hide scores; -1 is an unlimited side of a window, and 0 no soft cap.

    Raises
    ------
    ValueError
        Naming the value.
    """
    if scale is not None:
        check_scale(scale)
    if left < -1 or right < -1:
        raise ValueError(f"window={(left, right)} has a number below -1: -1 is an unlimited side, 0 shows no key there")
    if not (softcap == 0 or SOFTCAPS[0] <= softcap <= SOFTCAPS[1]):
        raise ValueError(f"softcap={softcap!r} is outside 2^-20 to 2^20 nats: leave it out for no cap")


def _check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Check that sinks are one number for each query head, on q's device; heads are the second dimension of q."""
    if sinks is None:
        return
    if sinks.dtype not in DTYPES:
        raise TypeError(f"sinks is {sinks.dtype}, expected one of {DTYPES}: call .float()")
    if tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, expected one score a query head: ({q.shape[1]},)")
    _check_device("sinks", sinks, q)


def _check_agreement(q: Tensor, k: Tensor, v: Tensor, rank: int) -> None:
    """Check that three tensors share rank, dtype, device and head dimension, and that k and v have one shape."""
    if q.dtype not in DTYPES:
        raise TypeError(f"q is {q.dtype}, expected one of {DTYPES}: call .half()")
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_like(name, x, "q", q, rank)
    queries, keys, values = q.shape, k.shape, v.shape
    if keys != values:
        raise ValueError(f"k and v differ in shape: {tuple(keys)} and {tuple(values)}; pad or cut v to k's shape")
    if queries[-1] != keys[-1]:
        hint = "pad the smaller one with zeros, and pass the scale of the unpadded q"
        raise ValueError(f"head dim of q is {queries[-1]} but that of k is {keys[-1]}: {hint}")
    if 0 in queries or 0 in keys:
        name, shape = ("q", queries) if 0 in queries else ("k", keys)
        raise ValueError(f"{name} is empty: {tuple(shape)}; leave out calls without queries or keys")


def _check_heads(heads: int, kv_heads: int, advice: str = "") -> None:
    if heads % kv_heads:
        hint = f"repeat heads of k and v{advice}"
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key heads: {hint}")


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise _on_other_device(name, x, "q", q)


def _on_other_device(name: str, x: Tensor, other_name: str, other: Tensor) -> ValueError:
    hint = f"call .to({str(other.device)!r})"
    if x.is_meta or other.is_meta:
        empty = name if x.is_meta else other_name
        hint = f"{empty} has no data on meta; load its values, or put all tensors on meta"
    return ValueError(f"{name} is on {x.device} but {other_name} is on {other.device}: {hint}")


def _check_mask(attn_mask: Tensor, q: Tensor, scores: tuple[int, ...]) -> None:
    """Check that a mask is bool or float, on q's device, and broadcasts to the shape of the scores."""
    if attn_mask.dtype not in (torch.bool, *DTYPES):
        hint = "call .float()" if attn_mask.is_floating_point() else "call .bool() if 1 means keep (True = keep)"
        raise TypeError(
            f"attn_mask is {attn_mask.dtype}, expected bool (True = keep) or one of {DTYPES} (added): {hint}"
        )
    _check_device("attn_mask", attn_mask, q)
    shape = tuple(attn_mask.shape)
    if not _broadcasts(shape, scores):
        hint = _mask_advice(shape, scores)
        raise ValueError(f"attn_mask {shape} does not broadcast to (B, Hq, Sq, Skv) = {scores}: {hint}")


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(shape) <= 4 and all(a in (1, b) for a, b in zip(reversed(shape), reversed(target), strict=False))


def _mask_advice(shape: tuple[int, ...], scores: tuple[int, ...]) -> str:
    """Return what to do with a mask of a shape that does not broadcast."""
    if shape == (scores[0], scores[3]):
        return "for a padding mask pass mask[:, None, None, :], with True = keep"
    if len(shape) == 3 and _broadcasts((shape[0], 1, *shape[1:]), scores):
        return "for one mask a batch entry pass mask[:, None]"
    if shape[-2:] == (scores[1], scores[1]):  # then H is the number of tokens
        return "pass tensor_layout='NHD' if q, k and v are (B, S, H, D)"
    return "reshape it, or leave it out"


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """Check two caches (pages, slots, Hkv, D): one shape, dtype and device, and head dimensions with stride 1."""
    if k_cache.dtype not in DTYPES:
        raise TypeError(f"k_cache is {k_cache.dtype}, expected one of {DTYPES}: allocate it in FP16")
    shape = k_cache.shape
    if len(shape) != 4:
        raise _wrong_rank("k_cache", shape, 4)
    _check_like("v_cache", v_cache, "k_cache", k_cache, 4)
    if shape != v_cache.shape or 0 in shape:
        shapes = f"{tuple(shape)} and {tuple(v_cache.shape)}"
        raise ValueError(f"caches (pages, slots, Hkv, D) are {shapes}: give two of one shape that are not empty")
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        name, x = ("k_cache", k_cache) if k_cache.stride(3) != 1 else ("v_cache", v_cache)
        raise ValueError(f"{name} has strides {x.stride()}: the last one is not 1; call .contiguous()")


def _check_like(name: str, x: Tensor, other_name: str, other: Tensor, dims: int) -> None:
    """Check that a tensor has `dims` dimensions, and the dtype and device of another tensor."""
    shape = x.shape
    if len(shape) != dims:
        raise _wrong_rank(name, shape, dims)
    if x.dtype != other.dtype:
        raise TypeError(f"{name} is {x.dtype} but {other_name} is {other.dtype}: call .to({other.dtype})")
    if x.device != other.device:
        raise _on_other_device(name, x, other_name, other)


def _wrong_rank(name: str, shape: torch.Size, dims: int) -> ValueError:
    form = {3: "(tokens, heads, D)", 4: "(B, H, S, D)"}[dims]
    form = "(pages, slots, Hkv, D)" if name.endswith("_cache") else form
    return ValueError(f"{name} has {len(shape)} dimensions {tuple(shape)}, expected {dims}: reshape it to {form}")


def _check_table(name: str, x: Tensor, k_cache: Tensor, dims: int) -> None:
    """Check a tensor of integers that a kernel uses as indices."""
    if x.dtype not in INTEGERS:
        raise TypeError(f"{name} is {x.dtype}, not an int32 or int64 Tensor: call .int()")
    if x.dim() != dims:
        form = "a row of pages for each sequence" if dims == 2 else "one entry after another"
        raise ValueError(f"{name} has {x.dim()} dimensions {tuple(x.shape)}, expected {dims}: {form}")
    if x.device != k_cache.device:
        raise _on_other_device(name, x, "k_cache", k_cache)


def _check_longest(max_seqlen_q: int | None, max_seqlen_k: int | None) -> None:
    """Check bounds of the queries and of the keys of a sequence; None is a bound that the caller does not know."""
    for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if most is not None and most < 1:
            raise ValueError(f"{name}={most} is not a positive integer: leave it out if it is not known")


def _check_anchors(key_anchors: Tensor | None, k_cache: Tensor) -> None:
    if key_anchors is None:
        return
    if key_anchors.dtype != torch.float16:
        raise TypeError(f"key_anchors is {key_anchors.dtype}, not an FP16 Tensor: allocate it in FP16")
    pages, _, heads, dim = k_cache.shape
    shape, device = tuple(key_anchors.shape), key_anchors.device
    if shape != (pages, heads, dim) or not key_anchors.is_contiguous() or device != k_cache.device:
        raise ValueError(
            f"key_anchors {shape} on {device} are not contiguous, or not the {(pages, heads, dim)} of k_cache on "
            f"{k_cache.device}"
        )
