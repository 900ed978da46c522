"""Model decoding on an Ascend 310P: which engine bounds a block of keys, and how much of its time reads K and V.

Also the choice between decoding and prefill, for which keys and values are laid out anew before: up to how many tiles
of rows decoding is faster.

Modelled, not measured. Counts are those of the kernel on the CPU twin, for one tile and a block of 128 keys. K and V
come from memory, because each key is read once. No column leaves the frame. The launch that merges parts, and what
a tile costs once, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pasa.eval.kit.tables import Table

Record = dict[str, Any]
Rates = dict[str, float]
DIMS, ROWS = (64, 128, 256), (1, 7, 64)  # rows: tokens of a tile with the query heads of a key head
SLOTS = (0, 16, 128)  # keys of a page; 0: keys lie in a row
FEW, MANY = 8, 40  # blocks: their difference is free of what a tile costs once
KEYS, HALF_BYTES = 128, 2
PASSES = ("shift", "frames", "lay_out")  # launches before prefill
CASES = [(dim, rows, 0) for dim in DIMS for rows in ROWS] + [(128, 7, slots) for slots in SLOTS[1:]]


def count(work: Callable[..., Record]) -> list[Record]:
    """Return the counters of a block of keys for each case; `work` runs counts_310p.cpp."""
    records = []
    for dim, rows, slots in CASES:
        few, many = (work("decode", dim, blocks, rows, slots) for blocks in (FEW, MANY))
        block = {name: (many[name] - few.get(name, 0)) / (MANY - FEW) for name in many}
        records.append({"dim": dim, "rows": rows, "slots": slots, "work": block})
    return records


def reads_keys_once(record: Record) -> bool:
    """Return whether a block reads the bytes of its keys and values, and no others."""
    return bool(record["work"]["MTE2"] == kv_bytes(record["dim"]))


def kv_bytes(dim: int) -> int:
    """Return the bytes of the keys and values of a block."""
    return 2 * KEYS * dim * HALF_BYTES


def predict(
    record: Record, rates: Rates, engine_cycles: Callable[[Record, Rates], Rates], varied: list[Rates]
) -> Record:
    """Return the times of a block by engine, the engine that bounds it, and the share of reading K and V.

    `varied` holds other rates, with which the bound may be another one.
    """

    def cycles(some: Rates) -> Rates:
        found = engine_cycles(record["work"], some)
        del found["L2 read"]  # K and V are not there
        return found | {"memory": record["work"]["MTE2"] / some["memory"]}

    ns = {name: 1e9 * each / rates["clock"] for name, each in cycles(rates).items()}
    bound = max(ns, key=lambda name: ns[name])
    bounds = {max(found := cycles(some), key=lambda name: found[name]) for some in varied}
    reading = 1e9 * kv_bytes(record["dim"]) / rates["memory"] / rates["clock"]
    return record | {
        "ns": ns,
        "bound": bound,
        "bound_if_one_rate_is_off": sorted(bounds),
        "reading": reading / ns[bound],
        "reading_without_overlap": reading / sum(ns.values()),
    }


def table(records: list[Record]) -> Table:
    """Return the times of a block and the share of reading K and V."""
    engines = list(records[0]["ns"])
    rows = [
        [
            str(each["dim"]),
            str(each["rows"]),
            f"pages of {each['slots']}" if each["slots"] else "in a row",
            *(f"{each['ns'][name]:.0f}" for name in engines),
            f"{each['bound']} ({', '.join(each['bound_if_one_rate_is_off'])} if a rate is off by 30 %)",
            f"{100 * each['reading_without_overlap']:.0f} to {100 * each['reading']:.0f} %",
        ]
        for each in records
    ]
    heads = ["D", "rows", "keys", *engines, "bound by", "share of reading K and V, without to with overlap"]
    return Table("Decoding, a tile against 128 keys: modelled nanoseconds of a core by engine", heads, rows)


def count_passes(work: Callable[..., Record]) -> list[Record]:
    """Return the counters of each launch before prefill, for a block of keys; `work` runs counts_310p.cpp."""
    records = []
    for dim in DIMS:
        works = {}
        for name in PASSES:
            few, many = (work(name, dim, blocks) for blocks in (FEW, MANY))
            works[name] = {key: (many[key] - few.get(key, 0)) / (MANY - FEW) for key in many}
        records.append({"dim": dim, "passes": works})
    return records


def choose(
    record: Record, prefill: Rates, decoding: Rates, rates: Rates, engine_cycles: Callable[[Record, Rates], Rates]
) -> Record:
    """Return the times of the launches before prefill, and the most tiles for which decoding is faster.

    `prefill` and `decoding` are the times of a tile of 64 rows by engine. The first tile finds keys in memory, and
    further ones find them in L2, so the vector unit bounds both. All cores have work in both: where tiles are no
    multiple of the cores, some of them idle in prefill, and decoding is faster for more tiles.
    """
    passes = {}
    for name, work in record["passes"].items():
        memory = max(work["MTE2"], work["MTE3"]) / rates["memory"]
        passes[name] = 1e9 * max(engine_cycles(work, rates)["vector"], memory) / rates["clock"]
    longer = decoding["vector"] - prefill["vector"]
    times = {"ns": passes, "prefill_ns": prefill["vector"], "decoding_ns": decoding["vector"]}
    return record | times | {"tiles": int(sum(passes.values()) / longer)}


def choices(records: list[Record]) -> Table:
    """Return the times between which the choice of decoding or prefill is made."""
    rows = [
        [
            str(each["dim"]),
            *(f"{each['ns'][name]:.0f}" for name in PASSES),
            f"{each['prefill_ns']:.0f}",
            f"{each['decoding_ns']:.0f}",
            str(each["tiles"]),
        ]
        for each in records
    ]
    passes = ["K' and anchors", "frames", "V as fractals"]
    heads = ["D", *passes, "a tile of prefill", "a tile of decoding", "tiles up to which decoding is faster"]
    return Table("Decoding or prefill: modelled nanoseconds of a core for 128 keys", heads, rows)
