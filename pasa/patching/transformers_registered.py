"""Register the attention "pasa" with transformers, for `attn_implementation="pasa"` and `set_attn_implementation`.

transformers looks an attention up by name, and its masks in a second registry. Here the name is registered once, for
the whole process, and every attention module whose config carries the name runs PASA with default settings.
`pasa/patching/transformers.py` registers further names, each while a patch is in force.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.utils import logging

from pasa.patching.transformers_attention import REGISTERED, Binding, run_pasa
from pasa.patching.transformers_masks import make_mask
from pasa.patching.transformers_selection import is_named_attention
from pasa.patching.transformers_serving import accept_continuous_batching

DEFAULT = Binding(config=None, backend=None, handle=None)
_LOGGER = logging.get_logger(__name__)


def register() -> str:
    """Register attention and masks under the name "pasa"; return the line of code that selects them."""
    AttentionInterface.register(REGISTERED, attend_registered)
    AttentionMaskInterface.register(REGISTERED, make_registered_mask)
    accept_continuous_batching()
    return f"from_pretrained(..., attn_implementation={REGISTERED!r}) or model.set_attn_implementation({REGISTERED!r})"


def attend_registered(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with PASA and its default settings, in a module whose config names the attention "pasa".

    As with SDPA, ``output_attentions=True`` returns None for the weights, and transformers' log says so once.
    """
    if kwargs.pop("output_attentions", False):
        _LOGGER.warning_once(
            'attn_implementation="pasa" never forms attention weights, so output_attentions=True returns None for '
            'them: call model.set_attn_implementation("eager")'
        )
    explicit = reach_in_file(type(module).__module__) != "all"
    return run_pasa(DEFAULT, module, query, key, value, attention_mask, explicit_masks=explicit, **kwargs)


def make_registered_mask(*, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """Build a mask for a model whose config names the attention "pasa".

    A mask may be left out in favour of `is_causal` only if every attention module that may read it goes through the
    attention interface. A module that computes attention itself adds the mask to its scores, as after eager attention,
    so it needs the masks of eager attention.

    Raises
    ------
    NotImplementedError
        No attention module of the model goes through the interface, so PASA would never run.
    """
    reach = "some" if config is None else reach_of_models(type(config))
    if reach == "none":
        raise NotImplementedError(
            f'{type(config).__name__}: attn_implementation="pasa" has no effect, because this model computes its '
            'attention itself, not through AttentionInterface: pass attn_implementation="eager", then call '
            "pasa.patch_pipeline, which can patch some of these models"
        )
    if reach == "all":
        return make_mask(config=config, **kwargs)
    mask: torch.Tensor | None = eager_mask(config=config, **kwargs)
    return mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def reach_of_models(config_class: type) -> str:
    """Return whether "all", "some" or "none" of the attention of this config's models uses the attention interface."""
    models = [each for each in _subclasses(PreTrainedModel) if each.config_class is config_class]
    reaches = {reach_in_file(each.__module__) for each in models}
    return reaches.pop() if len(reaches) == 1 else "some"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def reach_in_file(name: str) -> str:
    """Return whether "all", "some" or "none" of the attention classes of a file use the attention interface.

    A file with a model that does not support SDPA counts as "some", because such modules may declare `is_causal`
    wrongly: nothing but SDPA reads it.
    """
    return _reach_in_file(name)


@cache
def _reach_in_file(name: str) -> str:
    here: list[Any] = [each for each in vars(sys.modules[name]).values() if getattr(each, "__module__", None) == name]
    classes: list[Any] = [each for each in here if isinstance(each, type) and issubclass(each, torch.nn.Module)]
    used = [_uses_interface(each) for each in classes if is_named_attention(each)]
    if used and not any(used):
        return "none"
    with_sdpa = all(each._supports_sdpa for each in classes if issubclass(each, PreTrainedModel))
    return "all" if used and all(used) and with_sdpa else "some"


def _subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _uses_interface(kind: Any) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
