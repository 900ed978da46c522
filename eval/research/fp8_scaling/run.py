"""Runs every scaling through transients of training, on real and on synthetic weights, and the FP8 score tile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from pasa import concentration
from pasa.eval.kit import output
from pasa.eval.kit.embedded_model import find_essays, load_model, require_built_in
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.tables import Table, percent, short
from pasa.eval.models.rescue.run import ESSAY
from pasa.eval.research.fp8_scaling.scaling import AutoAlpha, Current, Delayed, Geometry, Scaling
from pasa.eval.research.fp8_scaling.tile import run_tiles
from pasa.eval.research.fp8_scaling.training import Trainer
from pasa.ops.numerics.formats import E4M3_MAX, round_to

DELTA, TOKENS, LEARNING_RATE, BATCHES, SEED = 1e-6, 128, 1e-5, 8, 0
SYNTHETIC = {
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "intermediate_size": 256,
    "vocab_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "initializer_range": 0.06,
}
"""Grouped 8:1, with weights large enough for logits that delayed scaling's first scale is too small for."""


@dataclass(frozen=True)
class Scenario:
    """Steps of training, an event, and the steps that follow: those are judged."""

    name: str
    before: int
    after: int
    event: Callable[[Trainer, list[list[Scaling]]], None] = lambda trainer, scalings: None


def _resume(trainer: Trainer, scalings: list[list[Scaling]]) -> None:
    for layers in scalings:
        for scaling in layers:
            scaling.reset()


SCENARIOS = (
    Scenario("pretrained load", 0, 4),
    Scenario("resume without state", 6, 4, _resume),
    Scenario("learning rate x 100", 6, 8, lambda trainer, scalings: trainer.multiply_learning_rate(100.0)),
    Scenario("weights x 4", 6, 4, lambda trainer, scalings: trainer.multiply_weights(4.0)),
)


def run_fp8(
    quick: Annotated[bool, "Synthetic weights alone."] = False, progress: output.Report | None = None
) -> dict[str, Any]:
    """Compare FP8 scale factors of logits in transients of training; exit 1 if those from the weights overflow.

    Returns
    -------
    dict
        JSON-able: ``records`` (model, scenario, method: overflows, largest scaled logit, utilisation), ``tiles``,
        ``gate`` (passed: geometry-aware scaling overflows nowhere, delayed scaling at the first step everywhere).
    """
    if not quick:
        require_built_in(model=True, text=True)
    started = time.perf_counter()
    models = {"synthetic": synthetic} if quick else {"SmolLM2-135M": embedded, "synthetic": synthetic}
    records: list[dict[str, Any]] = []
    jobs = [(name, scenario) for name in models for scenario in SCENARIOS]
    for done, (name, scenario) in enumerate(jobs):
        if progress:
            progress(done, len(jobs) + 1, f"{name}: {scenario.name}")
        records += [{"model": name, **each} for each in simulate(*models[name](), scenario)]
    if progress:
        progress(len(jobs), len(jobs) + 1, "FP8 score tiles")
    return {
        "experiment": "fp8",
        "gate": judge(records),
        "tiles": run_tiles(),
        "settings": {"delta": DELTA, "tokens": TOKENS, "learning_rate": LEARNING_RATE, "synthetic": SYNTHETIC},
        "environment": output.environment(),
        "duration_s": round(time.perf_counter() - started, 1),
        "records": records,
    }


def embedded() -> tuple[Any, list[Tensor]]:
    """Return the built-in language model, and the beginning of an essay."""
    model, tokenizer = load_model()
    ids = tokenizer(find_essays()[ESSAY].read_text(encoding="utf-8")[:8000], return_tensors="pt").input_ids[0]
    return model, [ids[i * TOKENS : (i + 1) * TOKENS][None] for i in range(BATCHES)]


