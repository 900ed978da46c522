"""Tests predictions: the bounds against one run of every model at hand, and policy "auto" against FP32."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import origin
from pasa.eval.kit.embedded_model import load_model, require_built_in
from pasa.eval.kit.experiment import Experiment, gate, outcome
from pasa.eval.kit.memory import peak_bytes
from pasa.eval.kit.options import stages
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.kit.tables import Column, Table, percent
from pasa.eval.models.diagnose import subjects
from pasa.eval.models.diagnose.subjects import EMBEDDED, TINY
from pasa.eval.models.predict.run import calibration, count_verdicts, observe, summarise
from pasa.eval.models.rescue.run import build_prompt, equal_prefix, generate
from pasa.ops.numerics.formats import FP16_MAX
from pasa.prediction import predict_overflow

Sizes = dict[str, Any]
TOKENS = 128
SEED = 0
CPU = torch.device("cpu")
LAYERS = 28  # of Qwen2-7B
SLIM: Sizes = {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 512, "max_position_embeddings": 4096}
QWEN2: Sizes = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN2 |= {"rope_parameters": {"rope_theta": 1e6}}
LLAMA: Sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}
GPT2: Sizes = {"n_embd": 1600, "n_head": 25, "n_layer": 2, "n_inner": 64, "vocab_size": 512}
ONE = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
COARSE: Sizes = {**SLIM, **ONE, "hidden_size": 4096, "head_dim": 192, "max_position_embeddings": 64}
BIAS = 20.0  # standard deviation of the biases of q and k: large beside what these weights make of an input
OFFSETS = {3: 131072.0, 14: -80000.0, 29: 131072.0}
"""Layers whose scores are biased, of 30, by either sign."""
AUTO_TOKENS, NEW_TOKENS = 256, 32
RUNS: dict[str, dict[str, Any] | None] = {
    "FP32, its own attention": None,
    "scores stored in FP16": {"policy": "all", "config": pasa.PasaConfig(precision="partial")},
    'PASA, policy="all"': {"policy": "all"},
    'PASA, policy="auto"': {"policy": "auto"},
}
"""The arguments of `pasa.patch_pipeline` in each run, None for the model without a patch."""
Subject = tuple[Any, Callable[[], object]]  # a model, and what runs it once


def run_soundness(progress: output.Report = output.silent) -> dict[str, Any]:
    """Predict and run each model, and time the prediction of a checkpoint of Qwen2-7B's shape.

    The result holds ``records`` (a model each), ``cost`` and ``gate`` (passed: no head beyond its proven bound).
    """
    makers: dict[str, Callable[[], Subject]] = {
        "SmolLM2-135M": partial(built_in, EMBEDDED, 0.0),
        "SmolLM2-135M, all layers biased": partial(built_in, EMBEDDED, None),
        "SVD in small": partial(built_in, TINY, 0.0),
        "SVD in small, spatial attention biased": partial(built_in, TINY, None),
        "GPT-2 XL's shape, 2 layers": partial(shaped, "GPT2", GPT2),
        "Qwen2-7B's shape, 2 layers": partial(shaped, "Qwen2", {**SLIM, **QWEN2}),
        "Llama-2-7B's shape, 2 layers": partial(shaped, "Llama", {**SLIM, **LLAMA}),
        "Llama in FP16, norm weights of 2^-24": coarse,
    }
    say, records = stages(progress, len(makers) + 1), []
    for name, make in makers.items():
        say(name)
        records.append({"model": name, **measure(*make())})
    say("a checkpoint of Qwen2-7B's shape")
    return {"gate": {"passed": not any(each["beyond_proven"] for each in records)}, "cost": cost(), "records": records}


def built_in(name: str, offset: float | None) -> Subject:
    """Return a model that can be installed; with an offset of None it overflows."""
    subject = subjects.load(name, offset=offset, dtype="float32")
    return subject.model, subject.run


def random_model(kind: str, sizes: Sizes) -> Any:
    """Return a model of transformers of these sizes with random weights, the same every time."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes)).eval()


