"""The masks of a patched transformers model: what transformers is asked to build, and what a call makes of it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

QUERY_SLICING_MODELS = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Model types that, in the last layers, keep the last queries only. They do so safely for the name "sdpa"; under any
other name a causal mask that was skipped would be read as aligned to the first key. They get explicit masks."""


def make_mask(*, allow_is_causal_skip: bool = True, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """Build the boolean mask (B, 1, Lq, Lk), True = attend; None where causality or full visibility says it all."""
    if config is not None and config.model_type in QUERY_SLICING_MODELS:
        allow_is_causal_skip = False
    mask: torch.Tensor | None = sdpa_mask(allow_is_causal_skip=allow_is_causal_skip, config=config, **kwargs)
    return mask


def implied_mask(
    queries: int, keys: int, window: int | None, causal: bool, device: torch.device
) -> torch.Tensor | None:
    """Return the (1, 1, Lq, Lk) mask that a call without one still implies; None where `is_causal` alone says it.

    transformers omits the mask only where the window covers all keys, so a window that does not is a caller's own.
    """
    narrow = window is not None and window < max(queries, keys)
    if not narrow and not (causal and queries > keys):
        return None
    rows = torch.arange(queries, device=device)[:, None]
    if queries == 1:
        rows = rows + keys - 1  # a decoded token stands at the last key
    distance = rows - torch.arange(keys, device=device)[None, :]
    visible = distance >= 0 if causal or queries == 1 else torch.ones_like(distance, dtype=torch.bool)
    if window is not None and narrow:
        # transformers' own conventions: a causal window holds `window` keys, a bidirectional one reaches that far
        visible &= distance < window if causal or queries == 1 else distance.abs() <= window
    return visible[None, None]


def without_lowest(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Replace the lowest finite number of a float mask, which transformers means as "masked out", by -inf.

    Added to an FP16 model's scores beyond 65504, which PASA holds, -65504 would mask nothing out.
    """
    if mask is None or not mask.is_floating_point():
        return mask
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)


BORDERS = {
    "cu_seq_lens_q": "borders of packed sequences need cu_seq_lens_k too, and as many queries as keys",
    "cu_seq_lens_k": "borders of packed sequences need cu_seq_lens_q too, and as many queries as keys",
}
"""Keywords that hold the borders of packed sequences, and what each of them needs."""


def separate_sequences(
    module: torch.nn.Module,
    mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
    cu_seq_lens_k: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor | None:
    """Mask out the tokens of other sequences where the borders of packed sequences are given.

    Flash attention attends by these borders. Position ids that start anew say the same, but transformers reads them
    only without a cache and without a mask of the caller's own.
    """
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return mask
    if cu_seq_lens_q is None or cu_seq_lens_k is None or queries != keys:
        name = "cu_seq_lens_q" if cu_seq_lens_q is not None else "cu_seq_lens_k"
        raise NotImplementedError(f"{type(module).__name__}: {name} is not supported here: {BORDERS[name]}")
    if batch == 1 and cu_seq_lens_q.numel() <= 2:
        return mask  # one sequence
    tokens = torch.arange(batch * queries, device=query.device)  # borders count on over the rows of a batch
    sequence = torch.bucketize(tokens, cu_seq_lens_q.to(query.device), right=True).view(batch, 1, -1)
    same = sequence[..., :, None] == sequence[..., None, :]
    if mask is None:
        return same
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, -torch.inf)
