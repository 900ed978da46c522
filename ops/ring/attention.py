"""Ring attention: every rank keeps its queries, while keys and values pass by.

Each step is one call of the attention operator, on the keys of one rank, and takes no time for keys that no query
sees. The keys of the next step travel meanwhile. For gradients keys and values go round once more, with their own
gradients behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pasa.ops import dispatch, library
from pasa.ops.attention.inputs import to_fp16
from pasa.ops.ring.frames import agree
from pasa.ops.ring.group import Ring
from pasa.ops.ring.layout import ALL, Part, visible_part
from pasa.ops.ring.merge import Merge, frame_gradient, frame_scores


@dataclass(frozen=True)
class RingCall:
    """What a call is told beside its tensors.

    Attributes
    ----------
    ring : Ring
    lengths : tuple of int
        Keys of every rank.
    early : tuple of int, optional
        Under a causal mask, how many of them are of the early chunk (layout.py).
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
        """What this rank's queries see of the keys of `source`."""
        return Part(ALL, ALL, False) if self.early is None else visible_part(self.ring.rank, source, self.early)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, shift: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return output and LSE of one call, the LSE with what the frame of its keys adds."""
        arguments = (None, is_causal, self.scale, *self.arithmetic, False, self.backend)
        out, lse, _ = dispatch.call(library.attention, q, k, v, *arguments)
        return out, lse if shift is None else lse + frame_scores(q.detach(), shift, self.scale)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks.

    Parameters
    ----------
    q : Tensor (B, Hq, Sq, D)
    k, v : Tensor (B, Hkv, Skv, D)
        What this rank holds; FP16, or BF16 and FP32 that fit into it.
    call : RingCall

    Returns
    -------
    out : Tensor (B, Hq, Sq, D), dtype of q
    lse : Tensor (B, Hq, Sq), FP32
        Of the scores less scale * q.anchor.
    anchor : Tensor (B, Hkv, 1, D), FP16
        See frames.py.
    """
    found: tuple[Tensor, Tensor, Tensor] = _RingAttention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return found


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):  # it would change what the kernels are given
            return _RingAttention._forward(ctx, q, k, v, call)

    @staticmethod
    def _forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> tuple[Tensor, Tensor, Tensor]:
        half, keys, values = to_fp16(q, "q"), to_fp16(k, "k"), to_fp16(v, "v")
        frames = agree(half, keys, call.lengths, call.scale, call.ring)
        held = torch.stack((frames.apply(keys, call.ring.rank), values))
        merge = Merge(half, wide=frames.shifts is not None)
        for source, (shifted, passing) in call.ring.rotate(held, call.lengths):
            for (rows, seen, is_causal), shift in frames.pieces(call.part(source), source):
                found = call.attend(half[:, :, rows], shifted[:, :, seen], passing[:, :, seen], is_causal, shift)
                merge.add(rows, *found)
        mean, lse = merge.finish()
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(half, held, mean, lse)
            ctx.call, ctx.frames, ctx.dtype = call, frames, q.dtype
        ctx.mark_non_differentiable(frames.anchor)
        return mean.to(q.dtype, copy=True), lse.float(), frames.anchor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor, _: None) -> tuple[Tensor | None, ...]:
        """A chunk of weight w = exp(LSE_j - LSE) has w grad_out for its output, w (grad_out.(o_j - o) + grad_lse)
        for its LSE. The mean o in FP32, of the very o_j, makes the second ones sum to grad_lse: a bias that keys
        share, to which they multiply, cancels."""
        with torch.autocast(grad_out.device.type, enabled=False):
            return _RingAttention._backward(ctx, grad_out, grad_lse)

    @staticmethod
    def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        half, held, mean, lse = ctx.saved_tensors
        call: RingCall = ctx.call
        grad = grad_out.float()
        slope = grad_lse - (grad * mean).sum(-1)
        dq = torch.zeros_like(grad)
        behind = torch.zeros_like(held, dtype=torch.float32)  # gradients of the keys and values that are here
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
