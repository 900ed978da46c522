"""Hooks of a scaled model: its inputs and outputs, its FP32 islands, and counters that never wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_map_only, tree_unflatten

from pasa.fp16.editing import Models, module_at
from pasa.fp16.planning import LARGEST, Plan
from pasa.fp16.tracing import bind, flatten, float_leaves

EVERY = 16
"""Values are compared with the margin in one forward pass of this many; infinities are looked for in each."""


def hook_entries(models: Models, plan: Plan, known: dict[str, set[str]]) -> Iterable[Any]:
    """Scale what enters and restore what leaves the outermost modules; refuse tensors that the sample did not hold.

    Parameters
    ----------
    known : dict of str to set of str
        Paths of the floating-point inputs of each outermost module, as the trace saw them.
    """
    for name in plan.inputs:
        module = module_at(models, name)
        inputs = _Inputs(name or type(module).__name__, plan.inputs[name], known.get(name, set()))
        yield module.register_forward_pre_hook(inputs, with_kwargs=True)
        if plan.outputs.get(name):
            yield module.register_forward_hook(_Outputs(plan.outputs[name]))


def hook_unmeasured(modules: Mapping[torch.nn.Module, str], ran: Set[torch.nn.Module]) -> Iterable[Any]:
    """Refuse calls of modules with parameters that the sample did not run: nobody knows how they must be scaled."""
    for module, name in modules.items():
        if module not in ran and next(module.parameters(recurse=False), None) is not None:
            yield module.register_forward_pre_hook(_Unmeasured(name))


class _Unmeasured:
    """Refuses the call of a module that the sample did not run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        raise RuntimeError(
            f"to_fp16: {self.name} did not run on the sample, so it was not scaled: undo, and pass a sample "
            "that runs it"
        )


class Epilogue:
    """Multiplies the floating-point results of a module by a factor, 1 until the powers of two are chosen."""

    factor = 1.0

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """Return the results times the factor."""
        return tree_map_only(Tensor, lambda each: each * self.factor if each.is_floating_point() else each, output)


class _Inputs:
    """Scales the inputs of an outermost module."""

    def __init__(self, name: str, powers: dict[str, int], known: set[str]) -> None:
        self.name, self.powers, self.known = name, powers, known

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        bound = bind(module, args, kwargs)
        unknown = [path for path, _ in float_leaves(bound.arguments) if path not in self.known and not _harmless(path)]
        if unknown:
            raise ValueError(
                f"to_fp16: {self.name} was scaled for calls without {unknown[0]}, which would have to be scaled too: "
                "undo, and pass a sample that holds it"
            )
        if has_adapters(module):
            raise RuntimeError(
                f"to_fp16: an adapter was loaded into {self.name} after it was scaled, and writes unscaled values: "
                "undo, load (or merge) the adapter, then call to_fp16 again"
            )
        if not self.powers:
            return None
        leaves, spec = flatten(dict(bound.arguments))
        powers = [self.powers.get(keystr(path), 0) for path, _ in leaves]
        values = [leaf * 2.0**-power if power else leaf for (_, leaf), power in zip(leaves, powers, strict=True)]
        bound.arguments.update(tree_unflatten(values, spec))
        return bound.args, bound.kwargs


def _harmless(path: str) -> bool:
    """Return whether a tensor under this name is never added to a tensor that may be scaled."""
    return any(part in path for part in ("mask", "past_key_values", "cache", "position_embeddings", "timestep"))


def has_adapters(module: torch.nn.Module) -> bool:
    """Return whether an adapter of PEFT is loaded; adapters that were there before the trace were merged or refused."""
    return bool(getattr(module, "_hf_peft_config_loaded", False) or getattr(module, "peft_config", None))


class _Outputs:
    """Multiplies hidden states that leave a model back, in FP32, because FP16 could not hold them."""

    def __init__(self, powers: dict[str, int]) -> None:
        self.powers = powers

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        leaves, spec = flatten(output)
        powers = [self.powers.get(keystr(path), 0) for path, _ in leaves]
        values = [leaf.float() * 2.0**power if power else leaf for (_, leaf), power in zip(leaves, powers, strict=True)]
        return tree_unflatten(values, spec)


