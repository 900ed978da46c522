"""Hooks of a scaled model: they scale its inputs and outputs, and run its FP32 islands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pasa.fp16 import offloading
from pasa.fp16.containers import NESTED, float_leaves, replaced, shared_path
from pasa.fp16.editing import Models, module_at
from pasa.fp16.guards import Entered
from pasa.fp16.planning import LARGEST, Plan
from pasa.fp16.tracing import Tracer

HARMLESS_NAMES = re.compile(
    r"masks?'\]|past_key_values|cache|position_embeddings|timesteps?'\]|attentions|router_logits|loss"
)
"""Names of inputs and outputs that are never scaled, or only between two calls of one model."""
CACHES = re.compile("past_key_values|cache")
"""Those among them that hold what an earlier call has returned."""


@contextmanager
def plain(models: Models) -> Iterator[None]:
    """Leave inference mode and autocast inside: they would make parameters that cannot be used elsewhere, and casts."""
    devices = {device.type for device in offloading.devices(models)}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device in filter(torch.amp.is_autocast_available, sorted(devices)):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def hook_entries(
    models: Models, plan: Plan, known: dict[str, dict[str, bool]], entered: Entered, returned: dict[str, set[str]]
) -> Iterable[Any]:
    """Scale what enters and restore what leaves the outermost modules; refuse tensors that the sample did not hold.

    Parameters
    ----------
    known : dict of str to dict of str to bool
        Paths of the floating-point inputs of each outermost module, as the trace saw them, each with whether it was in
        the model's precision.
    entered : Entered
        Notes which of them are running. Within another one nothing is scaled.
    returned : dict of str to set of str
        Paths of the floating-point outputs of each of them, as the trace saw them.
    """
    for name in plan.inputs:
        module = module_at(models, name)
        restored = any(NESTED.match(path) for path in plan.outputs.get(name, {}))
        inputs = _Inputs(name, module, plan.inputs[name], known.get(name, {}), entered, restored=restored)
        yield module.register_forward_pre_hook(inputs, with_kwargs=True)
        outputs = _Outputs(
            name, plan.outputs.get(name, {}), entered, returned.get(name, set()) if plan.scales else None
        )
        yield module.register_forward_hook(outputs, always_call=True)


class Seeded:
    """Context in which random numbers are the same each time, and after which they go on as before."""

    def __enter__(self) -> None:
        self._fork = torch.random.fork_rng(devices=range(torch.cuda.device_count()))  # else a warning on several GPUs
        self._fork.__enter__()
        torch.manual_seed(0)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


class _Inputs:
    """Scales the inputs of an outermost module, and refuses calls that its powers of two do not fit."""

    def __init__(
        self,
        path: str,
        module: torch.nn.Module,
        powers: dict[str, int],
        known: dict[str, bool],
        entered: Entered,
        *,
        restored: bool,
    ) -> None:
        self.path, self.name, self.entered = path, path or type(module).__name__, entered
        self.restored = restored  # tensors that it returns in nested tuples, perhaps keys and values
        self.powers, self.known = powers, known
        self.narrow = {name for name, narrow in known.items() if narrow}
        parameters = inspect.signature(module.forward).parameters.values()  # read once: it costs 50 us
        self.positional = [each.name for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
        self.rest = next((each.name for each in parameters if each.kind == each.VAR_POSITIONAL), None)
        self.others = next((each.name for each in parameters if each.kind == each.VAR_KEYWORD), None)
        self.named = {each.name for each in parameters} - {self.rest, self.others}
        first = {
            parameter.dtype: (each, name)  # and not the parameter, which offloading replaces
            for each in module.modules()
            for name, parameter in each._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        }
        self.dtypes = [(each, name, dtype) for dtype, (each, name) in first.items()]

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.entered.enter(self.path):
            return None
        self._check(module)
        paths = [self._by_position(index) for index in range(len(args))]
        keys = {name: self._by_name(name) for name in kwargs}
        for path, value in (*zip(paths, args, strict=True), *((keys[name], kwargs[name]) for name in kwargs)):
            self._check_argument(path, value)
        if not self.narrow and not self.powers:
            return None
        scaled = tuple(replaced(value, self._scaled, path) for path, value in zip(paths, args, strict=True))
        return scaled, {name: replaced(value, self._scaled, keys[name]) for name, value in kwargs.items()}

    def _by_position(self, index: int) -> str:
        """Return the path of a positional argument, as a trace names it."""
        if index < len(self.positional):
            return f"[{self.positional[index]!r}]"
        return f"[{self.rest!r}][{index - len(self.positional)}]"

    def _by_name(self, name: str) -> str:
        return f"[{name!r}]" if name in self.named else f"[{self.others!r}][{name!r}]"

    def _check_argument(self, path: str, value: Any) -> None:
        for leaf, _ in float_leaves(value, path):
            harmless = _harmless(leaf) and not (self.restored and CACHES.search(leaf))
            if leaf not in self.known and not harmless:
                raise ValueError(
                    f"to_fp16: {self.name} was scaled for calls without {leaf}, which would have to be scaled too: "
                    "undo, and pass a sample that holds it"
                )

    def _check(self, module: torch.nn.Module) -> None:
        """Refuse an adapter, a changed dtype and training."""
        if has_adapters(module):
            raise RuntimeError(
                f"to_fp16: an adapter was loaded into {self.name} after it was scaled, and writes unscaled values: "
                "undo, merge the adapter (merge_and_unload, fuse_lora), then call to_fp16 again"
            )
        for owner, name, dtype in self.dtypes:
            now = getattr(owner, name).dtype
            if now != dtype:
                raise RuntimeError(
                    f"to_fp16: parameters of {self.name} changed from {dtype} to {now} after it was "
                    "scaled: move it by to(device) alone, without half(), float() or a dtype"
                )
        if module.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"to_fp16: {self.name} is in training mode, and gradients of scaled parameters are scaled: call "
                "eval(), or undo and train the original"
            )

    def _scaled(self, path: str, leaf: Tensor) -> Tensor:
        """Return an input times its power of two, and in FP16 where the trace had it in the model's precision."""
        power = self.powers.get(path, 0)
        leaf = leaf * 2.0**-power if power else leaf
        return leaf.half() if path in self.narrow else leaf


