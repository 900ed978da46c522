"""Find out from runs of the benchmark which of our backends serves a shape faster, and check what is chosen.

`pasa/ops/measured.py` reads the table that `measurements` makes. The choice may not depend on data, so where a kernel's
time does, it is measured on N(0, 1) and on biased data. What counts first is the attention that a caller had: a backend
that on both is as fast as the fastest SDPA kernel, or nearly (`NEARLY`), is chosen before one that is not. Otherwise it
is the one whose worst slowdown against the other is smaller.

cuDNN, which `sdpa` calls, prepares each new shape for `PLANNING_MS`, and the calls of a language model have a new shape
for every prompt and every token. There it has to save that time in `CALLS` calls, on the data where it saves most,
unless a graph is captured, which is then replayed many times. Other calls, as of images, keep their shapes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from pasa.eval.speed.implementations import GUARDED
from pasa.ops import measured
from pasa.ops.measured import OTHER, PREFERRED, Measurement, Shape

Record = Mapping[str, Any]
BACKENDS = {"pasa": PREFERRED, GUARDED: OTHER}
"""Implementations of the benchmark, and the backends that they measure."""
NEARLY = 0.95  # of the speed of the fastest SDPA kernel
PLANNING_MS = 40.0  # of the host, at least, for which cuDNN prepares its first call with a shape (cuDNN 9.19)
CALLS = 40  # with a shape, in a language model: about the layers that a prompt or a token goes through
DATA = {"randn": "", "channels": " biased"}  # kinds of data, and how the ways of running on them are named
WAYS = tuple(how + data for data in DATA.values() for how in ("eager", "graph"))
FORM = re.compile(r"\((\d+), (\d+)(?:/(\d+))?, (?:(\d+) x )?(\d+), (\d+)\) (causal|full)")


def shape_of(case: Record) -> Shape:
    """Return the shape of a case of a run, such as ``(1, 28/4, 1 x 8192, 128) full``."""
    form = FORM.fullmatch(case["shape"])
    if form is None:
        raise ValueError(f"{case['shape']!r} is no shape of a case, such as '(1, 28/4, 1 x 8192, 128) full'")
    batch, heads, kv_heads, rows, keys, dim = (int(each) if each else 0 for each in form.groups()[:-1])
    padded = bool(case.get("padded"))
    return Shape(
        dim=dim,
        causal=form[7] == "causal" and not padded,
        mask="bool" if padded else "none",
        heads=batch * heads,
        kv_heads=batch * (kv_heads or heads),
        rows=rows or keys,
        keys=keys,
    )


def gain(
    ratios: Mapping[str, float],
    rows: int = 1,
    *,
    captured: bool = False,
    behind: Mapping[str, Mapping[str, float]] | None = None,
) -> float:
    """Return by how many octaves the worst slowdown of `OTHER` is smaller than that of `PREFERRED`.

    `ratios` has the speed of `OTHER` over that of `PREFERRED`, for each way of running that was measured, and `behind`
    for each backend and way its time over that of the fastest SDPA kernel, if one was measured. Times in a graph are
    those of the device. They count where a graph captures the call, and for prompts (`rows`): the host enqueues one
    layer while the device runs another. In eager decoding each token waits for the host.
    """
    if not ratios:
        return 0.0
    ratios = _deciding(ratios, rows, captured)
    slowdown_of_preferred = max(1.0, *ratios.values())
    slowdown_of_other = max(1.0, *(1 / each for each in ratios.values()))
    if behind is not None:
        preferred, other = (max(behind[each][how] for how in ratios) for each in (PREFERRED, OTHER))
        if min(preferred, other) * NEARLY <= 1 < max(preferred, other) * NEARLY:
            slowdown_of_preferred, slowdown_of_other = preferred, other
    return math.log2(slowdown_of_preferred / slowdown_of_other)


def _deciding(ratios: Mapping[str, float], rows: int, captured: bool) -> Mapping[str, float]:
    """Return the ratios in the ways of running that decide; all, if none was measured."""
    counts = "graph" if captured or rows > measured.DECODING else "eager"
    return {how: each for how, each in ratios.items() if how.startswith(counts)} or ratios


def has_new_lengths(shape: Shape) -> bool:
    """Return whether calls like it come with ever new lengths: those of language models, causal, masked or decoding."""
    return shape.causal or shape.mask != "none" or shape.decodes


def measurements(runs: Sequence[Record]) -> list[Measurement]:
    """Return what runs of the benchmark show, one measurement for each shape that both backends were measured on.

    Of several runs of one implementation the last counts. Two runs are compared by their times relative to cuDNN's.
    """
    found: dict[tuple[str, Shape], dict[tuple[str, str], tuple[Record, Record]]] = defaultdict(dict)
    names: dict[Shape, str] = {}
    for run in runs:
        cases = {each["name"]: each for each in run["cases"] if each["data"] in DATA}
        for record in run["records"]:
            if record["case"] in cases and record["implementation"] in BACKENDS and record["status"] == "ok":
                case = cases[record["case"]]
                shape = shape_of(case)
                names[shape] = record["case"].partition("+")[0]
                key = record["how"] + DATA[case["data"]], BACKENDS[record["implementation"]]
                found[run["environment"].get("capability", ""), shape][key] = record, run["environment"]
    result = []
    for (capability, shape), records in found.items():
        ways = [
            how
            for how in WAYS
            if {(how, each) for each in BACKENDS.values()} <= records.keys()
            and _comparable(records[how, OTHER], records[how, PREFERRED])
        ]
        ratios = {how: round(_ratio(records[how, OTHER], records[how, PREFERRED]), 3) for how in ways}
        if ratios:
            used = [
                environment for how in ratios for _, environment in (records[how, each] for each in BACKENDS.values())
            ]
            sources = sorted({f"{each['device']}, commit {each['commit']}" for each in used})
            behind = _behind(ways, records)
            eagerly, in_graph = (gain(ratios, shape.rows, captured=each, behind=behind) for each in (False, True))
            if has_new_lengths(shape):
                own = {how: records[how, PREFERRED][0]["median_ms"] for how in _deciding(ratios, shape.rows, False)}
                eagerly = min(eagerly, max(_prepared(ms, ratios[how]) for how, ms in own.items()))
            gains = round(eagerly, 3), round(in_graph, 3)
            result.append(Measurement(capability, shape, *gains, ratios, names[shape], tuple(sources)))
    return result


def _prepared(ms: float, ratio: float) -> float:
    """Return by how many octaves `OTHER` is faster, with its share of cuDNN's preparation.

    For the time of `PREFERRED`, and the speed of `OTHER` over its speed.
    """
    return math.log2(ms / (ms / ratio + PLANNING_MS / CALLS))


def _behind(
    ways: Sequence[str], records: Mapping[tuple[str, str], tuple[Record, Record]]
) -> dict[str, dict[str, float]] | None:
    """Return the time of each backend over that of the fastest SDPA kernel beside it, or None if one had none."""
    behind: dict[str, dict[str, float]] = {PREFERRED: {}, OTHER: {}}
    for (each, found), how in product(behind.items(), ways):
        speeds = [speed for name in ("to_cudnn", "to_flash") if (speed := records[how, each][0].get(name))]
        if not speeds:
            return None
        found[how] = 1 / min(speeds)
    return behind


def _comparable(one: tuple[Record, Record], two: tuple[Record, Record]) -> bool:
    """Return whether two records are of one run, or cuDNN was timed beside each; it does not serve every shape."""
    return one[1] is two[1] or all(record["to_cudnn"] is not None for record, _ in (one, two))


def _ratio(other: tuple[Record, Record], preferred: tuple[Record, Record]) -> float:
    """Return the speed of a record over that of another one, from one run or relative to cuDNN's speed in each."""
    (one, its_run), (two, its_own) = other, preferred
    if its_run is its_own:
        return float(two["median_ms"] / one["median_ms"])
    return float(one["to_cudnn"] / two["to_cudnn"])


def wrong(run: Record, table: Sequence[Measurement] | None = None) -> list[str]:
    """Return a line for each shape of a run that is not served as the run asks for, with the table that is in use."""
    lines = []
    for each, captured in product(measurements([run]), (False, True)):
        expected = measured.expected_gain(each.capability, each.shape, table, captured=captured)
        chosen = measured.faster(expected or 0.0) or PREFERRED
        if (better := each.best(captured)) not in ("", chosen):
            times = ", ".join(f"{ratio:.2f} {how}" for how, ratio in each.ratios.items())
            new = " with new lengths" if not captured and has_new_lengths(each.shape) else ""
            said = f"{chosen} is chosen {'in a graph' if captured else 'eagerly'}, although {better} loses less{new}"
            lines.append(f"{each.case}: {said} (speed of {OTHER} over {PREFERRED}: {times})")
    return lines
