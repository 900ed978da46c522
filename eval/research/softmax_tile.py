# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The softmax side alone: the online softmax step over score tiles stored in FP16 or in FP32.

A tile is R rows by 128 keys in device memory. Each step reads a tile, moves the running maximum, exponentiates, sums,
and writes P in FP16 and the maximum: what the vector side of attention does where scores pass through memory, as on an
NPU. In an attention kernel of a GPU they stay in registers, and no such traffic is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pasa.eval.accuracy.rmse.metrics import measure_errors
from pasa.eval.kit.timing import Call, Clock, interleave, ratio, summary

BLOCK, ROWS, WARPS = 128, 16, 4
IN_GRAPH = 20  # launches per graph where a single one is too short to time
CHECKED_ROWS = 256
FP32 = "FP32 tile"
LOG2E = tl.constexpr(1.4426950408889634)
RMSE_LIMIT = 2.0**-11
"""Of the weights: P is rounded to FP16 once."""
HALF_LIMIT = 2.0**-9.9 + 2 * 16 * 2.0**-11
"""With FP16 arithmetic: ex2.approx.f16x2's own error (PTX ISA), and two roundings of an exponent of up to 16."""


@triton.jit
def softmax_step(p_s, p_p, p_max, p_sum, rows, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """One program: ROWS rows over all their tiles. HALF: exponents and exponentials in FP16, two at a time."""
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_tile = o_row[:, None].to(tl.int64) * (blocks * BLOCK) + tl.arange(0, BLOCK)[None, :]
    b_max = tl.full((ROWS,), float("-inf"), tl.float32)
    b_sum = tl.zeros((ROWS,), tl.float32)
    for block in range(blocks):
        b_s = tl.load(p_s + o_tile + block * BLOCK)  # (ROWS, BLOCK)
        b_new = tl.maximum(b_max, tl.max(b_s, 1).to(tl.float32))  # (ROWS,)
        if HALF:
            b_x = (b_s - b_new.to(tl.float16)[:, None]) * tl.full((1, 1), LOG2E, tl.float16)
            b_p = tl.inline_asm_elementwise(
                "ex2.approx.f16x2 $0, $1;", "=r,r", [b_x], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            b_p = tl.exp2((b_s.to(tl.float32) - b_new[:, None]) * LOG2E).to(tl.float16)
        b_sum = b_sum * tl.exp2((b_max - b_new) * LOG2E) + tl.sum(b_p.to(tl.float32), 1)
        b_max = b_new
        tl.store(p_p + o_tile + block * BLOCK, b_p)
        tl.store(p_max + block * rows + o_row, b_max)
    tl.store(p_sum + o_row, b_sum)


@dataclass(frozen=True)
class Tiles:
    """Scores (rows, keys), and what the steps write: P (rows, keys), maxima (blocks, rows), sums (rows,)."""

    scores: Tensor
    weights: Tensor
    maxima: Tensor
    sums: Tensor
    half: bool

    def repeat(self, launches: int) -> Tensor:
        """Enqueue all steps of all rows so many times."""
        rows, keys = self.scores.shape
        tensors = self.scores, self.weights, self.maxima, self.sums
        for _ in range(launches):
            softmax_step[(rows // ROWS,)](
                *tensors, rows, keys // BLOCK, ROWS=ROWS, BLOCK=BLOCK, HALF=self.half, num_warps=WARPS
            )
        return self.weights

    @property
    def bytes(self) -> int:
        """Return the bytes that are read and written, each once."""
        return sum(x.numel() * x.element_size() for x in (self.scores, self.weights, self.maxima, self.sums))

    def error(self) -> float:
        """Return the relative RMSE of some rows against FP64 softmax of the scores as they are stored."""
        rows = slice(0, CHECKED_ROWS)
        scale = torch.exp(self.maxima[:, rows].double() - self.maxima[-1, rows].double()).mT  # (rows, blocks)
        weights = self.weights[rows].double().unflatten(1, (-1, BLOCK)) * scale.unsqueeze(-1)
        made = weights.flatten(1) / self.sums[rows].double().unsqueeze(1)
        return measure_errors(made, torch.softmax(self.scores[rows].double(), 1)).rmse


class Arithmetic(NamedTuple):
    """Format of a stored tile, and of the arithmetic on it; and the largest RMSE of its weights."""

    name: str
    stored: torch.dtype
    half: bool
    limit: float


ARITHMETICS = (
    Arithmetic(FP32, torch.float32, False, RMSE_LIMIT),
    Arithmetic("FP16 tile", torch.float16, False, RMSE_LIMIT),
    Arithmetic("FP16 tile, FP16 arithmetic", torch.float16, True, HALF_LIMIT),
)
SIZES = (("device memory", 65536, 4096, True), ("L2", 4096, 1024, False))
"""(where the tiles are, rows, keys, cold)."""


def make_tiles(arithmetic: Arithmetic, rows: int, keys: int, device: torch.device | str) -> Tiles:
    """Return scores from N(0, 1), the same numbers for every arithmetic before they are rounded."""
    source = torch.Generator(device).manual_seed(rows)
    scores = torch.randn(rows, keys, generator=source, device=device).to(arithmetic.stored)
    return Tiles(
        scores,
        torch.empty(rows, keys, dtype=torch.float16, device=device),
        torch.empty(keys // BLOCK, rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        arithmetic.half,
    )


def run_softmax(clock: Clock, rounds: int) -> list[dict[str, Any]]:
    """Time every arithmetic at every size; one whose weights are wrong has an error and no time.

    Returns
    -------
    list of dict
        One per size and arithmetic: ``status``, ``why``, ``rmse``, ``rmse_limit``, ``bytes``, times as of
        `timing.summary`, ``bandwidth`` in bytes per second, ``to_fp32``: how many times as fast as with FP32 tiles.
    """
    records: list[dict[str, Any]] = []
    for where, rows, keys, cold in SIZES:
        launches, calls, by_name = 1 if cold else IN_GRAPH, {}, {}
        for arithmetic in ARITHMETICS:
            tiles = make_tiles(arithmetic, rows, keys, clock.device)
            by_name[arithmetic.name] = {"where": where, "rows": rows, "keys": keys, **check(arithmetic, tiles)}
            if not by_name[arithmetic.name]["why"]:
                call = Call(partial(tiles.repeat, launches))
                calls[arithmetic.name] = clock.graph(call) if launches > 1 else call
        times, _ = interleave(clock, calls, rounds, cold)
        for name, taken in times.items():
            per_launch = summary([[value / launches for value in turn] for turn in taken])
            by_name[name] |= per_launch | {"bandwidth": by_name[name]["bytes"] / (1e-3 * per_launch["median_ms"])}
            by_name[name]["to_fp32"] = ratio(taken, times[FP32]) if FP32 in times else None
        records += by_name.values()
    return records


def check(arithmetic: Arithmetic, tiles: Tiles) -> dict[str, Any]:
    """Run once and return the error beside its limit; ``why`` is empty where it holds."""
    tiles.repeat(1)
    error, limit = tiles.error(), arithmetic.limit
    why = "" if error <= limit else f"RMSE {error:.2e}, limit {limit:.2e}"
    status = "failed gate" if why else "ok"
    record = {"arithmetic": arithmetic.name, "status": status, "why": why, "rmse": error, "rmse_limit": limit}
    return record | {"bytes": tiles.bytes}