def _harmless(path: str) -> bool:
    """Return whether a tensor under this name is never scaled, nor added to a tensor that may be."""
    return HARMLESS_NAMES.search(path) is not None


def has_adapters(module: torch.nn.Module) -> bool:
    """Return whether an adapter of PEFT is loaded; adapters that were there before the trace were merged or refused."""
    return bool(getattr(module, "_hf_peft_config_loaded", False) or getattr(module, "peft_config", None))


class _Outputs:
    """Multiplies hidden states that leave a model back, in FP32, because FP16 could not hold them."""

    def __init__(self, path: str, powers: dict[str, int], entered: Entered, known: set[str] | None) -> None:
        self.path, self.powers, self.entered, self.known = path, powers, entered, known

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not self.entered.leave(self.path):
            return output
        returned = [shared_path(path) for path, _ in float_leaves(output)]
        unknown = [path for path in returned if self.known is not None and path not in self.known]
        if unknown := [path for path in unknown if not _harmless(path)]:
            raise ValueError(
                f"to_fp16: {self.path or type(module).__name__} was scaled for calls that do not return {unknown[0]}, "
                "whose power of two is not known: undo, and pass a sample that returns it (output_hidden_states, "
                "return_dict)"
            )
        if not self.powers:
            return output
        return replaced(output, self._restored)

    def _restored(self, path: str, leaf: Tensor) -> Tensor:
        power = self.powers.get(shared_path(path), 0)
        return leaf.float() * 2.0**power if power else leaf


def hook_islands(models: Models, plan: Plan, tracer: Tracer) -> Iterable[Any]:
    """Run the modules that stay in FP32 on FP32 inputs, and round what they return to FP16.

    Attention masks among it, which are added to scores, become -65504 where they are lower.
    """
    for name in plan.islands:
        island = module_at(models, name)
        for module in island.modules():  # in between, a model may round to the precision that its caller passed
            yield module.register_forward_pre_hook(_widen, with_kwargs=True)
        results = tracer.results.get(name, {})
        yield island.register_forward_hook(
            _Narrow({path for path in results if tracer.operations[results[path]].scores})
        )


def _widen(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Return arguments in FP32; scores there may pass the lowest number of FP16, so masks get that of FP32 for it."""

    def wide(each: Tensor) -> Tensor:
        return each.float() if each.dtype == torch.float16 else each

    def wide_mask(mask: Tensor) -> Tensor:
        if mask.dtype != torch.float16:
            return mask
        return mask.float().masked_fill(mask <= -LARGEST, torch.finfo(torch.float32).min)

    named = {name: tree_map_only(Tensor, wide_mask if "mask" in name else wide, each) for name, each in kwargs.items()}
    return tree_map_only(Tensor, wide, args), named


class _Narrow:
    def __init__(self, masks: set[str]) -> None:
        self.masks = masks

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        return replaced(output, self._rounded)

    def _rounded(self, path: str, leaf: Tensor) -> Tensor:
        if leaf.dtype != torch.float32:
            return leaf
        return (leaf.clamp(-LARGEST, LARGEST) if path in self.masks else leaf).half()
