"""Shows the attention calls of a running model to a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pasa


class AttentionCalls(TorchDispatchMode):
    """Context manager that calls a function with q and k of every :func:`pasa.attention` call inside, in order.

    With `values` also with v. With `counts` also with the operator's counts (B, Hq, 6), which it makes while
    diagnostics are recorded.
    """

    def __init__(self, on_call: Callable[..., None], *, values: bool = False, counts: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_call, self.tensors, self.counts = on_call, 2 + values, counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and pass its tensors on if it is attention."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.pasa.attention.default:
            self.on_call(*args[: self.tensors], *([result[3]] if self.counts else []))
        return result


def show_layers(model: Any, ids: Tensor, on_layer: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """Let a model read token ids (1, S) once, and call a function with q, k and v of each layer, in order."""
    with torch.no_grad(), pasa.patch_pipeline(model), AttentionCalls(on_layer, values=True):
        model(ids, use_cache=False)