@torch.no_grad()
def shaped(kind: str, sizes: Sizes) -> Subject:
    """Return a random model with the attention of a real one: widths, head counts, biases where it has them."""
    model, generator = random_model(kind, sizes), torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias", "c_attn.bias")):
            parameter.copy_(BIAS * torch.randn(parameter.shape, generator=generator))
    ids = torch.randint(512, (1, TOKENS), generator=generator)
    return model, partial(model, input_ids=ids, use_cache=False)


@torch.no_grad()
def coarse() -> Subject:
    """Return a Llama whose norm has FP16's smallest weights, with inputs that its roundings enlarge most.

    The norm's output is a few steps of 2^-24. Elements of 0.501 and 1.502 steps are stored as 1 and 2, in such numbers
    that their root mean square is just below 1, so the norm does not change them.
    """
    model = random_model("Llama", COARSE).half()
    model.layers[0].input_layernorm.weight.fill_(2.0**-24)
    for projection in (model.layers[0].self_attn.q_proj, model.layers[0].self_attn.k_proj):
        projection.weight.fill_(FP16_MAX)
    inputs = torch.full((1, 2, COARSE["hidden_size"]), 0.501, dtype=torch.float16)
    inputs[..., :1500] = 1.502
    return model, partial(model, inputs_embeds=inputs, use_cache=False)


@torch.no_grad()
def measure(model: Any, run: Callable[[], object]) -> dict[str, Any]:
    """Predict one model, run it, and compare."""
    prediction = predict_overflow(model)
    return {"verdicts": summarise(prediction), **calibration(prediction, observe(model, run))}


def cost() -> dict[str, Any]:
    """Measure the prediction of a checkpoint with Qwen2-7B's 28 attention layers, BF16, in a fresh process."""
    sizes = {**SLIM, **QWEN2, "num_hidden_layers": LAYERS, "max_position_embeddings": 32768}
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
        random_model("Qwen2", sizes).bfloat16().save_pretrained(folder)
        return {"shape": QWEN2, "layers": LAYERS, **pool.apply(_predict_alone, (folder,))}


def _predict_alone(folder: str) -> dict[str, Any]:
    before, started = peak_bytes(CPU) or 0, time.perf_counter()
    predict_overflow(folder)
    seconds, peak = time.perf_counter() - started, peak_bytes(CPU) or 0
    memory = {"peak_mib": peak / 2**20, "before_mib": before / 2**20}
    return {"seconds": seconds, **memory, "threads": torch.get_num_threads()}


def soundness_table(result: dict[str, Any]) -> Table:
    """Return what models formed, over what was predicted."""
    columns: dict[str, Column] = {
        "model": "model",
        "heads": "heads",
        "modules": lambda each: count_verdicts(each["verdicts"]),
        "largest score": ("largest_score", ",.0f"),
        "observed / proven, largest": ("largest_of_proven", ".3g"),
        "median": ("median_of_proven", ".3g"),
        "observed / probable, largest": ("largest_of_probable", ".3g"),
        "heads beyond probable": "beyond_probable",
        "auto-alpha": ("auto_alpha", ".3g"),
    }
    note = (
        "Observed: largest score of each head in one run. A ratio above 1 would refute a proven bound. It passes a "
        "probable bound where inputs are not of uniform direction. Heads of unknown modules have no bound, and are not "
        "counted. Auto-alpha: P99.99 of observed over interaction bound. Random weights (shapes, SVD in small) test "
        "that the bounds hold, not what trained models do."
    )
    return Table.of("Bounds and reality", result["records"], columns, note)


def verdict(result: dict[str, Any]) -> str:
    """Return how many bounds were exceeded, and what a prediction costs."""
    measured, beyond = result["cost"], sum(each["beyond_proven"] for each in result["records"])
    return (
        f"{beyond} of {sum(each['heads'] for each in result['records'])} heads exceeded their proven bound. "
        f"Qwen2-7B's {measured['layers']} attention layers (random, BF16) were predicted in {measured['seconds']:.1f} "
        f"s with {measured['threads']} threads, peak {measured['peak_mib']:,.0f} MiB ({measured['before_mib']:,.0f} "
        "before)."
    )


