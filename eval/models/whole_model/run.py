"""The command `pasa eval whole-model`: language models in FP32, BF16 and FP16, and in FP16 after `pasa.to_fp16`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Annotated, Any

import torch

from pasa.eval.kit import output
from pasa.eval.kit.device import describe, find_device
from pasa.eval.kit.embedded_model import find_essays, require_built_in
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.options import at_least
from pasa.eval.models.rescue.run import ESSAY, generate
from pasa.eval.models.whole_model.arms import (
    ARMS,
    BF16,
    CONVERTED,
    REFERENCE,
    SUBJECTS,
    UNCONVERTED,
    WRITTEN,
    Subject,
)
from pasa.eval.models.whole_model.measuring import TensorCoreProducts, best_gaps, compare_texts, measure
from pasa.eval.models.whole_model.report import change, report

Result = dict[str, Any]
Record = dict[str, Any]
PROMPT_TOKENS = 100
BOUNDS = {CONVERTED: (0.998, 0.02), WRITTEN: (0.995, 0.05)}
"""Least share of top tokens that are FP32's, and largest change of perplexity in percent.

A model that is written to disk returns logits in FP16, which make some near ties exact.
"""
BOUND_TOKENS = 4000
"""For so many tokens the two bounds are meant. Means of fewer scatter more, by the root of the number."""
KL_RATIO = 10.0  # BF16's mean KL divergence from FP32 is at least so many times that after to_fp16
GREEDY_GAP = 0.01  # nats between FP32's two best tokens below which another greedy token is no error
NATIVE = "FP16 products are torch's own"
PRODUCTS = (
    "FP16 products take FP16 operands and FP32 sums, and round results to FP16, as tensor cores do; products in FP32 "
    "make the sums"
)


def run_whole_model(
    models: Annotated[Sequence[str], "gemma, smollm2, amplified: SmolLM2 with a larger residual."] = tuple(SUBJECTS),
    arms: Annotated[Sequence[str], "Ways to run them; fp32 is always added."] = tuple(ARMS),
    tokens: Annotated[int, "Tokens of an essay to predict."] = 4000,
    chunk: Annotated[int, "Tokens to predict in one forward pass."] = 500,
    new_tokens: Annotated[int, "Tokens to generate."] = 64,
    native: Annotated[bool, "Use torch's own FP16 products on the CPU (up to 4 times as slow)."] = False,
    device: Annotated[str, "Device, such as cuda:0; FP16 products are torch's own unless it is the CPU."] = "cpu",
    progress: output.Report = output.silent,
) -> Result:
    """Run language models in FP16 before and after pasa.to_fp16; exit 1 if they are not as in FP32 afterwards."""
    at_least(1, tokens=tokens, chunk=chunk, new_tokens=new_tokens)
    place = find_device(device)
    native = native or place.type != "cpu"
    names, ways = choose(models, SUBJECTS), choose([REFERENCE, *arms], ARMS)
    require_built_in(model=False, text=True)
    for name in names:
        SUBJECTS[name].require()
    runs: list[Record] = []

    def say(title: str) -> None:
        progress(len(runs), len(names) * len(ways), title)

    with nullcontext() if native else TensorCoreProducts():
        for name in names:
            for record in measure_arms(SUBJECTS[name], ways, tokens, chunk, new_tokens, say, place):
                runs.append({"model": name, **record})
    return {
        "gate": judge(runs),
        "titles": {name: SUBJECTS[name].title for name in names},
        "settings": {"text": ESSAY, "tokens": tokens, "chunk": chunk, "new_tokens": new_tokens, "native": native},
        "runs": runs,
        "note": NATIVE if native else PRODUCTS,
        "environment": describe(place, "transformers"),
    }


def choose(names: Sequence[str], known: dict[str, Any]) -> list[str]:
    """Return the names without repeats; raise ValueError for one that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    return list(dict.fromkeys(names))


