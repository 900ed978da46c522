"""The kernels on the twin beside the Python reference: inputs, launches, and the reference's tiles."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pasa.eval.check_device.npu.calls import INTEGERS
from pasa.ops.attention import call as operator_call
from pasa.ops.attention.ascend.backend import paper_matrix
from pasa.ops.attention.ascend.masks import find_visits, keeps
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.spec import attention as reference
from pasa.ops.attention.spec import scores
from pasa.ops.attention.spec.scores import Block, ScoreTile
from pasa.ops.attention.spec.shift_keys import shift_exact, shift_paper, whole_blocks
from pasa.ops.numerics.dither import COLUMNS
from tests.ascend_c.twin_build import Program

BLOCK, HALF_ROWS = 128, 64
LAUNCHES = [("eager", seed) for seed in range(8)] + [("deferred", seed) for seed in range(4)]
# A third of them, with a seed of every remainder by 3, for tests of many shapes; scripts/test.sh --all gives them all.
FEW_LAUNCHES = [("eager", 0), ("eager", 4), ("deferred", 2), ("deferred", 3)]
SOME_LAUNCHES = LAUNCHES if "PASA_ALL_MUTANTS" in os.environ else FEW_LAUNCHES
OVERFLOW = {"inf": "inf_nan", "saturate": "saturate"}  # the reference's names, and the twin's


def ulp(x: Tensor) -> Tensor:
    """An ulp of FP16 at |x|."""
    return torch.exp2(torch.floor(torch.log2(x.double().abs().clamp(min=2.0**-14))) - 10)


@dataclass(frozen=True)
class Call:
    """One call of attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    exact: bool = True
    overflow: Any = "inf"
    lengths: Tensor | None = None
    starts: Tensor | None = None  # (2, sequences + 1): the one batch entry is packed sequences
    sinks: Tensor | None = None
    scale: float | None = None
    window: tuple[int, int] = operator_call.NO_WINDOW
    largest: bool = False  # also the largest score of each row
    counts: bool = False  # also what score tiles hold
    mask: Tensor | None = None  # bool or FP32 (B or 1, H or 1, Sq or 1, Skv)
    unbiased: torch.dtype | None = None  # the type that outputs are rounded to without bias, if they are

    @property
    def softmax_scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def blocks(self) -> int:
        """Return how many blocks of keys have anchors; of packed sequences, how many could."""
        keys = self.k.shape[2]
        return -(-keys // BLOCK) if self.starts is None else keys // BLOCK + self.starts.shape[1] - 1

    def sequences(self) -> list[tuple[slice, slice, Call]]:
        """Return the rows and the keys of each packed sequence, and its call without packing."""
        spans = [[slice(*pair) for pair in pairwise(each)] for each in self.starts.tolist()]
        return [
            (rows, keys, replace(self, q=self.q[:, :, rows], k=self.k[:, :, keys], v=self.v[:, :, keys], starts=None))
            for rows, keys in zip(*spans, strict=True)
        ]

    @property
    def begins_anywhere(self) -> bool:
        return self.mask is not None or self.window[0] >= 0

    @property
    def anchor_rows(self) -> int:
        return 3 if self.begins_anywhere else 2

    def mask_settings(self) -> dict[str, int]:
        """Return the strides of the mask, and the entries of its table."""
        if self.mask is None:
            return {}
        names = ("batch_stride", "head_stride", "row_stride")
        strides = (0 if self.mask.shape[axis] == 1 else self.mask.contiguous().stride(axis) for axis in range(3))
        entries = {"mask_batches": self.mask.shape[0], "mask_heads": self.mask.shape[1]}
        return entries | dict(zip(names, strides, strict=True)) | {"adds_mask": int(self.mask.is_floating_point())}

    def settings(self) -> dict[str, Any]:
        """Return the settings that a program needs."""
        batch, heads, rows, dim = self.q.shape
        kv_heads, keys = self.k.shape[1:3]
        shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "rows": rows, "keys": keys, "dim": dim}
        how = {"causal": int(self.causal), "exact": int(self.exact)}
        how |= {name: int(getattr(self, name) is not None) for name in ("lengths", "sinks", "mask")}
        how |= {"left": self.window[0], "right": self.window[1], "begins_anywhere": int(self.begins_anywhere)}
        how |= {"sequences": 0 if self.starts is None else self.starts.shape[1] - 1}
        how |= {"largest": int(self.largest), "counts": int(self.counts)}
        how |= self.mask_settings()
        rounding = {"unbiased_columns": min(COLUMNS, dim), "to_bf16": int(self.unbiased == torch.bfloat16)}
        how |= rounding if self.unbiased else {}
        return shape | how | {"overflow": OVERFLOW[self.overflow], "scale": repr(self.softmax_scale)}


