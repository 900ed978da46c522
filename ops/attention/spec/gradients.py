"""Gradients of attention from its inputs alone, for every backend without gradient kernels of its own.

They are the gradients of exact attention at the FP16 inputs: roundings of the forward pass count as
identities, whatever arithmetic it emulates. With P the softmax of the scores S, G_O and G_L the
gradients of output and log-sum-exp:

    dV = P^T G_O        dS = P * (G_O V^T - delta + G_L)        delta = rowsum(P * G_O V^T)
    dQ = scale * dS K   dK = scale * dS^T Q

In FP32, scores of 1e5 have two digits behind the point, and exp(S - lse) keeps nothing of the
weights that the forward pass got right. Softmax does not change with q.c for a vector c that all
keys share. So scores are formed from K - c, with c the mean key. dQ is formed from K - c as well,
because the rows of dS sum to G_L: dS K = dS (K - c) + G_L c.

Maximum and sum of a row must refer to the same frame, so both are recomputed. The saved log-sum-exp
minus scale * q.c would be a difference of two huge numbers. Nor is delta computed from the output,
whose rounding to 16 bits would enter every key's gradient with the same sign.

What keys do not share stays in the scores, such as biases that rotary embeddings turn block by
block. The scores are then as good as FP32 sums of such products are. Where K - c makes a key longer
than K, a row that gives its weight to such keys would lose accuracy. So each row takes its scores
from K or from K - c, whichever has its maximum nearer to 0.

A sink s is one more score of each row, whose value is 0: P_s = exp(s - lse), dS_s = P_s * (G_L - delta).
The rows of dS then sum to G_L - dS_s. A soft cap multiplies dS by 1 - tanh^2. It needs the true
scores, so nothing is centred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from pasa.ops.attention.call import Call
from pasa.ops.attention.spec.masking import KeyMask, dense_mask, fitting_mask, hidden_keys, read_mask
from pasa.ops.attention.spec.scores import matmul_rows, soft_capped
from pasa.ops.numerics.formats import FP32_MAX

BLOCK = 128  # keys of a tile; it changes no number except by the order of sums
Gradients = tuple[Tensor, Tensor, Tensor]


def gradients(
    call: Call,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_mask: Tensor | None = None,
    grad_sinks: Tensor | None = None,
) -> Gradients:
    """Return the gradients of queries (B, Hq, Sq, D), keys and values (B, Hkv, Skv, D).

    FP16, BF16 and FP32 tensors are converted to FP16 numbers, as in the forward pass, and computed
    with in FP32; FP64 stays FP64. Memory grows with Sq + Skv: score tiles are (Sq, BLOCK).

    Parameters
    ----------
    call : Call
        A dense call.
    grad_out : Tensor (B, Hq, Sq, D), optional
    grad_lse : Tensor (B, Hq, Sq), optional
        At least one of the two gradients is present. Gradients that FP16 holds give finite results.
    grad_mask : Tensor (4 dimensions, broadcastable like a float mask), optional
        The gradient of the mask is added to it.
    grad_sinks : Tensor (Hq,), FP32, optional
        The gradient of the sinks is added to it.

    Returns
    -------
    dq, dk, dv : Tensor
        Shape and dtype of q, k and v, rounded once. A row without keys contributes 0 and gets 0.

    Notes
    -----
    A NaN or infinity in a key or value may reach all gradients of its head, unless no query sees that key.
    """
    q, k, v, scale = call.q, call.k, call.v, call.scale
    attn_mask = None if call.mask is None else fitting_mask(call.mask, scale)
    mask = read_mask(call, attn_mask)
    rows, keys, values = _wide(q).unflatten(1, (k.shape[1], -1)), _wide(k), _wide(v)
    grad = torch.zeros_like(rows) if grad_out is None else grad_out.to(rows.dtype).unflatten(1, (k.shape[1], -1))
    count = k.shape[2]
    if attn_mask is None:
        hidden = torch.zeros_like(keys[..., :1], dtype=torch.bool)
    else:
        hidden = hidden_keys(dense_mask(call, attn_mask), k)[:, None, :, None]
        keys, values = keys.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0)
    centre = keys.sum(2, keepdim=True) / (count - hidden.sum(2, keepdim=True)).clamp(min=1)
    if call.softcap:
        centre = torch.zeros_like(centre)  # a cap needs the true scores
    longer = ((keys - centre).abs() > keys.abs()) & ~hidden
    sinks = None if call.sinks is None else call.sinks.to(rows.dtype).clamp(max=FP32_MAX)
    sinks = None if sinks is None else sinks.reshape(-1, rows.shape[2], 1, 1)
    plain = keys if bool(longer.any()) else None
    tiles = RecomputedScores(rows, keys - centre, values, grad, mask, scale, plain, call.softcap, sinks, centre)
    lse_part = None if grad_lse is None else grad_lse.to(rows.dtype).reshape(*rows.shape[:-1], 1)
    dq, dk, dv = _sum_tiles(tiles, lse_part, grad_mask)
    if lse_part is not None:
        dq += (lse_part * scale).where(tiles.top > -torch.inf, 0.0) * centre.unsqueeze(2)
    if sinks is not None:
        of_sinks = tiles.sink_share() * (-tiles.delta if lse_part is None else lse_part - tiles.delta)
        dq -= of_sinks * scale * centre.unsqueeze(2)
        if grad_sinks is not None:
            grad_sinks += of_sinks.sum((0, 3, 4)).flatten()
    return dq.flatten(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def packed_gradients(
    one: Callable[..., Gradients],
    call: Call,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_sinks: Tensor | None = None,
) -> Gradients:
    """Return the gradients of packed sequences (T, H, D), computed one sequence after another.

    `one` computes a sequence: `gradients` here, or a backend's. Lengths are read on the host.
    """
    q, k, v = call.q, call.k, call.v
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    edges_q, edges_k = call.edges()
    for (q0, q1), (k0, k1) in zip(pairwise(edges_q), pairwise(edges_k), strict=True):
        if k0 == k1 and grad_sinks is not None and grad_lse is not None:
            grad_sinks += grad_lse[q0:q1].sum(0)  # the log-sum-exp of a row without keys is its sink
        if q0 == q1 or k0 == k1:
            continue
        out = None if grad_out is None else grad_out[q0:q1].transpose(0, 1).unsqueeze(0)
        lse = None if grad_lse is None else grad_lse[q0:q1].T.unsqueeze(0)
        one_q, one_k, one_v = (x.transpose(0, 1).unsqueeze(0) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        dense = replace(call, q=one_q, k=one_k, v=one_v, cu_q=None, cu_k=None).narrowed()
        grads = [x[0].transpose(0, 1) for x in one(dense, out, lse, grad_sinks=grad_sinks)]
        first = k1 - dense.k.shape[2]  # keys before it are outside of the window
        dq[q0:q1], dk[first:k1], dv[first:k1] = grads
    return dq, dk, dv


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float16).float()


@dataclass
class RecomputedScores:
    """Recompute score tiles of all rows against BLOCK keys whenever they are needed, instead of storing them.

    Attributes
    ----------
    q, grad : Tensor (B, Hkv, G, Sq, D)
    keys, values : Tensor (B, Hkv, Skv, D)
        The keys are centred: K - c.
    uncentred : Tensor (B, Hkv, Skv, D), optional
        The keys without centring, if some row may need them.
    softcap : float
    sinks : Tensor (Hkv, G, 1, 1), optional
    centre : Tensor (B, Hkv, 1, D), optional
        What was subtracted from the keys; needed with sinks.
    plain : Tensor (B, Hkv, G, Sq, 1), bool, optional
        Rows that take their scores from `uncentred`.
    top, total : Tensor (B, Hkv, G, Sq, 1)
        Maximum and sum of weights of every row, in the row's frame.
    delta : Tensor (B, Hkv, G, Sq, 1)
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    grad: Tensor
    mask: KeyMask
    scale: float
    uncentred: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    centre: Tensor | None = None
    plain: Tensor | None = None

    def __post_init__(self) -> None:
        if self.uncentred is not None:
            centred = self.largest()
            self.plain = torch.ones_like(centred, dtype=torch.bool)
            self.plain = self.largest().abs() < centred.abs()
        self.top = self.q.new_full((*self.q.shape[:-1], 1), -torch.inf)
        self.total, self.delta = torch.zeros_like(self.top), torch.zeros_like(self.top)
        if self.sinks is not None:
            self.top, self.total = self.sink_scores(), torch.ones_like(self.total)
        for part, rows in self.parts():
            scores = self.scores(part, rows)
            old = self.top[..., rows, :].clone()
            top = torch.maximum(old, scores.amax(-1, keepdim=True))
            base = top.where(top > -torch.inf, 0.0)
            weights, keep = torch.exp(scores - base), torch.exp(old - base)
            self.top[..., rows, :] = top
            total, delta = self.total[..., rows, :], self.delta[..., rows, :]
            total.mul_(keep).add_(weights.sum(-1, keepdim=True))
            products = (weights * self.slopes(part, rows)).sum(-1, keepdim=True)
            delta.mul_(keep).add_(products)
        self.delta /= self.total.where(self.total != 0, 1.0)

    def largest(self) -> Tensor:
        """Return the largest score of every row, (B, Hkv, G, Sq, 1)."""
        top = self.q.new_full((*self.q.shape[:-1], 1), -torch.inf)
        for part, rows in self.parts():
            some = top[..., rows, :]
            some.copy_(torch.maximum(some, self.scores(part, rows).amax(-1, keepdim=True)))
        return top

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Yield the keys of each tile, and the rows that see some of them."""
        for start in range(0, self.keys.shape[2], BLOCK):
            stop = min(start + BLOCK, self.keys.shape[2])
            first, end = self.mask.rows_of(start, stop)
            if first < end:
                yield slice(start, stop), slice(first, end)

    def products(self, part: slice, rows: slice) -> Tensor:
        """Return scaled scores in the rows' frames, capped but not masked: (B, Hkv, G, R, n)."""
        scores = matmul_rows(self.q[..., rows, :], self.keys[..., part, :]) * self.scale
        if self.uncentred is not None and self.plain is not None:
            others = matmul_rows(self.q[..., rows, :], self.uncentred[..., part, :]) * self.scale
            scores = torch.where(self.plain[..., rows, :], others, scores)
        return soft_capped(scores, self.softcap)

    def scores(self, part: slice, rows: slice) -> Tensor:
        """Return the same with the mask, -inf where masked out."""
        scores = self.products(part, rows)
        visible, bias = self.mask.tile(rows.start, rows.stop, part.start, part.stop)
        if bias is not None:
            scores = scores + bias
        return scores if visible is None else scores.masked_fill(~visible, -torch.inf)

    def sink_scores(self) -> Tensor:
        """Return the sinks in the frame of each row, (B, Hkv, G, Sq, 1)."""
        sinks = torch.zeros_like(self.top) if self.sinks is None else self.sinks.expand_as(self.top)
        if self.centre is None:
            return sinks
        framed = sinks - matmul_rows(self.q, self.centre) * self.scale
        return framed if self.plain is None else torch.where(self.plain, sinks, framed)

    def sink_share(self) -> Tensor:
        """Return the weight of the sink in each row."""
        share = torch.exp(self.sink_scores() - self.top.where(self.top > -torch.inf, 0.0))
        return share / self.total.where(self.total != 0, 1.0)

    def weights(self, part: slice, rows: slice) -> Tensor:
        """Return P. It is not exp(S - lse), because beside a maximum of 1e30 that a mask adds, the sum would vanish."""
        top, total = self.top[..., rows, :], self.total[..., rows, :]
        shifted = self.scores(part, rows) - top.where(top > -torch.inf, 0.0)
        return torch.exp(shifted) / total.where(total != 0, 1.0)

    def slopes(self, part: slice, rows: slice) -> Tensor:
        """Return G_O V^T, the gradients of the weights."""
        return matmul_rows(self.grad[..., rows, :], self.values[..., part, :])


