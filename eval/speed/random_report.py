"""Tables of a result of `pasa bench speed --random`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import outcome
from pasa.eval.kit.tables import Column, Table, short
from pasa.eval.kit.timing import quantile

Record = dict[str, Any]
SLOW = 0.95  # cases below this ratio are shown by name
MOST_REASONS = 8  # why packages were not timed: the most frequent ones
_HEADER = ["number", "median", "1st percentile", "minimum", f"below {SLOW}"]
METHOD = (
    "Ratio: device time of the fastest SDPA backend with a right answer (math only where no other has one) over that "
    "of pasa.attention with its own choice of backend, both in CUDA graphs; above 1 ours is faster. Eager: the same "
    "ratio of calls outside of graphs, which wait for the host where it is slower than the device. Host: microseconds "
    "to enqueue an eager call."
)


def report(result: Record) -> list[Table | str]:
    """Return what is shown in the terminal."""
    beside, failed = other_table(result), failed_table(result)
    shown = [each for each in (beside, failed) if each.rows]
    tables = [ratio_table(result), slow_table(result), host_table(result), *shown]
    return [f"{outcome(result)} {progress(result)}", *tables, METHOD, *absences(result), origin(result)]


def progress(result: Record) -> str:
    """Return how many cases are done."""
    settings = result["settings"]
    return f"{len(result['records'])} of {settings['cases']} cases of seed {settings['seed']} are done."


def ratio_table(result: Record) -> Table:
    """Return number, median, 1st percentile and minimum of the ratios: of all cases, of each kind and of each data."""
    records = [each for each in result["records"] if "ratio" in each]
    groups = {"all": records, "all, eager": [each | {"ratio": each["eager_ratio"]} for each in records]}
    groups |= {kind: [each for each in records if each["kind"] == kind] for kind in ("prefill", "decode")}
    groups |= {"padded": [each for each in records if each["padded"]]}
    for data in dict.fromkeys(each["data"] for each in records):
        groups[data] = [each for each in records if each["data"] == data]
    rows = [[name, *_distribution([each["ratio"] for each in group])] for name, group in groups.items()]
    return Table("Ratios", ["cases", *_HEADER], rows)


def _distribution(ratios: Sequence[float]) -> list[str]:
    if not ratios:
        return ["0", "-", "-", "-", "0"]
    ordered, slow = sorted(ratios), sum(each < SLOW for each in ratios)
    shown = [f"{value:.3f}" for value in (quantile(ordered, 0.5), quantile(ordered, 0.01), ordered[0])]
    return [str(len(ratios)), *shown, str(slow)]


COLUMNS: dict[str, Column] = {
    "case": "case",
    "shape": "shape",
    "kind": lambda each: f"{each['kind']}{', padded' if each['padded'] else ''}",
    "data": "data",
    "ratio": ("ratio", ".3f"),
    "eager": ("eager_ratio", ".3f"),
    "us": ("us", ".1f"),
    "SDPA us": ("peer_us", ".1f"),
    "backend": "peer",
    "host us": ("host_us", ".0f"),
    "SDPA host us": ("peer_host_us", ".0f"),
    "RMSE": lambda each: short(each["rmse"]) if "rmse" in each else "-",
}


def slow_table(result: Record, bound: float = SLOW) -> Table:
    """Return the cases whose ratio is below a bound, the slowest first."""
    slow = [each for each in result["records"] if "ratio" in each and each["ratio"] < bound]
    title = f"Cases below {bound}" if bound == SLOW else "Every case"
    return Table.of(title, sorted(slow, key=lambda each: float(each["ratio"])), COLUMNS)


def host_table(result: Record, most: int = 10) -> Table:
    """Return the cases to which we add the most host time."""
    timed = [each for each in result["records"] if "added_host_us" in each]
    columns = COLUMNS | {"added us": ("added_host_us", ".0f")}
    return Table.of(
        "Most host time added", sorted(timed, key=lambda each: -float(each["added_host_us"]))[:most], columns
    )


def failed_table(result: Record) -> Table:
    """Return the cases without a ratio, with the reason."""
    columns: dict[str, Column] = {name: COLUMNS[name] for name in ("case", "shape", "kind", "data")}
    failed = [each for each in result["records"] if "ratio" not in each]
    return Table.of("Cases without a ratio", failed, columns | {"status": "status", "why": "why"})


def other_table(result: Record) -> Table:
    """Return how our time compares with that of packages which take no part in the gates."""
    ratios: dict[str, list[float]] = {}
    for each in result["records"]:
        for name, us in each.get("others", {}).items():
            if us is not None:
                ratios.setdefault(name, []).append(us / each["us"])
    rows = [[name, *_distribution(values)] for name, values in ratios.items()]
    note = "Device time of the package over ours, on the cases that it serves with a right answer."
    return Table("Other packages", ["package", *_HEADER], rows, note)


def absences(result: Record) -> list[str]:
    """Return why packages were not timed, and on how many cases."""
    reasons = Counter((name, why) for each in result["records"] for name, why in each.get("others_why", {}).items())
    return [f"{name}, not timed on {count} cases: {why}" for (name, why), count in reasons.most_common(MOST_REASONS)]
