"""Refuse calls of modules within a scaled model, and of modules that its sample did not reach."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch

from pasa.fp16.editing import Models, module_at, named_tensors
from pasa.fp16.paths import contains, join, owner
from pasa.fp16.planning import Plan
from pasa.fp16.tracing import Tracer
from pasa.fp16.tracks import Constant

HARMLESS_MODULES = (
    torch.nn.ModuleList,
    torch.nn.ModuleDict,
    torch.nn.Identity,
    torch.nn.Softmax,
    torch.nn.modules.dropout._DropoutNd,
    torch.nn.modules.loss._Loss,
)
"""Modules without parameters that may run although the sample did not reach them."""
DIGITS = re.compile(r"\.\d+(?=\.|$)")
"""Index of a module in a list, in a path."""


class Entered:
    """Outermost modules that are running, by thread.

    Attributes
    ----------
    guards : list of tuple of dict, int and callable
        Hooks of the modules within, each with the dict that holds it and its key there. They are out of their dicts
        while an outermost module runs, because a hook that does nothing costs a step of decoding 5 us or more.
    """

    def __init__(self) -> None:
        self._running: dict[int, list[str]] = {}
        self.compiled = False
        self.guards: list[tuple[dict[int, Any], int, Any]] = []

    def enter(self, name: str) -> bool:
        """Note that an outermost module begins, and return whether it runs within another one.

        Names that an interrupted call has left behind are dropped: only a module within the running one can begin.
        """
        self.compiled = self.compiled or torch.compiler.is_compiling()
        running = self._running.setdefault(_thread(), [])
        while running and not (running[-1] != name and contains(running[-1], name)):
            running.pop()
        running.append(name)
        if len(running) == 1 and not torch.compiler.is_compiling():
            for hooks, key, _ in self.guards:
                hooks.pop(key, None)
        return len(running) > 1

    def leave(self, name: str) -> bool:
        """Note that such a module has ended, and return whether none is running any more."""
        running = self._running.get(_thread(), [])
        if running and running[-1] == name:
            running.pop()
        if not running and not torch.compiler.is_compiling():
            for hooks, key, guard in self.guards:
                hooks[key] = guard
        return not running

    @property
    def depth(self) -> int:
        """Return how many are running in this thread, each within the one before."""
        return len(self._running.get(_thread(), ()))

    @property
    def idle(self) -> bool:
        """Return whether none is running in this thread; compiled models do not say, and count as running."""
        return not self.compiled and not self.depth


def _thread() -> int:
    """Return a number of the running thread, or 0 in a trace by torch.compile."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def hook_guards(models: Models, plan: Plan, entered: Entered, unreached: Iterable[str]) -> Iterator[Any]:
    """Refuse calls of scaled modules on their own, and of modules without powers of two.

    Layers are the innermost modules that are guarded, so that a forward pass does not become slower.
    """
    scaled: set[object] = {module_at(models, place.module) for place in plan.constants}
    scaled |= {module_at(models, name) for name in (*plan.epilogues, *plan.prologues)}
    scaled |= {tensor for name, tensor in named_tensors(models) if name in plan.scales or name in plan.offsets}
    entries = {id(module_at(models, name)): name for name in plan.inputs}
    for prefix, model in models.items():
        for path, module in _guarded(model, prefix, {module_at(models, name) for name in plan.inputs}):
            if not scaled.isdisjoint((*module.modules(), *module.parameters(), *module.buffers())):
                callers = [name for name in entries.values() if contains(name, path)] or [prefix]
                caller = max(callers, key=len) or type(model).__name__
                guard = _Guard(path, caller, entered)
                handle = module.register_forward_pre_hook(guard)
                entered.guards.append((module._forward_pre_hooks, handle.id, guard))
                yield handle
    for path in unreached if scaled else ():  # modules of one model may write to a tensor that is scaled
        yield module_at(models, path).register_forward_pre_hook(_Unreached(path))


