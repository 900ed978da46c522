"""Ring attention: every rank keeps its queries, while keys and values pass by.

Each step is one call of the attention operator on the keys of one rank. Keys that no query sees
cost no time. The keys of the next step travel meanwhile. For gradients, keys and values go round
once more, followed by their own gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pasa.ops import dispatch, operators
from pasa.ops.attention.call import to_fp16
from pasa.ops.ring.frames import agree
from pasa.ops.ring.group import Ring
from pasa.ops.ring.layout import ALL, Part, visible_part
from pasa.ops.ring.merge import Merge, frame_gradient, frame_scores


@dataclass(frozen=True)
class RingCall:
    """Hold what a ring call needs beside its tensors.

    Attributes
    ----------
    ring : Ring
    lengths : tuple of int
        Number of keys of every rank.
    early : tuple of int, optional
        Under a causal mask, how many of these keys belong to each rank's early chunk (layout.py).
    scale : float
    arithmetic : tuple
        `AttentionOptions.arguments`.
    backend : str, optional
    """

    ring: Ring
    lengths: tuple[int, ...]
    early: tuple[int, ...] | None
    scale: float
    arithmetic: tuple[Any, ...]
    backend: str | None

    def part(self, source: int) -> Part:
        """Return which of this rank's queries see which keys of `source`."""
        return Part(ALL, ALL, False) if self.early is None else visible_part(self.ring.rank, source, self.early)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, shift: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return output and LSE of one call; the LSE includes what the frame of its keys adds to the scores."""
        arguments = (None, None, is_causal, self.scale, -1, -1, 0.0, False, *self.arithmetic, False, self.backend)
        out, lse, *_ = dispatch.call(operators.attention, q, k, v, *arguments)
        return out, lse if shift is None else lse + frame_scores(q.detach(), shift, self.scale)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor, Tensor]:
    """Attend from this rank's queries to the keys of all ranks.

    Parameters
    ----------
    q : Tensor (B, Hq, Sq, D)
    k, v : Tensor (B, Hkv, Skv, D)
        The tensors of this rank: FP16, or BF16 and FP32 whose values fit into FP16.
    call : RingCall

    Returns
    -------
    out : Tensor (B, Hq, Sq, D), dtype of q
    lse : Tensor (B, Hq, Sq), FP32
        LSE of the scores without scale * q.anchor.
    anchor : Tensor (B, Hkv, 1, D), FP16
        See frames.py.
    """
    results: tuple[Tensor, Tensor, Tensor] = _RingAttention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return results


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):  # autocast would change the kernels' operands
            return _RingAttention._forward(ctx, q, k, v, call)

    @staticmethod
    def _forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor, Tensor]:
        half, keys, values = to_fp16(q, "q"), to_fp16(k, "k"), to_fp16(v, "v")
        frames = agree(half, keys, call.lengths, call.scale, call.ring)
        held = torch.stack((frames.apply(keys, call.ring.rank), values))
        merge = Merge(half, wide=frames.shifts is not None)
        for source, (shifted, passing) in call.ring.rotate(held, call.lengths):
            for (rows, seen, is_causal), shift in frames.pieces(call.part(source), source):
                results = call.attend(half[:, :, rows], shifted[:, :, seen], passing[:, :, seen], is_causal, shift)
                merge.add(rows, *results)
        mean, lse = merge.finish()
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(half, held, mean, lse)
            ctx.call, ctx.frames, ctx.dtype = call, frames, q.dtype
        ctx.mark_non_differentiable(frames.anchor)
        return mean.to(q.dtype, copy=True), lse.float(), frames.anchor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor, _: None) -> tuple[Tensor | None, ...]:
        """Differentiate each chunk of keys by the weight that its output had in the merge.

        A chunk of weight w = exp(LSE_j - LSE) receives w grad_out for its output o_j, and w
        (grad_out.(o_j - o) + grad_lse) for its LSE. The mean o is kept in FP32 and made of the same
        o_j, so the gradients of the LSEs sum to grad_lse. Hence a bias that all keys share, which
        multiplies that sum, cancels.
        """
        with torch.autocast(grad_out.device.type, enabled=False):
            return _RingAttention._backward(ctx, grad_out, grad_lse)

    @staticmethod
    def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        half, held, mean, lse = ctx.saved_tensors
        call: RingCall = ctx.call
        grad = grad_out.float()
        slope = grad_lse - (grad * mean).sum(-1)
        dq = torch.zeros_like(grad)
        behind = torch.zeros_like(held, dtype=torch.float32)  # gradients of the keys and values now on this rank
        for source, passing in call.ring.rotate(held, call.lengths):
            for (rows, seen, is_causal), shift in ctx.frames.pieces(call.part(source), source):
                leaves = [x.float().requires_grad_() for x in (half[:, :, rows], *passing[:, :, :, seen])]
                with torch.enable_grad():
                    out, part_lse = call.attend(leaves[0], leaves[1], leaves[2], is_causal, shift)
                weight = torch.exp(part_lse.detach() - lse[:, :, rows]).float()
                of_lse = weight * ((grad[:, :, rows] * out.detach()).sum(-1) + slope[:, :, rows])
                of_out = weight.unsqueeze(-1) * grad[:, :, rows]
                gradients = torch.autograd.grad((out, part_lse), leaves, (of_out, of_lse.to(part_lse.dtype)))
                dq[:, :, rows] += gradients[0]
                if shift is not None:
                    dq[:, :, rows] += frame_gradient(of_lse, shift, call.scale)
                behind[:, :, :, seen] += torch.stack(gradients[1:])
            behind = call.ring.hand_on(behind, call.lengths[(source - 1) % call.ring.size])
        return dq.to(ctx.dtype), behind[0].to(ctx.dtype), behind[1].to(ctx.dtype), None
