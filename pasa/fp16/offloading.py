"""Read and replace the data of a model's tensors, also of those that accelerate offloads to host memory or to disk.

An offloaded parameter has no data: it is on the meta device. Before its module runs, a hook of accelerate loads it from
a map of weights, and makes a new parameter each time. A trace must know parameters by their objects. So while a model
is converted, :class:`Weights` loads them in the place of those hooks, into objects that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pasa.fp16.paths import join

Models = Mapping[str, torch.nn.Module]


def _align_hooks(models: Models) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """Yield the hooks of accelerate that offload the tensors of a module, each with the module and its path."""
    for prefix, model in models.items():
        for path, module in model.named_modules():
            hook = getattr(module, "_hf_hook", None)
            for each in getattr(hook, "hooks", [hook]):
                if getattr(each, "offload", False) is True and each.weights_map is not None:
                    yield join(prefix, path), module, each


def _names(module: torch.nn.Module, hook: Any) -> Iterator[str]:
    """Yield the names, within a module, of the parameters and buffers that a hook offloads."""
    inside = module.named_modules() if hook.place_submodules else [("", module)]
    for path, each in inside:
        held = [name for name, value in each._parameters.items() if value is not None]
        if hook.offload_buffers:
            kept = {name for name, value in each._buffers.items() if value is not None}
            held += sorted(kept - each._non_persistent_buffers_set)
        yield from (join(path, name) for name in held)


def _place(hook: Any, name: str) -> tuple[Any, str]:
    """Return the innermost map of weights that a hook reads a tensor from, and the tensor's key there."""
    weights, key = hook.weights_map, name
    while hasattr(weights, "prefix") and hasattr(weights, "dataset"):
        weights, key = weights.dataset, f"{weights.prefix}{key}"
    if key in (state := getattr(weights, "state_dict", {})):
        return state, key
    return weights, key


def _identity(hook: Any, name: str) -> object:
    """Return what tied tensors on one device share: their memory, or their place in a file."""
    weights, key = _place(hook, name)
    if isinstance(weights, dict):
        tensor = weights[key]
        return hook.execution_device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    entry = weights.index[key]
    place = (
        (file, entry.get("weight_name", key)) if (file := entry.get("safetensors_file")) else (weights.save_folder, key)
    )
    return hook.execution_device, *place


def offloaded(models: Models) -> dict[str, bool]:
    """Return the paths of offloaded parameters and buffers, each with whether it is on disk."""
    return {
        join(path, name): not isinstance(_place(hook, name)[0], dict)
        for path, module, hook in _align_hooks(models)
        for name in _names(module, hook)
    }


def forget(models: Models, name: str) -> None:
    """Let the hooks of accelerate forget a buffer that is gone; they look for it when they are removed themselves."""
    for _, _, hook in _align_hooks(models):
        getattr(hook, "original_devices", {}).pop(name, None)


def in_groups(model: torch.nn.Module) -> bool:
    """Return whether hooks of diffusers offload the modules of a model in groups."""
    registries = (getattr(module, "_diffusers_hook", None) for module in model.modules())
    return any("group_offloading" in getattr(registry, "hooks", ()) for registry in registries)


def _device(hook: Any) -> torch.device:
    """Return the device to which a hook loads tensors."""
    return torch.device("cpu" if hook.execution_device is None else hook.execution_device)


def devices(models: Models) -> set[torch.device]:
    """Return the devices on which models run; for an offloaded parameter that is where it is loaded to."""
    found = {each.device for model in models.values() for each in model.parameters() if not each.is_meta}
    return found | {_device(hook) for _, _, hook in _align_hooks(models)}


