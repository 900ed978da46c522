"""Bounds on attention scores that follow from the weights of the projections alone.

An attention layer after a norm (RMSNorm, LayerNorm) has inputs x = gain * n + shift with ``|n| <= sqrt(d)``. So its
unscaled scores are q.k = (A n + a).(B n' + e). Here A and B are the projections times the gain. The constants a and e
hold the biases of the projections and the projected shift of the norm. Since |n| is bounded, so is q.k.

The interaction norm and the bound of :mod:`pasa.concentration` are from S. M. Emadi, "Rank-Aware Spectral Bounds on
Attention Logits for Stable Low-Precision Training". The paper does not treat gains, biases, centred norms or rounding.
It treats neither the worst rotation under rotary embeddings (of the constant part and of the probable bound) nor a
certified norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pasa.concentration import log_ratio, minimum_alpha
from pasa.projections import Projection
from pasa.roundings import RELATIVE


@dataclass(frozen=True)
class ScoreBounds:
    """Bounds on the unscaled scores q.k of one layer; every field is (Hq,), FP64.

    Attributes
    ----------
    naive : Tensor
        max |q| max |k| in exact arithmetic. Rotations do not change it, so it holds under rotary embeddings.
    interaction : Tensor
        max |q.k| with q and k paired as the weights pair them. It is proven without rotary embeddings. With them it is
        the paper's empirical bound, which ignores the rotation between q and k.
    proven : Tensor
        Proven bound on scores that are formed in FP16: the smaller proven bound of these two, plus what rounding can
        add, also in constant rows after a layer norm.
    constant : Tensor
        Largest magnitude of the part a.e, which does not depend on the input, over all rotations of the rotary planes.
    probable : Tensor
        Bound on all |q.k| of the model that holds with probability 1 - delta, for inputs of uniform direction. It
        includes the absolute parts of FP16's roundings, because they can exceed a tiny q. The relative parts are left
        out.
    certain : Tensor
        With the same probability, some |q.k| exceeds this value, also after such roundings. It is formed from the
        scores of a token with itself, which no rotation changes.
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
    """Return all bounds of one layer.

    Parameters
    ----------
    query, key : Projection
        Projections of Hq and Hkv heads; each key head serves Hq / Hkv consecutive query heads.
    heads, seq_len, delta
        As for :func:`pasa.concentration.typicality`.
    rotary : int
        Number of leading dimensions of a head that rotary embeddings rotate, in pairs (i, i + rotary/2); 0 for none.
    """
    (query_norm, longest_query), (key_norm, longest_key) = _lengths(query), _lengths(key)
    groups = query.gram.shape[0] // key.gram.shape[0]
    key = _repeat(key, groups)
    key_norm, longest_key = (each.repeat_interleave(groups, 0) for each in (key_norm, longest_key))
    a, e = query.offset, key.offset
    norm = interaction_norm(query, key)
    towards_key = _quadratic(query.gram, e)  # |Aᵀe|: spread of the scores with a constant key
    towards_query = _quadratic(key.gram, a)
    constant, fixed = _rotated_product(a, e, rotary), (a * e).sum(-1).abs()

    naive = longest_query * longest_key
    interaction = _largest_score(query, key, norm, towards_key, towards_query, fixed)
    exact = naive if rotary else torch.minimum(naive, interaction)

    affine = bool(a.any() or e.any())
    share = delta / 2 if affine else delta  # the other half is for the two linear parts
    alpha = minimum_alpha(query.fan_in, query.gram.shape[-1], heads, seq_len, share)
    # Lévy's lemma, with a union bound over tokens and heads; over pairs of tokens with rotary, one rotation a distance
    linear = math.sqrt(2.0 * log_ratio(8 * heads * (seq_len**2 if rotary else seq_len), delta))
    scale = alpha * math.sqrt(query.fan_in * key.fan_in)
    spread = scale * norm + linear * (towards_key + towards_query)
    turned = spread
    if rotary:  # the worst rotation between q and k
        turned = scale * query_norm * key_norm + linear * (
            _rotated_quadratic(query.gram, query_norm, e, rotary) + _rotated_quadratic(key.gram, key_norm, a, rotary)
        )
    absolute = (longest_query + query.absolute) * (longest_key + key.absolute) - naive
    return ScoreBounds(
        naive=naive,
        interaction=interaction,
        proven=_proven(query, key, longest_query, longest_key, exact, rotary),
        constant=constant,
        probable=torch.minimum(constant + turned, exact) + absolute,
        certain=(fixed - spread - absolute).clamp(min=0.0),
    )


