"""Prefill, decode and peak memory of a whole model by its attention: real configuration, random weights.

Speed and memory do not depend on the values of weights, except that scores which share a bias cost PASA more. So the
model is timed with and without a bias in q and k that pushes all scores beyond FP16.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from typing import Annotated, Any

import torch

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import describe, origin, pick_device
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.memory import peak_bytes, reset_peak
from pasa.eval.kit.options import at_least
from pasa.eval.kit.random_model import CONFIGS, SEED, SMALL, build
from pasa.eval.kit.tables import Table, number, percent
from pasa.eval.kit.timing import now

ATTENTIONS = ("eager", "sdpa", "pasa")  # the first two are the model's own
ROUNDS = 3  # that are timed, after one to warm up
BIAS = 362  # its square is 131,044: twice the largest FP16 number


def run_throughput(
    config: Annotated[str, "Configuration: qwen2-7b (on an accelerator), or tiny."] = "qwen2-7b",
    tokens: Annotated[Sequence[int], "Prompt lengths."] = (8192,),
    new_tokens: Annotated[int, "Tokens to decode, one at a time, without a CUDA graph."] = 32,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Time prefill and decode of a whole model with random weights, and its memory, by attention."""
    if config not in CONFIGS:
        raise ValueError(f"config={config!r} is not one of {', '.join(CONFIGS)}")
    at_least(1, tokens=min(tokens), new_tokens=new_tokens)
    device = pick_device()
    if device.type == "cpu" and config != SMALL:
        raise ValueError(
            f"config={config!r} is too large for a CPU, and there is no accelerator here: try --config {SMALL}"
        )
    model = build(CONFIGS[config], device)
    records: list[dict[str, Any]] = []
    cases = list(product((0, BIAS), tokens, ATTENTIONS))
    for bias, length, name in cases:
        progress(len(records), len(cases), f"{name}, {length} tokens, bias {bias}")
        set_bias(model, bias)
        model.set_attn_implementation("sdpa" if name == "pasa" else name)
        with pasa.patch_pipeline(model) if name == "pasa" else nullcontext():
            times = _time(model, length, new_tokens, device)
        records.append({"attention": name, "tokens": length, "bias": bias, **times})
    return {
        "config": config,
        "settings": {"new_tokens": new_tokens, "rounds": ROUNDS, "seed": SEED, "dtype": "float16", "batch": 1},
        "records": records,
        "note": "random weights; nothing was run on an NPU",
        "environment": describe(device, "transformers"),
    }


@torch.no_grad()
def set_bias(model: Any, bias: int) -> None:
    """Put a constant into the first dimension of each head's slowest rotary pair, in q and in k of all layers.

    Its square is added to every score.
    """
    for attention in (layer.self_attn for layer in model.model.layers):
        for projection in (attention.q_proj, attention.k_proj):
            heads = projection.bias.zero_().view(-1, attention.head_dim)
            heads[:, attention.head_dim // 2 - 1] = bias


@torch.no_grad()
def _time(model: Any, length: int, new_tokens: int, device: torch.device) -> dict[str, Any]:
    """Return medians over the rounds, the first of which is not counted; memory is that of all rounds."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator).to(device)
    reset_peak(device)
    prefills, decodes, broken = [], [], 0.0
    for _ in range(ROUNDS + 1):
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
    return Table.of(
        f"{result['config']}, random weights",
        result["records"],
        {
            "attention": lambda each: (
                f"{each['attention']}, {each['tokens']:,} tokens" + (f", bias {each['bias']}" if each["bias"] else "")
            ),
            "prefill s": ("prefill_s", ".4g"),
            "prefill tokens/s": ("prefill_tokens_per_s", ",.0f"),
            "decode tokens/s": ("decode_tokens_per_s", ",.1f"),
            "peak GiB": lambda each: number(each["peak_bytes"] and each["peak_bytes"] / 2**30, ".2f"),
            "logits not finite": lambda each: percent(each["nonfinite_logits"]),
        },
        f"FP16, batch 1, medians of {result['settings']['rounds']} rounds, decoding without a CUDA graph. Bias: a "
        "number added to q and k, so that its square is added to every score.",
    )


EXPERIMENT = Experiment(
    name="model",
    run=run_throughput,
    report=lambda result: [table(result), origin(result)],
    title="Prefill, decode and memory of a whole model",
    needs_models=True,
)