def _sum_tiles(tiles: RecomputedScores, grad_lse: Tensor | None, grad_mask: Tensor | None) -> Gradients:
    """Return dQ (B, Hkv, G, Sq, D) without the term G_L c, and dK and dV (B, Hkv, Skv, D)."""
    dq, dk, dv = torch.zeros_like(tiles.q), torch.zeros_like(tiles.keys), torch.zeros_like(tiles.values)
    frame = tiles.delta if grad_lse is None else tiles.delta - grad_lse
    for part, rows in tiles.parts():
        weights = tiles.weights(part, rows)
        slopes = tiles.slopes(part, rows) - frame[..., rows, :]
        scores = weights * slopes.where(weights != 0, 0.0)
        if grad_mask is not None:
            _add_mask(grad_mask, scores.flatten(1, 2), part, rows)
        if tiles.softcap:
            scores = scores * (1.0 - (tiles.products(part, rows) / tiles.softcap).square())
        dv[..., part, :] = weights.flatten(2, 3).mT @ tiles.grad[..., rows, :].flatten(2, 3)
        dk[..., part, :] = scores.flatten(2, 3).mT @ tiles.q[..., rows, :].flatten(2, 3) * tiles.scale
        dq[..., rows, :] += matmul_rows(scores, tiles.keys[..., part, :].mT) * tiles.scale
    return dq, dk, dv


def _add_mask(grad_mask: Tensor, scores: Tensor, part: slice, rows: slice) -> None:
    """Add dS (B, Hq, R, n) of a tile to the mask's gradient, summed over the dimensions that were broadcast."""
    rows = slice(None) if grad_mask.shape[2] == 1 else rows
    keys = slice(None) if grad_mask.shape[3] == 1 else part
    target = grad_mask[:, :, rows, keys]
    target += scores.sum_to_size(target.shape)
