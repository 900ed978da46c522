"""Put PASA behind torch's flash attention, for `torch.nn.attention.activate_flash_attention_impl("PASA")`.

From torch 2.11 on, a library can replace the kernels that `scaled_dot_product_attention` calls when it chooses flash
attention. The registration here is of the two operators behind that choice, for CUDA: forward and backward. Calls that
torch gives to another backend (with a mask, or where cuDNN is preferred) are not reached, and neither are
`torch.nn.attention.varlen` and nested tensors. To reach every FP16 call, replace the function itself by
`pasa.scaled_dot_product_attention`.

The two functions are tested on a CPU, by registering them for that device. On a GPU they have not been run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pasa.checks import DEFAULT
from pasa.ops import operators
from pasa.ops.attention.call import Call

NAME = "PASA"
FORWARD, BACKWARD = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
_inside = threading.local()


def register() -> str:
    """Register the implementation under the name "PASA"; return the line of code that activates it.

    Raises
    ------
    ImportError
        This torch has no registry of flash attention.
    """
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise ImportError(f"torch {torch.__version__} cannot replace its flash attention: install torch 2.11 or newer")
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=activate)
    return f"torch.nn.attention.activate_flash_attention_impl({NAME!r})"


class Handle:
    """The replacement in force; torch keeps it, and calls `remove` when another implementation is activated."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        """Give the operators back to torch."""
        if self.library is not None:
            self.library._destroy()
        self.library = None


def activate(key: str = "CUDA") -> Handle:
    """Replace the two operators for a dispatch key, and return the handle that undoes it.

    The kernels in force before still serve BF16 calls, and the calls that PASA's own backends make.
    """
    kernels = Kernels(key)
    library = torch.library.Library("aten", "IMPL")
    # Another library may have replaced them before.
    library.impl(FORWARD, kernels.forward, key, with_keyset=True, allow_override=True)
    library.impl(BACKWARD, kernels.backward, key, with_keyset=True, allow_override=True)
    return Handle(library)


class Kernels:
    """The two replacements, and the kernels that they replace."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.originals = {name: _kernel(name, key) for name in (FORWARD, BACKWARD)}

    def forward(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """Attend; the operator's arguments and results, with causality aligned bottom-right as in flash attention."""
        if query.dtype != torch.float16 or getattr(_inside, "attending", False):
            arguments = (query, key, value, dropout_p, is_causal, return_debug_mask)
            results: tuple[Any, ...] = self._original(FORWARD, query)(keys, *arguments, scale=scale)
            return results
        for name, setting in (("dropout_p", dropout_p), ("return_debug_mask", return_debug_mask)):
            if setting:
                raise NotImplementedError(f"flash attention by pasa: {name}={setting!r} is not supported: leave it out")
        with _attending():
            out, lse, *_ = operators.attention(query, key, value, is_causal=is_causal, scale=scale)
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # dropout would need it
        nothing = random_state.new_zeros(()), query.new_empty(0)
        return out, lse, None, None, query.shape[2], key.shape[2], random_state, *nothing

    def backward(
        self,
        keys: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        *rest: Any,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value; `is_causal` is the sixth of the remaining arguments."""
        if query.dtype != torch.float16 or getattr(_inside, "attending", False):
            arguments = (grad_out, query, key, value, out, logsumexp, *rest)
            grads: tuple[Tensor, Tensor, Tensor] = self._original(BACKWARD, query)(keys, *arguments, scale=scale)
            return grads
        server = operators.choose(Call(query, key, value, 1.0), None, *DEFAULT.arguments)[2]
        switches = (None, None, rest[5], scale, -1, -1, 0.0, False, False, server)
        with _attending():
            dq, dk, dv, *_ = operators.attention_backward(grad_out, None, query, key, value, *switches)
        return dq, dk, dv

    def _original(self, name: str, query: Tensor) -> Any:
        kernel = self.originals[name]
        if kernel is None:
            raise NotImplementedError(
                f"flash attention by pasa: query is {query.dtype}, which is left to torch, and torch has no flash "
                f"attention for {self.key} here: call torch.nn.attention.restore_flash_attention_impl()"
            )
        return kernel.call_boxed


def _kernel(name: str, key: str) -> Any:
    """Return the kernel that an operator has for a dispatch key; None if it has none, as for CUDA on a CPU build."""
    operator = getattr(torch.ops.aten, name).default
    present = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
    return torch.library.get_kernel(operator, key) if present else None


@contextmanager
def _attending() -> Iterator[None]:
    """Mark this thread as attending, so that a backend's own call of flash attention gets torch's kernel."""
    _inside.attending = True
    try:
        yield
    finally:
        _inside.attending = False
