"""Find the backends that will serve the calls of patched modules, by the modules' dtypes and head dimensions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pasa.config import PasaConfig
from pasa.ops import registry

USUAL = (torch.float16, 64)  # assumed dtype and head dimension of a module that states none


def backends_by_device(
    modules: Iterable[torch.nn.Module], config: PasaConfig | None, backend: str | None
) -> tuple[tuple[str, str], ...]:
    """Return (device type, backend) pairs: which backend serves these modules' calls on this machine's devices."""
    calls = {(_dtype(module), head_dim(module) or USUAL[1]) for module in modules}
    return registry.servers(calls or (USUAL,), config, backend)


def _dtype(module: torch.nn.Module) -> torch.dtype:
    """Return the dtype of a module's weights, which is that of its queries unless autocast changes it."""
    dtypes = (each.dtype for each in module.parameters() if each.is_floating_point())
    dtype = next(dtypes, USUAL[0])
    return dtype if dtype in (torch.float16, torch.bfloat16, torch.float32) else USUAL[0]  # 8-bit weights


def head_dim(module: Any) -> int | None:
    """Return the head dimension of an attention module of transformers or diffusers; None if it states none."""
    for holder, widths, counts in (
        (module, ("inner_dim", "inner_kv_dim"), ("heads",)),
        (getattr(module, "config", None), ("hidden_size", "n_embd", "d_model"), ("num_attention_heads", "n_head")),
    ):
        # In latent attention the config's `head_dim` is that of the rotated part only, so `qk_head_dim` comes first.
        for name in ("qk_head_dim", "head_dim", "attention_head_size"):
            if isinstance(size := getattr(holder, name, None), int):
                return size
        width, count = (_first(holder, names) for names in (widths, counts))
        if width and count:
            return width // count
    return None


def _first(holder: object, names: tuple[str, ...]) -> int | None:
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