@contextmanager
def moves_unseen(
    modules: Iterable[torch.nn.Module], unseen: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Let hooks of accelerate move models outside of a trace: a move reads all parameters of a model, and uses none."""

    def hidden(move: Callable[..., Any]) -> Callable[..., Any]:
        def to(*args: Any, **kwargs: Any) -> Any:
            with unseen():
                return move(*args, **kwargs)

        return to

    moved = {module: vars(module).get("to") for module in modules if hasattr(module, "_hf_hook")}
    for module in moved:
        vars(module)["to"] = hidden(module.to)
    try:
        yield
    finally:
        for module, before in moved.items():
            vars(module).pop("to", None)
            if before is not None:
                vars(module)["to"] = before


@dataclass(eq=False)
class _Held:
    """An offloaded tensor: the object that stands for it in its modules, and a function that returns its data."""

    tensor: Tensor
    device: torch.device
    load: Callable[[], Tensor]
    on_disk: bool
    users: int = 0

    def enter(self) -> None:
        """Load the data for a module that runs."""
        if not self.users:
            self.tensor.data = self.load().to(
                self.device, copy=not _is_parameter(self.tensor)
            )  # models write to buffers
        self.users += 1

    def leave(self) -> None:
        """Drop the data, unless another module that runs has loaded it too."""
        self.users -= 1
        if not self.users:
            self.empty(self.tensor.dtype)

    def empty(self, dtype: torch.dtype) -> None:
        """Let the tensor have its shape and one number in memory."""
        self.tensor.data = torch.zeros((), dtype=dtype, device=self.device).expand(self.tensor.shape)


class Weights:
    """The data of the parameters and buffers of some models, wherever they are kept.

    Inside a ``with`` block offloaded tensors have objects that stay, and hooks of this class load them. At its end they
    are on the meta device again, and the hooks of accelerate read their new data from new maps of weights.

    Parameters
    ----------
    models : mapping of str to torch.nn.Module
    """

    def __init__(self, models: Models) -> None:
        self.models = models
        self._held: dict[int, _Held] = {}
        self._taken: list[tuple[torch.nn.Module, Any, bool, list[Any]]] = []

    def __enter__(self) -> Weights:
        sources: dict[object, _Held] = {}
        listed = [
            (module, hook, {name: _identity(hook, name) for name in _names(module, hook)})
            for _, module, hook in _align_hooks(self.models)
        ]
        for module, hook, names in listed:  # all before the first module is changed, because data may not fit
            for name, source in names.items():
                if source not in sources:
                    sources[source] = self._hold(module, hook, name)
        for module, hook, names in listed:
            for name, source in names.items():
                _put(module, name, sources[source].tensor)
            here = list({id(held): held for held in (sources[source] for source in names.values())}.values())
            handles = [
                module.register_forward_pre_hook(lambda *_, held=here: _each(held, _Held.enter)),
                module.register_forward_hook(lambda *_, held=here: _each(held, _Held.leave), always_call=True),
            ]
            on_disk = any(held.on_disk for held in here)
            self._taken.append((module, hook, on_disk, handles))
            hook.offload = False
        return self

    def _hold(self, module: torch.nn.Module, hook: Any, name: str) -> _Held:
        weights, key = _place(hook, name)
        device, on_disk, meta = _device(hook), not isinstance(weights, dict), _owner(module, name)

        def load() -> Tensor:
            data: Tensor = weights[key].to(meta.dtype)
            if data.shape != meta.shape:  # accelerate compares them only when the hook loads
                raise ValueError(
                    f"to_fp16: {key} has the shape {tuple(data.shape)}, and the model's configuration says "
                    f"{tuple(meta.shape)}: correct its config.json, or load all files of the model again"
                )
            return data

        empty = torch.zeros((), dtype=meta.dtype, device=device).expand(meta.shape)
        tensor = torch.nn.Parameter(empty, meta.requires_grad) if isinstance(meta, torch.nn.Parameter) else empty
        held = self._held[id(tensor)] = _Held(tensor, device, load if on_disk else partial(_same, load()), on_disk)
        return held

    def __exit__(self, *error: Any) -> None:
        for module, hook, on_disk, handles in self._taken:
            for handle in handles:
                handle.remove()
            weights = {}
            for name in list(_names(module, hook)):
                tensor = _owner(module, name)
                weights[name] = self._held[id(tensor)].load() if id(tensor) in self._held and not on_disk else tensor
                meta = torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)
                _put(module, name, torch.nn.Parameter(meta, tensor.requires_grad) if _is_parameter(tensor) else meta)
            if not on_disk:
                hook.weights_map = {name: tensor.detach().cpu() for name, tensor in weights.items()}
            for copies in (hook.tied_params_map or {}).values():
                copies.clear()  # by addresses of memory that is free now, and may soon hold another tensor
            hook.offload = True
        self._held, self._taken = {}, []

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is offloaded."""
        return id(tensor) in self._held

    def load(self, tensor: Tensor) -> Tensor:
        """Return the data of a tensor, in host memory if it is offloaded."""
        held = self._held.get(id(tensor))
        return tensor.data if held is None else held.load()

    def loader(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns the data which a tensor has now; it reads anew what is on disk."""
        held = self._held.get(id(tensor))
        if held is not None:
            return held.load
        return partial(_same, tensor.data)

    def set(self, tensor: Tensor, original: Callable[[], Tensor], change: Callable[[Tensor], Tensor]) -> None:
        """Give a tensor the data ``change(original())``, which is computed at each load if the tensor is on disk."""
        held = self._held.get(id(tensor))
        if held is None:
            tensor.data = change(original()).to(tensor.device)
            return
        if held.on_disk:
            held.load = lambda: change(original())
            held.empty(change(torch.zeros(tensor.shape, dtype=held.tensor.dtype)).dtype)
            return
        data = change(original())
        held.load = partial(_same, data)
        held.empty(data.dtype)


def _same(data: Tensor) -> Tensor:
    return data


def _each(held: list[_Held], act: Callable[[_Held], None]) -> None:
    for each in held:
        act(each)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def _owner(module: torch.nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by its name within a module."""
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), attribute)
    return tensor


def _put(module: torch.nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    (owner._parameters if attribute in owner._parameters else owner._buffers)[attribute] = tensor  # type: ignore[assignment]