def synthetic() -> tuple[Any, list[Tensor]]:
    """Return a random Llama and random tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(LlamaConfig(**SYNTHETIC)).eval()
    generator = torch.Generator().manual_seed(SEED)
    return model, [torch.randint(512, (1, TOKENS), generator=generator) for _ in range(BATCHES)]


def simulate(model: Any, batches: list[Tensor], scenario: Scenario) -> list[dict[str, Any]]:
    """Run one scenario and return a record for each method, over the layers and the steps after the event."""
    config, trainer = model.config, Trainer(model, batches, LEARNING_RATE)
    heads, layers = config.num_attention_heads * config.num_hidden_layers, config.num_hidden_layers
    dim = config.head_dim or config.hidden_size // config.num_attention_heads
    alpha = concentration.minimum_alpha(config.hidden_size, dim, heads, TOKENS, DELTA)
    methods: dict[str, list[Scaling]] = {
        "delayed": [Delayed() for _ in range(layers)],
        "current": [Current() for _ in range(layers)],
        "geometry": [Geometry(alpha) for _ in range(layers)],
        "geometry, sum of heads": [Geometry(alpha, per_head=False) for _ in range(layers)],
        "geometry, auto-alpha": [AutoAlpha(alpha) for _ in range(layers)],
    }
    scaled: dict[str, list[list[float]]] = {name: [] for name in methods}
    for step in range(scenario.before + scenario.after):
        if step == scenario.before:
            scenario.event(trainer, list(methods.values()))
            calibrate(methods["geometry, auto-alpha"])
        largest, weights = trainer.step()
        for name, scalings in methods.items():
            row = []
            for scaling, layer, most in zip(scalings, weights, largest, strict=True):
                row.append(most / scaling.scale(layer, most))
                scaling.observe(most)
            if step >= scenario.before:
                scaled[name].append(row)
    return [summarise(scenario, name, rows, alpha, methods[name]) for name, rows in scaled.items()]


def calibrate(scalings: list[Scaling]) -> None:
    """Set one alpha for the model, from the slack of all its layers."""
    adaptive = [each for each in scalings if isinstance(each, AutoAlpha)]
    slack = [ratio for each in adaptive for ratio in each.slack]
    for each in adaptive:
        each.slack = slack
        each.calibrate()


def summarise(
    scenario: Scenario, name: str, rows: list[list[float]], alpha: float, scalings: list[Scaling]
) -> dict[str, Any]:
    """Return overflows and utilisation max|S| / (scale 448) over the layers and steps.

    An overflow is what E4M3, rounding to nearest, has no number for: beyond 464.
    """
    scaled = torch.tensor(rows, dtype=torch.float64)  # (steps, layers)
    beyond = ~round_to(scaled, "fp8_e4m3").isfinite()
    low, median, high = (scaled / E4M3_MAX).quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    first = scalings[0]
    return {
        "scenario": scenario.name,
        "method": name,
        "layers": scaled.shape[1],
        "steps": len(rows),
        "overflowing_layers_first_step": int(beyond[0].sum()),
        "overflowing_steps": int(beyond.any(1).sum()),
        "overflows": int(beyond.sum()),
        "largest_scaled": float(scaled.max()),
        "utilisation": {"p10": low, "median": median, "p90": high},
        "alpha": first.alpha if isinstance(first, Geometry) else None,
        "alpha_min": alpha,
    }


def judge(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the paper's claims: of geometry-aware scaling with the alpha of the theory, and of delayed scaling."""
    predictive = [each for each in records if each["method"] == "geometry"]
    stale = [
        each
        for each in records
        if each["method"] == "delayed" and each["scenario"] in ("pretrained load", "resume without state")
    ]
    checks = {
        "geometry_never_overflows": all(not each["overflows"] for each in predictive),
        "delayed_overflows_first": all(each["overflowing_layers_first_step"] == each["layers"] for each in stale),
    }
    return {"passed": all(checks.values()), "checks": checks}


def transient_table(result: dict[str, Any]) -> Table:
    """Return a row for every model, scenario and method."""
    rows = [
        [
            *(each[name] for name in ("model", "scenario", "method")),
            f"{each['overflowing_layers_first_step']}/{each['layers']}",
            f"{each['overflowing_steps']}/{each['steps']}",
            f"{each['largest_scaled']:,.0f}",
            " / ".join(percent(each["utilisation"][name]) for name in ("p10", "median", "p90")),
            "-" if each["alpha"] is None else f"{each['alpha']:.3g}",
        ]
        for each in result["records"]
    ]
    header = ["model", "scenario", "method", "layers beyond, first step", "steps with overflow", "largest scaled"]
    settings = result["settings"]
    note = (
        "Methods choose the scale that logits are divided by before E4M3, whose largest number is 448. The steps are "
        "those after the event. Delayed: history of 16 steps, eta 0.9, initial 1.0. Geometry: alpha for delta = "
        f"{settings['delta']:g}, norm by power iteration of the worst head or, as in the paper, of the sum of heads. "
        "Auto-alpha is calibrated on the steps before the event. Utilisation: largest scaled logit over 448. Training "
        f"is in FP32, {settings['tokens']} tokens a step, AdamW at {settings['learning_rate']:g}; no method changes it."
    )
    return Table("FP8 scaling in transients", [*header, "utilisation P10 / median / P90", "alpha"], rows, note)


def tile_table(result: dict[str, Any]) -> Table:
    """Return the RMSE by the format of the score tile."""
    names = list(result["tiles"][0]["rmse"])
    rows = [[each["case"], *(short(each["rmse"][name]) for name in names)] for each in result["tiles"]]
    note = (
        "RMSE against FP64; statistics, probabilities and sums in FP32, so that only the score tile is rounded. plain: "
        "q.k/sqrt(d); pasa: shifted by the block's mean and referenced to the row's largest score so far. A block has "
        "128 x 128 scores. Emulated."
    )
    return Table("Score tiles in FP16 and in FP8 (E4M3)", ["case (x0,Am)", *names], rows, note)


def verdict(result: dict[str, Any]) -> str:
    """Return the outcome of the checks and the machine."""
    counts = {"geometry": 0, "delayed": 0}
    for each in result["records"]:
        if each["method"] in counts:
            counts[each["method"]] += each["overflows"]
    outcome = "All checks hold." if result["gate"]["passed"] else f"FAILED: {result['gate']['checks']}."
    machine = result["environment"]
    return (
        f"Geometry-aware scaling: {counts['geometry']} overflows in all scenarios. Delayed scaling: "
        f"{counts['delayed']}. {outcome} ({machine['processor']}; torch {machine['torch']}, pasa {machine['pasa']}, "
        f"commit {machine['commit'] or 'unknown'}.)"
    )


EXPERIMENT = Experiment(
    name="fp8",
    run=run_fp8,
    report=lambda result: [verdict(result), transient_table(result), tile_table(result)],
    title="FP8 scale factors of attention logits",
    needs_models=True,
)
