"""Sample completions as a server does: a token at a time, from keys and values that are kept.

Prompts are equally long, and every completion has equally many tokens, so no row is padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.kit.cache import cache_name

PAGED = "pasa_rl_pages"  # the name under which paged attention is registered with transformers
SLOTS = 16  # of a page


@dataclass
class Completions:
    """Hold what a rollout sampled.

    Attributes
    ----------
    tokens : Tensor (B, prompt + new)
    logits : Tensor (B, new, vocabulary), FP32
        Those from which each new token was sampled.
    finite : bool
        Whether all logits were finite. If not, sampling stopped, and the rest is missing.
    """

    tokens: Tensor
    logits: Tensor
    finite: bool


@dataclass
class PagedCache:
    """Hold the pages of all layers for B sequences of equal length; sequence b has pages of its own, one after another.

    Attributes
    ----------
    batch, room : int
        Sequences, and tokens that each has room for.
    length : int
        Tokens of each sequence, including those of the step that is computed.
    """

    batch: int
    room: int
    length: int = 0
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Write the newest keys and values (B, Hkv, n, D), and attend to all from q (B, Hq, n, D)."""
        new, pages = q.shape[2], -(-self.room // SLOTS)
        if layer not in self.layers:
            shape = (self.batch * pages, SLOTS, k.shape[1], k.shape[3])
            self.layers[layer] = (k.new_zeros(shape), v.new_zeros(shape))
        caches = self.layers[layer]
        first = torch.arange(self.batch, device=q.device)[:, None]
        slots = first * (pages * SLOTS) + torch.arange(self.length - new, self.length, device=q.device)
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        pasa.write_pages(rows[1], rows[2], *caches, slots.flatten())
        table = (first * pages + torch.arange(pages, device=q.device)).int()
        lengths = torch.full((self.batch,), self.length, dtype=torch.int32, device=q.device)
        how: dict[str, Any] = {"max_seqlen_k": self.length, "scale": scale}
        if new > 1:
            how |= {"cu_seqlens_q": torch.arange(self.batch + 1, device=q.device).int() * new, "max_seqlen_q": new}
        out = pasa.attention_paged(rows[0], *caches, table, lengths, is_causal=True, **how)
        by_sequence: Tensor = out.unflatten(0, (self.batch, new))
        return by_sequence


def register_pages() -> None:
    """Register `attend_pages` with transformers under the name `PAGED`; it needs no masks."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PAGED, attend_pages)
    AttentionMaskInterface.register(PAGED, lambda *_, **__: None)


def attend_pages(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **how: Any
) -> tuple[Tensor, None]:
    """Attend from the pages of the rollout that runs; an attention function of transformers."""
    cache: PagedCache = how["pages"]
    layer: Any = module.layer_idx
    return cache.attend(layer, query, key, value, how["scaling"]), None


@torch.no_grad()
def sample(model: Any, prompts: Tensor, new: int, attention: str, generator: torch.Generator) -> Completions:
    """Sample `new` tokens for each prompt (B, S) at temperature 1.

    Parameters
    ----------
    attention : str
        `PAGED`, or an attention of transformers, which then keeps keys and values in its own cache.
    generator : torch.Generator
        On the device of the prompts.
    """
    model.set_attn_implementation(attention)
    batch, length = prompts.shape
    pages = PagedCache(batch, length + new) if attention == PAGED else None
    tokens, step, kept, logits = prompts, prompts, None, []
    cache = cache_name(model)
    for at in range(new):
        first = 0 if at == 0 else length + at - 1
        positions = torch.arange(first, length + at, device=prompts.device).expand(batch, -1)
        if pages is not None:
            pages.length = length + at
            out = model(step, position_ids=positions, use_cache=False, logits_to_keep=1, pages=pages)
        else:
            out = model(step, position_ids=positions, use_cache=True, logits_to_keep=1, **{cache: kept})
            kept = out[cache]
        last = out.logits[:, -1].float()
        if not bool(last.isfinite().all()):
            return Completions(tokens, torch.empty(0), False)
        logits.append(last)
        step = torch.multinomial(torch.softmax(last, -1), 1, generator=generator)
        tokens = torch.cat([tokens, step], 1)
    return Completions(tokens, torch.stack(logits, 1), True)