def hook_islands(models: Models, plan: Plan) -> Iterable[Any]:
    """Run the modules that stay in FP32 on FP32 inputs, and round what they return to FP16."""
    for name in plan.islands:
        island = module_at(models, name)
        for module in island.modules():  # in between, a model may round to the precision that its caller passed
            yield module.register_forward_pre_hook(_widen, with_kwargs=True)
        yield island.register_forward_hook(_narrow)


def _widen(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each.float() if each.dtype == torch.float16 else each, (args, kwargs))


def _narrow(module: torch.nn.Module, args: Any, output: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each.half() if each.dtype == torch.float32 else each, output)


class Counters:
    """Counts values of scaled modules that pass the planned limit, and outputs that are not finite.

    Nothing here waits for the device: counts stay there, and a copy that has arrived by the next call is looked at.

    Parameters
    ----------
    models : mapping of str to torch.nn.Module
    watched : list of str
        Paths of modules whose results are compared with the limit.
    entries : list of str
        Paths of outermost modules, whose results are checked for infinities.
    margin : float
        The planned limit is 65504 / margin.
    """

    def __init__(self, models: Models, watched: list[str], entries: list[str], margin: float) -> None:
        self.names = [*watched, *entries]
        self.limit = LARGEST / margin
        self.calls = 0
        self._largest: dict[torch.device, Tensor] = {}
        self._arriving: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._warned: set[str] = set()
        self._finite_from = len(watched)
        self.handles = []
        for index, name in enumerate(self.names):
            module = module_at(models, name)
            if index >= self._finite_from:
                self.handles.append(module.register_forward_pre_hook(self._begin))
            self.handles.append(module.register_forward_hook(self._hook(index)))

    def _hook(self, index: int) -> Any:
        def look(module: torch.nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or (index < self._finite_from and self.calls % EVERY != 1):
                return
            for _, leaf in float_leaves(output)[:1]:
                largest = self._on(leaf.device)
                if leaf.numel():
                    torch.maximum(largest[index], leaf.detach().abs().amax().float(), out=largest[index])

        return look

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._largest:
            self._largest[device] = torch.zeros(len(self.names), device=device)
        return self._largest[device]

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        """Look at the counts that have arrived, and send the next ones."""
        if torch.compiler.is_compiling():
            return
        self.calls += 1
        self._arriving = [pair for pair in self._arriving if not self._seen(*pair)]
        if not self._arriving:
            for largest in self._largest.values():
                self._send(largest)

    def _send(self, largest: Tensor) -> None:
        if largest.device.type != "cuda":
            self._warn(largest)
            return
        if torch.cuda.is_current_stream_capturing():
            return
        host = torch.empty(largest.shape, pin_memory=True)
        host.copy_(largest, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._arriving.append((host, event))

    def _seen(self, host: Tensor, event: torch.cuda.Event | None) -> bool:
        if event is not None and not event.query():
            return False
        self._warn(host)
        return True

    def _warn(self, host: Tensor) -> None:
        for name, (value, kind) in self.beyond(host).items():
            if name not in self._warned:
                self._warned.add(name)
                what = "returned infinity or NaN" if kind == "infinite" else f"reached {value:.4g}"
                warnings.warn(
                    f"to_fp16: {name or 'the model'} {what}; the sample allowed {self.limit:.4g} "
                    f"(65504 / {LARGEST / value:.3g} now): undo, and call to_fp16 with this input as its sample",
                    stacklevel=4,
                )

    def beyond(self, host: Tensor | None = None) -> dict[str, tuple[float, str]]:
        """Return the modules that passed the limit, each with its largest value.

        Without `host`, wait for the device.
        """
        counts = [host] if host is not None else [each.cpu() for each in self._largest.values()]
        found: dict[str, tuple[float, str]] = {}
        for count in counts:
            for index, value in enumerate(count.tolist()):
                if not value < float("inf"):
                    found[self.names[index]] = value, "infinite"
                elif value > self.limit and index < self._finite_from:
                    found[self.names[index]] = value, "large"
        return found