@torch.no_grad()
def run_auto(progress: output.Report = output.silent) -> dict[str, Any]:
    """Generate with every layer on PASA, with those that are predicted to overflow, and with none.

    The model is FP32 and attention alone is FP16 (emulated): where scores are stored in FP16, and on PASA.
    """
    require_built_in(model=True, text=True)
    say = stages(progress, len(RUNS) + 1)
    base, tokenizer = load_model()
    ids = build_prompt(tokenizer, most=AUTO_TOKENS)
    model, info = inject_overflow(base, OFFSETS)
    records: list[dict[str, Any]] = []
    fp32: list[int] = []
    for name, patch in RUNS.items():
        say(name)
        with nullcontext() if patch is None else pasa.patch_pipeline(model, backend="reference", **patch) as handle:
            run = generate(model, tokenizer, ids, NEW_TOKENS)
            patched = _patched(handle)
        fp32 = fp32 or run["tokens"]
        equal = {"tokens_equal_to_fp32": equal_prefix(run["tokens"], fp32), "tokens": len(fp32)}
        records.append({"run": name, **patched, **equal} | {key: run[key] for key in ("nonfinite_logits", "text")})
    say("without a bias")
    before = base(input_ids=ids).logits
    with pasa.patch_pipeline(base, policy="auto") as handle:
        identical = torch.equal(before, base(input_ids=ids).logits)
        unbiased = {**_patched(handle), "bit_identical": identical}
    return {
        "gate": judge(records, unbiased),
        "fixture": info.as_dict(),
        "unbiased": unbiased,
        "prompt": {"tokens": ids.shape[1], "new_tokens": NEW_TOKENS},
        "records": records,
    }


def _patched(handle: pasa.PatchHandle | None) -> dict[str, Any]:
    report = handle and handle.report()
    return {"patched": list(report.patched) if report else [], "alarms": list(report.alarms) if report else []}


def judge(records: list[dict[str, Any]], unbiased: dict[str, Any]) -> dict[str, Any]:
    """Return the gate of policy "auto"."""
    _, stored, every, auto = records
    return gate(
        {
            "stored_fp16_breaks": stored["nonfinite_logits"] > 0,
            "text_as_all_and_fp32": auto["text"] == every["text"] and auto["tokens_equal_to_fp32"] == auto["tokens"],
            "patched_are_the_biased": auto["patched"] == [f"model.layers.{layer}.self_attn" for layer in OFFSETS],
            "no_alarm": not auto["alarms"] and not unbiased["alarms"],
            "unbiased_is_untouched": unbiased["bit_identical"] and not unbiased["patched"],
        }
    )


def auto_table(result: dict[str, Any]) -> Table:
    """Return what each policy patched, and what came of it."""
    columns: dict[str, Column] = {
        "run": "run",
        "layers patched": lambda run: str(len(run["patched"])),
        "logits not finite": lambda run: percent(run["nonfinite_logits"]),
        "tokens equal to FP32": lambda run: f"{run['tokens_equal_to_fp32']} of {run['tokens']}",
    }
    biased = [str(layer) for layer, offset in enumerate(result["fixture"]["offset"]) if offset]
    unbiased = result["unbiased"]
    note = (
        f"SmolLM2-135M-Instruct, FP32, its layers {', '.join(biased)} biased beyond FP16; attention in FP16, emulated; "
        f"{result['prompt']['tokens']} tokens. Without the bias policy auto patches {len(unbiased['patched'])} layers, "
        f"and logits are {'' if unbiased['bit_identical'] else 'NOT '}bit-identical."
    )
    return Table.of('policy="auto"', result["records"], columns, note)


EXPERIMENT = Experiment(
    name="soundness",
    run=run_soundness,
    report=lambda result: [verdict(result), soundness_table(result), origin(result)],
    title="Bounds and reality",
    needs_models=True,
)
AUTO = Experiment(
    name="auto",
    run=run_auto,
    report=lambda result: [outcome(result), auto_table(result), origin(result)],
    title='policy="auto"',
    needs_models=True,
)
