"""Times the scale of a layer beside the layer: a warm step of power iteration in every forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

from pasa import geometry
from pasa.concentration import geometry_scale
from pasa.eval.kit import output
from pasa.eval.kit.device import describe, origin, pick_device
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.tables import Table
from pasa.eval.kit.timing import Call, CudaClock, added_cost
from pasa.power_iteration import PowerIteration
from pasa.projections import Norm, project

INLINE, SIDE, SUM = "inline", "side stream", "inline, sum of heads"
PARTS = ("attention", "attention and MLP")
TURNS, CALLS = 9, 5
SMALLEST_BYTES = 200e6  # of q and k weights of all layers of a run, so that none is in L2 when its turn comes again
UNIT = 2.0**-8  # of BF16
CHECKED = ((8, 8), (8, 2), (8, 1))  # heads and key heads that are compared with singular values
CHECK_STEPS = 30
NEAR = 0.95  # of the exact norm, which random weights' next singular values are close to


@dataclass(frozen=True)
class Shape:
    """A model of the paper: tables 7 and 8, the width of its MLP, and the overhead that table 9 prints, in percent."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    width: int
    gated: bool
    alpha: float
    batch: int
    printed: float
    tokens: int = 1024


SHAPES = (
    Shape("GPT-2 XL", 1600, 25, 25, 64, 6400, False, 0.08, 8, 1.0),
    Shape("Mistral-7B", 4096, 32, 8, 128, 14336, True, 0.04, 4, -5.3),
    Shape("Llama-2-13B", 5120, 40, 40, 128, 13824, True, 0.03, 4, 1.9),
    Shape("Llama-2-70B", 8192, 64, 8, 128, 28672, True, 0.02, 2, 4.3),
)
SMALL = (Shape("tiny", 64, 4, 2, 32, 96, True, 0.5, 2, 0.0, tokens=16),)


def run_overhead(
    small: Annotated[bool, "A tiny size, on any device."] = False,
    turns: Annotated[int, "Of each case, with and without."] = TURNS,
    progress: output.Report | None = None,
) -> dict[str, Any]:
    """Time FP8 scales from the weights in a forward pass on a CUDA device; exit 1 if a norm is wrong.

    Returns
    -------
    dict
        JSON-able: ``checks`` (errors of the norms), ``records`` (milliseconds a layer, cost in percent: median, p20
        and p80 of the turns' ratios), ``gate``, ``settings``, ``environment``. Nothing is timed where a norm is wrong.

    Raises
    ------
    ValueError
        Without a CUDA device, unless `small`; turns < 1.
    """
    if turns < 1:
        raise ValueError(f"turns={turns} is below 1")
    device = pick_device()
    if not small and device.type != "cuda":
        raise ValueError(f"there is no CUDA device here, but {device.type}: try --small")
    checks = [check(*heads, device) for heads in CHECKED]
    gate = {"norms_are_those_of_svd": all(each["error"] <= 4 * UNIT for each in checks)}
    records: list[dict[str, Any]] = []
    cases = [(shape, part) for shape in (SMALL if small else SHAPES) for part in PARTS]
    for index, (shape, part) in enumerate(cases if gate["norms_are_those_of_svd"] else ()):
        if progress:
            progress(index, len(cases), f"{shape.name}, {part}")
        records += measure(shape, part, turns, device)
    gate["scales_follow_the_weights"] = all(each["follows"] for each in records)
    gate["norms_from_below"] = all(NEAR <= each.get("of_exact", 1.0) <= 1 + 4 * UNIT for each in records)
    return {
        "experiment": "fp8-overhead",
        "gate": {"passed": all(gate.values()), "checks": gate},
        "settings": {"turns": turns, "calls": CALLS, "small": small},
        "checks": checks,
        "records": records,
        "note": "random weights and data, BF16; nothing was run on an NPU",
        "environment": describe(device),
    }


