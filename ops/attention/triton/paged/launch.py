"""Launch the kernels that write pages, without reading anything back."""

from __future__ import annotations

import torch
from torch import Tensor

from pasa.ops.attention.triton.kernel_call import check_spans
from pasa.ops.attention.triton.launcher import launch
from pasa.ops.attention.triton.paged.kernel import page_anchors_kernel, write_pages_kernel
from pasa.ops.attention.triton.tiles import pad_dim
from pasa.ops.devices import on_device

TILE = 8192  # elements of a page that 4 warps hold


def write_pages(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, key_anchors: Tensor | None
) -> None:
    """Write pages as `spec.pages.write_pages` does; keys for a slot behind the cache are not written."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    slot_mapping = slot_mapping.contiguous()
    check_spans(k_cache, v_cache)
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
            page_pad = 1 << (slots - 1).bit_length()
            width, warps = anchor_tile(page_pad, pad)
            launch(
                page_anchors_kernel, (tokens * heads, 1, 1),
                (k_cache, slot_mapping, last, key_anchors),
                (*k_cache.stride()[:3], heads, pages),
                {"D": dim, "D_PAD": pad, "WIDTH": width, "PAGE": slots, "PAGE_PAD": page_pad},
                num_warps=warps,
            )  # fmt: skip


def anchor_tile(page: int, pad: int) -> tuple[int, int]:
    """Return the columns of a page that are processed together, and the warps for them.

    All columns are processed at once if registers allow it, because every iteration waits for
    memory again.
    """
    width = min(pad, max(16, TILE // page))
    return width, max(1, min(4, page * width // 1024))
