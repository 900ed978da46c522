"""Call the Ascend C kernels for the Ascend 310P (ascend_c/310p.md), which compute the exact recovery alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pasa.ops.attention.ascend.decode import Operands
from pasa.ops.attention.ascend.masks import HALF, find_visits, tile_bits, without_repeats
from pasa.ops.attention.call import Call

if TYPE_CHECKING:
    from pasa.ops.backends import Request

ARCHITECTURE = "dav-2002"  # the compiler's name
LACKING = ("diagnostics",)  # features of the kernels for Atlas A2
COLUMNS = 64  # that a vector call takes at a time: kFloats in ascend_c/kernel/rows.h
ROW_STEP = 16  # rows of a fractal, which the kernel takes as a whole: kFractal in ascend_c/tiling/tiling.h
FARTHEST = 2.0**126  # of a sink: FP32's distance between a score and infinity is infinite, which this chip replaces


def attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels; q, k and v are FP16 and contiguous, with a head dimension that is a multiple of 16.

    The chip saturates whatever `overflow` asks for. No number of the exact recovery does, so results
    are the same. Where a sequence has few rows, the heads that share a key head become rows of one
    tile, so the keys are read once.

    Parameters
    ----------
    lengths : Tensor (B,), INT32, optional
        Keys of each batch entry.
    mask : Tensor (B, Hq, Sq, Skv), bool, optional
        The only limit of the call: nothing else hides a key. Axes that repeat have strides of 0.

    Returns
    -------
    out, lse, largest : Tensor
        As `backend._kernels` returns them.
    """
    kernels, heads, rows = torch.ops.pasa, q.shape[1], q.shape[2]
    keys, *references = kernels.npu_310p_shift(k, lengths, call.scale)
    values = kernels.npu_310p_lay_out(v, lengths)
    group = heads // k.shape[1]
    token_rows = group if -(-rows * group // HALF) < group * -(-rows // HALF) else 1
    count = rows * token_rows
    missing = -count % ROW_STEP
    whole = torch.nn.functional.pad(_to_rows(q, token_rows), (0, 0, 0, missing)).contiguous()
    sinks = None
    if call.sinks is not None:
        bounded = _bounded(call.sinks).view(1, heads, 1, 1).expand(1, heads, rows, 1)
        sinks = torch.nn.functional.pad(_to_rows(bounded, token_rows)[0, :, :, 0], (0, missing)).contiguous()
    bits, visits = None, None
    if mask is not None:
        mask = _mask_rows(mask, token_rows)
        bits, visits = tile_bits(mask), find_visits(mask, count, HALF)
    limits = token_rows, call.is_causal, *call.window, call.scale, call.max_logits
    out, *numbers = kernels.npu_310p_attention(
        whole, keys, values, *references, lengths, sinks, bits, visits, count, k.shape[2], *limits
    )
    lse, largest = (x if x.numel() == 0 else _to_heads(x[:, :, :count, None], token_rows)[..., 0] for x in numbers)
    lse = lse if sinks is None else _without_bound(lse)
    return _to_heads(out[:, :, :count], token_rows), lse, largest


def most_tiles(_tokens: int, _group: int, dim: int) -> int:
    """Return how many tiles of decoding take as long as prefill, whatever the rows and heads: `decode.Chip.most_tiles`.

    Prefill, too, has the heads that share a key head in one tile. By the model (eval/npu), a block of keys takes a tile
    of 64 rows 1.7 us in prefill and 2.8 us in decoding, and the launches before prefill 3.7 us, for 64 columns. For 128
    columns these are 2.0, 3.4 and 7.3 us. The vector unit works on 64 columns at a time, so a limit holds up to there.
    Beyond, the model allows 5 tiles; 4 leave it room for error.
    """
    return 3 if dim <= COLUMNS else 4


def decode(call: Call, x: Operands) -> tuple[Tensor, Tensor]:
    """Launch the kernel that reads a cache where it is, as `decode.Chip.kernel` says."""
    sinks = None if call.sinks is None else _bounded(call.sinks).contiguous()
    out, lse = torch.ops.pasa.npu_310p_decode(*x[:-1], sinks, x.tokens, call.is_causal, call.scale)
    return out, lse if sinks is None else _without_bound(lse)


def _bounded(sinks: Tensor) -> Tensor:
    """Return sinks as FP32 numbers whose distance to a score is one, too."""
    return sinks.float().clamp(-FARTHEST, FARTHEST)


def _without_bound(lse: Tensor) -> Tensor:
    """Return log-sum-exps of which those at a bound of sinks are infinite."""
    return lse.masked_fill(lse <= -FARTHEST, -torch.inf).masked_fill(lse >= FARTHEST, torch.inf)


def _to_rows(x: Tensor, token_rows: int) -> Tensor:
    """Return (B, H, S, D) as (B, H / token_rows, S token_rows, D): heads become rows of a token."""
    rows: Tensor = x.unflatten(1, (-1, token_rows)).transpose(2, 3).flatten(2, 3)
    return rows


def _to_heads(x: Tensor, token_rows: int) -> Tensor:
    """Return what `_to_rows` made as (B, H, S, D) again."""
    heads: Tensor = x.unflatten(2, (-1, token_rows)).transpose(2, 3).flatten(1, 2)
    return heads


def _mask_rows(mask: Tensor, token_rows: int) -> Tensor:
    """Return a mask (B, Hq, Sq, Skv) for rows of `token_rows` heads, with axes of 1 where it repeats."""
    rows, mask = mask.shape[2], without_repeats(mask)
    if token_rows == 1 or mask.shape[1:3] == (1, 1):
        return mask
    if mask.shape[1] == 1:
        return mask.repeat_interleave(token_rows, 2)
    return _to_rows(mask.expand(-1, -1, rows, -1), token_rows)


def refusals(request: Request) -> list[str]:
    """Return every reason why this chip or its kernels cannot serve a request."""
    reasons = []
    if request.dtype == torch.bfloat16:
        reasons.append("an Ascend 310P has no BF16: convert q, k and v to torch.float16")
    if request.options.recovery != "exact":
        reasons.append(
            f"the kernels for the Ascend 310P have no recovery {request.options.recovery}, only exact: their scores "
            "are FP32, so nothing is to be recovered from FP16"
        )
    if request.options.softmax != "safe":
        reasons.append(f"the kernels for the Ascend 310P have no softmax {request.options.softmax}, only safe")
    lacking = [name for name in LACKING if name in request.features]
    if request.mask == "float":
        lacking.append("float masks")
    return reasons + [f"the kernels for the Ascend 310P have no {name}" for name in lacking]