def spectral_norm(gram: Tensor, slack: float) -> Tensor:
    """Return a certified upper bound on |A| from A Aᵀ (..., D, D): root of its largest eigenvalue, plus rounding."""
    largest: Tensor = torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0.0)
    return (largest * (1.0 + slack)).sqrt()


def interaction_norm(query: Projection, key: Projection) -> Tensor:
    """Return a certified upper bound on ``|AᵀB|`` per head, (H,).

    Its square is lambda_max(R (B Bᵀ) Rᵀ) with RᵀR = A Aᵀ, where all matrices are D x D. Power iteration approaches a
    norm from below, so no number of steps makes it a bound. This bound is certified, and as exact as FP64. It costs as
    much as forming the two Gram matrices, or about D steps of power iteration.
    """
    values, vectors = torch.linalg.eigh(query.gram)
    root = values.clamp(min=0.0).sqrt()[..., None] * vectors.mT
    square: Tensor = torch.linalg.eigvalsh(root @ key.gram @ root.mT)[..., -1].clamp(min=0.0)
    slack = max(query.slack, key.slack)
    lost: Tensor = 3.0 * slack * values[..., -1].clamp(min=0.0) * key.gram.norm(dim=(-2, -1))
    return (square + lost).sqrt()


def _lengths(part: Projection) -> tuple[Tensor, Tensor]:
    """Return |A| and max |A n + a| over the ball |n| <= r, each (H,).

    The maximum is bounded by augmentation: A n + a is [A, a/s] applied to [n, s], whose length is sqrt(r^2 + s^2).
    Every s > 0 gives a bound. With s^2 = r |a| / |A| it is at most r |A| + |a|, the triangle inequality.
    """
    norm = spectral_norm(part.gram, part.slack)
    if not part.offset.any():
        return norm, part.radius * norm
    square = _ratio(part.radius * part.offset.norm(dim=-1), norm, part.radius)
    return norm, (part.radius**2 + square).sqrt() * spectral_norm(_augment(part, square).gram, part.slack)


def _largest_score(
    query: Projection, key: Projection, norm: Tensor, towards_key: Tensor, towards_query: Tensor, fixed: Tensor
) -> Tensor:
    """Return a bound on max |(A n + a).(B n' + e)| over both balls, (H,), by augmentation as in :func:`_lengths`.

    The two s are chosen so that the bound is at most r r' |AᵀB| + r |Aᵀe| + r' |Bᵀa| + |a.e|. With this choice (r, s)
    and (r', s') are the singular vectors of the 2 x 2 matrix of these norms, which has no negative entry (Perron).
    """
    r_q, r_k = query.radius, key.radius
    if not (query.offset.any() or key.offset.any()):
        return r_q * r_k * norm
    square_q = _ratio(r_q * (towards_query * r_k + fixed), norm * r_k + towards_key, r_q)
    square_k = _ratio(r_k * (towards_key * r_q + fixed), norm * r_q + towards_query, r_k)
    augmented = interaction_norm(_augment(query, square_q), _augment(key, square_k))
    return (r_q**2 + square_q).sqrt() * (r_k**2 + square_k).sqrt() * augmented


def _proven(
    query: Projection, key: Projection, longest_query: Tensor, longest_key: Tensor, exact: Tensor, rotary: int
) -> Tensor:
    """Return the bound on scores in FP16, (H,), with roundings of q and k, and for rows that are constant.

    Let |q| <= Q and |k| <= K, and let roundings move q by at most e and k by at most f. Then a rounded score is at most
    |q.k| + Q f + K e + e f = |q.k| + (Q + e) (K + f) - Q K.
    """
    level_query, level_key = (part.level * part.ones.norm(dim=-1) + part.offset.norm(dim=-1) for part in (query, key))
    rows_query = (longest_query, _rounded(query, longest_query + query.uneven, query.hidden))
    rows_key = (longest_key, _rounded(key, longest_key + key.uneven, key.hidden))
    flat_query = (level_query, _rounded(query, level_query, query.level_hidden))
    flat_key = (level_key, _rounded(key, level_key, key.level_hidden))
    proven = exact + rows_query[1] * rows_key[1] - rows_query[0] * rows_key[0]
    mixed = (
        (flat_query, rows_key, _constant_query(query, key)),
        (rows_query, flat_key, _constant_query(key, query)),
        (flat_query, flat_key, _constant_rows(query, key)),
    )
    for (length, moved), (length_key, moved_key), score in mixed if query.level or key.level else ():
        naive = length * length_key
        paired = naive if rotary else torch.minimum(naive, score)
        proven = torch.maximum(proven, paired + moved * moved_key - naive)
    return proven.nan_to_num(math.inf, posinf=math.inf)  # inf - inf is NaN: with an epsilon of 0 there is no bound


