"""Fit the model's two free rates to published measurements, and compare each published point with the model.

A kernel takes launch + t / efficiency, where t is the time of its slowest engine at documented rates. `launch` and
`efficiency` are the only rates that no document gives. ``measurements.json`` holds the points with their sources, and
the work of the public kernel that they time, counted from its description.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pasa.eval.npu import roofline as model
from pasa.eval.npu.precision_variants import Work, combine

MEASUREMENTS = Path(__file__).with_name("measurements.json")
ROWS, KEYS = 128, 128  # of a task and of a score tile of the public kernel
HEAD_DIM = 128
FITTED = {"launch": 7, "efficiency": 3}  # the fitted rates, and the decimals to which they are stored
RESIDUAL_LIMIT = 0.26  # of modelled time / measured time - 1, over the fitted points
STEPS = 20  # of Gauss-Newton, which converges in 5


@cache
def load_measurements() -> dict[str, Any]:
    """Return the contents of ``measurements.json``."""
    data: dict[str, Any] = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))
    return data


def kernel_work(tasks: int, tiles: int) -> Work:
    """Return the work of the public kernel's busiest group: so many query tiles and score tiles."""
    number = {"task": tasks, "tile": tiles}
    return combine(*((number[line["per"]], line["work"]) for line in load_measurements()["kernel"]["lines"]))


def points() -> Iterator[dict[str, Any]]:
    """Yield every published point.

    ``documented_us`` is the time of the slowest engine at documented rates, ``us`` the measured time and ``flops`` the
    work. Where a rate alone is published, the three are None. ``peak_tflops`` is the peak of the cubes.
    """
    data = load_measurements()
    core_peak = 2e-12 * model.rate("cube") * model.rate("clock")  # TFLOPS
    for kind in ("attention", "products", "shares"):
        for series in data[kind]:
            peak = core_peak * series["cores"]
            common = {"series": series["name"], "device": series["device"], "fitted": series["fitted"]}
            for numbers in series["points"]:
                point: dict[str, Any]
                if kind == "attention":
                    queries, keys, us = numbers
                    flops = 4.0 * queries * keys * HEAD_DIM
                    documented = _attention_us(queries, keys, series["cores"])
                    point = {"point": f"{queries} x {keys}", "us": us, "documented_us": documented, "flops": flops}
                elif kind == "products":
                    size, us = numbers
                    flops = 2.0 * size**3
                    point = {"point": f"{size}^3", "us": us, "documented_us": 1e-6 * flops / peak, "flops": flops}
                else:
                    point = {"point": "-", "us": None, "documented_us": None, "flops": None, "tflops": numbers[0]}
                if point["us"] is not None:
                    point["tflops"] = 1e-6 * point["flops"] / point["us"]
                yield common | point | {"peak_tflops": peak}


def _attention_us(queries: int, keys: int, cores: int) -> float:
    """Return the time of the public kernel at documented rates, in us: of its slowest engine on the busiest core."""
    tasks = math.ceil(queries / ROWS / cores)
    documented = model.changed_rates("efficiency", 1 / model.rate("efficiency"))
    times = model.engine_times(kernel_work(tasks, tasks * keys // KEYS), documented)
    return 1e6 * model.bound(times)[1]


def fit_free_rates() -> dict[str, float]:
    """Return ``launch`` (s a kernel) and ``efficiency`` (share of documented rates), with the decimals that are stored.

    The fit minimises the sum of squares of log(modelled time / measured time) over the points marked as fitted.
    """
    launch, efficiency, _ = fit([(each["documented_us"], each["us"]) for each in points() if each["fitted"]])
    return {"launch": round(1e-6 * launch, FITTED["launch"]), "efficiency": round(efficiency, FITTED["efficiency"])}


def fit(times: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return launch (us), efficiency, and the root mean square of the logarithms that are left.

    `times` are documented and measured times, us. They are fitted by Gauss-Newton.
    """
    launch, slowdown = min(us for _, us in times) / 2, 1.0  # us, and 1 / efficiency
    for _ in range(STEPS):
        aa = ab = bb = ar = br = 0.0  # normal equations
        for documented, us in times:
            modelled = launch + slowdown * documented
            a, b, r = 1 / modelled, documented / modelled, math.log(modelled / us)
            aa, ab, bb, ar, br = aa + a * a, ab + a * b, bb + b * b, ar + a * r, br + b * r
        determinant = aa * bb - ab * ab
        launch -= (bb * ar - ab * br) / determinant
        slowdown -= (aa * br - ab * ar) / determinant
    squares = sum(math.log((launch + slowdown * documented) / us) ** 2 for documented, us in times)
    return launch, 1 / slowdown, math.sqrt(squares / len(times))


def compare() -> list[dict[str, Any]]:
    """Return every point with ``modelled_us``, ``modelled_tflops`` and ``residual``: modelled time / measured - 1."""
    launch, efficiency = 1e6 * model.rate("launch"), model.rate("efficiency")
    compared = []
    for each in points():
        modelled: float | None = None
        tflops = efficiency * each["peak_tflops"]  # cube-bound and without a launch, where no time is published
        if each["us"] is not None:
            modelled = launch + each["documented_us"] / efficiency
            tflops = 1e-6 * each["flops"] / modelled
        residual = each["tflops"] / tflops - 1
        compared.append(each | {"modelled_us": modelled, "modelled_tflops": tflops, "residual": residual})
    return compared


def worst(compared: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest residual of a fitted point, up or down."""
    return max(abs(float(each["residual"])) for each in compared if each["fitted"])


def within_limit(compared: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the residual of every fitted point is within `RESIDUAL_LIMIT`."""
    return all(abs(float(each["residual"])) < RESIDUAL_LIMIT for each in compared if each["fitted"])
