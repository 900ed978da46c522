"""Masks of patched transformers models: build them for transformers, and convert them in each attention call."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import sdpa_mask

QUERY_SLICING_MODELS = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Model types that keep only the last queries in their last layers, and therefore get explicit masks.

If their causal mask is left out, they are correct only with the attention name "sdpa". Under any other name the missing
mask would be read as aligned to the first key.
"""


def make_mask(*, allow_is_causal_skip: bool = True, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """Build the boolean mask (B, 1, Lq, Lk), True = attend; None if `is_causal` or full visibility describes it."""
    if config is not None and config.model_type in QUERY_SLICING_MODELS:
        allow_is_causal_skip = False
    mask: torch.Tensor | None = sdpa_mask(allow_is_causal_skip=allow_is_causal_skip, config=config, **kwargs)
    return mask


def implied_limits(
    queries: int, keys: int, window: int | None, causal: bool, device: torch.device
) -> tuple[torch.Tensor | None, tuple[int, int] | None]:
    """Return the mask and the window of `pasa.attention` that a call without a mask implies beside `is_causal`.

    transformers leaves the mask out only if the sliding window covers all keys. A narrower window here was set by a
    direct caller. `pasa.attention` aligns windows with the last key, so other alignments need a mask.
    """
    narrow = window is not None and window < max(queries, keys)
    if narrow and window is not None and window > 0 and queries in (1, keys):
        return None, (window - 1, -1) if causal or queries == 1 else (window, window)
    if narrow or (causal and queries > keys):
        return implied_mask(queries, keys, window, causal, device), None
    return None, None


def implied_mask(queries: int, keys: int, window: int | None, causal: bool, device: torch.device) -> torch.Tensor:
    """Return the (1, 1, Lq, Lk) mask that a call without a mask implies."""
    rows = torch.arange(queries, device=device)[:, None]
    if queries == 1:
        rows = rows + keys - 1  # a decoded token is at the position of the last key
    distance = rows - torch.arange(keys, device=device)[None, :]
    visible = distance >= 0 if causal or queries == 1 else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        # as in transformers: a causal window holds `window` keys, a bidirectional one reaches `window` keys either way
        visible &= distance < window if causal or queries == 1 else distance.abs() <= window
    return visible[None, None]


def both(mask: torch.Tensor | None, visible: torch.Tensor) -> torch.Tensor:
    """Return the mask with the keys masked out that the bool mask `visible` does not have."""
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)


def with_bias(mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return the float mask that adds `bias` to the scores where `mask` lets a row see a key."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def chosen_keys(
    module: Any,
    mask: torch.Tensor | None,
    key: torch.Tensor,
    indices: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return the mask with the keys masked out that an indexer has not chosen (sparse attention).

    Parameters
    ----------
    module : torch.nn.Module
        The attention module.
    mask : Tensor, optional
        Bool or float mask (B, 1, Lq, Lk).
    key : Tensor (B, Hkv, Lk, D)
    indices : Tensor (B, Lq, chosen), optional
        The keys that each row attends to.
    block_indices : Tensor (B, Hkv, Lq, chosen), optional
        The blocks of keys that each row attends to, as the module's indexer counts them; -1 is none.
    positions : Tensor (Lq) or (B, Lq), optional
        Positions of the rows; the last keys by default.
    """
    batch, keys = key.shape[0], key.shape[2]
    if indices is not None:
        visible = torch.zeros(batch, indices.shape[1], keys, dtype=torch.bool, device=key.device)
        mask = both(mask, visible.scatter(-1, indices.long(), True)[:, None])
    if block_indices is not None:
        if positions is None:
            positions = torch.arange(keys - block_indices.shape[2], keys, device=key.device)
        blocks = (block_indices, mask, keys, key.dtype, key.device, positions.expand(batch, -1))
        mask = module.indexer.build_block_mask(*blocks) == 0  # it is float, and keeps what `mask` masks out
    return mask


def without_lowest(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Replace the lowest finite number of a float mask, by which transformers means "masked out", by -inf.

    In an FP16 model this number is -65504. PASA can hold scores beyond 65504, and -65504 added to one of them would not
    mask its key out.
    """
    if mask is None or not mask.is_floating_point():
        return mask
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)


BORDERS = {
    "cu_seq_lens_q": "borders of packed sequences need cu_seq_lens_k too, and as many queries as keys",
    "cu_seq_lens_k": "borders of packed sequences need cu_seq_lens_q too, and as many queries as keys",
}
"""Maps each keyword with borders (cumulative lengths) of packed sequences to the message about what it needs."""


def separate_sequences(
    module: torch.nn.Module,
    mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
    cu_seq_lens_k: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor | None:
    """Return the mask with the tokens of other packed sequences masked out, if borders of sequences are passed.

    Flash attention uses these borders (cumulative lengths). Position ids that restart at 0 mark the same borders, but
    transformers reads them only if there is no cache and the caller passes no mask.
    """
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return mask
    if cu_seq_lens_q is None or cu_seq_lens_k is None or queries != keys:
        name = "cu_seq_lens_q" if cu_seq_lens_q is not None else "cu_seq_lens_k"
        raise NotImplementedError(f"{type(module).__name__}: {name} is not supported here: {BORDERS[name]}")
    if batch == 1 and cu_seq_lens_q.numel() <= 2:
        return mask  # one sequence
    tokens = torch.arange(batch * queries, device=query.device)  # borders count tokens across the rows of a batch
    sequence = torch.bucketize(tokens, cu_seq_lens_q.to(query.device), right=True).view(batch, 1, -1)
    same = sequence[..., :, None] == sequence[..., None, :]
    return both(mask, same)
