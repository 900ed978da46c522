"""Prefill, decode and peak memory of a whole model by its attention: real configuration, random weights.

Speed and memory do not depend on the values of weights, except that scores which share a bias cost PASA more. So the
model is timed with and without a bias in q and k that pushes all scores beyond FP16.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Annotated, Any

import torch

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import describe, pick_device
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.memory import peak_bytes, reset_peak
from pasa.eval.kit.options import at_least
from pasa.eval.kit.random_model import CONFIGS, SEED, SMALL, build
from pasa.eval.kit.tables import Table, number, percent
from pasa.eval.kit.timing import now

ATTENTIONS = ("eager", "sdpa", "pasa")
BIAS = 362
"""Its square is 131,044: twice the largest FP16 number."""


def run_throughput(
    config: Annotated[str, "Configuration: qwen2-7b (on an accelerator), or tiny."] = "qwen2-7b",
    tokens: Annotated[Sequence[int], "Prompt lengths."] = (8192,),
    attention: Annotated[Sequence[str], "Attention to time: eager and sdpa are the model's own."] = ATTENTIONS,
    new_tokens: Annotated[int, "Tokens to decode, one at a time, without a CUDA graph."] = 32,
    rounds: Annotated[int, "Rounds to time, after one warm-up round."] = 3,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Time prefill and decode of a whole model with random weights, and its memory, by attention."""
    if config not in CONFIGS:
        raise ValueError(f"config={config!r} is not one of {', '.join(CONFIGS)}")
    for name in attention:
        if name not in ATTENTIONS:
            raise ValueError(f"attention {name!r} is not one of {', '.join(ATTENTIONS)}")
    at_least(1, tokens=min(tokens, default=0), new_tokens=new_tokens, rounds=rounds)
    device = pick_device()
    if device.type == "cpu" and config != SMALL:
        raise ValueError(
            f"config={config!r} is too large for a CPU, and there is no accelerator here: try --config {SMALL}"
        )
    model = build(CONFIGS[config], device)
    records: list[dict[str, Any]] = []
    cases = list(product((0, BIAS), tokens, attention))
    for bias, length, name in cases:
        progress(len(records), len(cases), f"{name}, {length} tokens, bias {bias}")
        set_bias(model, bias)
        with _attention(model, name):
            times = _time(model, length, new_tokens, rounds, device)
        records.append({"attention": name, "tokens": length, "bias": bias, **times})
    return {
        "config": config,
        "settings": {"new_tokens": new_tokens, "rounds": rounds, "seed": SEED, "dtype": "float16", "batch": 1},
        "records": records,
        "note": "random weights; nothing was run on an NPU",
        "environment": describe(device, "transformers"),
    }


@torch.no_grad()
def set_bias(model: Any, bias: int) -> None:
    """Put a constant into the first dimension of each head's slowest rotary pair, in q and in k of all layers.

    Its square is added to every score.
    """
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj):
            heads = projection.bias.view(-1, attention.head_dim)
            heads.zero_()
            heads[:, attention.head_dim // 2 - 1] = bias


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    model.set_attn_implementation("sdpa" if name == "pasa" else name)
    if name != "pasa":
        yield
        return
    with pasa.patch_pipeline(model):
        yield


@torch.no_grad()
def _time(model: Any, length: int, new_tokens: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return medians over the rounds, the first of which is not counted; memory is that of all rounds."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator).to(device)
    reset_peak(device)
    prefills, decodes, broken = [], [], 0.0
    for _ in range(rounds + 1):
        started = now(device)
        step = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        prefills.append(now(device) - started)
        broken = float((~step.logits.isfinite()).float().mean())
        started, token = now(device), ids[:, -1:]
        for _ in range(new_tokens):
            step = model(input_ids=token, past_key_values=step.past_key_values, use_cache=True)
        decodes.append(now(device) - started)
        del step
    prefill, decode = statistics.median(prefills[1:]), statistics.median(decodes[1:])
    return {
        "prefill_s": prefill,
        "prefill_tokens_per_s": length / prefill,
        "decode_tokens_per_s": new_tokens / decode,
        "peak_bytes": peak_bytes(device),
        "nonfinite_logits": broken,
    }


def table(result: dict[str, Any]) -> Table:
    """Return a row for every measurement."""
    rows = [
        [
            f"{each['attention']}, {each['tokens']:,} tokens" + (f", bias {each['bias']}" if each["bias"] else ""),
            f"{each['prefill_s']:.4g}",
            number(each["prefill_tokens_per_s"], ",.0f"),
            number(each["decode_tokens_per_s"], ",.1f"),
            number(each["peak_bytes"] and each["peak_bytes"] / 2**30, ".2f"),
            percent(each["nonfinite_logits"]),
        ]
        for each in result["records"]
    ]
    rounds, machine = result["settings"]["rounds"], result["environment"]
    header = ["attention", "prefill s", "prefill tokens/s", "decode tokens/s", "peak GiB", "logits not finite"]
    note = (
        f"FP16, batch 1, {'one round' if rounds == 1 else f'medians of {rounds} rounds'}, decoding without a graph. "
        f"Bias: its square is added to every score. {result['note']}. ({machine['device']}, torch {machine['torch']}, "
        f"commit {machine['commit'] or 'unknown'}.)"
    )
    return Table(f"{result['config']}, random weights", header, rows, note)


EXPERIMENT = Experiment(
    name="model",
    run=run_throughput,
    report=lambda result: [table(result)],
    title="Prefill, decode and memory of a whole model",
    needs_models=True,
)
