"""Trace forward passes of a model for the exponents that its tensors may have, and for the largest value of each.

The pass is run in BF16. It has the range of FP32, and can be distinguished from what the model itself computes in FP32:
what is BF16 in the trace will be FP16. Every operation is seen below autograd, so it does not matter how the model is
written. An operation without a rule in :mod:`pasa.fp16.rules` makes the exponents of its operands 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from pasa.fp16 import factors, offsets, rules
from pasa.fp16.containers import ENCODED, HIDDEN, NESTED, float_leaves, opaque_leaves, replaced, shared_path
from pasa.fp16.exponents import Equations, Form
from pasa.fp16.names import Names
from pasa.fp16.offloading import moves_unseen
from pasa.fp16.operands import holds_values
from pasa.fp16.operators import COPIES, HOMOGENEOUS, VIEWS
from pasa.fp16.paths import join
from pasa.fp16.tracks import Constant, Cut, Operation, Track

TRACED = torch.bfloat16
"""The dtype that stands for FP16 in a trace."""


class Tracer(TorchDispatchMode):
    """Collects equations between exponents, and peaks, over all forward passes that run inside it.

    Parameters
    ----------
    models : mapping of str to torch.nn.Module
        The models, by the names that begin the paths of their modules ("" for a model alone).
    cuts : mapping of str to (int, tuple of cuts)
        Parts of fused parameters that have exponents of their own, each with the dimension (from the end) that is cut.
    inputs, outputs : mapping of str to mapping of str to int
        Exponents by which the inputs of outermost modules are scaled, and some of their outputs are scaled back.
    computed : set of str, optional
        Buffers that the model can compute again, such as position embeddings for another image size. They are not
        scaled.
    epilogues : set of str, optional
        Modules whose results are scaled after them, because a constant is added inside that no parameter holds.
    prologues : mapping of str to int, optional
        Modules whose first input is scaled before them, with the exponents that it is scaled by.

    Attributes
    ----------
    operations : list of Operation
        All operations that depend on the model, in their order.
    parameters : dict of str to Track
        The parameters and buffers that were read, and are known by name.
    constants : dict of Constant to Form
        Exponents of epsilons; `offsets` holds those of parameters to which a number is added, with the number.
    inputs, outputs : dict of str to dict of str to Form
        Exponents of what enters an outermost module, and of hidden states that leave it, by module and path.
    known, returned : dict
        Paths of all floating-point inputs, each with whether it was in the model's precision, and of all outputs.
    results : dict of str to dict of str to int
        Operations that made what each module returned last, by path.
    constant_sums : list of (int, str)
        Operations that add a constant to a tensor, each with the module behind which a factor could follow.
    shown : dict of str to (int, set of Cut)
        Parts of fused parameters that a split or slice shows, with their dimension.
    rigid : set of str
        Modules that add a number to a tensor, and keep it in no attribute for an epsilon.
    entries : dict of str to str
        Paths of the inputs that `prologues` scale, by module.
    read, aliased : set of str
        Parameters that were read but for sums with a number, and those whose memory was read under another name.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        cuts: Mapping[str, tuple[int, tuple[Cut, ...]]],
        inputs: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
        outputs: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
        computed: Set[str] = frozenset(),
        epilogues: Set[str] = frozenset(),
        prologues: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.equations = Equations()
        self.cuts = cuts
        self.epilogues: dict[str, Form | None] = dict.fromkeys(sorted(epilogues))
        self.prologues: dict[str, Form] = {}
        self.prologue_powers, self.rigid = prologues, set[str]()
        self.entries: dict[str, str] = {}
        self.constant_sums: list[tuple[int, str]] = []
        self.shown: dict[str, tuple[int, set[Cut]]] = {}
        self.operations: list[Operation] = []
        self.parameters: dict[str, Track] = {}
        self.constants: dict[Constant, Form] = {}
        self.offsets: dict[str, tuple[Form, float]] = {}
        self.inputs: dict[str, dict[str, Form]] = {}
        self.known: dict[str, dict[str, bool]] = {}
        self.returned: dict[str, set[str]] = {}
        self.powers, self._paused = (inputs, outputs), False
        self.outputs: dict[str, dict[str, Form]] = {}
        self.results: dict[str, dict[str, int]] = {}
        self.modules: dict[torch.nn.Module, str] = {}
        self.stack: list[torch.nn.Module] = []
        self.names = Names(models, computed)
        self.read, self.aliased = set[str](), set[str]()
        self.tracks: Any = WeakTensorKeyDictionary()
        for prefix, model in models.items():
            for path, module in model.named_modules():
                self.modules.setdefault(module, join(prefix, path))

    @property
    def module(self) -> str:
        """Return the path of the innermost module that is running."""
        return self.modules[self.stack[-1]] if self.stack else ""

    def track(self, value: object) -> Track:
        """Return the exponent of an operand."""
        if not isinstance(value, Tensor) or not holds_values(value):
            return Track(({},), constant=True)
        if name := self.names.of(value):
            return self._parameter(name, value)
        if not value.numel():
            return Track(None, constant=True)  # an empty cache, to which keys and values are joined
        track = self.tracks.get(value)
        if track is None and (behind := self.names.behind(value)):
            self.aliased.add(behind)
        return track or Track(({},), constant=True)

    def put(self, out: Any, track: Track) -> None:
        """Give all floating-point tensors among an operation's results an exponent."""
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and holds_values(leaf) and not self.names.of(leaf):
                self.tracks[leaf] = track

    def _operand(self, tensor: Tensor, *, written: bool) -> Track:
        """Return the exponent of a tensor that is read; one made as zeros may have been written by another name."""
        track = self.track(tensor)
        if track.forms is None and not written and bool((tensor != 0).any()):
            track.forms = ({},)
        return track

    def add_constant(self, constant: Track) -> None:
        """Note that a constant is added to a tensor that could be scaled, and where scaling would have to follow."""
        module = self.module if constant.origin is None else constant.origin
        self.constant_sums.append((len(self.operations) - 1, module))

    def _parameter(self, name: str, parameter: Tensor) -> Track:
        if name not in self.parameters:
            dim, cuts = self.cuts.get(name, (-1 if parameter.ndim < 2 else -2, None))
            names = [name] if cuts is None else [f"{name}[{':'.join(map(str, cut))}]" for cut in cuts]
            forms = tuple(self.equations.unknown(each) for each in names)
            self.parameters[name] = Track(forms, cuts, dim, parameter=name)
        return self.parameters[name]

    def equate(self, first: Form, second: Form, why: str) -> None:
        """Add an equation, with the module that it comes from as its reason."""
        self.equations.equate(first, second, f"{self.module or 'the model'} ({why})")

    def single(self, track: Track) -> Form | None:
        """Return one exponent for the whole tensor; parts that had exponents of their own are made equal."""
        if track.forms is None:
            return None
        for form in track.forms[1:]:
            self.equate(track.forms[0], form, "uses the parts of a fused tensor together")
        return track.forms[0]

    def pin(self, track: Track, why: str) -> None:
        """Make an exponent 0."""
        for form in track.forms or ():
            self.equate(form, {}, why)

    def add_number(self, value: float, form: Form, why: str) -> None:
        """Scale a number that is added to a tensor of exponent `form`, or make that exponent 0.

        The number can be scaled if the running module keeps it in an attribute for an epsilon, and in that one alone.
        It is one number for all that the module adds it to, also where that cannot be scaled.
        """
        held = vars(self.stack[-1]) if self.stack else {}
        names = [name for name, kept in held.items() if "eps" in name and isinstance(kept, float) and kept == value]
        if len(names) != 1:
            self.rigid.add(self.module)
            self.equate(form, {}, why)
            return
        place = Constant(self.module, names[0])
        if place not in self.constants:
            self.constants[place] = self.equations.unknown(f"{place.module}.{place.attribute}")
        self.equate(self.constants[place], form, why)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return function(*args, **kwargs)
        if torch.is_inference_mode_enabled():  # where operators arrive undivided: a linear layer is one
            with self:
                parts = function.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = function._schema.name.partition("::")[2]
        first = args[0] if name in VIEWS or name.endswith("_") else None
        tracks = [self._operand(tensor, written=tensor is first) for tensor in tensors]
        out = function(*args, **kwargs)
        if all(track.constant for track in tracks):
            self._constant(name, args, tracks, out)
            return out
        operation = Operation(name, self.module, tuple({track.producer for track in tracks} - {-1}))
        self.operations.append(operation)
        rules.apply(self, operation, args, kwargs, out)
        offsets.note_reads(
            self, tracks, [self.tracks.get(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        )
        if name not in VIEWS:
            self._record(operation, (args, kwargs), out)
        return out

    def _constant(self, name: str, args: Any, tracks: list[Track], out: Any) -> None:
        """Give a tensor that does not depend on the model the exponent 0, or every exponent if it holds zeros."""
        for number in (each for each in args if isinstance(each, float)):
            self.add_number(number, {}, "adds it to a constant")
        zeros = rules.makes_zeros(name, args)
        if tracks and name in VIEWS:
            self.put(out, tracks[0])
        elif tracks and name.endswith("_"):  # seen through all views of this memory
            tracks[0].forms = tracks[0].forms if zeros else ({},)
            self.put(out, tracks[0])
        else:
            origin = tracks[0].origin if tracks and name in COPIES | HOMOGENEOUS else None
            self.put(out, Track(None if zeros else ({},), constant=True, origin=origin))

    def _record(self, operation: Operation, operands: Any, out: Any) -> None:
        """Keep the exponents and peaks of an operation's first result that would be FP16."""
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()):
            track = self.tracks.get(tensor)
            if track is None or track.constant:
                continue
            track.producer = len(self.operations) - 1
            if tensor.dtype == TRACED and tensor.numel() and not operation.forms and self.stack:
                operation.forms = track.forms or ()
                operation.peaks = track.peaks(tensor)
                limit = rules.mask_limit(operation.name)
                if bool((operation.peaks >= limit).any()) and rules.hold_mask(operands, limit):  # and no overflow
                    operation.peaks = track.peaks(tensor, below=limit)

    @contextmanager
    def running(self) -> Iterator[Tracer]:
        """Trace what runs inside, without gradients."""
        hooks = torch.nn.modules.module
        handles = [hooks.register_module_forward_hook(self._leave, always_call=True)]
        handles += [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in self.modules]
        try:
            with torch.no_grad(), moves_unseen(self.modules, self._unseen), self:
                yield self
        finally:
            for handle in handles:
                handle.remove()
        for name in self.parameters.keys() - self.read - self.offsets.keys():  # copied, and read by nothing
            del self.parameters[name]

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Note which module runs; the inputs of an outermost module have exponents of their own."""
        enter = factors.scale_input if self.stack else factors.scale_inputs
        changed = enter(self, module, args, kwargs)
        self.stack.append(module)
        return changed

    def entered(self, kind: str, module: str, tensor: Tensor, form: Form, power: int) -> Tensor:
        """Return a tensor times ``2**-power`` that enters a module, with an exponent of its own."""
        view = self._times(tensor, -power)
        producer = self.tracks[tensor].producer if tensor in self.tracks else -1
        track = self.tracks[view] = Track((form,), producer=len(self.operations))
        self.operations.append(Operation(kind, module, tuple({producer} - {-1})))
        if view.dtype == TRACED and view.numel():
            with self._unseen():
                self.operations[-1].forms, self.operations[-1].peaks = (form,), track.peaks(view)
        return view

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Compute something that is no part of the model."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _times(self, tensor: Tensor, power: int) -> Tensor:
        """Return a new tensor object with a tensor's values times a power of two."""
        with self._unseen():
            return tensor * 2.0**power if power else tensor.detach()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """Note which operations made a module's result; what leaves an outermost module has the exponent 0.

        Hidden states and embeddings may have another inside of the model, and are multiplied back where they leave it.
        """
        if not self.stack or self.stack[-1] is not module:
            return None
        name, outermost = self.modules[module], len(self.stack) == 1
        leaves = [(path, leaf, self.track(leaf)) for path, leaf in float_leaves(output)]
        self.results[name] = {path: track.producer for path, _, track in leaves if track.producer >= 0}
        if name in self.epilogues:
            factors.scale_results(self, name, leaves)
        for _, leaf, track in leaves:
            if track.constant and track.origin is None and name not in self.epilogues:
                track.origin = name
                self.tracks[leaf] = track
        changed = self._leave_outermost(module, output) if outermost else None
        self.stack.pop()
        return changed

    def _leave_outermost(self, module: torch.nn.Module, output: Any) -> Any:
        """Return the output with copies in the place of what is multiplied back."""
        name = self.modules[module]
        outputs, powers = self.outputs.setdefault(name, {}), self.powers[1].get(name, {})
        for tensor in opaque_leaves(output):
            self.pin(self.track(tensor), "returns it")

        def leave(path: str, tensor: Tensor) -> Tensor:
            path = shared_path(path)
            self.returned.setdefault(name, set()).add(path)
            track = self.track(tensor)
            offsets.note_reads(self, [track], [])
            inner = HIDDEN.search(path) or NESTED.match(path) or ENCODED.match(path)
            if track.constant or not (inner or isinstance(module, torch.nn.Embedding)):
                self.pin(track, f"returns {path or 'it'}")
                return tensor
            form = self.single(track) or {}
            self.equate(outputs.setdefault(path, form), form, "returns both in one list")
            copy = self._times(tensor, powers.get(path, 0))
            self.tracks[copy] = Track(({},))
            return copy

        return replaced(output, leave)
