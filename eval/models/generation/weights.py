"""Random weights whose scores are like a trained model's: as spread, or beyond FP16 by a shared bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pasa.eval.kit.attention_calls import show_layers
from pasa.eval.kit.random_model import SEED
from pasa.eval.kit.timing import quantile

# Standard deviation in nats of a head's scores over all pairs that see each other, by the head's rank among all:
# SmolLM2-135M-Instruct on 1,024 tokens of text, the layers of eval/speed/recorded.py.
HEAD_SPREADS = {0.0: 0.83, 0.1: 1.81, 0.5: 2.81, 0.9: 3.80, 1.0: 7.16}
SAMPLE = 256  # tokens from which the spread of random weights is measured
BIAS = 362  # its square is 131,044: twice the largest FP16 number


def target_spreads(heads: int) -> list[float]:
    """Return a spread for each of so many heads, evenly by rank; between the recorded ranks linearly."""
    ranks = [(index + 0.5) / heads for index in range(heads)]
    known = sorted(HEAD_SPREADS)
    found = []
    for rank in ranks:
        above = next(each for each in known if each >= rank)
        below = max((each for each in known if each < above), default=above)
        share = (rank - below) / (above - below)
        found.append(HEAD_SPREADS[below] + share * (HEAD_SPREADS[above] - HEAD_SPREADS[below]))
    return found


def measured_spreads(model: Any, ids: Tensor) -> list[Tensor]:
    """Return for each layer the standard deviation of each query head's scaled scores (Hq,), causal pairs alone."""
    spreads: list[Tensor] = []

    def measure(q: Tensor, k: Tensor, v: Tensor) -> None:
        wide = k[0].float().repeat_interleave(q.shape[1] // k.shape[1], 0)
        scores = q[0].float() @ wide.mT * q.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril()
        spreads.append(scores[:, seen].std(1))

    show_layers(model, ids, measure)
    return spreads


@torch.no_grad()
def spread_scores(model: Any) -> list[float]:
    """Scale the queries of every head until scores spread as a trained model's; return the spreads that are reached."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(model.config.vocab_size, (1, SAMPLE), generator=generator).to(model.device)
    for layer, spreads in zip(model.model.layers, measured_spreads(model, ids), strict=True):
        factors = torch.tensor(target_spreads(len(spreads)), device=spreads.device) / spreads
        projection = layer.self_attn.q_proj
        for parameter in (projection.weight, projection.bias):
            heads = parameter.view(len(spreads), -1)
            heads.copy_(heads * factors[:, None])
    return sorted(torch.cat(measured_spreads(model, ids)).tolist())


@torch.no_grad()
def set_bias(model: Any, bias: int) -> None:
    """Put a constant into the first dimension of each head's slowest rotary pair, in q and in k of all layers.

    Its square is added to every score, before the scale.
    """
    for attention in (layer.self_attn for layer in model.model.layers):
        for projection in (attention.q_proj, attention.k_proj):
            heads = projection.bias.zero_().view(-1, attention.head_dim)
            heads[:, attention.head_dim // 2 - 1] = bias


def describe_spreads(spreads: Sequence[float]) -> dict[str, float]:
    """Return minimum, 10th percentile, median, 90th percentile and maximum of sorted spreads."""
    return {f"{share:g}": quantile(spreads, share) for share in HEAD_SPREADS}
