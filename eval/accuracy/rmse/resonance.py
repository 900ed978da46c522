"""Keys and scores as both recoveries store them: the matrices K' and S' of the paper's figures 11 to 14."""

from __future__ import annotations

import torch
from torch import Tensor

import pasa
from pasa.ops.attention.call import Call
from pasa.ops.attention.spec.scores import Block, paper_beta, scale_unit, score_model
from pasa.ops.attention.spec.shift_keys import shift_exact, shift_paper, whole_blocks
from pasa.ops.numerics.shifting import shifting_matrix


def shifted_keys(k: Tensor, config: pasa.PasaConfig) -> Tensor:
    """Return K' of all blocks of keys (1, 1, S, D), the paper's as stored, 1/sqrt(d) included.

    Ours are in the units of K, without the power of two of their block, which is at most 1; so are `stored_scores`.
    """
    scale, block = k.shape[-1] ** -0.5, config.block_k
    if config.recovery == "exact":
        unit = scale_unit(scale)
        shifted = [shift_exact(part, unit) for part in k.split(block, -2)]
        return torch.cat([each.keys / each.unit for each in shifted], -2)
    matrix = shifting_matrix(block, paper_beta(None, block, scale)[0], scale=scale).float()
    whole = [shift_paper(part, matrix, "inf") for part in whole_blocks(k, block).split(block, -2)]
    return torch.cat(whole, -2)[:, :, : k.shape[-2]]


def stored_scores(q: Tensor, k: Tensor, config: pasa.PasaConfig) -> Tensor:
    """Return S' (S, S) as it leaves the matrix unit: the score model of the reference, driven block by block."""
    rows, scale = q.unsqueeze(2), q.shape[-1] ** -0.5  # (B, Hkv, G, S, D)
    model = score_model(Call(q, k, k, scale, config), rows, k)
    top = rows.new_full((*rows.shape[:-1], 1), -torch.inf)
    tiles = []
    for index, keys in enumerate(k.split(config.block_k, -2)):
        tile = model.tile(Block(index, rows, keys, None, None, top, 0))
        top = torch.maximum(top + tile.carry, tile.scores.amax(-1, keepdim=True) + tile.offset)
        tiles.append(tile.stored if config.recovery == "paper" else tile.scores / scale)
    return torch.cat(tiles, -1)[0, 0, 0]
