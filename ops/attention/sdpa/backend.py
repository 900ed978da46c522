"""Attend by the fused attention that a device already has, with guards for what it does not promise.

README.md of the folder above has the proof. In short: fused.py sees to it that no score is formed in FP16; the guards
here keep what no row may see away from the rows, and outputs within FP16. Results are those of `pasa.attention`: causal
bands aligned bottom-right, 0 and -inf for rows without keys, NaN only where a row sees a NaN.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from pasa.ops.attention.call import Call, Results, capturing, is_tokens_first, to_fp16
from pasa.ops.attention.sdpa.anchors import head_anchors, pay
from pasa.ops.attention.sdpa.fused import (
    ALIGNED,
    MOST_BLOCKS,
    Fused,
    call_cudnn,
    cudnn_allowed,
    cudnn_serves,
    fused_attention,
    has_aligned_rows,
    is_warm,
    score_format,
    warm_up,
)
from pasa.ops.attention.spec.masking import dense_mask, fitting_mask, non_finite_reach, read_mask
from pasa.ops.attention.spec.packed import attend_apart, attend_each
from pasa.ops.attention.spec.pages import attend_gathered
from pasa.ops.attention.spec.scores import matmul_rows
from pasa.ops.devices import triton_too_old
from pasa.ops.numerics.formats import FP16_MAX
from pasa.ops.recording import repeat_whole, unrecorded

__all__ = ["attend", "is_warm", "warm_up"]

Repeated = Callable[..., tuple[Tensor, Tensor]]
HALVED = 2.0**15  # values of a column with larger ones are halved, so that a fused kernel cannot round up to infinity
WINDOW_ROWS = 256  # query rows of a window that share a call; the call has as many more keys as the window
LEAST_CAPABILITY = (7, 0)  # of the GPUs for which Triton compiles
STACKED_ROWS = 64  # with more, at most half of a tile of 128 rows is empty
# A single row stays as it is, because cuDNN has a kernel that divides its keys. For head dimensions above 128 that
# kernel is slower over 128 to 512 keys, and over more where the key heads of all sequences have work for half of the
# device (H100). Below a mask it is not.
SINGLE_DIM, SINGLE_KEYS, FEW_KEYS, SINGLE_HEADS = 128, 128, 512, 64
KEYS = 512  # keys of a tile of scores that are formed beside the fused attention


def attend(call: Call) -> Results:
    """Attend to dense tensors, packed sequences one after another, or a paged cache, whose pages are gathered."""
    if call.pages is not None:
        return attend_gathered(attend, call)
    if call.cu_q is not None:
        return attend_apart(_attend_dense, call)
    return attend_each(_attend_dense, call) if call.options.batch_invariant else _attend_planned(call)


def _attend_planned(call: Call) -> Results:
    """Attend to dense tensors, and let a plan of the call repeat that, unless something is read back on the way."""
    if call.q.dtype != torch.float16 or call.max_logits or _guard_of(call) is None:
        return _attend_dense(call)
    again = _stacked(call) if _may_stack(call) else _repeated(call)
    optional = [x for x in (call.mask, call.sinks) if x is not None]
    return Results(*repeat_whole(again, call.q, call.k, call.v, *optional))


def _may_stack(call: Call) -> bool:
    """Return whether the queries of a group of heads, which share keys, may be rows of one head.

    A tile of cuDNN holds rows of one head, and few rows leave most of it empty. As rows of one head they take as little
    as a sixth of the time.
    """
    (_, heads, rows, dim), (batch, kv_heads, keys) = call.q.shape, call.k.shape[:3]
    if rows == 1:
        slower = keys >= SINGLE_KEYS and (keys <= FEW_KEYS or batch * kv_heads >= SINGLE_HEADS)
        few = slower and dim > SINGLE_DIM and call.mask is None
    else:
        few = rows <= STACKED_ROWS
    grouped = heads > kv_heads
    alike = not call.is_causal and (call.mask is None or all(size == 1 for size in call.mask.shape[-3:-1]))
    return few and grouped and alike and call.sinks is None and call.window == (-1, -1)


def _stacked(call: Call) -> Repeated:
    """Return `_repeated` of a call whose groups of queries are rows of one head, with results as of the call itself."""
    (batch, heads, rows, dim), kv_heads = call.q.shape, call.k.shape[1]
    stack = batch, kv_heads, heads // kv_heads * rows, dim
    tokens_first = is_tokens_first(call.q)
    with unrecorded():  # it may copy
        again = _repeated(replace(call, q=call.q.reshape(stack)))

    def unstacked(q: Tensor, *others: Tensor, alone: bool = False) -> tuple[Tensor, Tensor]:
        out, lse = again(q.reshape(stack), *others)
        return _laid_out(out.view(batch, heads, rows, dim), tokens_first), lse.view(batch, heads, rows)

    return unstacked


def _repeated(call: Call) -> Repeated:
    """Return what attends to q, k and v, and a mask and sinks if the call has them, of its geometry."""
    optional = [name for name in ("mask", "sinks") if getattr(call, name) is not None]
    limits = {name: getattr(call, name) for name in ("scale", "options", "is_causal", "window")}  # and no tensor
    kept: list[Any] = []
    causal, scale, tokens_first = call.is_causal and call.q.shape[2] > 1, call.scale, is_tokens_first(call.q)
    listed = score_format(call.q.device.type).kind == "a"
    by_cudnn = listed and _is_direct(call) and cudnn_serves(call.q, call.k, call.v, _bias_like(call), causal)

    def again(q: Tensor, k: Tensor, v: Tensor, *others: Tensor, alone: bool = False) -> tuple[Tensor, Tensor]:
        if by_cudnn and kept and cudnn_allowed():
            done = kept[0].attend(call_cudnn, q, k, v, others[0] if others else None, causal, scale)
            if done is not None:
                return _laid_out(done[0], tokens_first), done[1].contiguous()
        given: dict[str, Any] = limits | dict(zip(optional, others, strict=True))
        out, lse, *_ = _attend_dense(Call(q, k, v, **given), kept, queries=not (by_cudnn and cudnn_allowed()))
        return _laid_out(out, tokens_first), lse.contiguous()

    return again


def _laid_out(out: Tensor, tokens_first: bool) -> Tensor:
    return out.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else out.contiguous()


def _is_direct(call: Call) -> bool:
    """Return whether one call of cuDNN on the tensors themselves serves a call for CUDA, before `finish`.

    A mask has to be bool, because a float mask may be changed first (`fitting_mask`).
    """
    full = not call.is_causal or call.q.shape[2] in (1, call.k.shape[2])
    if call.mask is not None:
        full = call.mask.dtype == torch.bool and not call.is_causal
    plain = call.sinks is None and call.window == (-1, -1) and full
    return plain and all(has_aligned_rows(x) for x in (call.q, call.k, call.v))


def _bias_like(call: Call) -> Tensor | None:
    """Return a bias, uninitialised, of the shape and dtype that a call's mask becomes."""
    if call.mask is None:
        return None
    keys = call.k.shape[2]
    row = torch.empty(keys + -keys % ALIGNED, dtype=torch.float16, device=call.q.device)[:keys]
    return row.expand(*call.q.shape[:3], keys)


