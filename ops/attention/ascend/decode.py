"""Call the Ascend C kernels of decoding: few query rows of many keys, which may lie in the pages of a cache.

The query heads that share a key head are rows of one tile, so keys are read once. Nothing is read back
from the device, so calls can be captured in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pasa.ops.attention.ascend.inputs import DIM_STEP, pad_head_dim
from pasa.ops.attention.call import NO_WINDOW, Call, capturing, to_fp16
from pasa.ops.numerics.dither import COLUMNS

TILE_ROWS = 64  # kDecodeRows in ascend_c/tiling/tiling.h
PREFILL_ROWS = 128  # kTileRows there
MOST_STRIDE = 65535  # numbers between neighbouring keys: what a copy into the matrix unit's memory can express


class Operands(NamedTuple):
    """Hold what a kernel of decoding reads.

    Attributes
    ----------
    q : Tensor (Hkv, T, G, D), FP16
        The query heads of each key head, for the tokens of all sequences.
    k, v : Tensor, FP16
        (B, Hkv, Skv, D), or pages (pages, slots, Hkv, D) if there is a table, or with starts alone packed
        (1, Hkv, Tk, D).
    table : Tensor (B, columns), INT32, optional
    lengths : Tensor (B,), INT32, optional
        Keys of each sequence.
    starts : Tensor (B + 1,) or (2, B + 1), INT32, optional
        The first token of each sequence, and the end; without a table also the first key, and the end.
    tokens : int
        Tokens of a sequence where there are no `starts`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    lengths: Tensor | None
    starts: Tensor | None
    tokens: int


