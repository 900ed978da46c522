"""Launches the kernels that write pages. Nothing is read back."""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.attention.triton_backend import on_device
from pasa.ops.paging_kernel import page_anchors_kernel, write_pages_kernel
from pasa.ops.shift_keys.triton_backend import pad_dim
from pasa.ops.shift_keys.triton_kernel import SLICE
from pasa.ops.triton_launch import launch


def write_pages(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, key_anchors: Tensor | None
) -> None:
    """As `paging.write_pages`; what a slot behind the cache would get is not written."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    tokens, heads, dim = k.shape
    pages, slots = k_cache.shape[:2]
    pad, anchored = pad_dim(dim), key_anchors is not None
    with on_device(k):
        last = slot_mapping
        if anchored:
            last = torch.full((pages,), -1, dtype=torch.int32, device=k.device)
        launch(
            write_pages_kernel, (tokens, 1, 1),
            (k, v, k_cache, v_cache, slot_mapping, last),
            (*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], heads, pages),
            {"D": dim, "D_PAD": pad, "HEADS_PAD": 1 << (heads - 1).bit_length(), "PAGE": slots, "ANCHORED": anchored},
        )  # fmt: skip
        if key_anchors is not None:
            launch(
                page_anchors_kernel, (tokens * heads, 1, 1),
                (k_cache, slot_mapping, last, key_anchors),
                (*k_cache.stride()[:3], heads, pages),
                {"D": dim, "D_PAD": pad, "WIDTH": min(SLICE, pad), "PAGE": slots,
                 "PAGE_PAD": 1 << (slots - 1).bit_length()},
            )  # fmt: skip
