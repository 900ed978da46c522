"""Model decoding on an Ascend 910B3: the kernel of decoding beside that of prefill, which served such calls before.

Counts are those of one group, fitted by lines to blocks of keys and to parts of a tile's keys. The busiest of the
groups takes the most of both. HBM is shared: all groups together read K and V once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pasa.eval.kit.stored import pick
from pasa.eval.npu import roofline as model
from pasa.eval.npu.precision_variants import Fit, Work, combine, fit
from pasa.eval.speed.cases import HALF_BYTES, SpeedCase, select_cases

Record = dict[str, Any]
CASES = select_cases(["decode-1x32k", "decode-1x128k", "decode-16x32k", "decode-batch-16x8k"])
DIM, BLOCK, TILE_ROWS = 128, 128, 64
PAGES = (0, 16)  # keys of a page; 0: keys lie in a row
BLOCKS = (6, 9, 12, 15)
SPLITS = (2, 3, 4)  # groups that share the keys of a tile, to count what a part costs
NEW, OLD = "decoding", "prefill"


class Twin(Protocol):
    """Run cases of counts.cpp on the CPU twin."""

    def work(self, what: str, *numbers: int) -> Work:
        """Return the counters of one case."""
        ...


def count(built: Twin) -> list[Record]:
    """Return the counters of both kernels for the rows of each case."""
    records = []
    for rows in sorted({rows_of(case) for case in CASES}):
        for blocks in BLOCKS:
            for slots in PAGES:
                work = built.work("decode", DIM, blocks, rows, slots, 1)
                records.append(
                    {"kernel": NEW, "rows": rows, "slots": slots, "blocks": blocks, "parts": 1, "work": work}
                )
        for parts in SPLITS:
            work = built.work("decode", DIM, BLOCKS[-1], rows, 0, parts)
            records.append(
                {"kernel": NEW, "rows": rows, "slots": 0, "blocks": BLOCKS[-1], "parts": parts, "work": work}
            )
    for rows in sorted({case.rows for case in CASES}):
        for blocks in BLOCKS:
            work = built.work("attend", 1, DIM, blocks, 0, 0, rows)
            records.append({"kernel": OLD, "rows": rows, "slots": 0, "blocks": blocks, "parts": 1, "work": work})
    return records


def rows_of(case: SpeedCase) -> int:
    """Return the rows of a tile: tokens with the query heads of a KV head."""
    group = case.heads // case.kv_heads
    return min(case.rows, TILE_ROWS // group) * group


def tiles_of(case: SpeedCase) -> int:
    """Return the tiles of a KV head, each of which reads the keys."""
    return -(-case.rows * case.heads // (case.kv_heads * rows_of(case)))


def predict(counts: Sequence[Record], shift: Fit) -> tuple[list[Record], dict[str, float]]:
    """Return a record for each case, kernel and page size, and the largest residual of each fitted line.

    `shift` is the fitted work of the pass that shifts keys before the kernel of prefill.
    """
    records, residuals = [], {}
    for case in CASES:
        old, residuals[f"{OLD}, {case.rows} rows"] = _prefill(case, counts, shift)
        for slots in PAGES:
            way = _fit(counts, NEW, rows_of(case), slots)
            residuals[f"{NEW}, {rows_of(case)} rows, pages of {slots}"] = way.residual
            gathers = [_gather(case)] * 2 if slots else []
            records.append(_record(case, OLD, slots, [*old, *gathers]))
            records.append(_record(case, NEW, slots, [_decoding(case, way, _part(counts, rows_of(case)))]))
            records[-1]["ratio"] = records[-2]["us"] / records[-1]["us"]
    return records, residuals


def _record(case: SpeedCase, kernel: str, slots: int, launches: Sequence[Mapping[str, float]]) -> Record:
    """Return the time of a case in microseconds, and the share of it in which K and V can be read once.

    The bound and the times of engines are those of the first launch, attention.
    """
    whole = sum(model.rate("launch") + model.bound(times)[1] for times in launches)
    engine, _ = model.bound(launches[0])
    reading = model.hbm_time(case.kv_bytes)["HBM"]
    engines = {name: 1e6 * s for name, s in sorted(launches[0].items(), key=lambda item: -item[1])[:3]}
    return {"case": case.name, "shape": case.shape, "kernel": kernel, "slots": slots, "bound": engine,
            "us": 1e6 * whole, "reading": reading / whole, "engines_us": engines, "ratio": 1.0}  # fmt: skip


def _fit(counts: Sequence[Record], kernel: str, rows: int, slots: int) -> Fit:
    chosen = pick(counts, kernel=kernel, rows=rows, slots=slots, parts=1)
    return fit([(each["blocks"], each["work"]) for each in chosen], lanes=2)


def _part(counts: Sequence[Record], rows: int) -> Work:
    """Return the work of one more part of a tile's keys: its start, its partial result, and its share of the merge."""
    chosen = pick(counts, kernel=NEW, rows=rows, slots=0, blocks=BLOCKS[-1])
    return fit([(each["parts"], each["work"]) for each in chosen if each["parts"] > 1]).per_tile


def _decoding(case: SpeedCase, way: Fit, part: Work) -> dict[str, float]:
    """Return the times of the busiest group: its share of all blocks, and the merge of a whole tile."""
    groups, tiles = int(model.rate("groups")), case.batch * case.kv_heads * tiles_of(case)
    blocks = -(-case.keys // BLOCK)
    own = -(-tiles * blocks // groups)
    parts = min(groups, -(-blocks // own) + 1)
    finished = max(1, own // blocks)
    work = combine((float(finished), way.per_task), (float(own), way.per_tile), (float(parts), part))
    return model.engine_times(work) | model.hbm_time(tiles_of(case) * case.kv_bytes + _vectors(case))


def _prefill(case: SpeedCase, counts: Sequence[Record], shift: Fit) -> tuple[list[dict[str, float]], float]:
    """Return the times of the kernel of prefill, a tile for each query head, and of the pass that shifts the keys."""
    way = _fit(counts, OLD, case.rows, 0)
    tiles = -(-case.batch * case.heads // int(model.rate("groups")))
    work = combine((float(tiles), way.per_task), (float(tiles * -(-case.keys // BLOCK)), way.per_tile))
    times = model.engine_times(work) | model.hbm_time(case.kv_bytes + _vectors(case))
    before = model.shift_times(case, "exact", {"exact": shift}, model.stored_rates())
    return [times, before], way.residual


def _vectors(case: SpeedCase) -> float:
    """Return the bytes of queries and output."""
    return 2.0 * case.batch * case.heads * case.rows * case.dim * HALF_BYTES


def _gather(case: SpeedCase) -> dict[str, float]:
    """Return the time in which the pages of keys, or of values, are read and written in a row."""
    return model.hbm_time(float(case.kv_bytes))