def _attend_dense(call: Call, kept: list[Any] | None = None, *, queries: bool = True) -> Results:
    """Attend to dense tensors; `kept` and `queries` as in `attend_guarded`."""
    dtype = call.q.dtype
    if dtype != torch.float16:
        call = replace(call, q=to_fp16(call.q, "q"), k=to_fp16(call.k, "k"), v=to_fp16(call.v, "v"))
    if call.mask is not None:
        mask = fitting_mask(dense_mask(call, call.mask), call.scale)
        call = replace(call, mask=mask, is_causal=False, window=(-1, -1))
    if not capturing(call.q):
        _prepare(call.q.device)
    guard = _guard_of(call)
    if guard is None:
        out, lse = _attend_checked(call)
    else:
        out, lse = guard(call, attend_visible, _fused(call), kept, anchored=pay(call), queries=queries)
    max_logits = _max_logits(call).masked_fill(lse.isnan().any(-1), torch.nan) if call.max_logits else None
    if call.sinks is not None:
        sinks = call.sinks.float()[:, None]
        joined = torch.logaddexp(lse, sinks)
        share = torch.sigmoid(lse - sinks).masked_fill(joined == -torch.inf, 0.0)  # -inf less -inf is NaN
        out, lse = (out * share.unsqueeze(-1)).half(), joined
    return Results(out.to(dtype), lse, max_logits)


