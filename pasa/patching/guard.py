"""Watches attention that was left unpatched: could any score have overflowed FP16 after all?

A score is at most the length of its query times that of its key, and rotary embeddings change neither. So hooks on the
projections follow the longest query and key of every head, on the device, and count the calls after which the product
of the two is beyond FP16. The count is copied to the host without waiting for it, and read there at the next call: a
warning comes a call late, and nothing waits. No alarm means that no score overflowed; an alarm, that one may have.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FORMATS
from pasa.patching.copying import UncopiedHook
from pasa.patching.onlookers import is_patched
from pasa.prediction.families import Layer, Part

if TYPE_CHECKING:
    from pasa.patching.handle import PatchHandle

LIMIT = FORMATS["fp16"].max


class _Watched:
    """One attention module: its longest queries (Hq,) and keys (Hkv,) so far, and how many calls were too long."""

    def __init__(self, name: str, layer: Layer, module: torch.nn.Module) -> None:
        self.name, self.layer, self.told = name, layer, False
        self._module = weakref.ref(module)  # which holds the hooks that hold this
        self.longest: dict[str, Tensor] = {}
        self.count: Tensor | None = None  # on the device
        self.seen: Tensor | None = None  # on the host, one call behind

    @property
    def patched(self) -> bool:
        """Whether another handle has patched the module since."""
        module = self._module()
        return module is not None and is_patched(module)

    def see(self, sides: tuple[str, ...], output: Tensor) -> None:
        """Look at what a projection gave (..., heads * D); one matrix may be both sides."""
        for side in sides:
            part: Part = getattr(self.layer, side)
            heads = self.layer.heads if side == "query" else self.layer.kv_heads
            rows = output.detach()[..., slice(*part.rows)] if part.rows is not None else output.detach()
            if self.layer.kind != "head":  # a norm of each head gives (..., heads, D)
                rows = rows.unflatten(-1, (heads, -1))
            lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)
            longest = lengths.flatten(0, -2).amax(0)
            before = self.longest.get(side)
            self.longest[side] = longest if before is None else torch.maximum(before.to(longest.device), longest)
        if "key" in sides:  # of q and k, k comes last
            self._count()

    def _count(self) -> None:
        beyond = ~(self.bound() <= LIMIT).all()  # so that NaN counts
        if self.count is None or self.count.device != beyond.device:
            self.count = torch.zeros((), dtype=torch.int32, device=beyond.device)
            self.seen = torch.zeros((), dtype=torch.int32, pin_memory=beyond.device.type == "cuda")
        self.count += beyond
        if self.seen is not None:
            if not torch.compiler.is_compiling():  # a value read on the host would break the graph
                self._warn_once(int(self.seen))
            self.seen.copy_(self.count, non_blocking=True)

    def _warn_once(self, calls: int) -> None:
        if calls and not self.told:
            self.told = True
            warnings.warn(
                f"{self.name} was left unpatched, and its queries and keys are long enough for a score beyond "
                f"{LIMIT:,.0f}: patch it (policy='all')",
                stacklevel=2,
            )

    def bound(self) -> Tensor:
        """Largest |q.k| that the lengths allow, (Hq,)."""
        query, key = self.longest["query"], self.longest["key"]
        return query * key.to(query.device).repeat_interleave(len(query) // len(key))


class Guard:
    """Hooks on the projections of unpatched attention modules.

    Parameters
    ----------
    watched : dict
        (name of the attention module) -> (its layer, the model that the layer's tensor names are of).
    handle : PatchHandle
        That the guard belongs to; it lives as long as the hooks do.
    """

    def __init__(self, watched: dict[str, tuple[Layer, torch.nn.Module]], handle: PatchHandle) -> None:
        self.handle = handle
        self._watched: list[_Watched] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for name, (layer, model) in watched.items():
            one = _Watched(name, layer, model.get_submodule(layer.name))
            self._watched.append(one)
            query, key = (part.weight.removesuffix(".weight") for part in (layer.query, layer.key))
            sides = {query: ("query", "key")} if query == key else {query: ("query",), key: ("key",)}
            for path, which in sides.items():
                hook: Callable[..., None] = UncopiedHook(partial(self._see, one, which))
                self._hooks.append(model.get_submodule(path).register_forward_hook(hook))

    def _see(self, one: _Watched, sides: tuple[str, ...], module: torch.nn.Module, args: Any, output: Tensor) -> None:
        """Forward hook of a projection."""
        if not one.patched:
            one.see(sides, output)

    def patched(self) -> tuple[str, ...]:
        """Modules that another handle has patched since."""
        return tuple(one.name for one in self._watched if one.patched)

    def alarms(self) -> tuple[tuple[str, str], ...]:
        """Modules that may have overflowed, with what their queries and keys allow; waits for the device."""
        return tuple(
            (one.name, f"lengths of queries and keys allow scores up to {one.bound().max().item():,.0f}")
            for one in self._watched
            if one.count is not None and int(one.count)
        )

    def remove(self) -> None:
        """Take the hooks out; what was counted stays readable."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
