"""Causal ring attention beside one device: error against FP64, time, and memory of each device.

Started by torchrun, one process a device. Rank 0 also computes the whole sequence alone. Two cases: plain N(0, 1) keys,
and keys that share a bias, which adds the same 131,072 to every scaled score and takes FP32 its digits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.memory import peak_bytes, reset_peak
from pasa.ops import envs

HEADS, DIM, BIASED = (28, 4), 128, 16  # of Qwen2-7B
OFFSETS = (0.0, 131072.0)
SAMPLE = 64  # rows that are judged against FP64
SEED = 42
NOTE = "time of the slowest rank; memory: most that the allocator held, q, k, v and output of that device included"


def run_ring(
    tokens: int = 131072, heads: tuple[int, int] = HEADS, rounds: int = 5, progress: output.Report | None = None
) -> dict[str, Any] | None:
    """Measure on the GPUs of one host, or on CPUs.

    Returns
    -------
    dict or None
        ``settings``, ``records`` (one for every offset), ``gate``, ``environment``; None on all ranks but the first.

    Raises
    ------
    ValueError
        If this process was not started by torchrun.
    """
    if not dist.is_torchelastic_launched():
        raise ValueError("start it with: torchrun --nproc-per-node N -m pasa.eval.cli bench ring")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(str(envs.read("RANK"))) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        records = []
        for index, offset in enumerate(OFFSETS):
            if progress is not None:
                progress(index, len(OFFSETS), f"offset {offset:,.0f}")
            records.append(_measure(tokens, heads, offset, rounds, device))
        if dist.get_rank():
            return None
        return {
            "settings": {
                "tokens": tokens,
                "heads": heads,
                "dim": DIM,
                "rounds": rounds,
                "ranks": dist.get_world_size(),
            },
            "records": records,
            "gate": {"passed": all(each["passed"] for each in records), "rule": _passes.__doc__},
            "environment": describe(device),
            "note": NOTE if device.type == "cuda" else f"{output.NOTE}; memory is that of the processes",
        }
    finally:
        dist.destroy_process_group()


def _inputs(tokens: int, heads: tuple[int, int], offset: float, device: torch.device) -> list[Tensor]:
    """The whole q, k, v, the same on every rank. The bias is one number in all keys: the other dimensions decide."""
    g = torch.Generator(device).manual_seed(SEED)
    shapes = [(1, each, tokens, DIM) for each in (heads[0], heads[1], heads[1])]
    q, k, v = (torch.randn(shape, generator=g, device=device, dtype=torch.float16) for shape in shapes)
    if offset:
        bias = (offset * DIM**0.5 / BIASED) ** 0.5
        q[..., :BIASED] += bias
        k[..., :BIASED] = bias
    return [q, k, v]


def _measure(tokens: int, heads: tuple[int, int], offset: float, rounds: int, device: torch.device) -> dict[str, Any]:
    out, slowest, peaks = _ring(tokens, heads, offset, rounds, device)
    record = {"offset": offset, "ring_s": statistics.median(slowest), "ring_peak_bytes": peaks}
    if dist.get_rank() == 0:
        whole = _inputs(tokens, heads, offset, device)
        one = _Timed(lambda: pasa.attention(*whole, is_causal=True), rounds, device)
        record |= {"one_s": statistics.median(one.seconds), "one_peak_bytes": one.peak}
        record |= _errors(whole, out.to(device), one.out)
        record["passed"] = _passes(record)
    dist.barrier()
    return record


def _ring(
    tokens: int, heads: tuple[int, int], offset: float, rounds: int, device: torch.device
) -> tuple[Tensor, list[float], list[int | None]]:
    """The whole output, on the host; the slowest rank's seconds in each round; the peak memory of each rank.

    Nothing but a rank's own part is in memory meanwhile.
    """
    q, k, v = (pasa.shard_sequence(x, 2).contiguous() for x in _inputs(tokens, heads, offset, device))
    found = _Timed(lambda: pasa.ring_attention(q, k, v, is_causal=True), rounds, device)
    seconds = torch.tensor(found.seconds, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    peaks: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, found.peak)
    return pasa.gather_sequence(found.out, 2).cpu(), seconds.tolist(), peaks


class _Timed:
    """A call, measured: its output, seconds of each round, peak memory of all rounds."""

    def __init__(self, call: Callable[[], Tensor], rounds: int, device: torch.device) -> None:
        self.out = call()  # tiles are chosen, connections made
        reset_peak(device)
        self.seconds = []
        for _ in range(rounds):
            del self.out
            started = _now(device)
            self.out = call()
            self.seconds.append(_now(device) - started)
        self.peak = peak_bytes(device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _errors(whole: list[Tensor], out: Tensor, one: Tensor) -> dict[str, float]:
    """Of rows that are spread over the sequence, against FP64, one key head at a time; and between the two, of all."""
    q, k, v = whole
    rows = torch.linspace(0, q.shape[2] - 1, SAMPLE, dtype=torch.float64).round().long().to(q.device)
    seen = torch.arange(k.shape[2], device=q.device) <= rows.unsqueeze(1)
    group = q.shape[1] // k.shape[1]
    golden = torch.cat(
        [
            pasa.golden_attention(
                q[:, h * group : (h + 1) * group, rows], k[:, h : h + 1], v[:, h : h + 1], attn_mask=seen
            )[0]
            for h in range(k.shape[1])
        ],
        1,
    )
    found = {"golden_max": float(golden.abs().max())}
    for name, each in (("ring", out), ("one", one)):
        error = each[:, :, rows].double() - golden
        found |= {f"{name}_max_error": float(error.abs().max()), f"{name}_rmse": float(error.norm() / golden.norm())}
    return found | {"difference": float((out - one).abs().max()), "not_finite": float((~out.isfinite()).float().mean())}


def _passes(record: dict[str, Any]) -> bool:
    """Every output is finite; the largest error is at most twice that of one device and one rounding to FP16, the RMSE
    at most sqrt(2) times that of one device: one more rounding of no more than the error there was."""
    most = 2 * record["one_max_error"] + 2**-11 * record["golden_max"]
    exact = record["ring_max_error"] <= most and record["ring_rmse"] <= 2**0.5 * record["one_rmse"]
    return bool(exact and record["not_finite"] == 0)