def _guarded(
    module: torch.nn.Module, path: str, entries: set[torch.nn.Module], met: set[torch.nn.Module] | None = None
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules within another one, but for entries, what contains entries, and the insides of layers."""
    met = set() if met is None else met
    listed = isinstance(module, torch.nn.ModuleList)
    for name, child in module.named_children():
        if child in met:
            continue
        met.add(child)
        inner = join(path, name)
        if entries.isdisjoint(child.modules()) and not isinstance(child, torch.nn.ModuleList):
            yield inner, child
            if listed:
                continue
        yield from _guarded(child, inner, entries, met)


class _Guard:
    def __init__(self, name: str, caller: str, entered: Entered) -> None:
        self.name, self.caller, self.entered = name, caller, entered

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if self.entered.idle and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"to_fp16: {self.name} is scaled by powers of two inside of {self.caller}, and its results alone would "
                f"be too small: call {self.caller}, or pass a sample (a function of the model) that calls {self.name} "
                "as you do"
            )


class _Unreached:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        raise RuntimeError(
            f"to_fp16: the sample did not reach {self.name}, so no power of two is known for it: undo, and pass a "
            "sample that uses it"
        )


def scale_unreached(
    tracer: Tracer, plan: Plan, shapes: Mapping[str, torch.Size], parameters: Set[str]
) -> tuple[list[str], list[str]]:
    """Give tensors and epsilons that the sample did not reach the powers of two of their siblings, as other experts.

    Siblings are modules of one list, with the same parameters and buffers. They must agree, and hold no epilogue.

    Parameters
    ----------
    tracer : Tracer
    plan : Plan
        Takes the powers of two.
    shapes : mapping of str to torch.Size
        Shapes of the parameters and of the buffers that a checkpoint holds.
    parameters : set of str
        Which of them are parameters.

    Returns
    -------
    list of str
        Modules that the sample did not reach and that have no such siblings.
    list of str
        Parameters that the sample did not reach, of modules that it did.
    """
    harmless = {name for module, name in tracer.modules.items() if isinstance(module, HARMLESS_MODULES)}
    shapes = {
        name: shape
        for name, shape in shapes.items()
        if name in parameters or (shape.numel() > 1 and owner(name) not in harmless)
    }
    missing = {name for name, shape in shapes.items() if name not in tracer.parameters and shape.numel() > 1}
    refused = _unreached_without_parameters(tracer)
    unread = []
    for name in sorted(missing):
        module = owner(name)
        if module in tracer.results:
            unread += [name] if name in parameters - tracer.aliased else []
            continue
        if module in refused:
            continue
        pair = _siblings(name, missing, shapes, parameters, plan)
        if pair is None:
            refused.append(module)
            continue
        member, sibling = pair
        other = sibling + name.removeprefix(member)
        if other in plan.scales:
            plan.scales[name] = plan.scales[other]
        if other in plan.offsets:
            plan.offsets[name] = plan.offsets[other]
        for place, power in list(plan.constants.items()):
            if contains(sibling, place.module):
                plan.constants[Constant(member + place.module.removeprefix(sibling), place.attribute)] = power
    return refused, unread


def _unreached_without_parameters(tracer: Tracer) -> list[str]:
    """Return modules without parameters that the sample did not reach, and nothing beside them in a list either.

    They may add numbers to a tensor that is scaled. Dropout, softmax and losses do not.
    """
    reached = {DIGITS.sub(".N", name) for name in tracer.results}
    return [
        name
        for module, name in tracer.modules.items()
        if DIGITS.sub(".N", name) not in reached
        and not isinstance(module, HARMLESS_MODULES)
        and next(module.parameters(), None) is None
    ]


def _siblings(
    name: str, missing: Set[str], shapes: Mapping[str, torch.Size], parameters: Set[str], plan: Plan
) -> tuple[str, str] | None:
    """Return the module of a list that holds a tensor, and one that was reached, if all such have the same powers."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if not part.isdigit():
            continue
        head = ".".join(parts[:index])
        member = f"{head}.{part}."
        if any(each.startswith(member) and each not in missing for each in shapes):
            continue  # partly reached: the list to look at is further inside
        layout = {each.removeprefix(member): shape for each, shape in shapes.items() if each.startswith(member)}
        siblings = {each[len(head) + 1 :].partition(".")[0] for each in shapes if each.startswith(f"{head}.")}
        alike = [
            f"{head}.{other}"
            for other in sorted(siblings)
            if all(shapes.get(f"{head}.{other}.{inner}") == shape for inner, shape in layout.items())
            and not any(f"{head}.{other}.{inner}" in missing & parameters for inner in layout)
            and any(f"{head}.{other}.{inner}" not in missing for inner in layout)
        ]
        powers = [
            [(plan.scales.get(f"{each}.{inner}"), plan.offsets.get(f"{each}.{inner}")) for inner in layout]
            for each in alike
        ]
        followed = any(contains(each, epilogue) for each in alike for epilogue in (*plan.epilogues, *plan.prologues))
        if alike and not followed and all(each == powers[0] for each in powers):
            return f"{head}.{part}", alike[0]
        return None
    return None