@torch.no_grad()
def check(heads: int, kv_heads: int, device: torch.device) -> dict[str, Any]:
    """Return the largest error of the norms of all heads, of weights whose first singular value stands apart."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(count, 64, 300, generator=generator) for count in (heads, kv_heads)]
    for part in parts:
        part[:, 0] *= 4
    q, k = (part.bfloat16().to(device) for part in parts)
    keys = k.double().cpu().repeat_interleave(heads // kv_heads, 0)
    exact = torch.linalg.svdvals(q.double().cpu().mT @ keys)[:, 0]
    power = PowerIteration(heads, kv_heads, generator=torch.Generator(device).manual_seed(1))
    norms = power.update(q.flatten(0, 1), k.flatten(0, 1), steps=CHECK_STEPS).double().cpu()
    return {"heads": heads, "kv_heads": kv_heads, "error": float((norms / exact - 1).abs().max())}


@torch.no_grad()
def measure(shape: Shape, part: str, turns: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a record for each way to compute the scales."""
    records = []
    for way in (INLINE, SIDE, SUM) if device.type == "cuda" else (INLINE, SUM):
        layers = Layers(shape, part == PARTS[1], device)
        plain, scaled = Call(layers.plain), Call(layers.scaled(way))
        if device.type == "cuda":
            clock = CudaClock()
            plain, scaled = clock.graph(plain), clock.graph(scaled)
        cost = added_cost(plain, scaled, turns, CALLS, device)
        count = len(layers.blocks)
        record = {"model": shape.name, "batch": shape.batch, "tokens": shape.tokens, "part": part, "way": way}
        record |= {"layers": count, "plain_ms": cost["plain_ms"] / count, "scaled_ms": cost["extended_ms"] / count}
        record |= {key: cost[key] for key in ("cost_percent", "p20_percent", "p80_percent")}
        record["printed_percent"] = shape.printed
        if way == INLINE and part == PARTS[0]:  # seconds on the host: once for each model
            record["of_exact"] = layers.of_exact()
        records.append(record | {"follows": layers.follows(scaled)})
    return records


