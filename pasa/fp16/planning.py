"""Choose the powers of two: as small as the measured peaks and the margin allow, and none where none is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pasa.fp16.exponents import Form
from pasa.fp16.paths import inside, owner
from pasa.fp16.rules import INFINITE
from pasa.fp16.tracing import Tracer
from pasa.fp16.tracks import Constant, Cut

LARGEST = 65504.0
"""Largest finite number of FP16."""
ROUNDS = 100
"""Steps beyond four for each limit after which the search for powers of two gives up."""


@dataclass(frozen=True)
class Peak:
    """The largest magnitude of a tensor that would be FP16.

    Attributes
    ----------
    module : str
        Path of the module that computed it, or name of a parameter.
    operation : str
        Name of the ATen operator; "parameter" for a parameter.
    form : Form
        The exponent that the tensor may have, in unknowns that are still free.
    value : float
    margin : float
        Factor that must stay between the scaled peak and 65504.
    index : int
        Place in the trace; -1 for a parameter.
    """

    module: str
    operation: str
    form: Form
    value: float
    margin: float
    index: int = -1

    @property
    def needed(self) -> int:
        """Return the smallest exponent that keeps the tensor in FP16's range; negative if it may grow."""
        if self.value == 0:
            return -(2**10)
        return math.ceil(math.log2(self.value * self.margin / LARGEST))


@dataclass
class Plan:
    """The powers of two for one model or pipeline.

    Attributes
    ----------
    scales : dict of str to list of (int, Cut or None, int)
        For each parameter and buffer: dimension, part (None for all of it) and exponent e of the factor ``2**-e``.
    offsets : dict of str to (int, float)
        Exponent and number for parameters to which the model adds that number. They stay in FP32.
    constants : dict of Constant to int
        Exponents of epsilons.
    inputs, outputs : dict of str to dict of str to int
        Exponents of what enters and leaves an outermost module, by module and path, where they are not 0.
    epilogues : dict of str to int
        Exponents of factors for the results of modules inside of which a constant is added.
    prologues : dict of str to int
        Exponents of factors for the first inputs of modules, and in `entries` the paths of these inputs.
    islands : dict of str to str
        Modules that stay in FP32, each with the reason.
    peaks : list of Peak
        All peaks of the trace, with resolved forms.
    values : dict of int to int
        The chosen value of each free unknown that is not 0.
    """

    scales: dict[str, list[tuple[int, Cut | None, int]]] = field(default_factory=dict)
    offsets: dict[str, tuple[int, float]] = field(default_factory=dict)
    constants: dict[Constant, int] = field(default_factory=dict)
    inputs: dict[str, dict[str, int]] = field(default_factory=dict)
    outputs: dict[str, dict[str, int]] = field(default_factory=dict)
    epilogues: dict[str, int] = field(default_factory=dict)
    prologues: dict[str, int] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)
    islands: dict[str, str] = field(default_factory=dict)
    peaks: list[Peak] = field(default_factory=list)
    values: dict[int, int] = field(default_factory=dict)

    def exponent(self, form: Form) -> int:
        """Return the exponent that a resolved form has with the chosen values; `denominators` makes it whole."""
        return int(sum(coefficient * self.values.get(unknown, 0) for unknown, coefficient in form.items()))


def plan_for(tracer: Tracer, parameter_peaks: Mapping[str, Sequence[float]], margin: float) -> Plan:
    """Choose all powers of two for what a tracer saw.

    Parameters
    ----------
    tracer : Tracer
    parameter_peaks : mapping of str to sequence of float
        Largest magnitude of each part of the parameters and buffers that the trace met.
    margin : float
        Factor between the scaled peaks of the trace and 65504.

    Raises
    ------
    OverflowError
        A tensor of the trace is infinite or NaN; the message names its module.
    NotImplementedError
        A tensor is too large, cannot be scaled, and no module around it can run in FP32 instead.
    """
    plan = Plan(peaks=list(peaks_of(tracer, margin)))
    plan.islands = find_islands(tracer, plan.peaks)
    returned = {index for island in plan.islands for index in tracer.results[island].values()}
    counted = [peak for peak in plan.peaks if peak.index in returned or not inside(peak.module, plan.islands)]
    for name, track in tracer.parameters.items():
        if not inside(name, plan.islands):
            for form, value in zip(track.forms or (), parameter_peaks[name], strict=True):
                counted.append(Peak(name, "parameter", tracer.equations.resolve(form), value, 1.0))
    plan.values = choose(counted, denominators(tracer))
    _collect(tracer, plan)
    return plan


