"""Times attention and a model under `pasa.watch` beside the same without; counts are checked first."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.cache import cache_name
from pasa.eval.kit.device import describe, find_device, named_here, origin, timed_kind
from pasa.eval.kit.experiment import Experiment, gate, outcome
from pasa.eval.kit.options import at_least
from pasa.eval.kit.random_model import CONFIGS, build
from pasa.eval.kit.tables import Column, Table, number
from pasa.eval.kit.timing import Call, Clock, CudaClock, NpuClock, added_cost
from pasa.eval.speed.cases import SpeedCase
from pasa.ops import dispatch, operators
from pasa.ops.attention.spec.repeated_maxima import EPSILON
from pasa.ops.attention.spec.watch import FIELDS, FIRST_BLOCK, RUNAWAY, STRIDE
from pasa.ops.numerics.formats import FP16_MAX

MOST_PERCENT = 2.0  # that watching a model may cost
STEPS = 73  # of decoding, a turn: with 28 heads 2,044 rows, of which two are sampled, as in the long run
ATTENTION = (
    SpeedCase("Qwen2-7B, 8192", 1, 28, 4, 8192, 8192, 128, causal=True),
    SpeedCase("paper, 1280", 1, 16, 16, 1280, 1280, 128),
)
MODEL = CONFIGS["qwen2-7b"] | {"num_hidden_layers": 4, "vocab_size": 4096}  # no vocabulary that outweighs four layers
PROMPTS, DECODED = ((2, 2048), (1, 8192)), 2048
SCALE = 0.125
SAMPLES = ((1, 0, 127), (12, 63, 127), (200, 510, STRIDE))
"""Largest of the numbers, first row, step: maxima repeat; rows run away; products pass FP16."""


Shape = tuple[tuple[int, int, int, int, int, int], bool, str | None]
"""Batch, query heads, key heads, queries, keys, head dimension; whether causal; "bool" or "float" for a mask."""
SHAPES: tuple[Shape, ...] = (
    ((2, 4, 2, 300, 407, 64), False, "bool"),
    ((1, 4, 4, 129, 300, 80), True, "float"),
    ((1, 28, 4, 2048, 2048, 128), True, None),
    ((1, 28, 4, 1, 32768, 128), False, None),
    ((1, 2, 2, 257, 257, 256), True, None),
    ((1, 5, 5, 2304, 2304, 64), False, None),
)
Case = tuple[str, str, Call, Call, int]  # kind, name, without, with, calls of a turn


def run_watch(
    turns: Annotated[int, "Timed turns of each case, with and without pasa.watch."] = 15,
    device: Annotated[str, "cuda, or an NPU such as npu:0."] = "cuda",
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Time pasa.watch on a GPU or NPU; exit 1 if a count or an output is wrong, or a model pays 2 % or more.

    Nothing is timed where a count is wrong. The result has ``checks`` (a record for each call that was counted) and
    ``records`` (milliseconds without and with; cost in percent: median, p20 and p80 of the turns' ratios).
    """
    at_least(1, turns=turns)
    clock = NpuClock(find_device(device)) if timed_kind(device) == "npu" else CudaClock()
    counted = judge(clock.device)
    checks = {"counts_exact": all(each["exact"] for each in counted)}
    records: list[dict[str, Any]] = []
    begin = None
    if checks["counts_exact"]:
        model = build(MODEL, clock.device)
        with pasa.patch_pipeline(model), torch.no_grad():
            begin = 1e3 * statistics.median(timeit.repeat(lambda: pasa.watch(model).unwatch(), number=1, repeat=10))
            cases = list(_cases(model, clock))
            for kind, name, plain, watched, calls in cases:
                progress(len(records), len(cases), f"{kind}, {name}")
                if kind == "model":
                    checks[f"unchanged, {name}"] = torch.equal(plain.output(), watched.output())
                cost = added_cost(plain, watched, turns, calls, clock.device)
                records.append({"kind": kind, "case": name, "watched_ms": cost.pop("extended_ms"), **cost})
        checks["model_cost"] = all(each["cost_percent"] < MOST_PERCENT for each in records if each["kind"] == "model")
    return {
        "gate": gate(checks),
        "settings": {"stride": STRIDE, "turns": turns, "steps": STEPS},
        "begin_ms": begin,
        "checks": counted,
        "records": records,
        "note": named_here("random weights and data, FP16,", clock.device),
        "environment": describe(clock.device),
    }


