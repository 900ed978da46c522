"""Refuse unknown arguments of public functions with a hint: the name that pasa uses, or what to do instead.

The signatures stay free of `**kwargs`, because :func:`hint_at_arguments` wraps the function and keeps its signature.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from pasa.ops.attention.options import AttentionOptions

Function = TypeVar("Function", bound=Callable[..., Any])

OUR_NAMES = {
    "attention_mask": "attn_mask",
    "attn_bias": "attn_mask",
    "bias": "attn_mask",
    "mask": "attn_mask",
    "block_tables": "block_table",
    "page_table": "block_table",
    "causal": "is_causal",
    "cache_seqlens": "seq_lens",
    "context_lens": "seq_lens",
    "seqused_k": "seq_lens",
    "input_layout": "tensor_layout",
    "layout": "tensor_layout",
    "qkv_format": "tensor_layout",
    "key": "k",
    "query": "q",
    "value": "v",
    "key_cache": "k_cache",
    "value_cache": "v_cache",
    "model": "model_or_pipeline",
    "pipe": "model_or_pipeline",
    "pipeline": "model_or_pipeline",
    "process_group": "group",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "sliding_window": "window",
    "window_size": "window",
    "max_logits": "return_max_logits",
    "scaling": "scale",
    "sm_scale": "scale",
    "logits_soft_cap": "softcap",
    "softmax_scale": "scale",
    "slots": "slot_mapping",
}
"""Maps keywords of torch, transformers, flash-attn, xformers and vLLM to the names of pasa."""

FORMS = {"window": "=(left, right), the numbers of keys on both sides; -1 is unlimited"}
"""Maps names of pasa to their form, where other libraries pass the same in another one."""

_DROPOUT = "attention weights have no dropout here; leave it out"
_SCORES = "only pasa.attention, attention_varlen and attention_paged take it"
_WEIGHTS = "the weights are never formed; leave it out, and use return_lse=True for the log-sum-exp"
HINTS = {
    "alibi_slopes": "ALiBi is not supported by name; pass the bias as a float attn_mask to pasa.attention",
    "attn_mask": "masks other than is_causal need pasa.attention",
    "deterministic": "there is no such switch; leave it out",
    "dropout": _DROPOUT,
    "dropout_p": _DROPOUT,
    "enable_gqa": "leave it out: grouped queries follow from the shapes, where Hq is a multiple of Hkv",
    "key_padding_mask": "it is True for padding, and attn_mask is True = keep; pass "
    "attn_mask=~key_padding_mask[:, None, None, :] to pasa.attention",
    "need_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "return_attn_probs": _WEIGHTS,
    "return_max_logits": _SCORES,
    "sinks": _SCORES,
    "softcap": _SCORES,
    "tensor_layout": "this function has one layout; leave it out",
    "window": _SCORES,
}
"""Maps keywords that pasa has under no name, or not for every function, to advice."""


def hint_at_arguments(function: Function) -> Function:
    """Let a function refuse unknown keywords, and too many positional arguments, with a hint; it costs 0.5 us a call.

    Raises
    ------
    TypeError
        From the returned function. The message names the keyword and its value.
    """
    parameters = inspect.signature(function).parameters
    names = frozenset(parameters)
    by_position = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters.values())
    called = function.__qualname__.removesuffix(".__init__")  # here, because torch.compile cannot trace it

    @wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        if not keywords.keys() <= names:
            name = next(each for each in keywords if each not in names)
            raise _unknown_keyword(called, name, keywords[name], list(parameters))
        if len(arguments) > by_position:
            raise _too_many(called, by_position, len(arguments), list(parameters)[by_position:])
        return function(*arguments, **keywords)

    return checked  # type: ignore[return-value]


def _unknown_keyword(called: str, name: str, value: object, names: list[str]) -> TypeError:
    return TypeError(f"{called}() got an unexpected keyword argument {name!r} ({_shown(value)}): {_hint(name, names)}")


def _too_many(called: str, most: int, count: int, rest: list[str]) -> TypeError:
    advice = f"pass the others by name ({', '.join(f'{name}=...' for name in rest)})" if rest else "leave out the rest"
    return TypeError(f"{called}() takes {most} positional arguments but {count} were given: {advice}")


def _shown(value: object) -> str:
    """Return a short text for a value: itself if it is short, else its type."""
    text = repr(value) if isinstance(value, (str, int, float, tuple, type(None))) else ""
    return text if 0 < len(text) <= 40 else f"a {type(value).__name__}"


def _hint(name: str, names: Collection[str]) -> str:
    """Return what to write in place of a keyword, for a function with the parameters `names`."""
    ours = OUR_NAMES.get(name, name)
    if ours in names:
        return f"use {ours}{FORMS.get(ours, '')}"
    if ours in HINTS:
        return HINTS[ours]
    if "config" in names and name in {field.name for field in fields(AttentionOptions)}:
        return f"pass config=pasa.PasaConfig({name}=...)"
    if near := difflib.get_close_matches(name, names, n=2):
        return f"did you mean {' or '.join(sorted(near))}?"
    return f"it accepts {', '.join(each for each in names if each != 'self')}"
