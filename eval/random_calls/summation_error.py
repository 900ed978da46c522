"""Effect of the order of FP32 sums of D products: scores differ by tenths of a nat where they are huge."""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.eval.random_calls.inputs import Call
from pasa.eval.random_calls.truth import UNIT, Part, Truth, in_pieces, prepare

MMA_DEPTH = 16  # products that a tensor core adds in one step
# The kernels take an anchor off keys where it is so many times as long as what it leaves, and where scores may pass
# so many nats: ops/attention/triton/tile_math.py. A judge needs no Triton: a test holds these against its numbers.
ANCHOR_GAIN, ANCHOR_LIMIT = 4.0, 2048.0
ALL = 40.0  # nats, for FP32 holds exp(2 ALL); an error above it is allowed less than it may do
MOST = 0.1  # of the values' spread


def find_moved(call: Call, truth: Truth) -> Tensor:
    """Return how far outputs may lie from FP64's because scores are sums in FP32: (B, Hq, Sq, D), inputs without NaN.

    With errors e_j of its scores, at most d_j, a row's output moves by sum_j p_j (exp(e_j - c) - 1) (v_j - o), where c,
    the logarithm of sum_j p_j exp(e_j), is at most that of sum_j p_j exp(d_j).
    """
    moved = in_pieces(lambda piece: {"moved": _move(piece)}, call)["moved"]
    return torch.minimum(moved, MOST * (truth.high - truth.low))


def _move(call: Call) -> Tensor:
    if not call.k.shape[2]:
        return torch.zeros_like(call.q, dtype=torch.float64)
    part = prepare(call)
    weights = torch.softmax(part.scores, -1).nan_to_num(0.0)
    errors, out, v = summed_error(part, call.scale).clamp(max=ALL), (weights @ part.v).float(), part.v.float()
    common = (weights * errors.exp()).sum(-1, keepdim=True).clamp(min=1.0).log()
    changes = (weights * torch.expm1(errors + common)).float()
    columns = range(out.shape[-1])  # (rows, keys, D) at once is too large
    moved = [(changes * (v[..., i].unsqueeze(2) - out[..., i].unsqueeze(3)).abs()).sum(-1) for i in columns]
    return torch.stack(moved, -1).double()


def summed_error(part: Part, scale: float) -> Tensor:
    """Return what a score may err by, in nats, as an FP32 sum of what the kernels multiply: d, (B, Hq, Sq, Skv).

    A tensor core adds 16 products to what it has, and truncates by at most 2 u of that: s = D / 16 partial sums that
    grow evenly up to sum |q_c k'_c| make (s + 1) u of it. D additions one by one, rounded to nearest, have a standard
    deviation of sqrt(D) / 3 u, at most two thirds of that.
    """
    q, k, exists = part.q, part.k, part.seen.any(2).unsqueeze(-1)
    mean = k.where(exists, 0.0).sum(2, keepdim=True) / exists.sum(2, keepdim=True).clamp(min=1)
    centred = (k - mean).where(exists, 0.0)
    reach = centred.norm(dim=-1, keepdim=True).amax(2, keepdim=True)
    # A block's mean is as near to this mean as the keys are, and twice as near to its own keys: then it is long enough
    # for any choice of blocks. Otherwise a kernel may multiply whole keys.
    anchored = mean.norm(dim=-1, keepdim=True) >= (2 * ANCHOR_GAIN + 1) * reach
    whole, rest = (q.abs() @ x.abs().mT * scale for x in (k, centred))
    terms = rest.where(anchored & (whole > ANCHOR_LIMIT), whole)
    return (-(-q.shape[-1] // MMA_DEPTH) + 1) * UNIT * terms