def _cases(model: Any, clock: Clock) -> Iterator[Case]:
    """Yield attention alone, eager and in a CUDA graph; prompts; steps of decoding."""
    for case in ATTENTION:
        plain, watched = _attention_alone(case, clock.device)
        yield "attention, eager", case.name, plain, watched, 20
        yield "attention, CUDA graph", case.name, clock.graph(plain), clock.graph(watched), 20
    generator = torch.Generator().manual_seed(0)
    calls: dict[str, Callable[[], Tensor]] = {}
    for size in PROMPTS:
        ids = torch.randint(model.config.vocab_size, size, generator=generator).to(clock.device)
        calls[f"prompt, {size[0]} x {size[1]}"] = partial(_read, model, ids)
    ids = torch.randint(model.config.vocab_size, (1, DECODED), generator=generator).to(clock.device)
    calls[f"{STEPS} steps of decoding at {DECODED}"] = _decoding(model, ids)
    for name, run in calls.items():
        yield "model", name, Call(run), Call(run, partial(pasa.watch, model)), 1


def _attention_alone(case: SpeedCase, device: torch.device) -> tuple[Call, Call]:
    q, k, v = case.inputs(device).tensors
    totals, walked = torch.zeros(len(FIELDS), dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64)

    def plain() -> Tensor:
        return pasa.attention(q, k, v, is_causal=case.causal)

    def watched() -> Tensor:
        out = plain()
        dispatch.call(operators.watch_scores, q, k, None, totals, walked, case.causal, case.dim**-0.5)
        return out

    return Call(plain), Call(watched)


def _read(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False, logits_to_keep=1).logits
    return logits


