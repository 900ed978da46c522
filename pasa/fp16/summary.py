"""List the results of modules that are scaled or near FP16's limit, for the report and for the counters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from pasa.fp16.exponents import add
from pasa.fp16.handle import ScaledModule
from pasa.fp16.paths import inside, owner
from pasa.fp16.planning import LARGEST, Peak, Plan
from pasa.fp16.tracing import Tracer

WATCHED = 64
"""Modules are watched whose results come within this factor of the planned limit on the sample."""
MOST_WATCHED = 16
"""Modules that are watched at most: the hook of each costs up to 5 us per forward pass, and 20 us in one of 16."""


def largest_results(plan: Plan, tracer: Tracer) -> dict[str, Peak]:
    """Return the largest peak that each module itself returned, by the module's path."""
    by_index: dict[int, Peak] = {}
    for peak in plan.peaks:
        if peak.index not in by_index or by_index[peak.index].value < peak.value:
            by_index[peak.index] = peak
    results: dict[str, Peak] = {}
    for module, indices in tracer.results.items():
        for index in indices.values():
            if index in by_index and (module not in results or results[module].value < by_index[index].value):
                results[module] = by_index[index]
    for module in plan.epilogues.keys() & results.keys():
        behind = tracer.equations.resolve(tracer.epilogues[module] or {})
        results[module] = replace(results[module], form=add(results[module].form, behind))
    return results


def modules_to_watch(plan: Plan, tracer: Tracer, margin: float) -> list[str]:
    """Return the modules to watch: for each of the results nearest to the limit, the outermost that returns it."""
    by_result: dict[int, tuple[float, str]] = {}
    for module, peak in largest_results(plan, tracer).items():
        scaled = math.ldexp(peak.value, -plan.exponent(peak.form))
        if module in plan.inputs or scaled * margin * WATCHED <= LARGEST or inside(owner(module), plan.islands):
            continue
        if peak.index not in by_result or len(module) < len(by_result[peak.index][1]):
            by_result[peak.index] = scaled, module
    return [module for _, module in sorted(by_result.values(), reverse=True)[:MOST_WATCHED]]


def scaled_modules(plan: Plan, tracer: Tracer, margin: float) -> Iterable[ScaledModule]:
    """Yield the modules with a scaled result, or one near FP16's limit."""
    for module, peak in largest_results(plan, tracer).items():
        power = plan.exponent(peak.form)
        scaled = math.ldexp(peak.value, -power)
        if power or peak.value * margin > LARGEST:
            yield ScaledModule(module, peak.value, power, scaled, LARGEST / scaled if scaled else math.inf)
