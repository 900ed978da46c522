"""No score of random layers lies above its proven bound, whatever their sizes, biases and norms."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from pasa import geometry
from pasa.projections import Norm, project


@given(
    seed=st.integers(0, 2**31),
    hidden=st.sampled_from([4, 16, 33, 64]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)]),
    dim=st.sampled_from([2, 4, 16]),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    bias=st.sampled_from([0.0, 1.0, 100.0]),
    gain=st.booleans(),
    centred=st.booleans(),
)
def test_no_score_of_a_random_layer_exceeds_its_proven_bound(seed, hidden, heads, dim, size, bias, gain, centred):
    """Inputs are random, and lie along what the first query head looks for."""
    source = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    weights = [size * randn(count * dim, hidden) for count in heads]
    biases = [bias * randn(count * dim) for count in heads]
    gains = 1 + randn(hidden).abs() if gain else torch.ones(hidden, dtype=torch.float64)
    norm = Norm(math.sqrt(hidden), gains if gain else None, None, centred)
    query, key = (project(w, b, n, norm) for w, b, n in zip(weights, biases, heads, strict=True))
    n = torch.cat([randn(64, hidden), torch.linalg.svd(weights[0][:dim] * gains, full_matrices=False)[2]])
    n = n - n.mean(-1, keepdim=True) if centred else n
    x = gains * n / n.norm(dim=-1, keepdim=True).clamp(min=1e-12) * math.sqrt(hidden)
    q, k = ((x @ w.T + b).unflatten(-1, (-1, dim)).transpose(0, 1) for w, b in zip(weights, biases, strict=True))
    scores = (q @ k.repeat_interleave(heads[0] // heads[1], 0).mT).abs().flatten(1).amax(-1)
    for rotary in (0, dim):
        proven = geometry.score_bounds(query, key, heads=heads[0], seq_len=16, delta=1e-6, rotary=rotary).proven
        assert torch.isfinite(proven).all()
        assert (scores <= proven).all()
