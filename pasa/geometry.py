"""Bounds on attention scores that follow from the weights of the projections alone.

An attention layer behind a norm sees inputs x = gain * n + shift with ``|n| <= sqrt(d)`` (RMSNorm, LayerNorm), so its
unscaled scores are q.k = (A n + a).(B n' + e), where A, B are the projections times the gain, and a, e all constants:
the biases of the projections, and the norm's own shift. What a norm leaves of its input is bounded, so q.k is.

The rank-aware part is S. M. Emadi, "Rank-Aware Spectral Bounds on Attention Logits for Stable Low-Precision Training":
gamma, alpha and B_alpha below are its equations (12), (13) and (8). Gains, biases, centred norms, the constant part
under rotary embeddings and the certificate are not in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FORMATS

FP8_MARGIN = 0.8
"""eta_fp8 of the paper's section 3.4: the part of E4M3's range that a predicted bound is mapped to."""

ROUNDINGS = 16
"""Of FP16 between n and the score: norm, gain, projection, and five in the rotation (two products, their sum, cosine
and sine), for each of q and k. A rounding changes q or k by at most u of its length, so q.k by at most u |q| |k|."""

FP16_UNIT = 2.0 ** -(FORMATS["fp16"].mantissa_bits + 1)


def typicality(head_dim: int, heads: int, seq_len: int, delta: float) -> float:
    """gamma > 1 with gamma - 1 - ln(gamma) = (2/d_h) ln(2 N L / delta), equation (12).

    Parameters
    ----------
    head_dim, heads, seq_len : int
        d_h; N, the heads of all layers together; L.
    delta : float
        Probability of overflow that is accepted, for the whole model.
    """
    _check(head_dim=head_dim, heads=heads, seq_len=seq_len, delta=delta)
    target = 2.0 / head_dim * math.log(2.0 * heads * seq_len / delta)
    gamma = 1.0 + math.sqrt(2.0 * target) + target  # Laurent & Massart's bound: from above, so Newton's method descends
    while True:
        lower = gamma - (gamma - 1.0 - math.log(gamma) - target) / (1.0 - 1.0 / gamma)
        if gamma - lower <= 1e-12 * gamma:
            return gamma
        gamma = lower


def minimum_alpha(hidden: int, head_dim: int, heads: int, seq_len: int, delta: float) -> float:
    """alpha_min of equation (13): all |S| stay below alpha_min * B_max with probability 1 - delta.

    Holds for inputs whose directions are uniform on the sphere in `hidden` dimensions: an assumption about data, which
    trained models meet only roughly.
    """
    gamma = typicality(head_dim, heads, seq_len, delta)
    return math.sqrt(2.0 * gamma * head_dim) / hidden * math.sqrt(math.log(4.0 * heads * seq_len**2 / delta))


def concentration_gain(hidden: int, head_dim: int, gamma: float) -> float:
    """How many times the exponent of a rank-aware tail is that of a rank-agnostic one: d / (gamma d_h)."""
    return hidden / (gamma * head_dim)


def auto_alpha(slack: Sequence[float], *, quantile: float = 0.9999, kappa: float = 1.0) -> float:
    """alpha from observed slack ratios max|S| / B_max: their quantile times kappa (section 3.5).

    No guarantee remains: it holds for data like those that were observed.
    """
    if not slack:
        raise ValueError("auto_alpha: no slack ratio was observed")
    if not 0.0 < quantile <= 1.0 or not kappa >= 1.0:
        raise ValueError(f"auto_alpha: quantile={quantile} must be in (0, 1] and kappa={kappa} at least 1")
    return float(torch.tensor(slack, dtype=torch.float64).quantile(quantile)) * kappa


def geometry_scale(bound: float, *, margin: float = FP8_MARGIN) -> float:
    """What scores are divided by before they are rounded to E4M3, equation (15): bound / (margin * 448)."""
    return bound / (margin * FORMATS["fp8_e4m3"].max)


@dataclass(frozen=True)
class Norm:
    """What is known of an attention layer's input: x = gain * n + shift with |n| <= radius.

    Attributes
    ----------
    radius : float
        sqrt(d) for RMSNorm and LayerNorm; they reach it only where their epsilon does not matter.
    gain, shift : Tensor (d,), optional
    centred : bool
        The elements of n sum to zero (LayerNorm): what the projections do to the direction of ones is of no account.
    """

    radius: float
    gain: Tensor | None = None
    shift: Tensor | None = None
    centred: bool = False


@dataclass(frozen=True)
class Projection:
    """One projection with all that precedes it folded in, per head: n -> A n + offset. Small: A itself is not kept.

    Attributes
    ----------
    gram : Tensor (H, D, D), FP64
        A Aᵀ, whose largest eigenvalue is ``|A|^2``.
    offset : Tensor (H, D), FP64
    radius : float
        Largest length of n.
    fan_in : int
        d, the number of elements of n.
    """

    gram: Tensor
    offset: Tensor
    radius: float
    fan_in: int

    @property
    def slack(self) -> float:
        """Bound on the relative rounding error of an eigenvalue of `gram`.

        Forming A Aᵀ in FP64 errs by at most d eps trace(A Aᵀ) and a symmetric eigensolver by a few D eps of the norm;
        the trace is at most D times the norm.
        """
        dim = self.gram.shape[-1]
        return 2.0 * dim * (self.fan_in + 10 * dim) * torch.finfo(torch.float64).eps


def project(weight: Tensor, bias: Tensor | None, heads: int, norm: Norm) -> Projection:
    """Fold the norm before a projection, and its bias, into what the bounds need.

    Parameters
    ----------
    weight : Tensor (H * D, d)
        As of `torch.nn.Linear`; any floating dtype, read exactly.
    bias : Tensor (H * D,), optional
    heads : int
        H.
    norm : Norm
        Of the input.
    """
    weight = weight.detach()
    folded = weight.to("cpu", torch.float64, copy=True).unflatten(0, (heads, -1))  # not every accelerator has FP64
    offset = folded.new_zeros(folded.shape[:2])
    if norm.shift is not None:
        offset = offset + folded @ norm.shift.detach().to(folded)
    if bias is not None:
        offset = offset + bias.detach().to(folded).unflatten(0, (heads, -1))
    if norm.gain is not None:
        folded.mul_(norm.gain.detach().to(folded))
    if norm.centred:
        folded.sub_(folded.mean(-1, keepdim=True))
    return Projection(folded @ folded.mT, offset, norm.radius, weight.shape[1])


@dataclass(frozen=True)
class ScoreBounds:
    """Bounds on the unscaled scores q.k of one layer; every field is (Hq,), FP64.

    Attributes
    ----------
    naive : Tensor
        max |q| max |k|. Proven, whatever rotation comes between: it holds under rotary embeddings.
    interaction : Tensor
        max |q.k| with q and k paired as the weights pair them. Proven without rotary embeddings; with them it is the
        paper's empirical bound, since a rotation between q and k is not in it.
    constant : Tensor
        Largest magnitude of the part a.e that no input changes, over all rotations of the rotary planes.
    probable : Tensor
        Stays above all |q.k| of the model with probability 1 - delta, for inputs of uniform direction.
    certain : Tensor
        Some |q.k| lies above it with that probability (those of a token with itself, which no rotation changes).
    """

    naive: Tensor
    interaction: Tensor
    constant: Tensor
    probable: Tensor
    certain: Tensor

    def proven(self, *, rotary: bool) -> Tensor:
        """The proven bound on scores that are formed in FP16: what rounding can add to q and k is added."""
        exact = self.naive if rotary else torch.minimum(self.naive, self.interaction)
        return exact + ROUNDINGS * FP16_UNIT * self.naive


def score_bounds(
    query: Projection, key: Projection, *, heads: int, seq_len: int, delta: float, rotary: int = 0
) -> ScoreBounds:
    """All bounds of one layer.

    Parameters
    ----------
    query, key : Projection
        Of Hq and Hkv heads; with fewer key heads each serves Hq / Hkv query heads in a row.
    heads, seq_len, delta
        As for :func:`typicality`.
    rotary : int
        Leading dimensions of a head that rotary embeddings turn, in the pairs (i, i + rotary/2); 0 for none.
    """
    groups = query.gram.shape[0] // key.gram.shape[0]
    key = Projection(
        key.gram.repeat_interleave(groups, 0), key.offset.repeat_interleave(groups, 0), key.radius, key.fan_in
    )
    a, e = query.offset, key.offset
    norm = interaction_norm(query, key)
    towards_key = _quadratic(query.gram, e)  # |Aᵀe|: how far the scores of a constant key range
    towards_query = _quadratic(key.gram, a)
    constant, fixed = _rotated_product(a, e, rotary), (a * e).sum(-1).abs()

    affine = bool(a.any() or e.any())
    share = delta / 2 if affine else delta  # the rest for the two linear parts
    alpha = minimum_alpha(query.fan_in, query.gram.shape[-1], heads, seq_len, share)
    linear = math.sqrt(2.0 * math.log(8.0 * heads * seq_len / delta))  # Lévy's lemma, union over all tokens and heads
    spread = alpha * math.sqrt(query.fan_in * key.fan_in) * norm + linear * (towards_key + towards_query)
    naive = _largest(query) * _largest(key)
    interaction = _largest_score(query, key, norm, towards_key, towards_query, fixed)
    proven = naive if rotary else torch.minimum(naive, interaction)
    return ScoreBounds(
        naive=naive,
        interaction=interaction,
        constant=constant,
        probable=torch.minimum(constant + spread, proven),
        certain=(fixed - spread).clamp(min=0.0),
    )


def spectral_norm(gram: Tensor, slack: float) -> Tensor:
    """Certified upper bound on |A| from A Aᵀ (..., D, D): its largest eigenvalue, plus what rounding can hide."""
    largest: Tensor = torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0.0)
    return (largest * (1.0 + slack)).sqrt()


def interaction_norm(query: Projection, key: Projection) -> Tensor:
    """Certified upper bound on ``|AᵀB|`` per head, (H,): its square is lambda_max(R (B Bᵀ) Rᵀ) with RᵀR = A Aᵀ.

    These matrices are D x D. Power iteration approaches a norm from below, so no number of steps makes it a bound;
    this is one, and as exact as FP64. It costs what forming the two Gram matrices costs: some D steps of iteration.
    """
    values, vectors = torch.linalg.eigh(query.gram)
    root = values.clamp(min=0.0).sqrt()[..., None] * vectors.mT
    square: Tensor = torch.linalg.eigvalsh(root @ key.gram @ root.mT)[..., -1].clamp(min=0.0)
    slack = max(query.slack, key.slack)
    hidden: Tensor = (
        3.0 * slack * values[..., -1].clamp(min=0.0) * torch.linalg.eigvalsh(key.gram)[..., -1].clamp(min=0.0)
    )
    return (square + hidden).sqrt()


def _largest(part: Projection) -> Tensor:
    """max |A n + a| over the ball, (H,), by augmentation: [A, a/s] applied to [n, s], whose length is sqrt(r^2 + s^2).

    Every s > 0 gives a bound; s^2 = r |a| / |A| gives at most r |A| + |a|, the triangle inequality.
    """
    norm, offset = spectral_norm(part.gram, part.slack), part.offset.norm(dim=-1)
    square = _ratio(part.radius * offset, norm, part.radius)
    return (part.radius**2 + square).sqrt() * spectral_norm(_augment(part, square).gram, part.slack)


def _largest_score(
    query: Projection, key: Projection, norm: Tensor, towards_key: Tensor, towards_query: Tensor, fixed: Tensor
) -> Tensor:
    """max |(A n + a).(B n' + e)| over both balls, (H,), by augmentation as in :func:`_largest`.

    The two s are those at which the bound is at most r r' |AᵀB| + r |Aᵀe| + r' |Bᵀa| + |a.e|: they make (r, s) and
    (r', s') the singular vectors of the 2 x 2 matrix of these norms, which has no negative entry (Perron).
    """
    r_q, r_k = query.radius, key.radius
    square_q = _ratio(r_q * (towards_query * r_k + fixed), norm * r_k + towards_key, r_q)
    square_k = _ratio(r_k * (towards_key * r_q + fixed), norm * r_q + towards_query, r_k)
    augmented = interaction_norm(_augment(query, square_q), _augment(key, square_k))
    return (r_q**2 + square_q).sqrt() * (r_k**2 + square_k).sqrt() * augmented


def _ratio(upper: Tensor, lower: Tensor, radius: float) -> Tensor:
    """s^2, kept within 1e-6 to 1e12 of the squared radius, where neither FP64 nor the bound loses anything."""
    square = upper / lower.clamp(min=torch.finfo(torch.float64).tiny)
    return square.clamp(1e-6 * radius**2, 1e12 * radius**2)


def _augment(part: Projection, square: Tensor) -> Projection:
    """[A, a/s] in place of A."""
    outer = part.offset[..., :, None] * part.offset[..., None, :] / square[..., None, None]
    return Projection(part.gram + outer, part.offset, part.radius, part.fan_in + 1)


def _quadratic(gram: Tensor, vector: Tensor) -> Tensor:
    """|Aᵀv| from A Aᵀ."""
    return (vector * (gram @ vector[..., None])[..., 0]).sum(-1).clamp(min=0.0).sqrt()


def _rotated_product(a: Tensor, e: Tensor, rotary: int) -> Tensor:
    """Largest |a.(R e)| over all rotations R of the rotary planes, (H,); plain |a.e| without such."""
    rest = (a * e)[..., rotary:].sum(-1).abs()
    a, e = (part[..., :rotary].unflatten(-1, (2, -1)).norm(dim=-2) for part in (a, e))
    return rest + (a * e).sum(-1)


def _check(*, head_dim: int, heads: int, seq_len: int, delta: float) -> None:
    for name, value in (("head_dim", head_dim), ("heads", heads), ("seq_len", seq_len)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta={delta} is not a probability between 0 and 1")