def measure_arms(
    subject: Subject,
    arms: Sequence[str],
    tokens: int,
    chunk: int,
    new_tokens: int,
    say: Callable[[str], None],
    device: torch.device,
) -> Iterator[Record]:
    """Yield a record for each way to run a model, FP32 first; each starts from a copy of the FP32 model."""
    say(f"loading {subject.title}")
    original, tokenizer = subject.load()
    original.to(device)
    chunks = [each.to(device) for each in split(tokenizer, output.read_text(find_essays()[ESSAY]), tokens, chunk)]
    prompt = chunks[0][:PROMPT_TOKENS]
    reference: list[torch.Tensor] = []
    expected: list[int] = []
    gaps: list[float] = []
    for name in arms:
        say(f"{subject.title}: {ARMS[name].title}")
        with ARMS[name].prepare(copy.deepcopy(original), tokenizer) as model:
            record, logits = measure(model, chunks, reference)
            text = generate(model, tokenizer, prompt[None], new_tokens)
        if name == REFERENCE:
            reference, expected = logits, text["tokens"]
            gaps = best_gaps(original, prompt, expected)
        greedy = {"text": text["text"], **compare_texts(text["tokens"], expected, gaps)}
        yield {"arm": name, **record, **(greedy if record["perplexity"] is not None else {})}


def split(tokenizer: Any, text: str, tokens: int, chunk: int) -> list[torch.Tensor]:
    """Return chunks of ids that predict the first `tokens` tokens of a text, each token once, `chunk` in each chunk.

    Each chunk begins with the token that begins a text. If the tokenizer adds none, it begins with the token before
    its first one, and the very first token of the text is not predicted.
    """
    begin = tokenizer("").input_ids
    ids = tokenizer(text, add_special_tokens=False).input_ids
    first = 0 if begin else 1
    end = first + tokens
    if len(ids) < end:
        raise ValueError(f"{ESSAY} has {len(ids)} tokens, fewer than tokens={end}")
    starts = range(first, end, chunk)
    return [torch.tensor((begin or [ids[start - 1]]) + ids[start : min(start + chunk, end)]) for start in starts]


def judge(runs: Sequence[Record]) -> dict[str, Any]:
    """Return the gate: FP32 is finite, a model that overflows fails as it is, and the converted model is as FP32."""
    checks: dict[str, bool] = {}
    for name in dict.fromkeys(each["model"] for each in runs):
        arms = {each["arm"]: each for each in runs if each["model"] == name}
        base = arms[REFERENCE]
        checks[f"{name}_fp32_finite"] = _finite(base)
        if SUBJECTS[name].overflows:
            for arm in (each for each in UNCONVERTED if each in arms):
                checks[f"{name}_{arm}_all_nan"] = arms[arm]["nonfinite_logits"] == 1
        for arm in (each for each in BOUNDS if each in arms):
            prefix = name if arm == CONVERTED else f"{name}_{arm}"
            checks |= {f"{prefix}_{check}": passed for check, passed in _as_fp32(arms[arm], base).items()}
        if CONVERTED in arms and BF16 in arms:
            finite = _finite(arms[CONVERTED]) and _finite(arms[BF16])
            checks[f"{name}_kl_below_bf16"] = finite and KL_RATIO * arms[CONVERTED]["kl"] <= arms[BF16]["kl"]
    return gate(checks)


def _finite(run: Record) -> bool:
    return run["first_nonfinite"] is None and run["perplexity"] is not None


def _as_fp32(run: Record, base: Record) -> dict[str, bool]:
    """Return the checks of a converted model against FP32's run."""
    if not (_finite(run) and _finite(base)):
        return {"finite": False}
    moved = change(run["perplexity"], base["perplexity"])
    scatter = max(1.0, math.sqrt(BOUND_TOKENS / run["tokens"]))
    top1, percent = BOUNDS[run["arm"]]
    checks = {
        "finite": True,
        "top1": 1 - run["top1_agreement"] <= scatter * (1 - top1),
        "perplexity": moved is not None and abs(moved) <= scatter * percent,
    }
    greedy = run["greedy_gap"] is None or run["greedy_gap"] <= GREEDY_GAP
    return checks | ({"greedy": greedy} if run["arm"] == CONVERTED else {})


EXPERIMENT = Experiment(
    name="whole-model",
    run=run_whole_model,
    report=report,
    title="Whole language models in FP16",
    needs_models=True,
)
