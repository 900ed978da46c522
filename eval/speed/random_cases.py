"""Random cases of the speed benchmark: shapes, masks and data, each from the seed and its index alone."""

from __future__ import annotations

from random import Random

from pasa.eval.speed.cases import DATA, SpeedCase

MOST_BYTES, MOST_FLOPS = 8e9, 5e12  # of one case; beyond, another one is drawn
MOST_BATCH, MOST_HEADS, MOST_KEYS, MOST_ROWS = 64, 64, 32768, 16  # rows: of decoding
DIMS = (32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)  # head dimensions of published models
PADDED = 0.25  # share of the batches that are left-padded


def draw_case(seed: int, index: int) -> SpeedCase:
    """Return the case of this seed and index: half prefill, causal, full or cross-attention; half decoding."""
    source = Random(f"{seed}/{index}")
    while True:
        case = _draw(source, f"random-{seed}-{index}")
        if case.bytes <= MOST_BYTES and case.flops <= MOST_FLOPS:
            return case


def _draw(source: Random, name: str) -> SpeedCase:
    batch, heads, keys = _size(source, MOST_BATCH), _size(source, MOST_HEADS), _size(source, MOST_KEYS)
    kind = source.choice(("causal", "full", "decode", "decode"))
    rows = keys
    if kind == "decode":
        rows = source.choice((1, source.randint(2, MOST_ROWS)))
    elif kind == "full" and source.random() < 0.5:  # cross-attention
        rows = _size(source, MOST_KEYS)
    return SpeedCase(
        name,
        batch,
        heads,
        source.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        rows,
        keys,
        source.choice(DIMS),
        causal=kind == "causal",
        decode=kind == "decode",
        data=source.choice(tuple(DATA)),
        graphed=True,
        padded=batch > 1 and source.random() < PADDED,
    )


def _size(source: Random, most: int) -> int:
    """Draw a whole number from 1 to `most`, its logarithm uniformly."""
    return min(most, int((most + 1) ** source.random()))
