"""Causal ring attention beside one device: error against FP64, time, and memory of each device.

Started by torchrun, one process a device. Rank 0 also computes the whole sequence alone. Two cases: plain N(0, 1) keys,
and keys that share a bias, which adds the same 131,072 to every scaled score and takes FP32 its digits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import describe, origin
from pasa.eval.kit.error_metrics import measure_errors
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.memory import peak_bytes, reset_peak
from pasa.eval.kit.options import at_least
from pasa.eval.kit.tables import Table, number, short
from pasa.eval.kit.timing import now
from pasa.ops import envs

HEADS, DIM, BIASED = (28, 4), 128, 16  # query heads, key heads and head dimension of Qwen2-7B
OFFSETS = (0.0, 131072.0)
SAMPLE = 64  # rows that are judged against FP64
SEED = 42
NOTE = "time of the slowest rank; memory: most that the allocator held, q, k, v and output of that device included"


def run_ring(
    tokens: Annotated[int, "Tokens of the whole sequence."] = 131072,
    rounds: Annotated[int, "Rounds to time."] = 5,
    progress: output.Report = output.silent,
) -> dict[str, Any] | None:
    """Compare causal attention of several devices with one, under torchrun; exit 1 if it errs more than one does.

    Returns None on all ranks but the first; ``records`` has one entry for every offset.
    """
    at_least(1, rounds=rounds)
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
            progress(index, len(OFFSETS), f"offset {offset:,.0f}")
            records.append(_measure(tokens, offset, rounds, device))
        if dist.get_rank():
            return None
        settings = {"tokens": tokens, "heads": HEADS, "dim": DIM, "rounds": rounds, "ranks": dist.get_world_size()}
        return {
            "settings": settings,
            "records": records,
            "gate": {"passed": all(each["passed"] for each in records)},
            "environment": describe(device),
            "note": NOTE if device.type == "cuda" else f"{output.NOTE}; memory is that of the processes",
        }
    finally:
        dist.destroy_process_group()


def _inputs(tokens: int, offset: float, device: torch.device) -> list[Tensor]:
    """Return the whole q, k, v, the same on every rank; one number biases all keys, the other dimensions decide."""
    g, heads = torch.Generator(device).manual_seed(SEED), (HEADS[0], HEADS[1], HEADS[1])
    q, k, v = (torch.randn(1, n, tokens, DIM, generator=g, device=device, dtype=torch.float16) for n in heads)
    if offset:
        bias = (offset * DIM**0.5 / BIASED) ** 0.5
        q[..., :BIASED] += bias
        k[..., :BIASED] = bias
    return [q, k, v]


def _measure(tokens: int, offset: float, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the record of an offset; rank 0 adds the single device, once the ring's inputs are gone."""
    out, slowest, peaks = _ring(tokens, offset, rounds, device)
    record = {"offset": offset, "ring_s": statistics.median(slowest), "ring_peak_bytes": peaks}
    if dist.get_rank() == 0:
        whole = _inputs(tokens, offset, device)
        one, seconds, peak = _timed(lambda: pasa.attention(*whole, is_causal=True), rounds, device)
        record |= {"one_s": statistics.median(seconds), "one_peak_bytes": peak}
        record |= _errors(whole, out.to(device), one)
        record["passed"] = _passes(record)
    dist.barrier()
    return record


def _ring(
    tokens: int, offset: float, rounds: int, device: torch.device
) -> tuple[Tensor, list[float], list[int | None]]:
    """Return the whole output, on the host; the slowest rank's seconds in each round; the peak memory of each rank.

    Nothing but a rank's own part is in memory meanwhile.
    """
    q, k, v = (pasa.shard_sequence(x, 2).contiguous() for x in _inputs(tokens, offset, device))
    out, seconds, peak = _timed(lambda: pasa.ring_attention(q, k, v, is_causal=True), rounds, device)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    peaks: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return pasa.gather_sequence(out, 2).cpu(), slowest.tolist(), peaks


def _timed(call: Callable[[], Tensor], rounds: int, device: torch.device) -> tuple[Tensor, list[float], int | None]:
    """Return the output of a call, the seconds of each round, and the peak memory of all rounds."""
    out = call()  # tiles are chosen, connections made
    reset_peak(device)
    seconds = []
    for _ in range(rounds):
        del out
        started = now(device)
        out = call()
        seconds.append(now(device) - started)
    return out, seconds, peak_bytes(device)


def _errors(whole: list[Tensor], out: Tensor, one: Tensor) -> dict[str, float]:
    """Return errors against FP64 of rows spread over the sequence, and the share of values that are not finite."""
    q, k, v = whole
    rows = torch.linspace(0, q.shape[2] - 1, SAMPLE, dtype=torch.float64).round().long().to(q.device)
    seen = torch.arange(k.shape[2], device=q.device) <= rows.unsqueeze(1)
    parts = zip(q[:, :, rows].chunk(k.shape[1], 1), k.split(1, 1), v.split(1, 1), strict=True)  # one key head at a time
    golden = torch.cat([pasa.golden_attention(*part, attn_mask=seen)[0] for part in parts], 1)
    result = {"golden_max": float(golden.abs().max())}
    for name, each in (("ring", out), ("one", one)):
        errors = measure_errors(each[:, :, rows], golden)
        result |= {f"{name}_max_error": errors.max_error, f"{name}_rmse": errors.rmse}
    return result | {"not_finite": float((~out.isfinite()).float().mean())}


def _passes(record: dict[str, Any]) -> bool:
    """Check that the ring errs little more than one device, and that every output is finite.

    The largest error is at most twice that of one device and one rounding to FP16. The RMSE is at most sqrt(2) times
    that of one device: one more rounding, of no more than the error there was.
    """
    most = 2 * record["one_max_error"] + 2**-11 * record["golden_max"]
    exact = record["ring_max_error"] <= most and record["ring_rmse"] <= 2**0.5 * record["one_rmse"]
    return bool(exact and record["not_finite"] == 0)


def table(result: dict[str, Any]) -> Table:
    """Return two rows for every offset: one device, and the ring."""
    settings, rows = result["settings"], []
    for each in result["records"]:
        ring = "ring", f"ring of {settings['ranks']}", each["ring_peak_bytes"]
        for name, title, peaks in (("one", "one device", [each["one_peak_bytes"]]), ring):
            cells = [f"offset {each['offset']:,.0f}, {title}", f"{1e3 * each[f'{name}_s']:,.1f}"]
            cells.append(number(None if None in peaks else max(peaks) / 2**30, ".2f"))
            rows.append([*cells, short(each[f"{name}_rmse"]), short(each[f"{name}_max_error"])])
    note = (
        "Offset: what the keys' bias adds to every scaled score. Errors: against FP64, in rows spread over the "
        f"sequence. Times: medians of {settings['rounds']}. Accuracy gate "
        f"{'passed' if result['gate']['passed'] else 'FAILED'}. "
        f"{origin(result)}"
    )
    heads, kv = settings["heads"]
    title = (
        f"Causal attention of {settings['tokens']:,} tokens, {heads} query heads on {kv}, head dim {settings['dim']}"
    )
    return Table(title, ["case", "ms", "peak GiB per device", "RMSE", "largest error"], rows, note)


EXPERIMENT = Experiment("ring", run_ring, lambda result: [table(result)], "Attention over several devices")