def peaks_of(tracer: Tracer, margin: float) -> Iterator[Peak]:
    """Yield the peaks of a trace that FP16 must hold; attention scores are left to attention that cannot overflow."""
    for index, operation in enumerate(tracer.operations):
        if operation.peaks is None or operation.scores:
            continue
        for form, value in zip(operation.forms, operation.peaks.tolist(), strict=True):
            if not math.isfinite(value):
                raise OverflowError(
                    f"to_fp16: {operation.module or 'the model'} computes {value} in {operation.name} already in BF16, "
                    "which has the range of FP32: no power of two helps; pass a sample that fits the model"
                )
            resolved = tracer.equations.resolve(form)
            # an input that cannot be scaled is the caller's; the lowest number of BF16 in a mask becomes that of FP16
            if resolved or (operation.name != "input" and value < INFINITE):
                yield Peak(operation.module, operation.name, resolved, value, margin, index)


def denominators(tracer: Tracer) -> dict[int, int]:
    """Return by what the value of an unknown must be divisible, where it is not 1: a root halves an exponent."""
    forms = [form for operation in tracer.operations for form in operation.forms]
    forms += [form for track in tracer.parameters.values() for form in track.forms or ()]
    forms += [*tracer.constants.values(), *(form for form, _ in tracer.offsets.values())]
    forms += [form for form in (*tracer.epilogues.values(), *tracer.prologues.values()) if form is not None]
    forms += [form for traced in (tracer.inputs, tracer.outputs) for each in traced.values() for form in each.values()]
    steps: dict[int, int] = {}
    for form in forms:
        for unknown, coefficient in tracer.equations.resolve(form).items():
            if coefficient.denominator > 1:
                steps[unknown] = math.lcm(steps.get(unknown, 1), coefficient.denominator)
    return steps


def choose(peaks: list[Peak], steps: Mapping[int, int]) -> dict[int, int]:
    """Return values of the free unknowns with which every peak that can be scaled fits.

    A peak that is too large raises the unknown that the forward pass met last among those that its exponent depends on:
    the projection before it, and not the embedding. Where that pushes other peaks out of range, the next one is tried.

    Raises
    ------
    NotImplementedError
        No values fit; the message names a tensor that does not.
    """
    largest: dict[tuple[tuple[int, object], ...], Peak] = {}
    for peak in peaks:
        key = tuple(sorted(peak.form.items()))
        if key and (key not in largest or largest[key].needed < peak.needed):
            largest[key] = peak
    limits = list(largest.values())
    values: dict[int, int] = {}
    for _ in range(ROUNDS + 4 * len(limits)):
        short = [peak for peak in limits if _missing(peak, values) > 0]
        if not short:
            return {unknown: value for unknown, value in values.items() if value}
        trials = list(_raised(short[0], values, steps))
        left = [sum(_missing(peak, trial) > 0 for peak in limits) for trial in trials]
        # The first that helps, because the one that leaves the fewest divides a whole stream by what one tensor needs.
        helps = (trial for trial, count in zip(trials, left, strict=True) if count < len(short))
        values = next(helps, trials[left.index(min(left))])
    peak = short[0]
    raise NotImplementedError(
        f"to_fp16: {peak.module or 'the model'} ({peak.operation}, up to {peak.value:.3g}) fits into FP16 only where "
        "other tensors then do not: lower the margin, or keep this model in FP32"
    )


def _missing(peak: Peak, values: dict[int, int]) -> float:
    """Return by how much a peak's exponent is smaller than it needs to be."""
    total = sum(float(coefficient) * values.get(unknown, 0) for unknown, coefficient in peak.form.items())
    return peak.needed - total


