"""Work per task and per score tile of each precision allocation: fitted to the twin's counts, or substituted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Work = dict[str, float]
"""Counts of work by engine: bytes of a queue, "macs", "barriers", and repeats of a vector call such as "Add float"."""
TILE = 128 * 128  # numbers of a score tile, which two vector cores share
FLOATS, HALVES = TILE // 64, TILE // 128  # repeats (256 bytes each) of a call on a score tile, in FP32 and in FP16
SUMS = FLOATS + FLOATS // 16  # repeats of ReduceDataBlock in a row reduction: 128 numbers to 16, 8 to 1
HALVED = FLOATS // 16  # repeats of the Add or Max between its two reductions: 16 numbers to 8
ROW = 2  # repeats of a call on one number per row of a tile: one on each vector core
BOTH = 2  # barriers of a tile: one on each vector core


@dataclass(frozen=True)
class Fit:
    """Counts as per_task + per_tile * tiles, by least squares, engine by engine.

    `residual` is the largest difference to a count, over that count.
    """

    per_task: Work
    per_tile: Work
    residual: float


Line = tuple[str, Work]
"""One substitution: its reason, and the change of the counts per tile."""


def fit(points: Sequence[tuple[int, Work]]) -> Fit:
    """Fit a line to each engine's counts; `points` are (tiles, counts)."""
    tiles = [n for n, _ in points]
    middle = sum(tiles) / len(tiles)
    spread = sum((n - middle) ** 2 for n in tiles)
    per_task, per_tile, residual = {}, {}, 0.0
    for engine in sorted({name for _, work in points for name in work}):
        counts = [work.get(engine, 0) for _, work in points]
        mean = sum(counts) / len(counts)
        slope = sum((n - middle) * count for n, count in zip(tiles, counts, strict=True)) / spread
        per_tile[engine], per_task[engine] = slope, mean - slope * middle
        for n, count in zip(tiles, counts, strict=True):
            residual = max(residual, abs(per_task[engine] + slope * n - count) / max(count, 1))
    return Fit(per_task, per_tile, residual)


def combine(*parts: tuple[float, Work]) -> Work:
    """Return the sum of factor times work."""
    names = {name for _, work in parts for name in work}
    return {name: sum(factor * work.get(name, 0.0) for factor, work in parts) for name in sorted(names)}


def substitutions(dim: int) -> dict[str, list[Line]]:
    """Return the lines that make one allocation of another.

    `partial` has FP16 score tiles with FP32 softmax and no shift, `fp32` FP32 score tiles (the paper's figure 1), and
    `paper-fp16` FP16 in every vector call on a tile (figure 3, Algorithm 1 to the letter).
    """
    output = 128 * dim // 64  # repeats of an output tile in FP32
    calls = {"Sub": FLOATS, "Exp": FLOATS, "Mul": output, "Add": output}
    narrowed = {f"{name} float": -float(n) for name, n in calls.items()} | {
        f"{name} half": n / 2 for name, n in calls.items()
    }
    folds = 7 * HALVES / 8  # 128 numbers to 64, 32, 16
    return {
        "partial, from paper": [
            ("no mean of S'", {"ReduceDataBlock float": -SUMS, "Add float": -HALVED, "Muls float": -ROW}),
            (
                "no moving frame, carry and offset (MoveFrame)",
                {"Muls float": -5 * ROW, "Add float": -3 * ROW, "Sub float": -3 * ROW, "barriers": -6 * BOTH},
            ),
            ("scores are scaled here, since K holds no scale", {"Muls float": FLOATS + ROW, "barriers": BOTH}),
        ],
        "fp32, from partial": [
            ("Fixpipe stores and the vector cores load FP32 scores", {"FIX": 2 * TILE, "MTE2 vector": 2 * TILE}),
            ("no conversion of the tile", {"Cast half": -FLOATS, "barriers": -BOTH}),
        ],
        "paper-fp16, from paper": [
            ("the tile never leaves FP16", {"Cast half": -FLOATS, "Cast float": -FLOATS, "barriers": -2 * BOTH}),
            ("128 numbers a repeat in the calls on S', P and O", narrowed),
            (
                "sums and maxima of rows: halves onto each other until 16 numbers are left, then blocks",
                {"ReduceDataBlock float": -3 * SUMS, "Add float": -2 * HALVED, "Max float": -HALVED,
                 "Add half": 2 * folds, "Max half": folds, "ReduceDataBlock half": 3 * HALVES / 8,
                 "barriers": 2 * BOTH},
            ),
            (
                "weights relative to their own tile's maximum: P V has a factor (line 20)",
                {"Mul half": output / 2, "Brcb half": FLOATS / 16, "Sub float": ROW, "Exp float": ROW,
                 "Mul float": ROW, "barriers": 2 * BOTH},
            ),
            ("P V stored and loaded in FP16", {"FIX": -128 * dim * 2, "MTE2 vector": -128 * dim * 2}),
        ],
    }  # fmt: skip


def substituted(base: Fit, lines: Iterable[Line]) -> Fit:
    """Return the fit with the lines' changes per tile; ValueError if they take off more than there is."""
    per_tile = combine((1.0, base.per_tile), *((1.0, change) for _, change in lines))
    missing = [name for name, count in per_tile.items() if count < -1e-6]
    if missing:
        raise ValueError(f"substitutions take off more than the kernel does: {missing}")
    return Fit(base.per_task, per_tile, base.residual)


def mixed(narrow: Fit, wide: Fit, share: float) -> Fit:
    """Return the exact recovery with a share, 0 to 1, of its tiles kept in FP32."""
    task = combine((1 - share, narrow.per_task), (share, wide.per_task))
    tile = combine((1 - share, narrow.per_tile), (share, wide.per_tile))
    return Fit(task, tile, max(narrow.residual, wide.residual))


def exact_name(share: float) -> str:
    """Return the name of the exact recovery with that share of its tiles in FP32, such as "exact 30.8 %"."""
    return f"exact {100 * share:.3g} %"


def allocations(fits: dict[str, Fit], dim: int, shares: Iterable[float] = (0.0,)) -> dict[str, Fit]:
    """Return every allocation by name, from the fits of "paper", "exact" and "exact wide" at one head dimension."""
    lines = substitutions(dim)
    partial = substituted(fits["paper"], lines["partial, from paper"])
    return {
        "fp32": substituted(partial, lines["fp32, from partial"]),
        "partial": partial,
        "paper": fits["paper"],
        "paper-fp16": substituted(fits["paper"], lines["paper-fp16, from paper"]),
        **{exact_name(share): mixed(fits["exact"], fits["exact wide"], share) for share in shares},
    }
