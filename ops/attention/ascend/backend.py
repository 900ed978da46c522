"""Call the Ascend C kernels (ascend_c/), which the library of `pasa build-ascend` holds.

The kernels require contiguous FP16 tensors with a head dimension that is a multiple of 16, and
blocks of 128 keys. This module prepares the tensors. Nothing here has run on an NPU; tests run the
same library on a CPU twin of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pasa.ops import envs
from pasa.ops.attention.ascend import build_record, decode, on_310p
from pasa.ops.attention.ascend.inputs import attend_padded, clear_before_windows, pad_head_dim
from pasa.ops.attention.ascend.masks import KernelMask, fold_mask
from pasa.ops.attention.call import NO_WINDOW, Call, Results, to_fp16
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.spec.diagnostics import MAXIMA
from pasa.ops.attention.spec.packed import attend_apart
from pasa.ops.attention.spec.pages import attend_gathered
from pasa.ops.attention.spec.scores import paper_beta
from pasa.ops.attention.spec.shift_keys import whole_blocks
from pasa.ops.devices import ASCEND_310P, npu_chip
from pasa.ops.numerics.dither import COLUMNS
from pasa.ops.numerics.shifting import shifting_matrix
from pasa.ops.packed import largest_by_sequence

if TYPE_CHECKING:
    from pasa.ops.backends import Request

BLOCK = 128  # keys: kBlockKeys in ascend_c/tiling/tiling.h
# The library links these packages, whose C++ interfaces change with every version.
LINKED = ("torch", "torch_npu")
OLDEST_ARCHITECTURE = "dav-2201"  # Atlas A2, which libraries that say nothing were built for


def attend(call: Call) -> Results:
    """Attend as the reference does, but for keys and values that are not finite.

    One that some query sees may reach every row of its head. With `overflow="saturate"` and on a 310P, rows that see
    one may come out finite and wrong.

    On Atlas A2 the exact recovery reads the lengths of packed sequences on the device, so such a call waits for nothing
    and can be captured in a graph. The published recovery and the 310P pad sequences (`_pad_sequences`).

    Calls of a few rows (decoding), and paged calls of the exact recovery, run on the kernel of decoding. Pages that it
    cannot read are gathered.
    """
    if call.pages is not None:
        if not decode.reads_pages(_chip(), call):
            return attend_gathered(attend, call)
        out, lse = decode.decode_pages(_chip(), call)
        return Results(out.to(call.q.dtype), lse)
    if call.cu_q is None or call.cu_k is None:
        call, mask = fold_mask(call, has_table=architecture() != on_310p.ARCHITECTURE)
        out, lse, largest, counts = _kernels(
            call, to_fp16(call.q, "q"), to_fp16(call.k, "k"), to_fp16(call.v, "v"), mask=mask
        )
        return Results(
            out.to(call.q.dtype),
            lse,
            largest.amax(-1) if call.max_logits else None,
            _table(counts, call.scale) if call.diagnose else None,
        )

    if call.cu_q.device != call.cu_k.device:
        raise ValueError(
            f"cu_seqlens_q is on {call.cu_q.device} but cu_seqlens_k is on {call.cu_k.device}: put both on one device"
        )
    if call.q.numel() == 0 or call.k.numel() == 0:
        return attend_apart(attend, call)  # launches nothing
    clean = clear_before_windows(call)
    if call.options.recovery == "paper" or architecture() == on_310p.ARCHITECTURE:
        return _pad_sequences(clean)
    return _attend_packed(clean, call.cu_q, call.cu_k)


def _attend_packed(call: Call, cu_q: Tensor, cu_k: Tensor) -> Results:
    """Attend within packed sequences by the exact recovery on Atlas A2, whose kernels read the lengths.

    Lengths in host memory are checked; those on a device would have to be waited for. Rows behind the last sequence
    are padding, and give 0 and LSE -inf.
    """
    if cu_q.device.type == "cpu":
        call.edges()
    tensors = to_fp16(call.q, "q"), to_fp16(call.k, "k"), to_fp16(call.v, "v")
    starts = torch.stack([x.to(call.q.device, torch.int32) for x in (cu_q, cu_k)])
    if decode.decodes_packed(_chip(), call):
        out, lse = decode.decode_packed(_chip(), call, *tensors, starts)
        return Results(out.to(call.q.dtype), lse)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in tensors)
    out, lse, largest, counts = _kernels(call, q, k, v, starts=starts)
    return Results(
        torch.empty_like(call.q).copy_(out[0].transpose(0, 1)),
        lse[0].T.contiguous(),
        largest_by_sequence(largest[0].T, starts[0]) if call.max_logits else None,
        _table(counts, call.scale) if call.diagnose else None,
    )


def _pad_sequences(call: Call) -> Results:
    """Attend within packed sequences, those that one launch can serve padded to the longest of them.

    The exact recovery passes the numbers of keys to the kernel; the published one needs sequences of equal lengths.
    Lengths are read on the host, so such a call cannot be captured in a graph. Diagnostics take a launch for each
    sequence.
    """
    if call.diagnose:
        return attend_apart(attend, call)

    def together(q: Tensor, k: Tensor, v: Tensor, keys: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        exact = call.options.recovery == "exact"
        return _kernels(call, q, k, v, torch.tensor(keys, dtype=torch.int32).to(q.device) if exact else None)[:3]

    is_aligned = call.is_causal or call.window != NO_WINDOW
    return Results(*attend_padded(call, _served_together(call.options, is_aligned), together))


def _served_together(options: AttentionOptions, is_aligned: bool) -> Callable[[int, int], Hashable]:
    """Return the function of a sequence's rows and keys that must be equal for all sequences of one launch.

    Causal masks and windows are aligned to the last row and key of the padded sequences, so keys - rows must be
    the same for all.
    """
    if options.recovery == "paper":
        return lambda rows, keys: (rows, keys)
    return (lambda rows, keys: keys - rows) if is_aligned else (lambda rows, keys: None)


# ---- the kernels


def _kernels(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    mask: KernelMask | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shift the keys, then attend; returns FP16, or BF16 for unbiased rounding of BF16 inputs.

    The third result holds the largest score of each row (B, Hq, Sq), and is empty unless the call asks for max logits.
    The fourth one holds the counts of each row (7, B, Hq, Sq), and is empty unless the call asks for diagnostics.

    `lengths` (B,), INT32, holds the number of keys of each batch entry. `starts` (2, sequences + 1), INT32, holds the
    cumulative lengths of packed queries and keys; then B is 1. BF16 is rounded directly because a second rounding would
    bring a bias back.
    """
    is_310p = architecture() == on_310p.ARCHITECTURE
    if mask is None and starts is None and decode.decodes(_chip(), call, q, k):
        out, lse = decode.decode(_chip(), call, q, k, v, lengths)
        return out, lse, lse.new_empty(0), lse.new_empty(0)
    dim = q.shape[-1]
    # The matrix unit must not receive NaN, so such rows are overwritten at the end.
    not_finite = ~torch.isfinite(q).all(-1)
    q = q.masked_fill(not_finite.unsqueeze(-1), 0.0)
    q, k, v = (pad_head_dim(x) for x in (q, k, v))
    if is_310p:
        out, lse, largest = on_310p.attend(call, q, k, v, lengths, None if mask is None else mask.elements)
        counts = lse.new_empty(0)
    else:
        out, lse, largest, counts = _on_a2(call, q, k, v, lengths, starts, mask)
    if mask is not None:
        not_finite = not_finite & mask.seeing | mask.invalid
    elif call.sinks is None:
        not_finite &= ~lse.isneginf()  # a row without keys gives 0 and -inf, or its sink, whatever its query
    else:
        not_finite &= _sees_keys(call, q.shape[2], k.shape[2], lengths, starts, q.device)
    out = out[..., :dim].masked_fill(not_finite.unsqueeze(-1), torch.nan)
    largest = largest.masked_fill(not_finite, torch.nan) if call.max_logits else largest
    return out, lse.masked_fill(not_finite, torch.nan), largest, counts