def _constant_query(query: Projection, key: Projection) -> Tensor:
    """Return the largest |q.k| of a constant row's query q = level A 1 + a over all keys k = B n + e, (H,)."""
    spread = query.level * _quadratic(key.gram, query.ones) + _quadratic(key.gram, query.offset)
    fixed = query.level * (query.ones * key.offset).sum(-1).abs() + (query.offset * key.offset).sum(-1).abs()
    return key.radius * spread + fixed


def _constant_rows(query: Projection, key: Projection) -> Tensor:
    """Return the largest |q.k| of two constant rows, (H,)."""
    parts = [
        scale * (left * right).sum(-1).abs()
        for left, right, scale in (
            (query.ones, key.ones, query.level * key.level),
            (query.ones, key.offset, query.level),
            (query.offset, key.ones, key.level),
            (query.offset, key.offset, 1.0),
        )
    ]
    total: Tensor = torch.stack(parts).sum(0)
    return total


def _rounded(part: Projection, length: Tensor, hidden: Tensor) -> Tensor:
    """Return the largest length of q in FP16, (H,), from its length before; see `Projection` for `hidden`."""
    return length + RELATIVE * (length + hidden) + (1.0 + RELATIVE) * part.absolute


def _repeat(part: Projection, groups: int) -> Projection:
    """Return the key projection with every head repeated `groups` times, once for each query head it serves."""
    tensors: dict[str, Any] = {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}
    return replace(part, **{name: value.repeat_interleave(groups, 0) for name, value in tensors.items()})


def _ratio(upper: Tensor, lower: Tensor, radius: float) -> Tensor:
    """Return s^2, clamped to 1e-6 to 1e12 times the squared radius: there neither FP64 nor the bound loses accuracy."""
    square = upper / lower.clamp(min=torch.finfo(torch.float64).tiny)
    return square.clamp(1e-6 * radius**2, 1e12 * radius**2)


def _augment(part: Projection, square: Tensor) -> Projection:
    """Return the projection with [A, a/s] in place of A; `square` is s^2."""
    outer = part.offset[..., :, None] * part.offset[..., None, :] / square[..., None, None]
    return replace(part, gram=part.gram + outer, fan_in=part.fan_in + 1)


def _quadratic(gram: Tensor, vector: Tensor) -> Tensor:
    """Return |Aᵀv| from A Aᵀ."""
    return (vector * (gram @ vector[..., None])[..., 0]).sum(-1).clamp(min=0.0).sqrt()


def _rotated_product(a: Tensor, e: Tensor, rotary: int) -> Tensor:
    """Return the largest |a.(R e)| over all rotations R of the rotary planes, (H,); |a.e| if there are no planes."""
    rest = (a * e)[..., rotary:].sum(-1).abs()
    a, e = (part[..., :rotary].unflatten(-1, (2, -1)).norm(dim=-2) for part in (a, e))
    return rest + (a * e).sum(-1)


def _rotated_quadratic(gram: Tensor, norm: Tensor, vector: Tensor, rotary: int) -> Tensor:
    """Return a bound on |Aᵀ R v| over all rotations R of the rotary planes, (H,).

    The bound is formed plane by plane, or is |A| |v| if that is smaller.
    """
    planes = gram.diagonal(dim1=-2, dim2=-1)[..., :rotary].unflatten(-1, (2, -1))  # diagonal of each plane's block
    cross = gram.diagonal(rotary // 2, dim1=-2, dim2=-1)[..., : rotary // 2]
    middle, half = planes.sum(-2) / 2, (planes[..., 0, :] - planes[..., 1, :]) / 2
    largest = (middle + torch.hypot(half, cross)).sqrt()  # |A| restricted to the plane
    turned = vector[..., :rotary].unflatten(-1, (2, -1)).norm(dim=-2)
    rest = _quadratic(gram[..., rotary:, rotary:], vector[..., rotary:])
    return torch.minimum((largest * turned).sum(-1) + rest, norm * vector.norm(dim=-1))