def _decoding(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    """Return a call that decodes `STEPS` steps behind ids (1, S), then cuts the cache back to S."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cached = {cache_name(model): cache}
    model(ids, logits_to_keep=1, **cached)

    def run() -> Tensor:
        for _ in range(STEPS):
            logits: Tensor = model(ids[:, -1:], **cached).logits
        cache.crop(-STEPS)
        return logits

    return run


def judge(device: torch.device) -> list[dict[str, Any]]:
    """Count each call by the counter of `device`, and say whether all five counts are those of the definitions.

    Whole numbers times 1/8: scores are exact in FP32, whatever the order of a sum, so counts can be equal.
    """
    generator, records = torch.Generator().manual_seed(0), []
    for sizes, causal, masked in SHAPES:
        for size, first, step in SAMPLES:
            q, k, mask = draw(sizes, masked, size, generator)
            q, k, mask = q.to(device), k.to(device), None if mask is None else mask.to(device)
            totals = torch.zeros(len(FIELDS), dtype=torch.int64, device=device)
            rows = q.shape[:3].numel()
            taken = range(first % min(step, rows), rows, step)
            operators.score_counter(device.type, q.shape[-1])(q, k, mask, totals, causal, SCALE, taken)
            counts = totals.tolist()
            exact = counts == define(q, k, mask, causal, SCALE, taken)
            record = {"shape": [*sizes, causal, masked], "size": size, "step": step, "exact": exact}
            records.append(record | dict(zip(FIELDS, counts, strict=True)))
    return records


def draw(
    sizes: tuple[int, ...], masked: str | None, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return q (B, Hq, Sq, D), k (B, Hkv, Skv, D), FP16, and mask or None."""
    batch, heads, kv_heads, rows, keys, dim = sizes
    q = torch.randint(-size, size + 1, (batch, heads, rows, dim), generator=generator).half()
    k = torch.randint(-size, size + 1, (batch, kv_heads, keys, dim), generator=generator).half()
    if size == 1:
        q[..., 8:] = 0  # few different scores, so that maxima repeat
    mask = torch.rand(batch, 1, rows, keys, generator=generator) < 0.3 if masked else None
    if mask is not None and masked == "float":
        mask = torch.randint(-9, 10, mask.shape, generator=generator).float().where(mask, -torch.inf)
    return q, k, mask


def define(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, taken: range) -> list[int]:
    """Return `FIELDS` of the rows `taken` of all B Hq Sq, in FP64."""
    (_, heads, rows, _), keys = q.shape, k.shape[2]
    entry, head, row = torch.unravel_index(torch.tensor(taken, device=q.device), q.shape[:3])
    of_row = k[entry, head // (heads // k.shape[1])].double()  # (sampled rows, Skv, D)
    products = (of_row @ q[entry, head, row].double().unsqueeze(2)).squeeze(2)
    added = torch.zeros_like(products)
    if mask is not None:
        at = mask.expand(*q.shape[:3], keys)[entry, head, row]
        added = torch.where(at, 0.0, -torch.inf).double() if at.dtype == torch.bool else at.double()
    seen = added > -torch.inf
    if causal:
        seen &= torch.arange(keys, device=q.device) <= row[:, None] + (keys - rows)
    scores = (products * scale + added).masked_fill(~seen, -torch.inf)
    top, near = scores.amax(1), scores[:, :FIRST_BLOCK].amax(1)
    counts = (
        seen.any(1),
        (seen & (scores >= top[:, None] - EPSILON)).sum(1) > 1,
        (near > -torch.inf) & (top - near > RUNAWAY),
        seen,
        seen & (products.abs() > FP16_MAX),
    )
    return [int(each.sum()) for each in counts]


def table(result: dict[str, Any]) -> Table:
    """Return a row for every case."""
    columns: dict[str, Column] = {
        "case": lambda each: f"{each['kind']}: {each['case']}",
        "ms": ("plain_ms", ".3f"),
        "ms watched": ("watched_ms", ".3f"),
        "cost": lambda each: f"{each['cost_percent']:+.2f} %",
        "p20 to p80": lambda each: f"{each['p20_percent']:+.2f} to {each['p80_percent']:+.2f} %",
    }
    settings = result["settings"]
    note = (
        f"One query row in {settings['stride']:,} is sampled. Wall time of host and device, medians of "
        f"{settings['turns']} interleaved turns; cost: median and p20 to p80 of the turns' ratios. The model: four "
        "layers of Qwen2-7B, random weights, eager. To begin and end a watch is not in the times: "
        f"{number(result['begin_ms'], '.2f')} ms once."
    )
    return Table.of("What watching costs", result["records"], columns, note)


def summary(result: dict[str, Any]) -> str:
    """Return a line for README.md: the cost for a model."""
    costs = ", ".join(
        f"{each['case']} {each['cost_percent']:+.1f} % ({each['p20_percent']:+.1f} to {each['p80_percent']:+.1f})"
        for each in result["records"]
        if each["kind"] == "model"
    )
    turns = result["settings"]["turns"]
    return (
        f"Added to the time of four layers of Qwen2-7B, median and p20 to p80 of {turns} turns: {costs}. "
        f"{verdict(result)} {origin(result)}"
    )


def verdict(result: dict[str, Any]) -> str:
    """Return how many counts are exact, and which checks fail."""
    exact = sum(each["exact"] for each in result["checks"])
    counted = f"Counts equal to FP64's in {exact} of {len(result['checks'])} calls."
    return f"{counted} {outcome(result)}"


EXPERIMENT = Experiment(
    "watch",
    run_watch,
    lambda result: [verdict(result), table(result), origin(result)],
    "What watching costs",
    needs_models=True,
)
