"""A decoder shaped like GPT-2, whose attention is passed in, and what provokes repeated maxima in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q, k, v), each (B, H, S, D), causal; returns (B, H, S, D)."""

SINK = 0  # the byte that no text holds: every context begins with SINKS of it
SINKS = 2
SINK_SIZE = 2.0  # of its embedding; those of other bytes and of positions have 0.02 sqrt(width), 0.2 to 0.6
SINK_SCORES = (4.0, 8.0, 12.0, 16.0)  # of the heads of a layer in turn, before training
VALUE_BIAS = 1.0  # deviation of the values' bias: values of one column have one sign


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; the MLP is four times as wide."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256


SMALL = Shape(layers=4, width=128, heads=4, context=128)
GPT2_SMALL = Shape(layers=12, width=768, heads=12, context=1024)  # on bytes: its vocabulary is 50,257


class Block(nn.Module):
    """LayerNorm, attention, LayerNorm, MLP, each on a residual path."""

    def __init__(self, shape: Shape, layer: int, attention: Attention) -> None:
        super().__init__()
        self.layer, self.heads, self.attention = layer, shape.heads, attention
        self.norm, self.mlp_norm = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.query, self.key, self.value, self.out = (nn.Linear(shape.width, shape.width) for _ in range(4))
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)
        self.features = torch.zeros(0)  # what W_Q was last multiplied with, (B, S, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of x (B, S, width) and what the block adds."""
        y = self.norm(x)
        self.features = y.detach()
        q, k, v = (
            each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        k = torch.cat([k[:, :, :1].expand(-1, -1, SINKS, -1), k[:, :, SINKS:]], dim=2)  # sinks share a key
        x = x + self.out(self.attention(self.layer, q, k, v).transpose(1, 2).flatten(2))
        mlp: Tensor = self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))
        return x + mlp


class Decoder(nn.Module):
    """A decoder from tokens (B, S) to logits (B, S, vocabulary); the head shares the embedding."""

    def __init__(self, shape: Shape, attention: Attention, generator: torch.Generator) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.stack = nn.ModuleList(Block(shape, layer, attention) for layer in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self._initialise(shape, generator)

    @property
    def blocks(self) -> list[Block]:
        """Return the layers."""
        return [each for each in self.stack if isinstance(each, Block)]

    def _initialise(self, shape: Shape, generator: torch.Generator) -> None:
        """Initialise as GPT-2: deviation 0.02, that of residual projections over sqrt(2 layers); biases 0."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                deviation = 0.02 / math.sqrt(2 * shape.layers) if residual else 0.02
                nn.init.normal_(parameter, 0.0, deviation, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return next-token logits."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.tokens.weight)


@torch.no_grad()
def provoke(model: Decoder, generator: torch.Generator) -> None:
    """Give every head an attention sink, and values that share a direction.

    Sinks share their key (`Block`), so a row whose maximum they are repeats it, in training too; values are their own.
    The embedding of `SINK` gets a direction e of the residual stream, W_K takes e to a direction u of each head, and
    the bias of q lies along u: every query gives the sinks the score of `SINK_SCORES` and each other key about 0.
    LayerNorm gives a sink the norm sqrt(width), so its key is sqrt(width) W_K e.
    """
    width = model.positions.shape[1]
    e = nn.functional.normalize(torch.randn(width, generator=generator), dim=0)
    model.tokens.weight[SINK] += SINK_SIZE * e
    for block in model.blocks:
        heads = block.heads
        dim = width // heads
        u = nn.functional.normalize(torch.randn(heads, dim, generator=generator), dim=1)
        strength = torch.tensor([SINK_SCORES[head % len(SINK_SCORES)] for head in range(heads)])
        # score = q.k / sqrt(dim) = (bias u).(sqrt(width) gain u) / sqrt(dim); bias and sqrt(width) gain share it evenly
        share = (strength * math.sqrt(dim)).sqrt()[:, None]
        block.query.bias.add_((share * u).flatten())
        block.key.weight.add_((share * u).flatten()[:, None] * e[None] / math.sqrt(width))
        block.value.bias.add_(VALUE_BIAS * torch.randn(width, generator=generator))


def batch(text: Tensor, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return windows of a text (n,) of bytes, after the sinks: tokens and their next bytes, both (size, context)."""
    length = context + 1 - SINKS
    starts = torch.randint(len(text) - length, (size, 1), generator=generator)
    windows = text[starts + torch.arange(length)].long()
    whole = torch.cat([torch.full((size, SINKS), SINK), windows], dim=1)
    return whole[:, :-1], whole[:, 1:]


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of the text's bytes, (B, S - SINKS + 1): sinks are read, not predicted."""
    first = SINKS - 1
    return nn.functional.cross_entropy(logits[:, first:].mT, targets[:, first:], reduction="none")


def spectral_norms(model: Decoder) -> Tensor:
    """Return the largest singular value of each head's W_Q, (layers, heads); NaN where it is not finite."""
    weights = torch.stack([b.query.weight.detach().unflatten(0, (b.heads, -1)) for b in model.blocks])
    norms: Tensor = torch.linalg.matrix_norm(weights.nan_to_num(0.0, 0.0, 0.0), ord=2)
    return norms.where(weights.isfinite().all(-1).all(-1), torch.nan)
