"""Apply powers of two to the parameters and epsilons of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from pasa.fp16.paths import join
from pasa.fp16.planning import Plan

Models = Mapping[str, torch.nn.Module]
COLLECTING = "_output_capturing_hooks_installed"  # set by transformers in a model that has returned hidden states


def named_tensors(models: Models) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point parameters and buffers of some models by path, each tensor once."""
    met: set[int] = set()
    for prefix, model in models.items():
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and id(tensor) not in met:
                met.add(id(tensor))
                yield join(prefix, path), tensor


def tied_names(models: Models) -> Iterator[tuple[str, str]]:
    """Yield all names of floating-point parameters, each with the first name of the same object."""
    firsts = {id(tensor): name for name, tensor in named_tensors(models)}
    for prefix, model in models.items():
        for path, tensor in model.named_parameters(remove_duplicate=False):
            if id(tensor) in firsts:
                yield join(prefix, path), firsts[id(tensor)]


def computed_buffers(models: Models) -> set[str]:
    """Return the buffers that no checkpoint holds, such as rotary frequencies."""
    return {
        join(prefix, path, name)
        for prefix, model in models.items()
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


@contextmanager
def unchanged(models: Models) -> Iterator[None]:
    """Let each run inside begin with the same state, and leave none: models write to copies of their buffers.

    Hooks by which transformers collects hidden states go again. They would slow down every later call, and torch.save
    refuses them.

    Raises
    ------
    NotImplementedError
        A model has registered another buffer.
    """
    kept = {name: buffer.data for name, buffer in _buffers(models)}
    for name, buffer in _buffers(models):
        buffer.data = kept[name].clone()
    modules = {module for model in models.values() for module in model.modules()}
    hooks = {module: {*module._forward_hooks} for module in modules}
    fresh = [module for module in modules if COLLECTING not in vars(module)]
    try:
        yield
    finally:
        for module, numbers in hooks.items():
            for number in module._forward_hooks.keys() - numbers:
                if module._forward_hooks[number].__module__.startswith("transformers."):
                    del module._forward_hooks[number]
        for module in fresh:
            vars(module).pop(COLLECTING, None)
        for name, buffer in _buffers(models):
            buffer.data = kept.get(name, buffer.data).to(buffer.device)  # offloading may have moved the model
    if new := [name for name, _ in _buffers(models) if name not in kept]:
        raise NotImplementedError(
            f"to_fp16: the model registers the buffer {new[0]} while it runs: load it again, and run it once before "
            "to_fp16"
        )


def _buffers(models: Models) -> Iterator[tuple[str, Tensor]]:
    for prefix, model in models.items():
        for path, buffer in model.named_buffers():
            yield join(prefix, path), buffer


def parameter_names(models: Models) -> list[str]:
    """Return the paths of the floating-point parameters that :func:`named_tensors` yields, without buffers."""
    parameters = {id(each) for model in models.values() for each in model.parameters()}
    return [name for name, tensor in named_tensors(models) if id(tensor) in parameters]


def module_at(models: Models, path: str) -> torch.nn.Module:
    """Return the module at a path that begins with the name of its model."""
    prefix, _, rest = path.partition(".")
    return models[prefix].get_submodule(rest) if prefix in models else models[""].get_submodule(path)


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Return a tensor in FP32, or as it is where that is wider."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def scaled(name: str, tensor: Tensor, plan: Plan) -> Tensor:
    """Return a parameter times its powers of two, in the same dtype; exact but for offsets, which are FP32 or wider."""
    if name in plan.offsets:
        power, number = plan.offsets[name]
        wide = (tensor.double() + number) * 2.0**-power - number
        return wide.to(torch.promote_types(tensor.dtype, torch.float32))
    if name not in plan.scales:
        return tensor
    result = tensor.clone()
    for dim, cut, power in plan.scales[name]:
        part = result if cut is None else result.transpose(dim, -1)[..., slice(*cut)]
        part.mul_(2.0**-power)
    return result


def largest(tensor: Tensor, *, mask: bool) -> float:
    """Return the largest finite magnitude of a tensor, or its largest number if it may be a mask.

    Infinities stay what they are in FP16, and a mask's large negative numbers may become infinite.
    """
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor.masked_fill(tensor.isinf(), 0))
    return float(high if mask else torch.maximum(high, -low))


def scale_constants(models: Models, plan: Plan, *, back: bool = False) -> None:
    """Scale the epsilons of norms, or scale them back."""
    for place, power in plan.constants.items():
        module = module_at(models, place.module)
        setattr(module, place.attribute, getattr(module, place.attribute) * 2.0 ** (power if back else -power))