def _raised(peak: Peak, values: dict[int, int], steps: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """Yield values that lift a peak's exponent to what it needs by one unknown, beginning with the one met last."""
    missing = _missing(peak, values)
    for unknown in sorted(peak.form, reverse=True):
        coefficient, unit = float(peak.form[unknown]), steps.get(unknown, 1)
        step = math.ceil(missing / abs(coefficient) / unit) * (unit if coefficient > 0 else -unit)
        yield {**values, unknown: values.get(unknown, 0) + step}


def modules_with_constants(tracer: Tracer, margin: float) -> set[str]:
    """Return the modules that add constants to tensors, if that may be why tensors that are too large cannot be scaled.

    The results of such a module can be scaled behind it.
    """
    if not any(not peak.form and peak.needed > 0 for peak in peaks_of(tracer, margin)):
        return set()
    sums = [module for index, module in tracer.constant_sums if not tracer.operations[index].scores]
    return {module for module in sums if module not in tracer.outputs}


def find_islands(tracer: Tracer, peaks: list[Peak]) -> dict[str, str]:
    """Return the smallest modules that must stay in FP32, because a tensor in them is too large and cannot be scaled.

    Raises
    ------
    NotImplementedError
        Such a tensor leaves an outermost module, where FP16 is asked for.
    """
    stuck = {peak.index: peak for peak in peaks if not peak.form and peak.needed > 0}
    islands: dict[str, str] = {}
    for peak in stuck.values():
        island = peak.module
        while (
            not island
            or island not in tracer.results
            or (island not in tracer.epilogues and any(result in stuck for result in tracer.results[island].values()))
        ):
            if island in tracer.outputs or not island:  # lists of modules have no results, and are passed by
                raise NotImplementedError(
                    f"to_fp16: {peak.module or 'the model'} computes values up to {peak.value:.3g}, which FP16 cannot "
                    f"hold with a margin, and they cannot be scaled because of {_why(tracer, peak)}: lower the margin, "
                    "or keep this model in FP32"
                )
            island = owner(island)
        if not inside(island, islands):
            islands = {name: why for name, why in islands.items() if not inside(name, [island])}
            why = _why(tracer, peak)
            islands[island] = f"{peak.operation} reaches {peak.value:.3g} and cannot be scaled because of {why}"
    return islands


def widen_scores(tracer: Tracer, plan: Plan, patched: Iterable[str], margin: float) -> None:
    """Let modules stay in FP32 that compute attention scores which FP16 cannot hold, and that are not patched.

    Raises
    ------
    NotImplementedError
        An outermost module computes them.
    """
    served = {*patched}
    for operation in tracer.operations:
        island = operation.module
        if not operation.scores or operation.peaks is None or inside(island, served | plan.islands.keys()):
            continue
        value = float(operation.peaks.max())
        if not LARGEST < value * margin < INFINITE:  # the lowest number of a dtype is that of FP16's where it is added
            continue
        refusal = (
            f"to_fp16: {operation.module or 'the model'} stores attention scores up to {value:.3g}, which FP16 cannot "
            "hold with a margin, and its attention cannot be patched: call scaled_dot_product_attention there"
        )
        _widen(tracer, plan, island, f"its attention scores reach {value:.3g}, and it cannot be patched", refusal)


def widen_owners(tracer: Tracer, plan: Plan, largest: Mapping[str, float]) -> None:
    """Let modules stay in FP32 that own a parameter or buffer which FP16 cannot hold after scaling either.

    Parameters
    ----------
    tracer : Tracer
    plan : Plan
    largest : mapping of str to float
        Largest magnitudes of scaled parameters and buffers.

    Raises
    ------
    NotImplementedError
        An outermost module owns one.
    """
    for name, value in largest.items():
        island = owner(name)
        if value <= LARGEST or inside(island, plan.islands):
            continue
        refusal = (
            f"to_fp16: {name} reaches {value:.3g}, which FP16 cannot hold, and it cannot be scaled: keep this model in "
            "FP32"
        )
        _widen(tracer, plan, island, f"{name} reaches {value:.3g} and cannot be scaled", refusal)


def _widen(tracer: Tracer, plan: Plan, island: str, why: str, refusal: str) -> None:
    """Let a module, or the innermost one around it whose result was traced, stay in FP32 with all within it.

    Raises
    ------
    NotImplementedError
        With the text `refusal`, if only an outermost module would do.
    """
    while island and island not in tracer.results:
        island = owner(island)
    if not island or island in tracer.outputs:
        raise NotImplementedError(refusal)
    plan.islands = {inner: other for inner, other in plan.islands.items() if not inside(inner, [island])}
    plan.islands[island] = why


def _why(tracer: Tracer, peak: Peak) -> str:
    """Return the module and operator that fix the exponent of a peak."""
    form: Form = {}
    for each in tracer.operations[peak.index].forms:
        form = form | each
    return tracer.equations.why(form)


def _collect(tracer: Tracer, plan: Plan) -> None:
    """Write down the exponents that are not 0, by what they apply to."""
    resolve = tracer.equations.resolve
    for name, track in tracer.parameters.items():
        cuts = track.cuts or (None,)
        parts = [
            (track.dim, cut, plan.exponent(resolve(form))) for cut, form in zip(cuts, track.forms or (), strict=True)
        ]
        if any(power for _, _, power in parts):
            plan.scales[name] = [part for part in parts if part[2]]
    for name, (form, number) in tracer.offsets.items():
        if power := plan.exponent(resolve(form)):
            plan.offsets[name] = power, number
    for place, form in tracer.constants.items():
        if power := plan.exponent(resolve(form)):
            plan.constants[place] = power
    plan.entries = tracer.entries
    for scaled, factors in ((plan.epilogues, tracer.epilogues), (plan.prologues, tracer.prologues)):
        powers = {name: plan.exponent(resolve(factor or {})) for name, factor in factors.items()}
        scaled.update({name: power for name, power in powers.items() if power})
    for kept, traced in ((plan.inputs, tracer.inputs), (plan.outputs, tracer.outputs)):
        for name, forms in traced.items():
            powers = {path: plan.exponent(resolve(form)) for path, form in forms.items()}
            kept[name] = {path: power for path, power in powers.items() if power}
