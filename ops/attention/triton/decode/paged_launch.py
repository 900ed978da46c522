"""Launch decoding from a paged cache; nothing is read back, as sizes come from shapes and from the caller's bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pasa.ops.attention.triton.decode.launch import (
    LANES,
    Splits,
    blocks_of_a_split,
    decode_tiles,
    fixed_limits,
    fixed_splits,
    keys_of_a_lane,
    lane_options,
    lane_stages,
    merge,
    sizes,
    split_limit,
)
from pasa.ops.attention.triton.decode.paged_anchored_kernel import TURNS, decode_anchored_paged_kernel
from pasa.ops.attention.triton.decode.paged_kernel import decode_lanes_paged_kernel, decode_paged_kernel
from pasa.ops.attention.triton.kernel_call import DECODE_TILE, KernelCall, strides_of
from pasa.ops.attention.triton.launcher import early, launch, launched_early
from pasa.ops.attention.triton.tiles import Tile, device_architecture, pad_dim, processors
from pasa.ops.packed import tile_table

# As FIXED_KEYS and FIXED_SPLITS, for tiles of several queries: the results of their splits take up to 8 times as much
# memory as those of one query, and the tiles of a prompt occupy a GPU without splits.
FIXED_KEYS_OF_TILES, FIXED_SPLITS_OF_TILES = 2048, 4


@dataclass(frozen=True)
class PagedTiles:
    """Describe where the tiles of a paged call find their keys.

    Attributes
    ----------
    table : Tensor (B, most pages of a sequence), INT32
    tiles : Tensor (B,) or (tiles, 3), INT32
        As in `decode_paged_kernel`.
    slots : int
        Slots of a page.
    longest : int
        Upper bound of the keys of a sequence, which decides the number of splits.
    anchors : Tensor (pages, Hkv, D), FP16, optional
        Anchors of each page, as `write_pages` keeps them; only for tiles of one query.
    """

    table: Tensor
    tiles: Tensor
    slots: int
    longest: int
    anchors: Tensor | None = None

    def fixed(self, call: KernelCall) -> tuple[int, int]:
        """Return the least keys of a split and the most splits of a batch-invariant call; (0, 0) for other calls."""
        if not call.options.batch_invariant:
            return 0, 0
        return (FIXED_KEYS_OF_TILES, FIXED_SPLITS_OF_TILES) if self.tiles.dim() == 2 else fixed_limits(call)


def paged_attention(call: KernelCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return output, log-sum-exp and row maxima of packed queries (T, Hq, D).

    Caches of other dtypes become FP16 when read. Anchors are used for single queries of up to 16
    heads that share a key head, head dimensions up to 128, and pages of a multiple of 16 slots,
    without a window or a soft cap.

    Raises
    ------
    NotImplementedError
        If more than `DECODE_TILE` query heads share a key head, or the results of the splits exceed
        32-bit offsets.
    """
    if call.pages is None:
        raise ValueError("the call has no pages")
    block_table, seq_lens, longest_q, longest_k, key_anchors = call.pages
    if call.group > DECODE_TILE:
        raise NotImplementedError(f"{call.group} query heads share a key head of a paged cache; at most {DECODE_TILE}")
    slots = call.k.shape[2]
    room = block_table.shape[1] * slots
    table, lengths = block_table.int(), seq_lens.int().contiguous()
    table = table if table.stride(1) == 1 else table.contiguous()
    longest = room if longest_k is None else min(longest_k, room)
    pages = PagedTiles(table, lengths, slots, longest, key_anchors)
    if call.cu_q is None:
        return _single_queries(call, pages)
    tokens = call.q.shape[0]
    if call.options.batch_invariant:
        return _by_number_of_queries(call, pages, call.cu_q, tokens if longest_q is None else longest_q)
    rows = min(tokens if longest_q is None else longest_q, max(1, DECODE_TILE // call.group))
    return _tiles_of_queries(call, pages, call.cu_q, rows)


def _single_queries(call: KernelCall, pages: PagedTiles) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend from one query (B, Hq, D) of each sequence."""
    out, lse, top = _decode(call.with_queries(call.q.unsqueeze(2)), pages)
    return out.squeeze(2), lse.squeeze(2), None if top is None else top.squeeze(2)


def _by_number_of_queries(
    call: KernelCall, pages: PagedTiles, cu_q: Tensor, longest_q: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend to sequences with one query as a call without other sequences does, and to the others in full tiles.

    So a sequence gets the same kernel and the same tiles in every batch. Sequences of the other kind have no keys in
    either launch.
    """
    tokens, counts = call.q.shape[0], cu_q.diff()
    first = cu_q[:-1].long().clamp(max=tokens - 1)
    alone = replace(pages, tiles=torch.where(counts == 1, pages.tiles, 0))
    single_out, single_lse, single_top = _single_queries(replace(call, q=call.q[first]), alone)
    out: Any = 0.0  # and below, of padding
    lse: Any = -torch.inf
    top: Any = -torch.inf
    if longest_q > 1:
        others = replace(pages, tiles=torch.where(counts > 1, pages.tiles, 0))
        out, lse, top = _tiles_of_queries(call, others, cu_q, max(1, DECODE_TILE // call.group))
    owner = torch.searchsorted(cu_q[1:].contiguous(), torch.arange(tokens, device=cu_q.device), right=True)
    used, owner = owner < len(counts), owner.clamp(max=len(counts) - 1)
    single = used & (counts[owner] == 1)

    def of_tokens(one: Tensor, other: Any) -> Tensor:
        """Return (T, Hq, ...) from the results of single queries (B, Hq, ...) and those of the others."""
        return torch.where(single.view(-1, *(1,) * (one.dim() - 1)), one[owner], other)

    largest = None if single_top is None else of_tokens(single_top, top)
    return of_tokens(single_out, out), of_tokens(single_lse, lse), largest


def _tiles_of_queries(
    call: KernelCall, pages: PagedTiles, cu_q: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend from packed queries (T, Hq, D), in tiles of at most `rows` queries of a sequence."""
    queries = Queries.of(cu_q, pages.tiles, rows, call.q.shape[0], call.banded, call.limits[0])
    tiled = replace(pages, tiles=queries.tiles, anchors=None)
    out, lse, top = _decode(call.with_queries(queries.gather(call.q)), tiled)
    top = None if top is None else queries.scatter(top, -torch.inf)
    return queries.scatter(out, 0.0), queries.scatter(lse, -torch.inf), top


@dataclass(frozen=True)
class Queries:
    """Cut packed queries into tiles of a few rows; the missing rows of a tile repeat its sequence's last query.

    Attributes
    ----------
    tiles : Tensor (tiles, 3), INT32
        As in `decode_paged_kernel`.
    token : Tensor (tiles, rows)
        The query of each row.
    tile, row : Tensor (T,)
        The tile of each query, and its row in that tile.
    padding : Tensor (T,)
        True for queries that belong to no sequence.
    """

    tiles: Tensor
    token: Tensor
    tile: Tensor
    row: Tensor
    padding: Tensor

    @classmethod
    def of(cls, cu_q: Tensor, lengths: Tensor, rows: int, tokens: int, banded: bool, right: int) -> Queries:
        """Compute the tiles on the device; `banded` and `right` are those of `KernelCall`."""
        cu = cu_q.long()
        counts = cu.diff()
        table, first = tile_table(cu, rows, tokens)
        sequence, within = table.long().unbind(1)
        used = sequence >= 0
        sequence = sequence.clamp(min=0)
        diagonal = within * rows + lengths[sequence] - counts[sequence] + right
        keys = lengths[sequence]
        if banded:
            keys = torch.minimum(keys, diagonal + rows).clamp(min=0)
        tiles = torch.stack([sequence, torch.where(used, keys, 0), diagonal], 1).int()
        row = torch.arange(rows, device=cu.device)
        query = torch.minimum((within * rows)[:, None] + row, counts[sequence][:, None] - 1)
        token = (cu[sequence][:, None] + query).clamp(0, tokens - 1)
        each = torch.arange(tokens, device=cu.device)
        owner = torch.searchsorted(cu[1:].contiguous(), each, right=True)
        padding = owner >= len(lengths)
        owner = owner.clamp(max=len(lengths) - 1)
        at = torch.where(padding, 0, each - cu[owner])
        return cls(tiles, token, first[owner].long().clamp(max=len(table) - 1) + at // rows, at % rows, padding)

    def gather(self, q: Tensor) -> Tensor:
        """Return (T, Hq, D) as (tiles, Hq, rows, D)."""
        return q[self.token].transpose(1, 2)

    def scatter(self, x: Tensor, nothing: float) -> Tensor:
        """Return (tiles, Hq, rows, ...) as (T, Hq, ...), with `nothing` for padding."""
        rows = x[self.tile, :, self.row]
        return torch.where(self.padding.view(-1, *(1,) * (rows.dim() - 1)), nothing, rows)


def _decode(call: KernelCall, pages: PagedTiles) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend from tiles of queries (tiles, Hq, rows, D): split the keys, repeat some splits exactly, then merge."""
    rows, dim = call.q.shape[2:]
    arch, pad = device_architecture(call.q.device), pad_dim(dim)
    lane = keys_of_a_lane(arch, pad)
    if lane and pages.tiles.dim() == 1 and call.group <= 16 and not (call.has_window or call.softcap):
        splits = _split(call, pages, Tile(16, lane, LANES, lane_stages(arch)), LANES)
        if pages.anchors is not None and pages.slots % 16 == 0:
            _lanes(call, pages, splits, lane, anchored=False, exact=False)
            for exact in (False, True):
                _anchored(call, pages, splits, pages.anchors, lane if pages.slots % lane == 0 else 16, exact)
            return merge(call, splits, shared_frame=True)
        for exact in (False, True):
            _lanes(call, pages, splits, lane, anchored=True, exact=exact)
        return merge(call, splits)
    tile, exact_tile = decode_tiles(arch, pad, call.group * rows)
    splits = _split(call, pages, tile, 1)
    _tiles(call, pages, splits, tile, exact=False)
    if not call.softcap:
        _tiles(call, pages, splits, exact_tile, exact=True)
    return merge(call, splits)


def _split(call: KernelCall, pages: PagedTiles, tile: Tile, lanes: int) -> Splits:
    """Allocate `lanes` splits for each program, as many programs as suit the device."""
    dim, pairs = call.q.shape[-1], call.q.shape[0] * call.k.shape[1]
    longest = pages.longest
    if call.has_window:  # the keys that a tile sees, and those of the block before the first
        longest = min(longest, call.limits[1] + call.q.shape[2] + tile.block_n)
    blocks = -(-longest // (lanes * tile.block_n))
    least, most = pages.fixed(call)
    if most:
        count = fixed_splits(longest, least, most) * lanes
    else:
        programs = processors(call.q.device) * (1 if lanes > 1 else 8 // tile.warps)
        count = -(-blocks // blocks_of_a_split(programs, blocks, pairs, split_limit(call) // lanes)) * lanes
    if pairs * count * tile.block_m * dim >= 2**31:
        raise NotImplementedError(f"{call.q.shape[0]} tiles of queries in {count} splits: call with fewer queries")
    return Splits.of(call, count, tile.block_n, tile.block_m, most * lanes)


def _tiles(call: KernelCall, pages: PagedTiles, splits: Splits, tile: Tile, exact: bool) -> None:
    """Run the fast or the exact pass of `decode_paged_kernel`."""
    tiled, device = pages.tiles.dim() == 2, call.q.device
    launch(
        decode_paged_kernel, (call.q.shape[0] * call.k.shape[1] * splits.count, 1, 1),
        (call.q, call.k, call.v, splits.part, splits.state, splits.anchor, splits.framed, pages.table, pages.tiles),
        (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), pages.table.stride(0),
         call.k.shape[1], call.group, call.q.shape[2], splits.count,
         call.limits[1] if tiled else max(call.window[0], 0), call.unit, call.ratio),
        {"TILED": tiled, "CAUSAL": call.banded and tiled, **sizes(call.q.shape[-1], tile.block_m, tile.block_n),
         "PAGE": pages.slots, "GRAIN": splits.keys, "EXACT": exact, "PDL": early(device),
         "WINDOW": call.has_window and (tiled or call.window[0] >= 0), "CAP": call.cap_kind,
         "LEAST": pages.fixed(call)[0]},
        num_warps=tile.warps, num_stages=paged_stages(tile.stages), **launched_early(device),
    )  # fmt: skip


def _lanes(
    call: KernelCall, pages: PagedTiles, splits: Splits, block_n: int, anchored: bool, exact: bool
) -> None:  # fmt: skip
    """Run one pass of the lanes; `anchored`: programs choose an anchor for each head."""
    device, programs = call.q.device, splits.count // LANES
    options = lane_options(device, exact)
    launch(
        decode_lanes_paged_kernel, (call.q.shape[0] * call.k.shape[1] * (splits.count if exact else programs), 1, 1),
        (call.q, call.k, call.v, splits.part, splits.state, splits.anchor, splits.framed, splits.marked,
         splits.low, pages.table, pages.tiles),
        (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), pages.table.stride(0),
         call.k.shape[1], call.group, programs, call.scale),
        {"ANCHORED": anchored, "EXACT": exact, **sizes(call.q.shape[-1], 16, block_n), "LANES": LANES,
         "PAGE": pages.slots, "PDL": early(device), "LEAST": pages.fixed(call)[0]},
        **options | {"num_stages": paged_stages(options["num_stages"])},
    )  # fmt: skip


def _anchored(call: KernelCall, pages: PagedTiles, splits: Splits, anchors: Tensor, block_n: int, exact: bool) -> None:
    """Run one pass of the lanes with the anchors of pages; `exact` repeats what the previous pass gave up."""
    device, programs = call.q.device, splits.count // LANES
    work = call.q.shape[0] * call.k.shape[1] * programs
    offsets = torch.empty(work * TURNS.value * LANES * 16, dtype=torch.float64, device=device)
    launch(
        decode_anchored_paged_kernel, (work, 1, 1),
        (call.q, call.k, call.v, anchors, splits.part, splits.state, splits.anchor, splits.framed, splits.marked,
         splits.low, offsets, pages.table, pages.tiles),
        (*strides_of(call.q), *strides_of(call.k), *strides_of(call.v), pages.table.stride(0),
         call.k.shape[1], call.group, programs, call.scale),
        {"EXACT": exact, **sizes(call.q.shape[-1], 16, block_n), "LANES": LANES, "PAGE": pages.slots,
         "PDL": early(device), "LEAST": pages.fixed(call)[0]},
        num_warps=LANES, num_stages=anchored_stages(device_architecture(device)), **launched_early(device),
    )  # fmt: skip


def anchored_stages(architecture: str) -> int:
    """Return the stages of the pass with anchors of pages: 7 take 104 KiB of shared memory, but sm_89 has 99."""
    return 5 if architecture == "sm_89" else 9


def paged_stages(stages: int) -> int:
    """Return the stages that load K and V as far ahead as `stages` do without pages.

    Triton 3.6 (AssignLatencies.cpp) loads (stages - 1) // (n + 1) blocks ahead, where n counts the
    loads that an address waits for. Here n is one, the load of the page's number.
    """
    return 2 * stages - 1
