"""Build the `Call` of a backend from the arguments of an operator, and write the part of the schema that all share.

The plain arguments are `LIMITS`, then the options of the arithmetic, then `diagnose` and `backend`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from pasa.ops import operands
from pasa.ops.attention.call import DEFAULT, Call, Pages
from pasa.ops.attention.options import AttentionOptions

# Maps the Python type of an option to its type in a schema.
TYPES = {"str": "str", "Overflow": "str", "int": "int", "float | None": "float?", "bool": "bool"}
OPTIONS = len(fields(AttentionOptions))
LIMITS = (
    "bool is_causal=False",
    "float? scale=None",
    "int window_left=-1",
    "int window_right=-1",
    "float softcap=0.0",
    "bool return_max_logits=False",
)
"""What changes or hides scores, and what is returned of them; see `Call`."""


def _text(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def schema() -> str:
    """Return the plain arguments of an operator as a schema has them."""
    options = [f"{TYPES[str(each.type)]} {each.name}={_text(each.default)}" for each in fields(AttentionOptions)]
    return ", ".join([*LIMITS, *options, "bool diagnose=False", "str? backend=None"])


def dense(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, *limits: Any) -> Call:
    """Return the checked call of tensors (B, H, S, D); `limits` are `LIMITS` and diagnose, as far as they are known."""
    operands.check_attention(q, k, v, attn_mask, sinks)
    return _call((q, k, v), attn_mask, sinks, None, None, None, *limits)


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, sinks: Tensor | None, is_causal: bool,
    scale: float | None, left: int, right: int, softcap: float, max_logits: bool = False, diagnose: bool = False,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
) -> Call:  # fmt: skip
    """Return the checked call of packed sequences (T, H, D)."""
    longest = max_seqlen_q, max_seqlen_k
    operands.check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, sinks)
    limits = is_causal, scale, left, right, softcap, max_logits, diagnose
    call = _call((q, k, v), None, sinks, cu_seqlens_q, cu_seqlens_k, None, *limits)
    call.longest = longest
    return call


def paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    key_anchors: Tensor | None,
    sinks: Tensor | None,
    *limits: Any,
) -> Call:
    """Return the checked call of queries (T, Hq, D) over a paged cache."""
    pages = Pages(block_table, seq_lens, max_seqlen_q, max_seqlen_k, key_anchors)
    operands.check_paged(q, (k_cache, v_cache), pages, cu_seqlens_q, sinks)
    return _call((q, k_cache, v_cache), None, sinks, cu_seqlens_q, None, pages, *limits)


def _call(
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    pages: Pages | None,
    is_causal: bool,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
    max_logits: bool = False,
    diagnose: bool = False,
) -> Call:
    operands.check_limits(scale, left, right, softcap)
    scale = qkv[0].shape[-1] ** -0.5 if scale is None else scale
    window = (left, right)  # by position, because keywords cost the host a microsecond
    return Call(*qkv, scale, DEFAULT, is_causal, mask, cu_q, cu_k, pages, diagnose, window, softcap, sinks, max_logits)
