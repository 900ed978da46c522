"""Factors at the borders of modules: behind results (epilogues), and before inputs (prologues)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pasa.fp16.containers import float_leaves, replaced
from pasa.fp16.exponents import add
from pasa.fp16.paths import contains, owner
from pasa.fp16.tracks import Track

if TYPE_CHECKING:
    from pasa.fp16.planning import Peak
    from pasa.fp16.tracing import Tracer


class Epilogue:
    """Multiplies the floating-point results of a module by a factor, 1 until the powers of two are chosen."""

    factor = 1.0

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """Return the results times the factor."""
        return tree_map_only(Tensor, lambda each: each * self.factor if each.is_floating_point() else each, output)


class Prologue:
    """Multiplies an input of a module by a factor: the one under this path in the call of the sample."""

    def __init__(self, name: str, path: str, factor: float) -> None:
        self.name, self.path, self.factor = name, path, factor

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the inputs, one of them times the factor."""
        changed: tuple[Any, Any] = replaced((args, kwargs), self._scaled)
        if changed[0] is args and changed[1] is kwargs:
            raise RuntimeError(
                f"to_fp16: {self.name} is called in another way than on the sample, and its input would be scaled "
                "wrongly: undo, and pass a sample that calls the model as you do"
            )
        return changed

    def _scaled(self, path: str, leaf: Tensor) -> Tensor:
        return leaf * self.factor if path == self.path else leaf


def hook_prologues(
    modules: Mapping[str, torch.nn.Module], powers: Mapping[str, int], paths: Mapping[str, str]
) -> Iterable[Any]:
    """Scale the first inputs of modules, behind the hooks that make the inputs of FP32 modules FP32."""
    for name, power in powers.items():
        prologue = Prologue(name, paths[name], 2.0**-power)
        yield modules[name].register_forward_pre_hook(prologue, with_kwargs=True)


def scale_results(tracer: Tracer, name: str, leaves: Sequence[tuple[str, Tensor, Track]]) -> None:
    """Add the exponent of a module's epilogue to those of its results."""
    epilogue = tracer.epilogues[name] = tracer.epilogues[name] or tracer.equations.unknown(f"results of {name}")
    for _, leaf, track in leaves:
        form = tracer.single(track)
        if form is not None:
            tracer.tracks[leaf] = Track((add(form, epilogue),), producer=track.producer)


def scale_inputs(tracer: Tracer, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Replace an outermost module's inputs by views with exponents of their own; a tensor passed twice has one."""
    name, bound = tracer.modules[module], inspect.signature(module.forward).bind(*args, **kwargs)
    inputs, known = tracer.inputs.setdefault(name, {}), tracer.known.setdefault(name, {})
    powers = tracer.powers[0].get(name, {})
    views: dict[int, Tensor] = {}

    def enter(path: str, tensor: Tensor) -> Tensor:
        known[path] = known.get(path, True) and tensor.dtype == torch.bfloat16
        if tracer.names.of(tensor):
            return tensor
        if path not in inputs:
            inputs[path] = tracer.equations.unknown(f"input {path} of {name or 'the model'}")
        if id(tensor) in views:
            tracer.equate(inputs[path], tracer.single(tracer.track(views[id(tensor)])) or {}, "is passed twice")
            return views[id(tensor)]
        view = views[id(tensor)] = tracer.entered("input", name, tensor, inputs[path], powers.get(path, 0))
        return view

    bound.arguments.update(replaced(dict(bound.arguments), enter))
    return bound.args, bound.kwargs


def scale_input(tracer: Tracer, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Add the exponent of a module's prologue to that of its first floating-point input."""
    name, inputs = tracer.modules[module], (args, kwargs)
    leaves = dict(float_leaves(inputs)) if name in tracer.prologue_powers else {}
    if not leaves:
        return None
    first = tracer.entries.setdefault(name, next(iter(leaves)))
    form = tracer.single(tracer.track(leaves[first])) if first in leaves else None
    if form is None:  # another call, which is refused when the scaled model makes it, or zeros
        return None
    if name not in tracer.prologues:
        tracer.prologues[name] = tracer.equations.unknown(f"first input of {name}")
    total = add(form, tracer.prologues[name])
    view = tracer.entered("its input", name, leaves[first], total, tracer.prologue_powers[name])
    changed: tuple[Any, Any] = replaced(inputs, lambda path, each: view if path == first else each)
    return changed


def modules_to_enter(tracer: Tracer, peaks: Iterable[Peak]) -> set[str]:
    """Return modules whose input could be scaled before them, where tensors that are too large cannot be.

    They are those whose epsilon is written in their code, which read a scaled stream only behind a factor; and the
    first of each list of layers with such a tensor, where a stream begins that no parameter writes.
    """
    stuck = {peak.module for peak in peaks if not peak.form and peak.needed > 0}
    firsts = {
        name
        for module, name in tracer.modules.items()
        if name.endswith(".0") and any(contains(owner(name), path) for path in stuck)
    }
    return {name for name in firsts | tracer.rigid if name in tracer.results and name not in tracer.inputs}
