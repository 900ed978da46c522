"""Bounds on attention scores that follow from the weights of the projections alone.

An attention layer behind a norm sees inputs x = gain * n + shift with ``|n| <= sqrt(d)`` (RMSNorm, LayerNorm), so its
unscaled scores are q.k = (A n + a).(B n' + e), where A, B are the projections times the gain, and a, e all constants:
the biases of the projections, and the norm's own shift. What a norm leaves of its input is bounded, so q.k is.

The interaction norm and what :mod:`pasa.concentration` adds are S. M. Emadi's, "Rank-Aware Spectral Bounds on Attention
Logits for Stable Low-Precision Training". Gains, biases, centred norms, rounding, the worst rotation under rotary
embeddings of what inputs do not change and of what is probable, and the certificate are not in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pasa.concentration import minimum_alpha
from pasa.ops.numerics.formats import FORMATS

ROUNDINGS = 8
"""Of FP16 between n and q, or k: norm, gain and shift, projection and bias, and five in the rotation (two products,
their sum, cosine and sine). Each changes q by at most u of its length, or of what `Projection.hidden` adds to it, and
by what `Projection.absolute` says."""

FP16_UNIT = 2.0 ** -(FORMATS["fp16"].mantissa_bits + 1)
FP16_HALF_STEP = FORMATS["fp16"].min_subnormal / 2
"""FP16 rounds x to x (1 + a) + b with |a| <= u and |b| <= 2^-25: below 2^-14 its steps no longer shrink with x."""


RELATIVE = (1.0 + FP16_UNIT) ** ROUNDINGS * (1.0 + 2.0 * FP16_HALF_STEP) - 1.0
"""All relative parts together: each acts on what the ones before it left. Cosines and sines, at most 1, are rounded by
2^-25 more: either element of a pair (a, b) moves by 2^-25 (|a| + |b|), the pair by at most 2^-24 of its length."""


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
    hidden : Tensor (H,), FP64
        Length that A n + offset has not, and what rounding works on has: the products with the direction of ones and
        with the shift may cancel, but the roundings of the elements of x do not know of each other.
    absolute : Tensor (H,), FP64
        Length that the absolute parts of FP16's roundings (2^-25 each) can add to q, before later roundings enlarge it.
        That of an element of n reaches q through the gain and the weights, that of an element of x through the weights;
        an element of q has one, and its rotation two (two products; a sum of FP16 numbers has none). So it is at most
        2^-25 times | |A| 1 | + | |W| 1 | + 3 sqrt(D), where 1 is the vector of ones and |A| has the magnitudes of A.
    radius : float
        Largest length of n.
    fan_in : int
        d, the number of elements of n.
    """

    gram: Tensor
    offset: Tensor
    hidden: Tensor
    absolute: Tensor
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
    hidden = folded.new_zeros(heads)
    absolute = _reach_of_ones(folded) + 3.0 * math.sqrt(folded.shape[1])
    if norm.shift is not None:
        shift = norm.shift.detach().to(folded)
        offset = offset + folded @ shift
        hidden = hidden + (folded.abs() @ shift.abs()).norm(dim=-1)
    if bias is not None:
        offset = offset + bias.detach().to(folded).unflatten(0, (heads, -1))
    if norm.gain is not None:
        folded.mul_(norm.gain.detach().to(folded))
    absolute = FP16_HALF_STEP * (absolute + _reach_of_ones(folded))
    if norm.centred:
        mean = folded.mean(-1, keepdim=True)
        hidden = hidden + math.sqrt(weight.shape[1]) * norm.radius * mean.norm(dim=(-2, -1))
        folded.sub_(mean)
    return Projection(folded @ folded.mT, offset, hidden, absolute, norm.radius, weight.shape[1])


