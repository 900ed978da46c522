"""Keep torch's `scaled_dot_product_attention` as it was when pasa was imported.

A program may set `torch.nn.functional.scaled_dot_product_attention = pasa.scaled_dot_product_attention`. From then on
pasa must not look the function up by its name, because it would call itself. Whatever in pasa needs torch's own
attention takes it from here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional


def _original() -> Callable[..., Tensor]:
    """Return torch's function, also if this module is loaded again after the name was given to pasa's function."""
    current: Callable[..., Tensor] = functional.scaled_dot_product_attention
    replaced = (current.__module__ or "").partition(".")[0] == "pasa"
    return torch._C._nn.scaled_dot_product_attention if replaced else current


torch_sdpa = _original()