def _guard_of(call: Call) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return what guards the attention by Triton kernels; None for more heads than their grid has place for."""
    return _triton_guard(call.q.device) if call.q.shape[1] <= MOST_BLOCKS else None


@cache
def _triton_guard(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return what guards a CUDA device's attention by Triton kernels, or None where they cannot run."""
    if device.type != "cuda" or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY or triton_too_old() is not None:
        return None
    from pasa.ops.attention.triton.guard.launch import attend_guarded  # Triton is an extra

    return attend_guarded


def _attend_checked(call: Call) -> tuple[Tensor, Tensor]:
    """Attend once; attend again with cleaned operands where a result is not finite.

    While a graph is captured, no result can be read, so operands are cleaned at once.
    """
    anchors = head_anchors(call)
    if capturing(call.q):
        out, lse = _attend_cleaned(call, anchors)
    else:
        clean = _are_clean(call)
        out, lse = attend_visible(call if anchors is None else replace(call, k=call.k - anchors))
        if not bool(clean & out.isfinite().all()):
            out, lse = _attend_cleaned(call, anchors)
    if anchors is not None:
        rows = call.q.unflatten(1, (call.k.shape[1], -1)).float()
        lse = lse + matmul_rows(rows, anchors.float()).flatten(1, 2).squeeze(-1) * call.scale
    return out, lse


@cache
def _prepare(device: torch.device) -> None:
    """Create the handle of cuBLAS, which cannot be created while a graph is captured."""
    if device.type == "cuda":
        torch.cuda.current_blas_handle()


def _are_clean(call: Call) -> Tensor:
    """Return whether all inputs are finite, but for -inf in a mask; a kernel may hide that a key is NaN.

    A sum in FP32 is finite if and only if its FP16 terms are.
    """
    total: Tensor = sum(x.sum(dtype=torch.float32) for x in (call.q, call.k, call.v))  # type: ignore[assignment]
    clean = torch.isfinite(total)
    return clean if call.mask is None or call.mask.dtype == torch.bool else clean & (call.mask < torch.inf).all()


