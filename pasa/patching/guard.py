"""Watch unpatched attention modules, and warn when one of their scores may have overflowed FP16.

The magnitude of a score q.k is at most the length of its query times the length of its key, and rotary embeddings
change neither length. So hooks on the projections keep the longest query and key of every head, on the device, and
count the calls after which their product exceeds 65504. The count is copied to the host without synchronisation and
read at the next call, so a warning comes one call late and nothing waits. Without an alarm no score has overflowed. An
alarm means that one may have.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FP16_MAX
from pasa.patching.callbacks import is_patched
from pasa.patching.copying import UncopiedHook
from pasa.prediction.families import Layer, Part


class _Watched:
    """The state of one watched module: its longest queries (Hq,) and keys (Hkv,), and a count of calls.

    The count is the number of calls after which a score beyond FP16 was possible.
    """

    def __init__(self, name: str, layer: Layer, module: torch.nn.Module) -> None:
        self.name, self.layer, self.warned = name, layer, False
        self._module = weakref.ref(module)  # weak, because the module's hooks hold this object
        self.longest: dict[str, Tensor] = {}
        self.count: Tensor | None = None  # calls that were too long, on the device
        self.seen: Tensor | None = None  # a copy of `count` on the host, one call behind

    @property
    def patched(self) -> bool:
        """Return whether another handle has patched the module since the guard was made."""
        module = self._module()
        return module is not None and is_patched(module)

    def see(self, sides: tuple[str, ...], output: Tensor) -> None:
        """Update the longest query or key with the output (..., heads * D) of a projection.

        `sides` names "query", "key" or both, since one fused matrix may give both.
        """
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
        if "key" in sides:  # k is projected after q, so both are known now
            self._count()

    def _count(self) -> None:
        beyond = ~(self.bound() <= FP16_MAX).all()  # so that NaN counts
        if self.count is None or self.count.device != beyond.device:
            self.count = torch.zeros((), dtype=torch.int32, device=beyond.device)
            self.seen = torch.zeros((), dtype=torch.int32, pin_memory=beyond.device.type == "cuda")
        self.count += beyond
        if self.seen is not None:
            if not torch.compiler.is_compiling():  # a value read on the host would break the graph
                self._warn_once(int(self.seen))
            self.seen.copy_(self.count, non_blocking=True)

    def _warn_once(self, calls: int) -> None:
        if calls and not self.warned:
            self.warned = True
            warnings.warn(
                f"{self.name} was left unpatched, and its queries and keys are long enough for a score beyond "
                f"{FP16_MAX:,.0f}: patch it (policy='all')",
                stacklevel=2,
            )

    def bound(self) -> Tensor:
        """Return the largest |q.k| that the lengths of queries and keys allow, (Hq,)."""
        query, key = self.longest["query"], self.longest["key"]
        return query * key.to(query.device).repeat_interleave(len(query) // len(key))


class Guard:
    """Hooks on the projections of unpatched attention modules.

    Parameters
    ----------
    watched : dict
        Maps the name of an attention module to its layer and to the model in which the layer's tensor names are found.
    handle : object
        The handle to which the guard belongs. The hooks keep it alive, and nothing else is done with it.
    """

    def __init__(self, watched: dict[str, tuple[Layer, torch.nn.Module]], handle: object) -> None:
        self._handle = handle
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
        """Pass the output of a projection on, unless its module has been patched since (forward hook)."""
        if not one.patched:
            one.see(sides, output)

    def patched(self) -> tuple[str, ...]:
        """Return the names of the watched modules that another handle has patched since."""
        return tuple(one.name for one in self._watched if one.patched)

    def alarms(self) -> tuple[tuple[str, str], ...]:
        """Return (module, largest possible score) for modules that may have overflowed; this waits for the device."""
        return tuple(
            (one.name, f"lengths of queries and keys allow scores up to {one.bound().max().item():,.0f}")
            for one in self._watched
            if one.count is not None and int(one.count)
        )

    def remove(self) -> None:
        """Remove the hooks; the counts stay readable."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