def _reach_of_ones(weight: Tensor) -> Tensor:
    """Return the longest W e for errors |e| <= 1 of the elements, (H,): the length of the sums of magnitudes."""
    sums: Tensor = torch.linalg.vector_norm(weight, 1, dim=-1)  # without a copy of the weights
    longest: Tensor = sums.norm(dim=-1)
    return longest


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
    proven : Tensor
        Of scores that are formed in FP16: the smaller one of these that is proven, and what rounding can add.
    constant : Tensor
        Largest magnitude of the part a.e that no input changes, over all rotations of the rotary planes.
    probable : Tensor
        Stays above all |q.k| of the model with probability 1 - delta, for inputs of uniform direction. It includes the
        absolute parts of FP16's roundings, which can be all that there is of q; the relative ones are left out.
    certain : Tensor
        Some |q.k| lies above it with that probability (those of a token with itself, which no rotation changes), and
        after such roundings.
    """

    naive: Tensor
    interaction: Tensor
    proven: Tensor
    constant: Tensor
    probable: Tensor
    certain: Tensor


def score_bounds(
    query: Projection, key: Projection, *, heads: int, seq_len: int, delta: float, rotary: int = 0
) -> ScoreBounds:
    """All bounds of one layer.

    Parameters
    ----------
    query, key : Projection
        Of Hq and Hkv heads; with fewer key heads each serves Hq / Hkv query heads in a row.
    heads, seq_len, delta
        As for :func:`pasa.concentration.typicality`.
    rotary : int
        Leading dimensions of a head that rotary embeddings turn, in the pairs (i, i + rotary/2); 0 for none.
    """
    (query_norm, longest_query), (key_norm, longest_key) = _lengths(query), _lengths(key)
    groups = query.gram.shape[0] // key.gram.shape[0]
    gram, offset, hidden, absolute, key_norm, longest_key = (
        each.repeat_interleave(groups, 0)
        for each in (key.gram, key.offset, key.hidden, key.absolute, key_norm, longest_key)
    )
    key = Projection(gram, offset, hidden, absolute, key.radius, key.fan_in)
    a, e = query.offset, key.offset
    norm = interaction_norm(query, key)
    towards_key = _quadratic(query.gram, e)  # |Aᵀe|: how far the scores of a constant key range
    towards_query = _quadratic(key.gram, a)
    constant, fixed = _rotated_product(a, e, rotary), (a * e).sum(-1).abs()

    naive = longest_query * longest_key
    interaction = _largest_score(query, key, norm, towards_key, towards_query, fixed)
    exact = naive if rotary else torch.minimum(naive, interaction)

    affine = bool(a.any() or e.any())
    share = delta / 2 if affine else delta  # the rest for the two linear parts
    alpha = minimum_alpha(query.fan_in, query.gram.shape[-1], heads, seq_len, share)
    # Lévy's lemma; a union over all tokens and heads, over all pairs where each distance has a rotation of its own
    linear = math.sqrt(2.0 * math.log(8.0 * heads * (seq_len**2 if rotary else seq_len) / delta))
    scale = alpha * math.sqrt(query.fan_in * key.fan_in)
    spread = scale * norm + linear * (towards_key + towards_query)
    turned = spread
    if rotary:  # the worst rotation between q and k
        turned = scale * query_norm * key_norm + linear * (
            _rotated_quadratic(query.gram, query_norm, e, rotary) + _rotated_quadratic(key.gram, key_norm, a, rotary)
        )
    absolute = _rounding(query, key, longest_query, longest_key, 0.0)
    return ScoreBounds(
        naive=naive,
        interaction=interaction,
        proven=exact + _rounding(query, key, longest_query, longest_key, RELATIVE),
        constant=constant,
        probable=torch.minimum(constant + turned, exact) + absolute,
        certain=(fixed - spread - absolute).clamp(min=0.0),
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
    lost: Tensor = 3.0 * slack * values[..., -1].clamp(min=0.0) * key.gram.norm(dim=(-2, -1))
    return (square + lost).sqrt()


def _lengths(part: Projection) -> tuple[Tensor, Tensor]:
    """|A|, and max |A n + a| over the ball, (H,).

    The latter by augmentation: [A, a/s] applied to [n, s], whose length is sqrt(r^2 + s^2). Every s > 0 gives a bound;
    s^2 = r |a| / |A| gives at most r |A| + |a|, the triangle inequality.
    """
    norm = spectral_norm(part.gram, part.slack)
    if not part.offset.any():
        return norm, part.radius * norm
    square = _ratio(part.radius * part.offset.norm(dim=-1), norm, part.radius)
    return norm, (part.radius**2 + square).sqrt() * spectral_norm(_augment(part, square).gram, part.slack)


def _largest_score(
    query: Projection, key: Projection, norm: Tensor, towards_key: Tensor, towards_query: Tensor, fixed: Tensor
) -> Tensor:
    """max |(A n + a).(B n' + e)| over both balls, (H,), by augmentation as in :func:`_lengths`.

    The two s are those at which the bound is at most r r' |AᵀB| + r |Aᵀe| + r' |Bᵀa| + |a.e|: they make (r, s) and
    (r', s') the singular vectors of the 2 x 2 matrix of these norms, which has no negative entry (Perron).
    """
    r_q, r_k = query.radius, key.radius
    if not (query.offset.any() or key.offset.any()):
        return r_q * r_k * norm
    square_q = _ratio(r_q * (towards_query * r_k + fixed), norm * r_k + towards_key, r_q)
    square_k = _ratio(r_k * (towards_key * r_q + fixed), norm * r_q + towards_query, r_k)
    augmented = interaction_norm(_augment(query, square_q), _augment(key, square_k))
    return (r_q**2 + square_q).sqrt() * (r_k**2 + square_k).sqrt() * augmented


def _rounding(query: Projection, key: Projection, longest_query: Tensor, longest_key: Tensor, share: float) -> Tensor:
    """Return what roundings of q and k to FP16 can add to a score, (H,); share: of the lengths, by the relative ones.

    Let |q| <= Q, |k| <= K, and let roundings move q by at most e and k by f. Then |(q + e).(k + f)| is at most
    |q.k| + Q f + K e + e f = |q.k| + (Q + e) (K + f) - Q K.
    """
    rounded_query, rounded_key = (
        longest + share * (longest + part.hidden) + (1.0 + share) * part.absolute
        for part, longest in ((query, longest_query), (key, longest_key))
    )
    return rounded_query * rounded_key - longest_query * longest_key


def _ratio(upper: Tensor, lower: Tensor, radius: float) -> Tensor:
    """s^2, kept within 1e-6 to 1e12 of the squared radius, where neither FP64 nor the bound loses anything."""
    square = upper / lower.clamp(min=torch.finfo(torch.float64).tiny)
    return square.clamp(1e-6 * radius**2, 1e12 * radius**2)


def _augment(part: Projection, square: Tensor) -> Projection:
    """[A, a/s] in place of A."""
    outer = part.offset[..., :, None] * part.offset[..., None, :] / square[..., None, None]
    return replace(part, gram=part.gram + outer, fan_in=part.fan_in + 1)


def _quadratic(gram: Tensor, vector: Tensor) -> Tensor:
    """|Aᵀv| from A Aᵀ."""
    return (vector * (gram @ vector[..., None])[..., 0]).sum(-1).clamp(min=0.0).sqrt()


def _rotated_product(a: Tensor, e: Tensor, rotary: int) -> Tensor:
    """Largest |a.(R e)| over all rotations R of the rotary planes, (H,); plain |a.e| without such."""
    rest = (a * e)[..., rotary:].sum(-1).abs()
    a, e = (part[..., :rotary].unflatten(-1, (2, -1)).norm(dim=-2) for part in (a, e))
    return rest + (a * e).sum(-1)


def _rotated_quadratic(gram: Tensor, norm: Tensor, vector: Tensor, rotary: int) -> Tensor:
    """Bound on |Aᵀ R v| over all rotations R of the rotary planes, (H,): plane by plane, or |A| |v| if that is less."""
    planes = gram.diagonal(dim1=-2, dim2=-1)[..., :rotary].unflatten(-1, (2, -1))  # of the plane's 2 x 2 block
    cross = gram.diagonal(rotary // 2, dim1=-2, dim2=-1)[..., : rotary // 2]
    middle, half = planes.sum(-2) / 2, (planes[..., 0, :] - planes[..., 1, :]) / 2
    largest = (middle + torch.hypot(half, cross)).sqrt()  # |A| of the plane
    turned = vector[..., :rotary].unflatten(-1, (2, -1)).norm(dim=-2)
    rest = _quadratic(gram[..., rotary:, rotary:], vector[..., rotary:])
    return torch.minimum((largest * turned).sum(-1) + rest, norm * vector.norm(dim=-1))