def _attend_cleaned(call: Call, anchors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend with 0 for each NaN and infinity, and halved values; then set the rows that see one to NaN."""
    inputs = call.q.float(), call.k.float(), call.v.float()
    q, k, v = (torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in inputs)
    if anchors is not None:
        k = (k - anchors).clamp(-FP16_MAX, FP16_MAX)  # only keys that no row sees can be beyond it
    factor = torch.where(v.abs().amax(-2, keepdim=True) > HALVED, 2.0, 1.0)
    mask = call.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = torch.nan_to_num(mask, nan=0.0, posinf=0.0, neginf=-torch.inf)
    out, lse = attend_visible(replace(call, q=q.half(), k=k.half(), v=(v / factor).half(), mask=mask))
    rows, elements = non_finite_reach(*inputs, read_mask(call, call.mask), KEYS)
    out = out.float() * factor.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return out.clamp(-FP16_MAX, FP16_MAX).half().masked_fill(elements, torch.nan), lse.masked_fill(rows, torch.nan)


def _fused(call: Call) -> Fused:
    """Return the fused attention for a call."""
    return partial(fused_attention, repeatable=True) if call.options.batch_invariant else fused_attention


def attend_visible(call: Call) -> tuple[Tensor, Tensor]:
    """Attend in as many calls as it takes to show each row its keys; a row without keys gives 0 and -inf."""
    q, k, v, scale, fused = call.q, call.k, call.v, call.scale, _fused(call)
    if call.mask is not None:
        visible = call.mask if call.mask.dtype == torch.bool else call.mask != -torch.inf
        out, lse = fused(q, k, v, call.mask, False, scale)
        empty = visible.any(-1).logical_not_().expand(lse.shape)
        return out.masked_fill_(empty.unsqueeze(-1), 0.0), lse.masked_fill_(empty, -torch.inf)
    rows, keys = q.shape[2], k.shape[2]
    lower, upper = call.band(rows, keys)
    if lower is None and (upper is None or upper >= keys - 1):
        return fused(q, k, v, None, False, scale)
    if lower is None and upper == keys - rows:
        return _attend_causal(fused, q, k, v, scale)
    parts = [fused(q[:, :, r], k[:, :, c], v[:, :, c], bias, False, scale) for r, c, bias in _chunks(call)]
    first = max(0, -(keys - 1 if upper is None else upper))
    outs, lses = zip(*parts, strict=True)
    return _below(first, torch.cat(outs, 2), torch.cat(lses, 2))


def _attend_causal(fused: Fused, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend causally, aligned bottom-right; a kernel's own causal band is aligned top-left.

    Keys that all rows see come in a call of their own, and its result is merged. Convex combinations stay between
    the values.
    """
    rows, keys = q.shape[2], k.shape[2]
    if rows > keys:
        return _below(rows - keys, *fused(q[:, :, rows - keys :], k, v, None, True, scale))
    if rows == keys:
        return fused(q, k, v, None, True, scale)
    shared = keys - rows
    out, lse = fused(q, k[:, :, shared:], v[:, :, shared:], None, True, scale)
    before, before_lse = fused(q, k[:, :, :shared], v[:, :, :shared], None, False, scale)
    total = torch.logaddexp(lse, before_lse)
    share, rest = ((x - total).exp().unsqueeze(-1) for x in (lse, before_lse))
    return ((out * share + before * rest) / (share + rest)).half(), total


def _below(first: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Put `first` rows that see no key before the others."""
    pad = torch.nn.functional.pad
    return pad(out, (0, 0, first, 0)), pad(lse, (first, 0), value=-torch.inf)


def _chunks(call: Call) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield the rows of each chunk that sees keys, the keys that they see, and a mask (rows, keys) if not all."""
    mask = read_mask(call, None)
    first = 0 if mask.upper is None else max(0, -mask.upper)
    for start in range(first, mask.rows, WINDOW_ROWS):
        end = min(start + WINDOW_ROWS, mask.rows)
        begin = 0 if mask.lower is None else max(0, start + mask.lower)
        stop = mask.keys if mask.upper is None else min(mask.keys, end + mask.upper)
        yield slice(start, end), slice(begin, stop), mask.tile(start, end, begin, stop)[0]


def _max_logits(call: Call) -> Tensor:
    """Return the largest visible score of each head, (B, Hq), from FP32 products."""
    mask, rows = read_mask(call, call.mask), call.q.float().unflatten(1, (call.k.shape[1], -1))
    top = rows.new_full(rows.shape[:3], -torch.inf)
    for start in range(0, mask.keys, KEYS):
        stop = min(start + KEYS, mask.keys)
        first, end = mask.rows_of(start, stop)
        if first >= end:
            continue
        scores = matmul_rows(rows[..., first:end, :], call.k[..., start:stop, :].float()) * call.scale
        visible, bias = mask.tile(first, end, start, stop)
        scores = scores if bias is None else scores + bias
        scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
        top = torch.maximum(top, scores.amax((-1, -2)))
    flat: Tensor = top.flatten(1, 2)
    return flat