@dataclass
class Run:
    """Hold the report and the arrays of a program."""

    report: dict[str, Any]
    arrays: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]


def array(x: Tensor) -> np.ndarray:
    return x.detach().contiguous().numpy()


def input_arrays(x: Call) -> dict[str, np.ndarray]:
    """Return the inputs that both programs share."""
    result = {"q": array(x.q), "k": array(x.k), "v": array(x.v)}
    if x.lengths is not None:
        result["lengths"] = array(x.lengths.int())
    if x.starts is not None:
        result |= {"starts": array(x.starts.int()), "key_starts": array(x.starts[1].int())}
    if x.sinks is not None:
        result["sinks"] = array(x.sinks.float())
    if x.mask is not None:
        elements = x.mask if x.mask.is_floating_point() else x.mask.byte()
        result |= {"mask": array(elements), "visits": array(find_visits(keeps(x.mask), x.q.shape[2]))}
    if not x.exact:
        result["k"] = array(whole_blocks(x.k, BLOCK))
        result["matrix"] = array(matrix_of(x)[0])
    return result


def matrix_of(x: Call) -> tuple[Tensor, float]:
    """Return M of the published recovery, and its invariance."""
    return paper_matrix(x.softmax_scale, None, x.k.device)


def launch_shift(program: Program, x: Call, **options: Any) -> Run:
    """Run shift_keys on the twin."""
    batch, heads, keys, dim = x.k.shape
    keys = keys if x.exact else x.blocks * BLOCK
    report = program.run("shift", input_arrays(x), **x.settings() | {"keys": keys}, **options)
    result = Run(report)
    if report["ok"]:
        result.arrays["keys"] = read(program, "keys", np.float16, (batch, heads, keys, -1))
    if report["ok"] and x.exact:
        result.arrays["anchors"] = read(program, "anchors", np.float16, (batch, heads, x.anchor_rows * x.blocks, dim))
        result.arrays["units"] = read(program, "units", np.float32, (batch, heads, x.blocks, 8))
    return result


