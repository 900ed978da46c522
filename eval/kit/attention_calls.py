"""Shows the attention calls of a running model to a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class AttentionCalls(TorchDispatchMode):
    """Context manager that calls a function with q and k of every :func:`pasa.attention` call inside, in order."""

    def __init__(self, on_call: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_call = on_call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and pass its q and k on if it is attention."""
        if func is torch.ops.pasa.attention.default:
            self.on_call(args[0], args[1])
        return func(*args, **(kwargs or {}))
