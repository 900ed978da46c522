"""Measure what the exact recovery does to the tiles of some data, on the reference: which are rescued or flushed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

import pasa
from pasa.eval.accuracy.rmse.cases import PAPER_CASES, RESONANCE_CASES
from pasa.eval.kit import output
from pasa.eval.kit.attention_calls import show_layers
from pasa.eval.kit.embedded_model import load_model, read_essay, require_built_in
from pasa.eval.kit.error_metrics import generator
from pasa.eval.npu.precision_variants import Tiles
from pasa.ops.attention.spec.scores import next_frame, scale_unit
from pasa.ops.attention.spec.shift_keys import shift_exact

VECTOR_ROWS, BLOCK = 64, 128  # rows that a vector core decides for, and keys of a block
GUESSED = 2 * BLOCK  # keys of the blocks that refer to guesses
LONG = 16384  # keys of the long case
TOKENS = 1024  # that the language model reads
NORMAL, LANGUAGE = f"exact, N(0,1), {LONG} keys", f"exact, SmolLM2, {TOKENS} tokens"
SHOWN = ("uniform(0,0.5)", "uniform(30,0.5)", "uniform(20,5)", "uniform(20,20)", "hybrid(0,10)", "hybrid(20,100)",
         "qwen-like, 180 deg", "svd-like, 180 deg")  # fmt: skip
Triple = tuple[Tensor, Tensor, Tensor]


def measure_shares(progress: output.Report = output.silent) -> dict[str, Tiles]:
    """Return the shares of every data set: N(0, 1), the layers of the embedded language model, cases of the paper."""
    shares = {"exact": Tiles(anchors=0.0), "exact, anchors": Tiles()}
    shares[NORMAL] = tiles_of([normal()], is_causal=False)
    progress(1, 3, NORMAL)
    shares[LANGUAGE] = tiles_of(layers(), is_causal=True)
    progress(2, 3, LANGUAGE)
    for case in (*PAPER_CASES, *RESONANCE_CASES):
        if case.name in SHOWN:
            one_head = dataclasses.replace(case, shape=(1, 1, *case.shape[2:]))
            shares[f"exact, {case.name}"] = tiles_of([one_head.tensors(0)], is_causal=False)
    return shares


def normal() -> Triple:
    """Return 128 queries and many keys, N(0, 1), with head dimension 128."""
    q, k, v = (torch.randn(1, 1, n, 128, generator=generator(0, "shares", part)).half()
               for n, part in ((BLOCK, "q"), (LONG, "k"), (LONG, "v")))  # fmt: skip
    return q, k, v


def layers() -> Iterator[Triple]:
    """Yield queries, keys and values of each layer of the embedded language model on an essay, as FP16."""
    require_built_in(model=True, text=True)
    model, tokenizer = load_model()
    found: list[Triple] = []
    show_layers(model, read_essay(tokenizer, TOKENS), lambda *qkv: found.append(tuple(x.half() for x in qkv)))
    yield from found


def tiles_of(calls: Iterator[Triple] | list[Triple], *, is_causal: bool) -> Tiles:
    """Return the shares over all tiles of 64 queries and 128 keys of some calls.

    Causal queries are those that see all of the first two blocks.
    """
    whole, guessed = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    anchored = blocks = 0.0
    for q, k, v in calls:
        rows = q[:, :, GUESSED:] if is_causal else q
        whole = [sum(each) for each in zip(whole, count(rows, k, v, is_causal), strict=True)]
        first = count(rows, k[:, :, :GUESSED], v[:, :, :GUESSED], False)
        guessed = [sum(each) for each in zip(guessed, first, strict=True)]
        own = own_references(k, q.shape[-1] ** -0.5)
        anchored, blocks = anchored + float(own.sum()), blocks + own.numel()
    rescued, flushed, tiles = (all_of - first for all_of, first in zip(whole, guessed, strict=True))
    shares = rescued / tiles, flushed / tiles, anchored / blocks, guessed[0] / guessed[2]
    return Tiles(*(round(share, 4) for share in shares))


def count(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[float, float, float]:
    """Return how many tiles are rescued and flushed, and how many there are."""
    config = pasa.PasaConfig(block_q=VECTOR_ROWS)
    with pasa.record_diagnostics() as records:
        pasa.attention(q, k, v, is_causal=is_causal, config=config, backend="reference")
    counts = records[0]
    return float(counts.rescued_tiles.sum()), float(counts.flushed_tiles.sum()), float(counts.tiles.sum())


def own_references(k: Tensor, scale: float) -> Tensor:
    """Return which blocks (B, Hkv, blocks) need references of their own: an offset, another frame or another unit."""
    found: list[Tensor] = []
    frame: Tensor | None = None
    unit: Tensor | None = None
    for start in range(0, k.shape[2], BLOCK):
        block = shift_exact(k[:, :, start : start + BLOCK].float(), scale_unit(scale))
        before, frame = frame, block.anchor if frame is None else next_frame(frame, block.anchor)
        own = (block.anchor != frame).any(-1).squeeze(-1)
        if before is not None and unit is not None:
            own |= (before != frame).any(-1).squeeze(-1) | (unit != block.unit).flatten(1)
        unit = block.unit
        found.append(own)
    return torch.stack(found, -1)
