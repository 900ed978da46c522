"""Pad tensors for NPU kernels: head dimensions to multiples of 16, and for some kernels sequences to one length."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from pasa.ops.attention.call import Call, to_fp16
from pasa.ops.attention.spec.packed import without_keys
from pasa.ops.packed import gather, group_sequences, scatter

DIM_STEP = 16  # elements on one side of a cube fractal: kFractal in ascend_c/tiling/tiling.h


def pad_head_dim(x: Tensor) -> Tensor:
    """Return x padded with zeros to a multiple of 16 elements, with the strides of a new tensor.

    The zeros add nothing to q.k, and the output columns that they cause are cut off later.
    """
    missing = -x.shape[-1] % DIM_STEP
    padded = (torch.nn.functional.pad(x, (0, missing)) if missing else x).contiguous()
    return padded.flatten().view(padded.shape)  # dimensions of one element may have had any stride


def clear_before_windows(call: Call) -> Call:
    """Return a packed call with 0 for keys and values that are not finite and lie before all windows of their sequence.

    A block of keys may hold keys that no query sees, such as slots of a cache that were never written. Dense calls cut
    keys before all windows off (`Call.narrowed`).
    """
    left = call.window[0]
    if left < 0 or call.cu_q is None or call.cu_k is None:
        return call
    starts_q, starts_k = (x.to(call.k.device).long() for x in (call.cu_q, call.cu_k))
    token = torch.arange(len(call.k), device=call.k.device)
    sequence = torch.bucketize(token, starts_k[1:-1], right=True)
    first = starts_k[sequence + 1] - starts_q.diff()[sequence] - left  # the first key that the first query sees
    before = (token < first)[:, None, None]
    k, v = (x.masked_fill(before & ~torch.isfinite(x), 0.0) for x in (call.k, call.v))
    return replace(call, k=k, v=v)


def attend_padded(
    call: Call,
    kind: Callable[[int, int], Hashable],
    attend: Callable[[Tensor, Tensor, Tensor, list[int]], tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend within packed sequences (T, H, D), each padded to the longest of those that share its launch.

    Parameters
    ----------
    kind : callable
        The value of kind(rows, keys) must be equal for all sequences of one launch.
    attend : callable
        Returns output, log-sum-exp and, if the call asks for max logits, the largest score of each row, of FP16
        q, k, v (B, H, S, D) and the true number of keys of each entry.

    Returns
    -------
    out : Tensor (T, H, D)
        In the dtype of q.
    lse : Tensor (T, H), FP32
    max_logits : Tensor (sequences, H), FP32, if the call asks for it
    """
    q = call.q
    q16, k16, v16 = to_fp16(q, "q"), to_fp16(call.k, "k"), to_fp16(call.v, "v")
    out = torch.zeros_like(q)
    lse = without_keys(call, q.shape[:2])
    largest = torch.full_like(lse, -torch.inf)
    for rows, keys in group_sequences(*call.edges(), kind):
        lengths = [stop - start for start, stop in keys]
        one, one_lse, one_largest = attend(gather(q16, rows), gather(k16, keys), gather(v16, keys), lengths)
        scatter(out, one.to(q.dtype), rows)
        scatter(lse.unsqueeze(-1), one_lse.unsqueeze(-1), rows)
        if call.max_logits:
            scatter(largest.unsqueeze(-1), one_largest.unsqueeze(-1), rows)
    if not call.max_logits:
        return out, lse, None
    none = largest.new_full((1, q.shape[1]), -torch.inf)  # of a sequence without queries
    tops = [torch.cat([none, largest[start:stop]]).amax(0) for start, stop in pairwise(call.edges()[0])]
    return out, lse, torch.stack(tops)
