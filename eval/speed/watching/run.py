"""Times attention and a model under `pasa.watch` beside the same without; counts are checked first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import describe, origin, pick_device
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.random_model import CONFIGS, build
from pasa.eval.kit.tables import Table
from pasa.eval.kit.timing import Call, CudaClock, added_cost
from pasa.eval.speed.watching.definition import SHAPES, SMALL, judge
from pasa.ops import dispatch, operators
from pasa.ops.attention.spec.watch import FIELDS, STRIDE

MOST_PERCENT = 2.0  # that watching a model may cost
STEPS = 73  # of decoding, a turn: with 28 heads 2,044 rows, of which two are sampled, as in the long run
ATTENTION = {  # batch, query heads, key heads, S, D, causal
    "Qwen2-7B, 8192": (1, 28, 4, 8192, 128, True),
    "paper, 1280": (1, 16, 16, 1280, 128, False),
}
MODEL = CONFIGS["qwen2-7b"] | {"num_hidden_layers": 4, "vocab_size": 4096}  # no vocabulary that outweighs four layers
PROMPTS, DECODED = ((2, 2048), (1, 8192)), 2048
TINY_ATTENTION = {"tiny": (1, 4, 2, 300, 64, True)}
TINY_PROMPTS, TINY_DECODED = ((2, 150),), 20
Case = tuple[str, str, Call, Call, int]  # kind, name, without, with, calls of a turn


def run_watch(
    small: Annotated[bool, "Use tiny sizes, which run on any device."] = False,
    turns: Annotated[int, "Timed turns of each case, with and without pasa.watch."] = 15,
    progress: output.Report | None = None,
) -> dict[str, Any]:
    """Time pasa.watch on a CUDA device; exit 1 if a count or an output is wrong, or a model pays 2 % or more.

    Nothing is timed where a count is wrong. The result has ``checks`` (a record for each call that was counted) and
    ``records`` (milliseconds without and with; cost in percent: median, p20 and p80 of the turns' ratios).
    """
    if turns < 1:
        raise ValueError(f"turns={turns} is below 1")
    device = pick_device()
    if not small and device.type != "cuda":
        raise ValueError(f"there is no CUDA device here, but {device.type}: try --small")
    checks = judge(SMALL if small else SHAPES, device)
    gate = {"counts_exact": all(each["exact"] for each in checks)}
    records: list[dict[str, Any]] = []
    begin = None
    if gate["counts_exact"]:
        model = build(CONFIGS["tiny"] if small else MODEL, device)
        with pasa.patch_pipeline(model), torch.no_grad():
            begin = _begin_ms(model)
            cases = list(_cases(model, device, small))
            for kind, name, plain, watched, calls in cases:
                if progress:
                    progress(len(records), len(cases), f"{kind}, {name}")
                if kind == "model":
                    gate[f"unchanged, {name}"] = torch.equal(plain.output(), watched.output())
                cost = added_cost(plain, watched, turns, calls, device)
                records.append({"kind": kind, "case": name, "watched_ms": cost.pop("extended_ms"), **cost})
    if not small and records:
        gate["model_cost"] = all(each["cost_percent"] < MOST_PERCENT for each in records if each["kind"] == "model")
    return {
        "experiment": "watching",
        "gate": {"passed": all(gate.values()), "checks": gate},
        "settings": {"stride": STRIDE, "turns": turns, "steps": STEPS, "small": small},
        "begin_ms": begin,
        "checks": checks,
        "records": records,
        "note": "random weights and data, FP16; nothing was run on an NPU",
        "environment": describe(device),
    }


def _begin_ms(model: torch.nn.Module) -> float:
    """Return the host time to begin and end a watch, which a run pays once."""
    taken = []
    for _ in range(10):
        started = time.perf_counter()
        pasa.watch(model).unwatch()
        taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken)


def _cases(model: Any, device: torch.device, small: bool) -> Iterator[Case]:
    """Yield attention alone, eager and (on a GPU) in a CUDA graph; prompts; steps of decoding."""
    for name, shape in (TINY_ATTENTION if small else ATTENTION).items():
        plain, watched = _attention_alone(shape, device)
        yield "attention, eager", name, plain, watched, 20
        if device.type == "cuda":
            clock = CudaClock()
            yield "attention, CUDA graph", name, clock.graph(plain), clock.graph(watched), 20
    generator = torch.Generator().manual_seed(0)
    for batch, length in TINY_PROMPTS if small else PROMPTS:
        ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(device)
        yield "model", f"prompt, {batch} x {length}", *_both(partial(_read, model, ids), model), 1
    length = TINY_DECODED if small else DECODED
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator).to(device)
    yield "model", f"{STEPS} steps of decoding at {length}", *_both(_decoding(model, ids), model), 1


def _both(run: Callable[[], Tensor], model: torch.nn.Module) -> tuple[Call, Call]:
    return Call(run), Call(run, partial(pasa.watch, model))


def _attention_alone(shape: tuple[int, int, int, int, int, bool], device: torch.device) -> tuple[Call, Call]:
    """Return a call, and the same with its counting."""
    batch, heads, kv_heads, length, dim, causal = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, number, length, dim, generator=generator).half().to(device)
        for number in (heads, kv_heads, kv_heads)
    )
    totals, walked = torch.zeros(len(FIELDS), dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64)

    def plain() -> Tensor:
        return pasa.attention(q, k, v, is_causal=causal)

    def watched() -> Tensor:
        out = plain()
        dispatch.call(operators.watch_scores, q, k, None, totals, walked, causal, dim**-0.5)
        return out

    return Call(plain), Call(watched)


def _read(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False, logits_to_keep=1).logits
    return logits


def _decoding(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    """Return a call that decodes `STEPS` steps behind ids (1, S), then cuts the cache back to S."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, logits_to_keep=1)

    def run() -> Tensor:
        for _ in range(STEPS):
            logits: Tensor = model(ids[:, -1:], past_key_values=cache).logits
        cache.crop(-STEPS)
        return logits

    return run


def table(result: dict[str, Any]) -> Table:
    """Return a row for every case."""
    rows = [
        [
            f"{each['kind']}: {each['case']}",
            f"{each['plain_ms']:.3f}",
            f"{each['watched_ms']:.3f}",
            f"{each['cost_percent']:+.2f} %",
            f"{each['p20_percent']:+.2f} to {each['p80_percent']:+.2f} %",
        ]
        for each in result["records"]
    ]
    settings = result["settings"]
    note = (
        f"One query row in {settings['stride']:,} is sampled. Wall time of host and device, medians of "
        f"{settings['turns']} interleaved turns; cost: median and p20 to p80 of the turns' ratios. The model: "
        f"{'a tiny Qwen2' if settings['small'] else 'four layers of Qwen2-7B'}, random weights, eager. To begin and "
        "end a watch is not in the times: "
        + ("not measured." if result["begin_ms"] is None else f"{result['begin_ms']:.2f} ms once.")
    )
    return Table("What watching costs", ["case", "ms", "ms watched", "cost", "p20 to p80"], rows, note)


def summary(result: dict[str, Any]) -> str:
    """Return a line for README.md: the cost for a model."""
    costs = ", ".join(
        f"{each['case']} {each['cost_percent']:+.1f} % ({each['p20_percent']:+.1f} to {each['p80_percent']:+.1f})"
        for each in result["records"]
        if each["kind"] == "model"
    )
    turns = result["settings"]["turns"]
    return f"Four layers of Qwen2-7B, median and p20 to p80 of {turns} turns: {costs}. {verdict(result)}"


def verdict(result: dict[str, Any]) -> str:
    """Return which checks hold and which do not, with the machine."""
    exact = sum(each["exact"] for each in result["checks"])
    failed = [name for name, passed in result["gate"]["checks"].items() if not passed]
    outcome = f"FAILED: {', '.join(failed)}." if failed else "All checks hold."
    counted = f"Counts equal to FP64's in {exact} of {len(result['checks'])} calls."
    return f"{counted} {outcome} {origin(result)}"


EXPERIMENT = Experiment(
    name="watch",
    run=run_watch,
    report=lambda result: [table(result), verdict(result)],
    title="What watching costs",
    needs_models=True,
)
