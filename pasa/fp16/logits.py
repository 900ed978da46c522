"""Return a language model's logits in FP32, from FP16 operands.

At 32 the numbers of FP16 are 0.03 apart, so that logits near to each other become equal. Rounding FP32's own logits to
FP16 changes the most probable token of 3 in 1,000 (Gemma-3-270m), more than all FP16 arithmetic before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pasa.fp16.paths import join

ROWS = 16384
"""Rows of the vocabulary that are converted to FP32 at a time, where no kernel returns FP32: 64 MB at width 1,024."""


def widen_logits(models: Mapping[str, torch.nn.Module]) -> list[tuple[str, Callable[[], None]]]:
    """Let the heads of language models return FP32; return their paths, each with a function that undoes it."""
    widened: list[tuple[str, Callable[[], None]]] = []
    for prefix, model in models.items():
        embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = embeddings()
        if type(head) is not torch.nn.Linear or head.weight.dtype != torch.float16:
            continue
        hooked = "_hf_hook" in vars(head)  # a hook of accelerate replaces the forward, and calls the old one
        name = "_old_forward" if hooked else "forward"
        if name in vars(head) and not (hooked and vars(head)[name] == type(head).forward.__get__(head)):
            continue
        product = Product(head)
        setattr(head, name, product)
        path = next(name for name, module in model.named_modules() if module is head)
        widened.append((join(prefix, path), partial(_narrow, head, product)))
    return widened


def _narrow(head: torch.nn.Linear, product: Product) -> None:
    """Let a head have its own forward again; since then, a hook of accelerate may have been added or removed."""
    if vars(head).get("forward") is product:
        del head.forward
    elif vars(head).get("_old_forward") is product:
        vars(head)["_old_forward"] = type(head).forward.__get__(head)


class Product:
    """The forward of a linear layer whose result is FP32; a copy of the layer has a copy of it."""

    def __init__(self, head: torch.nn.Linear) -> None:
        self.head = head

    def __call__(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias`` in FP32."""
        weight, bias = self.head.weight, self.head.bias
        rows = input.reshape(-1, input.shape[-1])
        if weight.is_cuda and rows.dtype == weight.dtype and "dtype" in torch.ops.aten.mm.overloads():
            product = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        else:
            wide = rows.float()
            product = torch.cat([wide @ part.float().t() for part in weight.split(ROWS)], dim=-1)
        result = product if bias is None else product + bias.float()
        return result.reshape(*input.shape[:-1], weight.shape[0])
