"""FP8 score tiles: what is left of attention's accuracy when PASA's tile is stored in E4M3 with a scale per block.

PASA's tile is q.(k - kbar) plus what the block's mean adds, less a reference of the row (its largest score so far), as
the exact recovery forms it. Statistics, probabilities and sums are FP32, so the tile's format is all that differs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.accuracy.rmse.cases import PAPER_CASES
from pasa.eval.kit.error_metrics import measure_errors
from pasa.ops.numerics.formats import E4M3_MAX, round_to

BLOCK = 128
SHAPE = (1, 4, 1280, 128)
SEED = 0
STORES = ("fp16", "e4m3, scale per block", "e4m3, one scale")


def run_tiles() -> list[dict[str, Any]]:
    """Return RMSE against FP64 on the paper's cases, of every store, for the plain scaled score tile and for PASA's."""
    rows = []
    for case in PAPER_CASES:
        tensors = dataclasses.replace(case, shape=SHAPE).tensors(SEED)
        golden, _ = pasa.golden_attention(*tensors)
        q, k, v = (x.float() for x in tensors)
        errors = {
            f"{tile}, {store}": measure_errors(attend(q, k, v, store, tile), golden).rmse
            for tile in ("plain", "pasa")
            for store in STORES
        }
        rows.append({"case": case.name, "rmse": errors})
    return rows


def attend(q: Tensor, k: Tensor, v: Tensor, store: str, tile: str) -> Tensor:
    """Return attention (B, H, S, D), FP32, whose score tiles went through a store; S is a multiple of 128."""
    tiles, references = form_tiles(q, k, tile == "pasa")
    logits = torch.cat([part + r for part, r in zip(round_tiles(tiles, store), references, strict=True)], -1)
    return torch.softmax(logits, -1) @ v


def form_tiles(q: Tensor, k: Tensor, shifted: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return score tiles (B, H, S, 128) of every key block, and the reference of each row (B, H, S, 1)."""
    scale, running = q.shape[-1] ** -0.5, None
    tiles, references = [], []
    for block in k.split(BLOCK, dim=-2):
        if not shifted:
            tiles.append(q @ block.mT * scale)
            references.append(torch.zeros(()))
            continue
        mean = block.mean(-2, keepdim=True)
        centre = q @ mean.mT * scale
        reference = centre if running is None else running
        part = q @ (block - mean).mT * scale + (centre - reference)
        tiles.append(part)
        references.append(reference)
        largest = part.amax(-1, keepdim=True) + reference
        running = largest if running is None else torch.maximum(running, largest)
    return tiles, references


def round_tiles(tiles: list[Tensor], store: str) -> list[Tensor]:
    """Return tiles as the store gives them back; a scale per block is one for 128 rows and 128 keys of a head."""
    if store == "fp16":
        return [round_to(tile, "fp16", overflow="saturate") for tile in tiles]
    whole = torch.stack([tile.abs().max() for tile in tiles]).max()
    stored = []
    for tile in tiles:
        rows = tile.unflatten(-2, (-1, BLOCK))
        per_block = store.endswith("per block")
        scale = (rows.abs().amax((-2, -1), keepdim=True) if per_block else whole) / E4M3_MAX
        stored.append((round_to(rows / scale, "fp8_e4m3", overflow="saturate") * scale).flatten(-3, -2))
    return stored