def _chip() -> decode.Chip:
    """Return the kernel of decoding for the chip of the library, and when it is faster."""
    if architecture() == on_310p.ARCHITECTURE:
        return decode.Chip(on_310p.decode, on_310p.most_tiles)
    return decode.Chip(decode.on_a2, decode.most_tiles_on_a2)


def _on_a2(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    mask: KernelMask | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels of prefill for Atlas A2; the results are those of `_kernels`."""
    options, scale, kernels = call.options, call.scale, torch.ops.pasa
    saturate = options.overflow == "saturate"
    if options.recovery == "paper":
        matrix, invariance = paper_matrix(scale, options.beta, k.device)
        keys = kernels.npu_shift_paper(whole_blocks(k, BLOCK), matrix, saturate)
        references = (None, None)
    else:
        begins_anywhere = mask is not None or call.window[0] >= 0
        keys, *references = kernels.npu_shift_exact(
            k, lengths, None if starts is None else starts[1], scale, saturate, begins_anywhere
        )
        invariance = 0.0
    unbiased = options.softmax == "unbiased"
    rounding = min(call.q.shape[-1], COLUMNS) if unbiased else 0, unbiased and call.q.dtype == torch.bfloat16
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    results: tuple[Tensor, Tensor, Tensor, Tensor] = kernels.npu_attention(
        q,
        keys,
        v,
        *references,
        lengths,
        starts,
        sinks,
        *(mask or (None, None))[:2],
        call.is_causal,
        *call.window,
        scale,
        invariance,
        saturate,
        *rounding,
        call.max_logits,
        call.diagnose,
    )
    return results


def _table(counts: Tensor, scale: float) -> Tensor:
    """Return the counts of heads (B, Hq, 7), FP64, of those of rows (7, B, Hq, Sq), whose first are in nats."""
    rows = counts.double()
    table = torch.cat([rows[:MAXIMA].amax(-1), rows[MAXIMA:].sum(-1)]).movedim(0, -1)
    table[..., 0] /= scale
    return table


def _sees_keys(
    call: Call, rows: int, keys: int, lengths: Tensor | None, starts: Tensor | None, device: torch.device
) -> Tensor:
    """Return which rows of a call without a mask see a key, broadcastable to (B, Hq, Sq)."""
    row = torch.arange(rows, device=device)
    aligned = row + keys - rows  # the key that a row is aligned with
    most = torch.tensor(keys, device=device) if lengths is None else lengths[:, None, None]
    if starts is not None:
        sequence = torch.searchsorted(starts[0, 1:].contiguous(), row.int(), right=True)
        count, most = torch.nn.functional.pad(starts.diff(), (0, 1))[:, sequence]  # rows of no sequence see none
        aligned = row - starts[0, sequence] + most - count
    lower, upper = call.band(0, 0)
    least = torch.zeros_like(row) if lower is None else (aligned + lower).clamp(min=0)
    last = torch.full_like(row, keys - 1) if upper is None else aligned + upper
    return (least <= last) & (least < most) & (last >= 0)


@cache
def paper_matrix(scale: float, beta: float | None, device: torch.device) -> tuple[Tensor, float]:
    """Return the shifting matrix of the published recovery, and its invariance."""
    solved, factor = paper_beta(beta, BLOCK, scale)
    return shifting_matrix(BLOCK, solved, scale=scale).to(device), factor


# ---- the library


@cache
def library_error() -> str | None:
    """Return why the kernels cannot be called, or None; the library is loaded at the first call of this function."""
    path = envs.ascend_library()
    if not path.is_file():
        return f"there is no {path}: run `pasa build-ascend` where CANN is installed"
    for name, (built, here) in build_record.differences(path).items():
        if name in LINKED:
            return f"{path} was built for {name} {built}, and {here} is installed: run `pasa build-ascend` again"
    chip, on_310p_here = npu_chip(), architecture() == on_310p.ARCHITECTURE
    if chip and chip.startswith(ASCEND_310P) != on_310p_here:  # do not load what was compiled for another chip
        kind = "the Ascend 310P" if on_310p_here else "Atlas A2"
        return f"{path} was built for {kind}, and this chip is an {chip}: run `pasa build-ascend` again"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path} does not load: {error}"
    chip_error = torch.ops.pasa.npu_310p_chip_error if on_310p_here else torch.ops.pasa.npu_chip_error
    return str(chip_error()) or None


def architecture() -> str:
    """Return the NPU architecture that the library was built for, such as "dav-2201"; empty without a library."""
    return _architecture(envs.ascend_library())


@cache
def _architecture(path: Path) -> str:
    return build_record.built_with(path).get("arch", OLDEST_ARCHITECTURE) if path.is_file() else ""


def limits(request: Request) -> list[str]:
    """Return what the kernels for the chip of the library do not do, of what the record of the backend lists."""
    return on_310p.refusals(request) if architecture() == on_310p.ARCHITECTURE else []
