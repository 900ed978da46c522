"""The steps of a conversion to FP16, and the way back from each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pasa.first_nonfinite import NonFiniteWatch
from pasa.fp16 import counting, editing, guards, offloading, running
from pasa.fp16.confirming import confirm
from pasa.fp16.factors import Epilogue, hook_prologues, modules_to_enter
from pasa.fp16.handle import Fp16Report
from pasa.fp16.logits import widen_logits
from pasa.fp16.offloading import Weights
from pasa.fp16.paths import inside, owner
from pasa.fp16.planning import LARGEST, Plan, modules_with_constants, peaks_of, plan_for, widen_owners, widen_scores
from pasa.fp16.summary import modules_to_watch, scaled_modules
from pasa.fp16.tracing import TRACED, Tracer
from pasa.fp16.tracks import Cut
from pasa.patching import PatchHandle

MARK = "scaled_by_pasa_to_fp16"
"""Attribute of each module of a converted model.

The model itself holds it as a buffer, so that its state dict cannot be mixed up with one of the original.
"""
SMALLEST = 2.0**-14
"""Smallest normal number of FP16."""


class Conversion:
    """A model or pipeline on its way to FP16.

    Parameters
    ----------
    models : mapping of str to torch.nn.Module
    run : callable
        Runs the model once on the sample.
    margin : float
    weights : Weights, optional
        The data of the models; it must hold offloaded tensors already.
    """

    hooked = True  # a module's inputs can be scaled by hooks

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        run: Callable[[], object],
        margin: float,
        weights: Weights | None = None,
    ) -> None:
        self.models, self.run, self.margin = models, run, margin
        self.weights = weights or Weights(models)
        self._original = {name: self.weights.loader(tensor) for name, tensor in editing.named_tensors(models)}
        self._owners = {name: editing.module_at(models, owner(name)) for name in self._original}
        self.plan = Plan()
        self._fixed = self._wide = editing.computed_buffers(models)
        self._upcasts = [
            model for model in models.values() if getattr(getattr(model, "config", None), "force_upcast", False)
        ]
        self.patch: PatchHandle | None = None
        self.underflow = 0.0
        self._lost = self._total = 0  # weights that scaling makes subnormal, and all of them
        self._unreached: list[str] = []
        self._unread: list[str] = []
        self._tracer = Tracer(models, {})
        self._scaled_constants = False
        self._hooks: list[Any] = []
        self._widened: list[tuple[str, Callable[[], None]]] = []
        self._entered = guards.Entered()
        self._counters: counting.Counters | None = None
        self._name, self._undone = "", False

    def plan_and_convert(self) -> None:
        """Trace the model in BF16, choose the powers of two, check there that all results follow them, and round.

        Raises
        ------
        RuntimeError
            A result did not follow the powers of two; the message names the module.
        """
        self._set_upcasts(False)
        tracer = self._first_trace()
        if not tracer.inputs:
            raise ValueError("to_fp16: the sample calls no module of the model: pass a dict of its arguments")
        cuts = self._partitions(tracer)
        if cuts:
            tracer = self._trace(cuts)
        epilogues: dict[str, Epilogue] = {}
        while new := modules_with_constants(tracer, self.margin) - epilogues.keys():  # one hides the next
            for name in sorted(new):
                epilogues[name] = Epilogue()
                self._hooks.append(editing.module_at(self.models, name).register_forward_hook(epilogues[name]))
            tracer = self._trace(cuts, epilogues=epilogues.keys())
        tracer = self._choose(tracer, cuts, epilogues.keys())
        parameters = {*editing.parameter_names(self.models)}
        shapes = {name: tensor.shape for name, tensor in self._tensors().items() if name not in self._fixed}
        self._unreached, self._unread = guards.scale_unreached(tracer, self.plan, shapes, parameters)
        widen_owners(tracer, self.plan, dict(self._largest(parameters)))
        self._set(lambda name, data: editing.scaled(name, self._narrow(name, data), self.plan))
        editing.scale_constants(self.models, self.plan)
        self._scaled_constants = True
        for name, power in self.plan.epilogues.items():
            epilogues[name].factor = 2.0**-power
        confirm(self.plan, tracer, self._trace(cuts, self.plan, epilogues.keys(), tracer.prologues.keys()))
        self._round()

    def _choose(self, tracer: Tracer, cuts: Mapping[str, tuple[int, tuple[Cut, ...]]], epilogues: Set[str]) -> Tracer:
        """Choose the powers of two; if there are none, scale the inputs of some modules. Return the trace in force."""
        try:
            return self._choose_for(tracer)
        except NotImplementedError as refusal:
            prologues = modules_to_enter(tracer, peaks_of(tracer, self.margin)) if self.hooked else set()
            if not prologues:
                raise
            try:
                return self._choose_for(self._trace(cuts, epilogues=epilogues, prologues=prologues))
            except NotImplementedError:
                raise refusal from None

    def _choose_for(self, tracer: Tracer) -> Tracer:
        peaks = {name: track.peaks(self._original[name]()).tolist() for name, track in tracer.parameters.items()}
        self.plan, self._tracer = plan_for(tracer, peaks, self.margin), tracer
        return tracer

    def _narrow(self, name: str, data: Tensor) -> Tensor:
        """Return a tensor in BF16, but computed buffers that need precision in FP32."""
        return editing.at_least_fp32(data) if name in self._wide else data.to(TRACED)

    def _first_trace(self) -> Tracer:
        """Trace the model in BF16 with its computed buffers in FP32, or in BF16 too where it does not run so.

        Rotary frequencies need FP32, and are cast where they are used. Sinusoidal positions are not.
        """
        for wide in (self._wide, set[str]()):
            self._wide = wide
            self._set(self._narrow)
            try:
                return self._trace({})
            except Exception as error:
                cause = error.__cause__ or error
                again = wide and isinstance(cause, RuntimeError) and not str(cause).startswith("to_fp16")
                if not again or isinstance(cause, torch.OutOfMemoryError):
                    raise
        raise AssertionError("unreachable")

    def widen_scores(self, patched: Iterable[str]) -> None:
        """Keep modules in FP32 whose attention scores FP16 cannot hold, but for those whose attention is patched."""
        before = self.plan.islands
        widen_scores(self._tracer, self.plan, patched, self.margin)
        if self.plan.islands.keys() != before.keys():
            self._round()

    def run_in_fp16(self) -> None:
        """Run the sample in FP16.

        Raises
        ------
        RuntimeError
            The model does not run in FP16, or a module returns infinity or NaN.
        """
        known, returned = self._tracer.known, self._tracer.returned
        self._hooks += running.hook_entries(self.models, self.plan, known, self._entered, returned)
        self._hooks += guards.hook_guards(self.models, self.plan, self._entered, self._unreached)
        self._hooks += running.hook_islands(self.models, self.plan, self._tracer)
        entered = {name: editing.module_at(self.models, name) for name in self.plan.prologues}
        self._hooks += hook_prologues(entered, self.plan.prologues, self.plan.entries)
        self._widened = widen_logits(self.models)
        watched = modules_to_watch(self.plan, self._tracer, self.margin)
        self._counters = counting.Counters(self.models, watched, list(self.plan.inputs), self.margin, self._entered)
        self._hooks.append(self._counters)
        with NonFiniteWatch(self.models) as watch, editing.unchanged(self.models), torch.no_grad(), running.Seeded():
            try:
                self.run()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                cause = error.__cause__ or error
                if str(cause).startswith("to_fp16"):
                    raise
                raise RuntimeError(
                    f"to_fp16: the model runs on the sample in BF16, but not in FP16 ({type(cause).__name__}: "
                    f"{(str(cause).splitlines() or [''])[0]}): please report this model"
                ) from cause
        if watch.first is not None and watch.first["origin"]:
            raise RuntimeError(
                f"to_fp16: {watch.first['module']} is infinite or NaN in FP16 on the sample, although its peaks are in "
                "range: please report this model"
            )
        self._counters.start()

    def stores_scores(self) -> str | None:
        """Return a module that computes attention scores by itself, or None; fused attention keeps them in FP32."""
        scores = (operation.module for operation in self._tracer.operations if operation.scores)
        return next((name or "the model" for name in scores if not inside(name, self.plan.islands)), None)

    def mark(self, name: str, *, keep: bool) -> None:
        """Mark the model as scaled, and forget the original unless it is kept."""
        self._name = name
        kept = dict(self._copies()) if keep else {}
        if keep:  # accelerate makes tied weights several parameters when its hooks are removed
            kept |= {name: kept[first] for name, first in editing.tied_names(self.models)}
        self._original = {name: partial(torch.Tensor.detach, data) for name, data in kept.items()}
        for model in self.models.values():
            device = next((parameter.device for parameter in model.parameters()), None)
            model.register_buffer(MARK, torch.ones((), dtype=torch.int64, device=device))
            for module in list(model.modules())[1:]:
                setattr(module, MARK, True)

    def _copies(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the original tensors in host memory, none of which the model can write to."""
        tensors = self._tensors()
        for name, original in self._original.items():
            data, now = original().cpu(), self.weights.load(tensors[name])
            shared = data.untyped_storage().data_ptr() == now.untyped_storage().data_ptr()  # stays as it was
            yield name, data.clone() if shared else data

    def undo(self) -> None:
        """Restore parameters, epsilons and attention."""
        if not self._original:
            raise RuntimeError(
                'to_fp16: the original was not kept, so undo is not possible: call to_fp16 with keep_original="cpu", '
                "or load the model again"
            )
        name = next((name for name, on_disk in offloading.offloaded(self.models).items() if on_disk), None)
        if name or any(map(offloading.in_groups, self.models.values())):
            where = f"{name} is offloaded to disk" if name else "the model is offloaded in groups"
            raise RuntimeError(
                f"to_fp16: {where} since the conversion, where the original cannot be restored: load the model again"
            )
        with running.plain(self.models), self.weights:
            self.restore()
        self._undone = True
        for module in (module for model in self.models.values() for module in model.modules()):
            if hasattr(module, MARK):
                delattr(module, MARK)
        offloading.forget(self.models, MARK)

    def restore(self) -> None:
        """Put everything back as it was."""
        for hook in self._hooks:
            hook.remove()
        for _, undo in self._widened:
            undo()
        self._widened = []
        self._set_upcasts(True)
        if self.patch is not None:
            self.patch.unpatch()
        if self._scaled_constants:
            editing.scale_constants(self.models, self.plan, back=True)
            self._scaled_constants = False
        self._set(lambda name, data: data)

    def report(self) -> Fp16Report:
        """Return what was done; see :class:`Fp16Report`."""
        fp32 = [*self.plan.islands.items()]
        fp32 += [(name, f"the model adds {number:g} to it") for name, (_, number) in self.plan.offsets.items()]
        fp32 += [(f"result of {name}", "FP16 makes near logits equal") for name, _ in self._widened]
        beyond = self._counters.beyond() if self._counters is not None else {}
        return Fp16Report(
            model=self._name,
            modules=tuple(scaled_modules(self.plan, self._tracer, self.margin)),
            parameters=len(self.plan.scales) + len(self.plan.offsets),
            fp32=tuple(fp32),
            underflow=self.underflow,
            beyond=tuple((name, *counted) for name, counted in beyond.items()),
            attention=str(self.patch.report()) if self.patch is not None else "not patched here",
            undone=self._undone,
        )

    def _tensors(self) -> dict[str, Tensor]:
        return dict(editing.named_tensors(self.models))

    def _set(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Replace the data of all tensors by a function of name and original, one by one: there is no second model.

        A tensor may have another name by now, because an adapter has wrapped its module.
        """
        tensors = self._tensors()
        for name, original in self._original.items():
            tensor = tensors.get(name)
            if tensor is None and name in self._owners:
                tensor = getattr(self._owners[name], name.rpartition(".")[2])
            if tensor is not None:
                self.weights.set(tensor, original, partial(change, name))

    def _set_upcasts(self, value: bool) -> None:
        """Say in the configs of autoencoders whether pipelines convert them to FP32."""
        for model in self._upcasts:
            model.register_to_config(force_upcast=value)  # type: ignore[operator]

    def _trace(
        self,
        cuts: Mapping[str, tuple[int, tuple[Cut, ...]]],
        plan: Plan | None = None,
        epilogues: Set[str] = frozenset(),
        prologues: Set[str] = frozenset(),
    ) -> Tracer:
        plan = plan or Plan()
        powers = {name: plan.prologues.get(name, 0) for name in prologues}
        tracer = Tracer(self.models, cuts, plan.inputs, plan.outputs, self._fixed, epilogues, powers)
        with editing.unchanged(self.models), running.Seeded(), tracer.running():
            self.run()
        return tracer

    def _partitions(self, tracer: Tracer) -> dict[str, tuple[int, tuple[Cut, ...]]]:
        """Return the parts of fused parameters that the trace saw, where they fill the dimension without overlap."""
        cuts, sizes = {}, self._tensors()
        for name, (dim, parts) in tracer.shown.items():
            size = sizes[name].shape[dim]
            covered = [index for part in parts for index in range(*part)]
            if sorted(covered) == list(range(size)):
                cuts[name] = dim, tuple(sorted(parts))
        return cuts

    def _largest(self, parameters: Container[str]) -> Iterable[tuple[str, float]]:
        """Yield the largest magnitudes of the scaled parameters and buffers that would be FP16, and may be read."""
        unread = {*self._wide, *self._unread, *self.plan.offsets}
        for name, tensor in self._tensors().items():
            if tensor.ndim and name not in unread and not inside(name, self._unreached):
                data = editing.scaled(name, self._original[name](), self.plan)
                yield name, editing.largest(data, mask=name not in parameters)

    def _round(self) -> None:
        """Scale and round all tensors, and count the weights that become subnormal by it."""
        self._lost = self._total = 0
        self._set(self._rounded)
        self.underflow = self._lost / max(self._total, 1)

    def _rounded(self, name: str, data: Tensor) -> Tensor:
        """Return a parameter or buffer scaled, and in FP16 unless it has to be FP32."""
        if name in self._wide:
            return editing.at_least_fp32(data)
        if name in self._unread and self.plan.scales:
            return torch.full_like(data, math.nan, dtype=torch.float16)  # its power of two is not known
        exact = editing.scaled(name, editing.at_least_fp32(data), self.plan)
        if not data.ndim and data and not SMALLEST <= abs(float(data)) <= LARGEST:
            return exact.float()  # without dimensions it makes no result FP32
        if name in self.plan.offsets or inside(owner(name), self.plan.islands):
            return exact.float()
        if name in self.plan.scales:
            self._lost += int(((exact.abs() < SMALLEST) & (data.abs() >= SMALLEST)).sum())
        self._total += int((data != 0).sum())
        return exact.half()
