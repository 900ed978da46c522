"""Work per task and per score tile of each precision allocation: fitted to the twin's counts, or substituted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Work = dict[str, float]
"""Counts of work by engine: bytes of a queue, "macs", "barriers", and repeats of a vector call such as "Add float"."""
TILE = 128 * 128  # numbers of a score tile, which two vector cores share
FLOATS, HALVES = TILE // 64, TILE // 128  # repeats (256 bytes each) of a call on a score tile, in FP32 and in FP16
SUMS = FLOATS + FLOATS // 16  # repeats of ReduceDataBlock in a row reduction: 128 numbers to 16, 8 to 1
SHARED_BLOCKS = 5  # of K and V that fit into L1 at D = 128, beside two tiles of Q, one of P and the next block
HALVED = FLOATS // 16  # repeats of the Add or Max between its two reductions: 16 numbers to 8
ROW = 2  # repeats of a call on one number per row of a tile: one on each vector core
BOTH = 2  # barriers of a tile: one on each vector core


@dataclass(frozen=True)
class Fit:
    """Counts as per_task + per_tile * tiles, by least squares, engine by engine.

    `residual` is the largest difference to a count, over that count. A task is `lanes` query tiles that share keys.
    """

    per_task: Work
    per_tile: Work
    residual: float
    lanes: int = 2


Line = tuple[str, Work]
"""One substitution: its reason, and the change of the counts per tile."""


def fit(points: Sequence[tuple[int, Work]], lanes: int = 2) -> Fit:
    """Fit a line to each engine's counts; `points` are (tiles, counts) of two query tiles of a head."""
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
    return Fit(combine((lanes / 2, per_task)), per_tile, residual, lanes)


def combine(*parts: tuple[float, Work]) -> Work:
    """Return the sum of factor times work."""
    names = {name for _, work in parts for name in work}
    return {name: sum(factor * work.get(name, 0.0) for factor, work in parts) for name in sorted(names)}


def substitutions(dim: int) -> dict[str, list[Line]]:
    """Return the lines that make one allocation of another.

    `partial` has FP16 score tiles with FP32 softmax and no shift, `fp32` FP32 score tiles (the paper's figure 1), and
    `paper-fp16` FP16 in every vector call on a tile (figure 3, Algorithm 1 to the letter). `fp32 lazy` is our exact
    kernel on FP32 score tiles, and `fp32 lazy, shared keys` the same with two query tiles that use the keys in L1 in
    turn, `SHARED_BLOCKS` blocks at a time.
    """
    output = 128 * dim // 64  # repeats of an output tile in FP32
    calls = {"Sub": FLOATS, "Exp": FLOATS, "Mul": output, "Add": output}
    narrowed = {f"{name} float": -float(n) for name, n in calls.items()} | {
        f"{name} half": n / 2 for name, n in calls.items()
    }
    folds = 7 * HALVES / 8  # 128 numbers to 64, 32, 16
    flushed = 128 * (dim + 16) * 4 / SHARED_BLOCKS  # bytes of an output tile and its row sums
    return {
        "fp32 lazy, from exact": [
            ("FP32 scores", {"FIX": 2 * TILE, "MTE2 vector": 2 * TILE}),
            ("no conversion of the tile", {"Cast half": -FLOATS, "barriers": -BOTH}),
            ("no reference on the cube core", {"macs": -TILE * 16, "MTE1": -3 * 128 * 32 - 128 * 32}),
            (
                "the reference of the weights is subtracted by the vector cores",
                {"Adds float": -FLOATS, "Sub float": FLOATS, "Brcb float": FLOATS / 16},
            ),
            ("no test of distances, anchors and frames", {"Abs float": -3 * ROW, "Max float": -2 * ROW,
             "ReduceRepeat float": -3 * ROW, "Sub float": -2 * ROW, "Duplicate float": -ROW}),
            ("no offsets", {"MTE2 vector": -2 * (2 * 64 * 4 + 32)}),
        ],
        "fp32 lazy, shared keys, from fp32 lazy": [
            ("K and V for two query tiles", {"MTE2 cube": -128 * dim * 2}),
            (
                "the output leaves L0C when the query tile changes",
                {"FIX": flushed, "MTE2 vector": flushed, "Add float": output / SHARED_BLOCKS},
            ),
        ],
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
    return Fit(base.per_task, per_tile, base.residual, base.lanes)


def mixed(*parts: tuple[float, Fit]) -> Fit:
    """Return the sum of the work of all parts, each times its share."""
    task = combine(*((share, way.per_task) for share, way in parts))
    tile = combine(*((share, way.per_tile) for share, way in parts))
    return Fit(task, tile, max(way.residual for _, way in parts), parts[0][1].lanes)


@dataclass(frozen=True)
class Tiles:
    """Hold what data make of the tiles of the exact recovery: shares of them, 0 to 1.

    `rescued` tiles are kept in FP32, `flushed` ones move references or are rescued, and `anchors` is the share of
    blocks of keys that need references of their own. `guesses` are the rescued ones of the first two tiles of a query
    tile, which the others do not count.
    """

    rescued: float = 0.0
    flushed: float = 0.0
    anchors: float = 1.0
    guesses: float = 0.0


def exact_with(fits: dict[str, Fit], tiles: Tiles) -> Fit:
    """Return the exact recovery on such data.

    A rescued tile is flushed and forms a reference. In the data "exact moving", every third tile is flushed.
    """
    moved = max(0.0, tiles.flushed - tiles.rescued)
    moving = mixed((3.0, fits["exact moving"]), (-2.0, fits["exact anchored"]))
    rest = mixed((1.0 - tiles.anchors, fits["exact"]), (tiles.anchors, fits["exact anchored"]))
    wide = fits["exact wide"]
    way = mixed((1.0 - tiles.rescued - moved, rest), (moved, moving), (tiles.rescued, wide))
    first = combine((2.0 * tiles.guesses, wide.per_tile), (-2.0 * tiles.guesses, way.per_tile))
    return Fit(combine((1.0, way.per_task), (1.0, first)), way.per_tile, way.residual, way.lanes)


def allocations(fits: dict[str, Fit], dim: int, data: Mapping[str, Tiles]) -> dict[str, Fit]:
    """Return every allocation by name, from the fits of `run.KERNELS`; `data` adds exact recoveries by name."""
    lines = substitutions(dim)
    partial = substituted(fits["paper"], lines["partial, from paper"])
    lazy = substituted(fits["exact"], lines["fp32 lazy, from exact"])
    return {
        "fp32": substituted(partial, lines["fp32, from partial"]),
        "fp32 lazy": lazy,
        "fp32 lazy, shared keys": substituted(lazy, lines["fp32 lazy, shared keys, from fp32 lazy"]),
        "partial": partial,
        "paper": fits["paper"],
        "paper-fp16": substituted(fits["paper"], lines["paper-fp16, from paper"]),
        "exact before": fits["exact before"],
        **{name: exact_with(fits, tiles) for name, tiles in data.items()},
    }
