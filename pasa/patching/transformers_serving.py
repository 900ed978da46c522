"""Let transformers' continuous batching run models whose attention is PASA.

`generate_batch`, `init_continuous_batching` and `transformers serve` take only transformers' own attention and flash
attention, and there is no function to add a name. A model with another attention is refused or, where flash attention
is installed, switched to that. So the method of the manager that decides is replaced by one that leaves models with
PASA alone. All other models are treated as before.

From transformers 5.24 on, attention modules themselves update the paged cache. The attention function then gets packed
sequences, with their lengths and without a mask (`pasa/patching/transformers_packed.py`). In older versions the
attention function has to update the cache. PASA is refused there, in the oldest of them with the first request.
"""

from __future__ import annotations

import inspect
from functools import cache, wraps
from typing import Any

from pasa.patching.callbacks import BINDING
from pasa.patching.copying import PatchedName
from pasa.patching.transformers_attention import REGISTERED, RING
from pasa.patching.transformers_selection import uses_interface

UPDATE = ["self", "key_states", "value_states", "layer_idx", "kwargs"]
"""The parameters of `PagedAttentionCache.update` where modules call it, which leaves a layer's lengths in `kwargs`."""


@cache
def accept_continuous_batching() -> None:
    """Make continuous batching accept models with PASA, for the whole process; a second call changes nothing."""
    try:
        from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache
    except ImportError:  # before 4.54, or without accelerate in some versions
        return
    manager: Any = ContinuousBatchingManager
    decide, make = getattr(manager, "switch_to_cb_friendly_attn", None), manager.__init__
    update = [*inspect.signature(PagedAttentionCache.update).parameters]
    if decide is None or update != UPDATE:
        return

    @wraps(decide)
    def keep_pasa(self: Any, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Leave a model with PASA as it is; for any other model, decide as transformers does."""
        ours = runs_pasa(model)
        check_manager(self, ours)
        if ours:
            check_modules(model)
        else:
            decide(self, model, auto_switch_to_flash)

    @wraps(make)
    def make_checked(self: Any, *args: Any, **kwargs: Any) -> None:
        """Make the manager, and check its settings if the model runs PASA."""
        make(self, *args, **kwargs)
        if runs_pasa(self.model):
            check_settings(self.continuous_batching_config)

    manager.switch_to_cb_friendly_attn, manager.__init__ = keep_pasa, make_checked


def runs_pasa(model: Any) -> bool:
    """Return whether the config of a model names PASA, other than over several devices."""
    name = model.config._attn_implementation
    return (isinstance(name, PatchedName) and name != RING) or name == REGISTERED


def check_settings(config: Any) -> None:
    """Refuse CUDA graphs and compiled steps, which pad batches; lengths of sequences are read on the host as well."""
    settings = {
        f"use_cuda_graph={config.use_cuda_graph}": any(config.cuda_graph_booleans),
        "torch.compile": config.varlen_compile_config is not None or config.decode_compile_config is not None,
    }
    if refused := [name for name, is_set in settings.items() if is_set]:
        raise NotImplementedError(
            f"continuous batching: {' and '.join(refused)} is not supported with PASA: pass "
            "ContinuousBatchingConfig(use_cuda_graph=False), without settings for torch.compile"
        )


def check_manager(manager: Any, ours: bool) -> None:
    """Refuse a manager that transformers has kept from before the model's attention changed to PASA, or from it.

    Its batches would have a mask that PASA does not need, or lack one that the other attention needs.
    """
    if manager.__dict__.setdefault("_for_pasa", ours) != ours:
        raise ValueError(
            "the model's attention has changed since its manager of continuous batching was made: call "
            "model.destroy_cached_continuous_batching_manager() first"
        )


def check_modules(model: Any) -> None:
    """Refuse a model whose attention modules do not update the paged cache, or were left out of the patch.

    A module that was left out would need a mask. Modules that take `past_key_values`, as all do before transformers
    5.24, leave the paged cache to the attention function.
    """
    patched = model.config._attn_implementation != REGISTERED  # whatever reads that name runs PASA
    for name, module in model.named_modules():
        if not uses_interface(module):
            continue
        if "past_key_values" in inspect.signature(type(module).forward).parameters:
            raise NotImplementedError(
                f"continuous batching: {name} ({type(module).__name__}) leaves its paged cache to the attention "
                "function, which PASA does not support: install transformers 5.24 or newer, or call model.generate"
            )
        if patched and BINDING not in module.__dict__:
            raise NotImplementedError(
                f"continuous batching: {name} keeps its own attention, which cannot share a batch with PASA: patch "
                'all modules (policy="all"), or unpatch the model'
            )