class Chip(NamedTuple):
    """Hold the kernel of decoding of a chip, and when it is faster than that of prefill.

    Attributes
    ----------
    kernel : function
        Launches the kernel, for finite queries; returns output and LSE.
    most_tiles : function
        Returns how many tiles of decoding take as long as prefill of a sequence, for its tokens, the query heads of a
        key head, and the head dimension.
    """

    kernel: Callable[[Call, Operands], tuple[Tensor, Tensor]]
    most_tiles: Callable[[int, int, int], int]

    def takes(self, tokens: int, group: int, dim: int) -> bool:
        """Return whether `tokens` of a sequence are few, for `group` query heads of a key head."""
        return self.lost_tiles(tokens, group, dim) <= 0

    def lost_tiles(self, tokens: int, group: int, dim: int) -> float:
        """Return how many tiles of its time decoding loses against prefill; it loses nothing from 0 down.

        Infinitely many if a tile cannot hold a token.
        """
        tiles = -(-tokens // (TILE_ROWS // group)) if group <= TILE_ROWS else math.inf
        return tiles - self.most_tiles(tokens, group, dim)


def decodes(chip: Chip, call: Call, q: Tensor, k: Tensor) -> bool:
    """Return whether the kernel serves dense q (B, Hq, Sq, D) and k (B, Hkv, Skv, D): rows are few."""
    return _plain(call) and call.mask is None and chip.takes(q.shape[2], q.shape[1] // k.shape[1], q.shape[3])


def decode(chip: Chip, call: Call, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend to dense FP16 tensors; returns (B, Hq, Sq, D) in FP16, or BF16 for unbiased BF16, and LSE (B, Hq, Sq).

    `lengths` (B,), INT32, holds the number of keys of each batch entry.
    """
    batch, heads, rows, dim = q.shape
    kv_heads = k.shape[1]
    grouped = pad_head_dim(q).view(batch, kv_heads, heads // kv_heads, rows, -1).permute(1, 0, 3, 2, 4)
    tokens = grouped.flatten(1, 2) if rows == 1 else grouped.contiguous().flatten(1, 2)
    out, lse = _launch(chip, call, Operands(tokens, _rows(k), _rows(v), None, lengths, None, rows))
    out = out[..., :dim].unflatten(1, (batch, rows)).permute(1, 0, 3, 2, 4)
    return out.flatten(1, 2), lse.unflatten(1, (batch, rows)).permute(1, 0, 3, 2).flatten(1, 2)


def decodes_packed(chip: Chip, call: Call) -> bool:
    """Return whether the kernel serves a packed call: it takes no longer than prefill, as far as the host can know.

    The host knows the longest sequences and the sums of all lengths. It assumes that as many sequences as possible have
    the most queries, and that the others have one query each. The keys of a sequence with the most queries lie between
    its queries, as of a prompt, and the most keys, as of a later chunk of one; their geometric mean is assumed. A bound
    that is not given is the sum.
    """
    (count, heads, dim), keys = call.q.shape, len(call.k)
    group = heads // call.k.shape[1]
    longest, most_keys = (min(most or n, n) for most, n in zip(call.longest, (count, keys), strict=True))
    if not _plain(call) or group > TILE_ROWS:
        return False
    if chip.takes(longest, group, dim):
        return True
    long = max(1, (count - call.sequences) // (longest - 1))
    long_keys = min(keys, long * math.isqrt(min(longest, most_keys) * most_keys))
    gained = -chip.lost_tiles(1, group, dim)
    return long_keys * chip.lost_tiles(longest, group, dim) <= (keys - long_keys) * gained


def decode_packed(chip: Chip, call: Call, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Attend within packed FP16 sequences (T, H, D); returns (T, Hq, D) as `decode` does, and LSE (T, Hq).

    `starts` (2, sequences + 1), INT32, holds the cumulative lengths of queries and keys.
    """
    k, v = (_rows(x.transpose(0, 1).unsqueeze(0)) for x in (k, v))
    dim = q.shape[-1]
    q = pad_head_dim(q)
    rows = q.view(len(q), k.shape[1], -1, q.shape[-1]).transpose(0, 1).contiguous()
    out, lse = _launch(chip, call, Operands(rows, k, v, None, None, starts, 0))
    return _by_token(out[..., :dim], lse, starts[0])


def _by_token(out: Tensor, lse: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return (Hkv, T, G, D) and (Hkv, T, G) as (T, Hq, D) and (T, Hq), with 0 and -inf behind the last sequence."""
    out, lse = out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2)
    behind = torch.arange(len(out), device=out.device) >= starts[-1]  # padding, which the kernel does not write
    return out.masked_fill(behind[:, None, None], 0.0), lse.masked_fill(behind[:, None], -torch.inf)


def reads_pages(chip: Chip, call: Call) -> bool:
    """Return whether the kernel serves a paged call as it is; other calls gather their pages first."""
    fits = call.q.shape[-1] % DIM_STEP == 0 and call.q.shape[1] // call.k.shape[2] <= TILE_ROWS
    there = call.q.numel() > 0 and call.k.numel() > 0
    fp16 = call.k.dtype == torch.float16
    copies = all(_copies(x, x.stride(1)) for x in (call.k, call.v))
    return _plain(call) and fits and there and fp16 and copies and not _is_prefill(chip, call)


def _is_prefill(chip: Chip, call: Call) -> bool:
    """Return whether most sequences of a paged call are about as long as the longest, and that one has many rows.

    The kernel of prefill is then faster, although pages are gathered for it. There each token of a decoding sequence
    takes a tile for every query head, so a prompt among decoding sequences stays here. Gathering reads lengths on the
    host, which a captured graph cannot.
    """
    if call.pages is None or call.cu_q is None:
        return False
    count, heads, dim = call.q.shape
    longest = min(count, call.pages.max_seqlen_q or count)
    are_few = chip.takes(longest, heads // call.k.shape[2], dim)
    return not are_few and 2 * count > call.sequences * longest and not capturing(call.q)


def _plain(call: Call) -> bool:
    """Return whether a call has no limit or result that the kernel lacks; masks are not among these."""
    lacks = call.softcap > 0 or call.max_logits or call.diagnose or call.window != NO_WINDOW
    return call.options.recovery == "exact" and not lacks


def decode_pages(chip: Chip, call: Call) -> tuple[Tensor, Tensor]:
    """Attend from q (T, Hq, D) to pages; returns (T, Hq, D) as `decode` does, and LSE (T, Hq).

    Raises
    ------
    ValueError
        If the call has no pages.
    """
    if call.pages is None:
        raise ValueError("the call has no pages")
    table, lengths = (x.int().contiguous() for x in call.pages[:2])
    starts = None if call.cu_q is None else call.cu_q.int().contiguous()
    count, heads, dim = call.q.shape
    rows = to_fp16(call.q, "q").contiguous().view(count, call.k.shape[2], -1, dim).transpose(0, 1)
    rows = rows if starts is None else rows.contiguous()
    out, lse = _launch(
        chip, call, Operands(rows, call.k, call.v, table, lengths, starts, 0 if starts is not None else 1)
    )
    if starts is None:
        return out.transpose(0, 1).reshape(count, heads, dim), lse.transpose(0, 1).reshape(count, heads)
    return _by_token(out, lse, starts)


def _launch(chip: Chip, call: Call, x: Operands) -> tuple[Tensor, Tensor]:
    """Launch the kernel; rows whose queries are not finite become NaN where they see a key."""
    # The matrix unit must not receive NaN, so such rows are overwritten at the end.
    not_finite = ~torch.isfinite(x.q).all(-1)
    out, lse = chip.kernel(call, x._replace(q=x.q.masked_fill(not_finite.unsqueeze(-1), 0.0)))
    if call.sinks is None:
        not_finite &= ~lse.isneginf()  # a row without keys gives 0 and -inf, or its sink, whatever its query
    else:
        keys = x.k.shape[2] if x.table is None else None
        starts, lengths = x.starts, x.lengths
        if starts is not None and x.table is None:
            starts, lengths = starts[0], starts[1].diff()
        sees = _sees_keys(x.q.shape[1], x.tokens, keys, lengths, starts, call.is_causal)
        not_finite &= sees.to(x.q.device)[:, None]
    return out.masked_fill(not_finite.unsqueeze(-1), torch.nan), lse.masked_fill(not_finite, torch.nan)


def most_tiles_on_a2(tokens: int, group: int, _: int) -> int:
    """Return how many tiles of decoding take as long as prefill on Atlas A2: `Chip.most_tiles`.

    Each tile of decoding reads the keys, as each tile of a query head does in prefill. By the model (eval/npu), a block
    of keys takes a tile of decoding 1.4 us, a tile of prefill 0.5 us or more, and the pass that shifts keys for prefill
    3.3 us.
    """
    return 2 + group * -(-tokens // PREFILL_ROWS) // 3


def on_a2(call: Call, x: Operands) -> tuple[Tensor, Tensor]:
    """Launch the kernel for Atlas A2, as `Chip.kernel` says."""
    unbiased = call.options.softmax == "unbiased"
    rounding = min(call.q.shape[-1], COLUMNS) if unbiased else 0, unbiased and call.q.dtype == torch.bfloat16
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    numbers = x.tokens, call.is_causal, call.scale, call.options.overflow == "saturate", *rounding
    out, lse = torch.ops.pasa.npu_decode(*x[:-1], sinks, *numbers)
    return out, lse


def _sees_keys(
    count: int, tokens: int, keys: int | None, lengths: Tensor | None, starts: Tensor | None, is_causal: bool
) -> Tensor:
    """Return which of `count` tokens see a key; sequences have `keys` keys, or `lengths`, and begin at `starts`."""
    token = torch.arange(count, device=None if lengths is None else lengths.device)
    if starts is None:
        sequence, place = token // tokens, token % tokens
        length = torch.full_like(token, keys or 0) if lengths is None else lengths[sequence]
        behind = (length if keys is None else keys) - tokens
    else:
        sequence = torch.bucketize(token, starts[1:-1], right=True)
        place = token - starts[sequence]
        length = torch.zeros_like(token) if lengths is None else lengths[sequence]
        behind = length - (starts[sequence + 1] - starts[sequence])
    return (length > 0) & (place + 1 + behind > 0) if is_causal else length > 0


def _rows(x: Tensor) -> Tensor:
    """Return keys or values (B, Hkv, S, D) with rows that the kernel can copy; most layouts need no copy."""
    return x if x.shape[-1] % DIM_STEP == 0 and _copies(x, x.stride(2)) else pad_head_dim(x)


def _copies(x: Tensor, row: int) -> bool:
    """Return whether the kernel can copy rows of x, `row` numbers apart: 32 bytes at a time, without overlap."""
    return (
        x.stride(-1) == 1
        and x.shape[-1] <= row <= MOST_STRIDE
        and all(step % DIM_STEP == 0 for step in x.stride()[:-1])
    )
