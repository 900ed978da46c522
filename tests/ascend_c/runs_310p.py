"""The 310P's kernels on the twin beside the Python reference: launches, and arrays in the layouts of that chip."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pasa.ops.attention.ascend.masks import HALF, find_visits, tile_bits
from tests.ascend_c.kernel_runs import BLOCK, Call, Run, array, read
from tests.ascend_c.twin_build import Program

FRACTAL = 16  # columns that lie together, and the step of the rows of a tile


def fractals(x: Tensor) -> Tensor:
    """Return (B, H, S, D) as blocks of 128 rows (B, H, blocks, D / 16, 128, 16), filled up with zeros."""
    batch, heads, rows, dim = x.shape
    whole = torch.nn.functional.pad(x, (0, 0, 0, -rows % BLOCK))
    return whole.view(batch, heads, -1, BLOCK, dim // FRACTAL, FRACTAL).transpose(3, 4).contiguous()


def rows_of(x: Tensor, rows: int) -> Tensor:
    """Return what `fractals` laid out, row by row again."""
    batch, heads, blocks, groups, _, _ = x.shape
    return x.transpose(3, 4).reshape(batch, heads, blocks * BLOCK, groups * FRACTAL)[:, :, :rows]


def settings_of(x: Call) -> dict[str, Any]:
    batch, heads, rows, dim = x.q.shape
    kv_heads, keys = x.k.shape[1:3]
    shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "rows": rows, "keys": keys, "dim": dim}
    how = {name: int(getattr(x, name) is not None) for name in ("lengths", "sinks", "mask")}
    how |= {"causal": int(x.causal), "left": x.window[0], "right": x.window[1], "largest": int(x.largest)}
    return shape | how | mask_settings(x) | {"scale": repr(x.softmax_scale)}


def mask_settings(x: Call) -> dict[str, int]:
    """Return the strides of the bits of a mask, and the entries of its table."""
    if x.mask is None:
        return {}
    bits = tile_bits(x.mask)
    strides = [0 if bits.shape[axis] == 1 else bits.stride(axis) for axis in range(3)]
    names = ("mask_batches", "mask_heads", "batch_stride", "head_stride", "row_stride")
    return dict(zip(names, (*bits.shape[:2], *strides), strict=True))


def launch_shift(program: Program, x: Call, **options: Any) -> Run:
    """Run the three launches that make K', its anchors and units, and V as fractals."""
    batch, heads, _, dim = x.k.shape
    arrays = {"k": array(x.k), "v": array(x.v)} | lengths_of(x)
    report = program.run("shift", arrays, **settings_of(x), **options)
    result = Run(report)
    if report["ok"]:
        blocks = (batch, heads, x.blocks)
        for name in ("keys", "values"):
            result.arrays[name] = read(program, name, np.float16, (*blocks, dim // FRACTAL, BLOCK, FRACTAL))
        result.arrays["anchors"] = read(program, "anchors", np.float16, (batch, heads, 2 * x.blocks, dim))
        result.arrays["units"] = read(program, "units", np.float32, (*blocks, 8))
    return result


def launch_attention(program: Program, x: Call, shifted: dict[str, Tensor], **options: Any) -> Run:
    """Run attention; its queries are filled up to a multiple of 16 rows, and those rows are cut off again."""
    batch, heads, rows, dim = x.q.shape
    whole = -(-rows // FRACTAL) * FRACTAL
    q = torch.nn.functional.pad(x.q, (0, 0, 0, whole - rows))
    arrays = {"q": array(q)} | {name: array(value) for name, value in shifted.items()} | lengths_of(x)
    if x.mask is not None:
        arrays |= {"mask": array(tile_bits(x.mask)), "visits": array(find_visits(x.mask, rows, HALF))}
    if x.sinks is not None:
        arrays["sinks"] = array(x.sinks.float()[:, None].expand(heads, whole))
    report = program.run("attend", arrays, **settings_of(x), **options)
    result = Run(report)
    if report["ok"]:
        result.arrays["out"] = read(program, "out", np.float16, (batch, heads, whole, dim))[:, :, :rows]
        for name in ("lse", "largest") if x.largest else ("lse",):
            result.arrays[name] = read(program, name, np.float32, (batch, heads, whole))[:, :, :rows]
    return result


def attend(program: Program, x: Call, **options: Any) -> Run:
    """Run all launches of a call; the report is that of the first which fails, or of attention."""
    shifted = launch_shift(program, x, **options)
    return launch_attention(program, x, shifted.arrays, **options) if shifted.report["ok"] else shifted


def lengths_of(x: Call) -> dict[str, np.ndarray]:
    return {} if x.lengths is None else {"lengths": array(x.lengths.int())}
