"""Records the peaks of residual streams and of MLPs in a running model, block by block.

Attention that cannot overflow helps neither. `pasa to-fp16` and `pasa.to_fp16` do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pasa.ops.numerics.formats import FP16_MAX

Record = dict[str, Any]
LISTS = (nn.ModuleList, nn.Sequential)
PARTS = {"residual": "residual stream", "mlp": "MLP"}
PRODUCTS = {
    *("mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "convolution", "conv2d"),
    *("_grouped_mm", "grouped_mm_fallback"),  # experts of transformers
}
"""Names of the operators that multiply activations and weights."""
REMEDY = "`pasa to-fp16 FOLDER OUT` or `pasa.to_fp16(model)`"


class StreamPeaks(TorchDispatchMode):
    """Context manager that records the residual stream and the MLP of every block of some models.

    A block is a module in a list of modules that has a norm of its own, such as a decoder layer. Values that are not
    finite are left out.

    Attributes
    ----------
    layers : dict of str to dict
        A record for each block, in the order in which blocks first run: its ``layer`` (path); ``residual``, the largest
        magnitude that its norms read or that it returns; ``mlp``, the largest magnitude that enters a product with
        weights outside of its attention, as the product of gate and up does, or None without such a product.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: dict[str, Record] = {}
        self._models = models
        self._running: list[str | None] = []  # blocks, innermost last; None while attention runs
        self._hooks: list[Any] = []

    def __enter__(self) -> Any:
        for prefix, model in self._models.items():
            found = blocks(model)
            for path, module in model.named_modules():
                if path in found:
                    self._watch(".".join(filter(None, (prefix, path))), module)
                elif "attention" in (kind := type(module).__name__.lower()) or "attn" in kind:
                    self._around(None, module)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _watch(self, name: str, block: nn.Module) -> None:
        self._around(name, block)
        see = partial(self._see, name, "residual")
        self._hooks.append(block.register_forward_hook(lambda module, args, output: see(output)))
        for norm in filter(_is_norm, block.children()):
            self._hooks.append(norm.register_forward_pre_hook(lambda module, args: see(args[:1])))

    def _around(self, name: str | None, module: nn.Module) -> None:
        """Put a name on the stack while a module runs."""
        self._hooks.append(module.register_forward_pre_hook(lambda *_: self._running.append(name)))
        leave = module.register_forward_hook(lambda *_: self._running.pop() and None, always_call=True)
        self._hooks.append(leave)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record its activation if it is a product outside of attention."""
        name = func.overloadpacket.__name__
        if name in PRODUCTS and self._running and (block := self._running[-1]):
            self._see(block, "mlp", activation(name, args))
        return func(*args, **(kwargs or {}))

    def _see(self, block: str, part: str, values: Any) -> None:
        record = self.layers.setdefault(block, {"layer": block, "residual": 0.0, "mlp": None})
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() and not leaf.is_meta:
                height = float(leaf.detach().abs().amax())
                record[part] = max(height if math.isfinite(height) else 0.0, record[part] or 0.0)


def blocks(model: nn.Module) -> set[str]:
    """Return the paths of the modules in lists that have a norm of their own, not in a further list."""
    lists = ((path, each) for path, each in model.named_modules() if isinstance(each, LISTS))
    return {
        f"{path}.{name}".strip(".") for path, each in lists for name, child in each.named_children() if has_norm(child)
    }


def has_norm(module: nn.Module) -> bool:
    """Return whether a module has a norm below it, outside of lists of modules."""
    return any(_is_norm(child) or (not isinstance(child, LISTS) and has_norm(child)) for child in module.children())


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def activation(name: str, operands: Any) -> Tensor:
    """Return what a product multiplies with weights; of a batched product of experts, the smaller operand."""
    pair: tuple[Tensor, Tensor] = operands[name in ("addmm", "baddbmm") :][:2]
    return min(pair, key=torch.numel) if name in ("bmm", "baddbmm") else pair[0]


@contextmanager
def in_fp32(models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Hold the parameters and buffers of some models in FP32 instead of FP16; they come back bit for bit."""
    tensors = [each for model in models.values() for each in (*model.parameters(), *model.buffers())]
    halves = [each for each in tensors if each.dtype == torch.float16]
    for each in halves:
        each.data = each.data.float()
    try:
        yield
    finally:
        for each in halves:
            each.data = each.data.half()


def largest(records: Iterable[Record]) -> list[Record]:
    """Return the records with the largest peaks first."""
    return sorted(records, key=lambda each: -peak(each))


def peak(record: Mapping[str, Any]) -> float:
    """Return the larger of the two peaks of a block."""
    return float(max(record["residual"], record["mlp"] or 0.0))


def beyond(records: Iterable[Record], part: str) -> list[Record]:
    """Return the blocks whose "residual" or "mlp" passes 65504, in the order of the run."""
    return [each for each in records if (each[part] or 0.0) > FP16_MAX]
