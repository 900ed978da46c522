"""Resonance of Q and K along the head dimension: ranges and maps before and after the shift (figures 6, 7, 11-14)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.accuracy.rmse.cases import ARITHMETICS, RESONANCE_CASES, ResonanceCase
from pasa.eval.accuracy.rmse.run import Job, Progress, check, overflow_modes, run_jobs, wrap
from pasa.ops.attention.spec.scores import Block, ExactScores, paper_beta, score_model
from pasa.ops.attention.spec.shift_keys import shift_exact, shift_paper, whole_blocks
from pasa.ops.numerics.shifting import shifting_matrix

VARIANTS = {"paper": pasa.PasaConfig(recovery="paper"), "exact": pasa.PasaConfig()}


@dataclass(frozen=True)
class Maps:
    """One head's matrices: (S, D) for q, k and the shifted keys, (S, S) for the scores; FP32.

    Attributes
    ----------
    q, k, scores : Tensor
        The inputs, and q.k unscaled.
    shifted_keys, stored_scores : dict of Tensor
        By variant. The paper's are as stored, 1/sqrt(d) included. Ours are in the units of K and q.k: the power of two
        that a block's keys carry, at most 1, is taken out, so what is stored is no larger.
    """

    q: Tensor
    k: Tensor
    scores: Tensor
    shifted_keys: dict[str, Tensor]
    stored_scores: dict[str, Tensor]


def run_resonance(
    heads: int | None = None,
    seq: int | None = None,
    seeds: Sequence[int] = (0,),
    overflow: str = "inf",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure every arithmetic on resonant inputs, and the ranges of scores and keys before and after the shift.

    Parameters
    ----------
    heads, seq : int, optional
        In place of those of the cases.
    seeds : sequence of int
    overflow : str
        "inf", "saturate" or "both".
    progress : callable, optional

    Returns
    -------
    dict
        As `run.run_rmse`; ``ranges`` holds per case [min, max] of the first head's matrices, seed seeds[0].

    Raises
    ------
    ValueError
        On a size below 1, no seed, or an unknown overflow mode.
    """
    check(seeds, heads=heads, seq=seq)
    modes = overflow_modes(overflow)
    started = time.perf_counter()
    cases = resized_cases(heads, seq)
    jobs: list[Job] = [(case, seed, mode) for case in cases for seed in seeds for mode in modes]
    records = run_jobs(jobs, ARITHMETICS, progress)
    table = [{"name": case.name, "shape": list(case.shape)} for case in cases]
    ranges = {case.name: ranges_of(make_maps(case, seeds[0])) for case in cases}
    what = {"seeds": list(seeds), "overflow": overflow, "cases": table, "ranges": ranges}
    return wrap("resonance", started, what, records)


def resized_cases(heads: int | None = None, seq: int | None = None) -> tuple[ResonanceCase, ...]:
    """`RESONANCE_CASES` with other numbers of heads and positions."""
    return tuple(
        dataclasses.replace(case, shape=(case.shape[0], heads or case.shape[1], seq or case.shape[2], case.shape[3]))
        for case in RESONANCE_CASES
    )


def make_maps(case: ResonanceCase, seed: int) -> Maps:
    """Matrices of the first head."""
    q, k, _ = (x[:1, :1].float() for x in case.tensors(seed))
    keys, stored = {}, {}
    for name, config in VARIANTS.items():
        keys[name] = shifted_keys(k, config)[0, 0]
        stored[name] = stored_scores(q, k, config)
    return Maps(q[0, 0], k[0, 0], (q @ k.mT)[0, 0], keys, stored)


def shifted_keys(k: Tensor, config: pasa.PasaConfig) -> Tensor:
    """K' of all blocks of keys (1, 1, S, D)."""
    scale, block = k.shape[-1] ** -0.5, config.block_k
    if config.recovery == "exact":
        unit = ExactScores(config, scale).unit
        shifted = [shift_exact(part, unit) for part in k.split(block, -2)]
        return torch.cat([each.keys / each.unit for each in shifted], -2)
    matrix = shifting_matrix(block, paper_beta(None, block, scale)[0], scale=scale).float()
    whole = [shift_paper(part, matrix, "inf") for part in whole_blocks(k, block).split(block, -2)]
    return torch.cat(whole, -2)[:, :, : k.shape[-2]]


def stored_scores(q: Tensor, k: Tensor, config: pasa.PasaConfig) -> Tensor:
    """S' (S, S) as it leaves the matrix unit: the score model of the reference, driven block by block."""
    rows, scale = q.unsqueeze(2), q.shape[-1] ** -0.5  # (B, Hkv, G, S, D)
    model = score_model(config, rows, k, scale)
    top = rows.new_full((*rows.shape[:-1], 1), -torch.inf)
    tiles = []
    for index, keys in enumerate(k.split(config.block_k, -2)):
        tile = model.tile(Block(index, rows, keys, None, None, top, 0))
        top = torch.maximum(top + tile.carry, tile.scores.amax(-1, keepdim=True) + tile.offset)
        tiles.append(tile.stored if config.recovery == "paper" else tile.scores / scale)
    return torch.cat(tiles, -1)[0, 0, 0]


def ranges_of(maps: Maps) -> dict[str, list[float]]:
    """[min, max] of every matrix, the figures that the paper prints in section 3.3.2."""
    named = {"Q": maps.q, "K": maps.k, "S = Q K^T": maps.scores}
    for variant in VARIANTS:
        named |= {f"K' ({variant})": maps.shifted_keys[variant], f"S' ({variant})": maps.stored_scores[variant]}
    return {name: [float(x.min()), float(x.max())] for name, x in named.items()}