@dataclass(frozen=True)
class Block:
    """Weights of a layer, BF16."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    mlp: tuple[Tensor, ...]  # up, down; and the gate


class Layers:
    """Layers in a row, each with other weights, without norms and residuals."""

    def __init__(self, shape: Shape, mlp: bool, device: torch.device) -> None:
        self.shape, self.device = shape, device
        source = torch.Generator(device).manual_seed(0)
        q_rows, k_rows, hidden = shape.heads * shape.dim, shape.kv_heads * shape.dim, shape.hidden

        def draw(rows: int, columns: int) -> Tensor:
            x = torch.randn(rows, columns, generator=source, device=device, dtype=torch.bfloat16)
            scaled: Tensor = x * columns**-0.5
            return scaled

        count = max(2, min(16, math.ceil(SMALLEST_BYTES / (2 * hidden * (q_rows + k_rows)))))
        rows = [(shape.width, hidden), (hidden, shape.width), *[(shape.width, hidden)] * shape.gated] if mlp else []
        self.blocks = [
            Block(
                draw(q_rows, hidden),
                draw(k_rows, hidden),
                draw(k_rows, hidden),
                draw(hidden, q_rows),
                tuple(draw(*size) for size in rows),
            )
            for _ in range(count if device.type == "cuda" else 2)
        ]
        self.x = torch.randn(shape.batch, shape.tokens, hidden, generator=source, device=device, dtype=torch.bfloat16)
        self.power: list[PowerIteration] = []
        self.scales = torch.zeros(len(self.blocks), device=device)

    def plain(self) -> Tensor:
        """Run the forward pass alone."""
        x = self.x
        for block in self.blocks:
            x = self._layer(block, x, lambda: None)
        return x

    def scaled(self, way: str) -> Callable[[], Tensor]:
        """Return the forward pass with all scales: before their layer's projections, or on a second stream."""
        shape = self.shape
        source = torch.Generator(self.device).manual_seed(1)
        self.power = [
            PowerIteration(shape.heads, shape.kv_heads, per_head=way != SUM, generator=source) for _ in self.blocks
        ]
        for index in range(len(self.blocks)):
            self._scale(index)  # the cold steps
        return self._beside if way == SIDE else self._inline

    def _inline(self) -> Tensor:
        x = self.x
        for index, block in enumerate(self.blocks):
            self._scale(index)
            x = self._layer(block, x, lambda: None)
        return x

    def _beside(self) -> Tensor:
        """Begin all scales with the pass, since they need weights alone; each attention waits for its scale."""
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        ready = []
        with torch.cuda.stream(side):
            for index in range(len(self.blocks)):
                self._scale(index)
                ready.append(side.record_event())
        x = self.x
        for block, event in zip(self.blocks, ready, strict=True):
            x = self._layer(block, x, partial(main.wait_event, event))
        main.wait_stream(side)
        return x

    def _scale(self, index: int) -> None:
        """Compute equation (15) on the device."""
        shape, block = self.shape, self.blocks[index]
        norm = self.power[index].update(block.query, block.key).amax()
        factor = geometry_scale(shape.alpha * shape.hidden / math.sqrt(shape.dim))
        torch.mul(norm, factor, out=self.scales[index])

    def _layer(self, block: Block, x: Tensor, wait: Callable[[], None]) -> Tensor:
        """Run a layer; `wait` stands before its attention, which needs the scale."""
        projected = (linear(x, each) for each in (block.query, block.key, block.value))
        q, k, v = (each.unflatten(-1, (-1, self.shape.dim)).transpose(1, 2) for each in projected)
        wait()
        grouped = self.shape.heads != self.shape.kv_heads
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = linear(attended.transpose(1, 2).flatten(2), block.out)
        if not block.mlp:
            return x
        up, down, *gate = block.mlp
        return linear(silu(linear(x, gate[0])) * linear(x, up) if gate else gelu(linear(x, up)), down)

    def of_exact(self) -> float:
        """Return the first layer's norms over the certified ones, the least of all heads."""
        shape, block = self.shape, self.blocks[0]
        norm = Norm(math.sqrt(shape.hidden))
        query, key = (
            project(weight, None, heads, norm)
            for weight, heads in ((block.query, shape.heads), (block.key, shape.kv_heads))
        )
        key = replace(key, gram=key.gram.repeat_interleave(shape.heads // shape.kv_heads, 0))
        norms = self.power[0].update(block.query, block.key).double().cpu()
        return float((norms / geometry.interaction_norm(query, key)).min())

    def follows(self, call: Call) -> bool:
        """Check that one more pass finds scales 16 times as large once q and k weights are 4 times as large."""
        before = self.scales.clone()
        for block in self.blocks:
            block.query.mul_(4)
            block.key.mul_(4)
        call.run()
        return bool(((self.scales / before - 16).abs() <= 16 * 4 * UNIT).all())


def table(result: dict[str, Any]) -> Table:
    """Return a row for every model, part and way."""
    rows = [
        [
            f"{each['model']}, {each['batch']} x {each['tokens']}, {each['part']}",
            each["way"],
            f"{1e3 * each['plain_ms']:,.0f}",
            f"{each['cost_percent']:+.1f} %",
            f"{each['p20_percent']:+.1f} to {each['p80_percent']:+.1f} %",
            f"{each['printed_percent']:+.1f} %",
        ]
        for each in result["records"]
    ]
    settings = result["settings"]
    note = (
        "Time of layers in BF16, causal, no norms, in a CUDA graph, beside the same without scales; wall time, medians "
        f"of {settings['turns']} interleaved turns of {settings['calls']} passes. Batch and tokens: the paper's table "
        "8. One warm step of power iteration a pass, a norm for each head; sum of heads: the paper's norm of a layer. "
        "Side stream: all scales begin with the pass, and each attention waits for its own. Printed: the paper's table "
        "9, whole models beside delayed scaling, which has costs of its own; nothing is rounded to FP8 here."
    )
    header = ["case", "way", "us a layer", "cost of the scale", "p20 to p80", "printed"]
    return Table("What a scale from the weights costs", header, rows, note, wraps="case")


def verdict(result: dict[str, Any]) -> str:
    """Return which checks hold and which do not, with the machine."""
    worst = max(each["error"] for each in result["checks"])
    failed = [name for name, passed in result["gate"]["checks"].items() if not passed]
    outcome = f"FAILED: {', '.join(failed)}." if failed else "All checks hold."
    checked = f"Norms are those of a full SVD in FP64 within {100 * worst:.2g} % (BF16)."
    return f"{checked} {outcome} {origin(result)}"


def summary(result: dict[str, Any]) -> str:
    """Return a paragraph for README.md: the range over the models, by part and way."""
    costs: dict[str, list[float]] = {}
    for each in result["records"]:
        costs.setdefault(f"{each['part']}, {each['way']}", []).append(each["cost_percent"])
    ranges = "; ".join(f"{name} {min(values):+.1f} to {max(values):+.1f} %" for name, values in costs.items())
    models = ", ".join(dict.fromkeys(each["model"] for each in result["records"]))
    return f"Added to a forward pass of {models}: {ranges}. {verdict(result)}"


EXPERIMENT = Experiment(
    name="predict",
    run=run_overhead,
    report=lambda result: [verdict(result), table(result)],
    title="What a scale from the weights costs",
)