def launch_attention(program: Program, x: Call, shifted: dict[str, Tensor], **options: Any) -> Run:
    """Run pasa_attention on the twin."""
    arrays = input_arrays(x) | {name: array(value) for name, value in shifted.items()}
    settings = x.settings() | options
    if not x.exact:
        settings["invariance"] = repr(matrix_of(x)[1])
    report = program.run("attend", arrays, **settings)
    result = Run(report)
    if report["ok"]:
        batch, heads, rows, _ = x.q.shape
        result.arrays["out"] = read(program, "out", np.float16, x.q.shape).view(x.unbiased or torch.float16)
        for name in ("lse", "largest") if x.largest else ("lse",):
            result.arrays[name] = read(program, name, np.float32, x.q.shape[:3])
        if x.counts:
            result.arrays["counts"] = read(program, "counts", np.float32, (7, *x.q.shape[:3]))
        if x.starts is not None:
            return result
        tiles = read(program, "scores", np.float16, (batch, heads, -(-rows // BLOCK), x.blocks, BLOCK, BLOCK))
        flat = tiles.permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)
        result.arrays["scores"] = flat[:, :, :rows, : x.k.shape[2]]
    return result


def launch_vector_probe(program: Program, probe: int, **options: Any) -> Run:
    """Run one probe of a vector core on the twin; integers are small, and the products of others leave FP16."""
    g = torch.Generator().manual_seed(probe)
    x, y = (300 * torch.rand(4096, generator=g) + 1 for _ in "xy")
    if probe == INTEGERS:
        x, y = (each.int() for each in (x, y))
    report = program.run("probe_vector", {"x": array(x), "y": array(y)}, probe=probe, **options)
    return Run(report, {"z": read(program, "z", np.float32, (4096,))} if report["ok"] else {})


def launch_product_probe(program: Program, m: int, n: int, k: int, **options: Any) -> Run:
    """Run the probe of a cube core on the twin; only what its products are stored to is returned."""
    g = torch.Generator().manual_seed(m)
    a, b, stale = (torch.randn(rows, k, generator=g).half() for rows in (m, n, BLOCK))
    arrays = {"a": array(a), "b": array(b), "stale": array(stale)}
    report = program.run("probe_product", arrays, m=m, n=n, k=k, **options)
    c = read(program, "c", np.float32, (3, BLOCK, BLOCK))[:, :m, :n] if report["ok"] else None
    return Run(report, {} if c is None else {"c": c})


def put_nan_behind_lengths(x: Call) -> None:
    """Make the keys and values of a call that do not exist NaN."""
    if x.lengths is None:
        raise ValueError("the call has no lengths")
    for b, length in enumerate(x.lengths.clamp(min=0).tolist()):
        x.k[b, :, length:] = torch.nan
        x.v[b, :, length:] = torch.nan


def read(program: Program, name: str, dtype: type, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(program.load(name, dtype).reshape(shape).copy())


def shifted_by_reference(x: Call) -> dict[str, Tensor]:
    """Return K', and for the exact recovery the anchor rows and units, in the layout of the kernels."""
    if not x.exact:
        matrix = matrix_of(x)[0].float()
        keys = [shift_paper(b, matrix, x.overflow) for b in whole_blocks(x.k.float(), BLOCK).split(BLOCK, 2)]
        return {"keys": torch.cat(keys, 2).half()}
    if x.starts is not None:
        return packed_by_reference(x)
    blocks = x.k.float().split(BLOCK, 2)
    unit = scores.scale_unit(x.softmax_scale)
    result = [shift_exact(b, unit) for b in blocks]
    frame = result[0].anchor
    rows = []
    for index, block in enumerate(result):
        frame = scores.next_frame(frame, block.anchor)
        rows += [frame, block.anchor - frame if index else block.mean_residual]
        rows += [block.mean_residual] if x.begins_anywhere else []
    keys = torch.cat([block.keys for block in result], 2)
    units = torch.cat([block.unit for block in result], 2).expand(-1, -1, -1, 8)
    return {"keys": keys.half(), "anchors": torch.cat(rows, 2).half(), "units": units}


def packed_by_reference(x: Call) -> dict[str, Tensor]:
    """Return what `shifted_by_reference` returns, of packed sequences; the places of no block hold NaN."""
    batch, heads, _, dim = x.k.shape
    result = {
        "keys": torch.full_like(x.k, torch.nan),
        "anchors": torch.full((batch, heads, x.anchor_rows * x.blocks, dim), torch.nan).half(),
        "units": torch.full((batch, heads, x.blocks, 8), torch.nan),
    }
    for index, (_, keys, one) in enumerate(x.sequences()):
        if one.k.shape[2] == 0:
            continue
        first, shifted = keys.start // BLOCK + index, shifted_by_reference(one)
        result["keys"][:, :, keys] = shifted["keys"]
        result["units"][:, :, first : first + one.blocks] = shifted["units"]
        rows = slice(first * x.anchor_rows, (first + one.blocks) * x.anchor_rows)
        result["anchors"][:, :, rows] = shifted["anchors"]
    return result


def seen(x: Call) -> Tensor:
    """Return which keys a row sees, (B, 1, Sq, Skv)."""
    rows, keys = x.q.shape[2], x.k.shape[2]
    row, key = torch.arange(rows).unsqueeze(1), torch.arange(keys)
    visible = (key <= row + keys - rows) if x.causal else torch.ones(rows, keys, dtype=torch.bool)
    if x.window[0] >= 0:
        visible &= key >= row + keys - rows - x.window[0]
    if x.window[1] >= 0:
        visible &= key <= row + keys - rows + x.window[1]
    visible = visible.expand(x.q.shape[0], 1, rows, keys)
    visible = visible if x.mask is None else visible & keeps(x.mask)
    return visible if x.lengths is None else visible & (key < x.lengths.view(-1, 1, 1, 1))


def attend_by_reference(x: Call) -> Run:
    """Return output, log-sum-exp, and the score tiles as FP16 stores them.

    Each vector core decides for its 64 rows if a tile comes in FP32.
    """
    options = AttentionOptions(recovery="exact" if x.exact else "paper", block_q=HALF_ROWS, overflow=x.overflow)
    mask = x.mask if x.lengths is None else seen(x)
    wide = torch.full((*x.q.shape[:3], x.k.shape[2]), torch.nan)
    model = scores.ExactScores if x.exact else scores.PaperScores
    make_tile = model.tile
    whole = mask is None or (x.lengths is None and bool(keeps(mask).any(2).any(1).all()))

    def kept(self: Any, block: Block) -> ScoreTile:
        tile = make_tile(self, block)
        start = block.index * BLOCK
        if whole:  # otherwise batch entries come one by one, without the keys that no row sees
            rows = slice(block.rows_before, block.rows_before + block.q.shape[-2])
            wide[:, :, rows, start : start + BLOCK] = tile.stored.flatten(1, 2)
        return tile

    try:
        model.tile = kept
        is_causal = x.causal and x.lengths is None
        call = operator_call.Call(
            x.q, x.k, x.v, x.softmax_scale, options, is_causal, mask, sinks=x.sinks, window=x.window
        )
        out, lse, *_ = reference.attend(call)
    finally:
        model.tile = make_tile
    narrow = scores.round_to(wide, scores.FP16, overflow=x.overflow).half()
    return Run({}, {"out": out, "lse": lse, "scores": narrow})


def means(heads: int, rows: int, keys: int, dim: int, **how: Any) -> Call:
    """Return queries of zero: an output row is the mean of the values that it sees, whose sums FP32 holds."""
    g = torch.Generator().manual_seed(rows * 1000 + keys)
    k = torch.randn(1, heads, keys, dim, generator=g).half()
    v = 1 + torch.randint(1024, (1, heads, keys, dim), generator=g) / 1024
    return Call(torch.zeros(1, heads, rows, dim).half(), k, (v * v.sub(1.5).sign()).half(), **how)


def means_with_biased_bits() -> Call:
    """Return means of 64 values whose six dropped bits are random except for one bias, which flags the rows of a head.

    The third bit is 1, or the fourth is, or one of them equals the next bit. In other heads 1/64 is dropped. The last
    columns are subnormal in FP16.
    """
    g = torch.Generator().manual_seed(7)
    units, dropped = torch.randint(960, (8, 64, 64), generator=g), torch.randint(64, (8, 64), generator=g)
    dropped[0] |= 8
    dropped[1] |= 4
    dropped[2] = dropped[2] & ~4 | dropped[2] >> 1 & 4
    dropped[3] = dropped[3] & ~2 | dropped[3] >> 1 & 2
    dropped[4:] = 1
    units[:, -1] += (dropped - units.sum(1)) % 64
    v = 1 + units / 1024
    v[:, :, -4:] = torch.randint(512, 1024, (8, 64, 4), generator=g) * 2.0**-24
    k = torch.randn(1, 8, 64, 64, generator=g).half()
    return Call(torch.zeros(1, 8, 3, 64).half(), k, v.half().unsqueeze(0), unbiased=torch.float16)
