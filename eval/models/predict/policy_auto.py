"""The policy "auto" on the language model: with three layers biased, and with none."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.device import origin
from pasa.eval.kit.embedded_model import load_model, require_built_in
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.gate import gate, outcome
from pasa.eval.kit.options import stages
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.kit.tables import Column, Table, percent
from pasa.eval.models.rescue.run import build_prompt, equal_prefix, generate

OFFSETS = {3: 131072.0, 14: -80000.0, 29: 131072.0}
"""Layers whose scores are biased, of 30, by either sign."""
TOKENS, NEW_TOKENS = 256, 32
RUNS: dict[str, dict[str, Any] | None] = {
    "FP32, its own attention": None,
    "scores stored in FP16": {"policy": "all", "config": pasa.PasaConfig(precision="partial")},
    'PASA, policy="all"': {"policy": "all"},
    'PASA, policy="auto"': {"policy": "auto"},
}
"""The arguments of `pasa.patch_pipeline` in each run, None for the model without a patch."""


def run_auto(progress: output.Report = output.silent) -> dict[str, Any]:
    """Generate with every layer on PASA, with those that are predicted to overflow, and with none.

    The model is FP32 and attention alone is FP16 (emulated): where scores are stored in FP16, and on PASA. The result
    holds ``records`` (a run each: what was patched, text, tokens equal to FP32's), ``unbiased`` and ``gate``.
    """
    require_built_in(model=True, text=True)
    say = stages(progress, len(RUNS) + 1)
    base, tokenizer = load_model()
    ids = build_prompt(tokenizer, most=TOKENS)
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
        seen = {key: run[key] for key in ("nonfinite_logits", "text")}
        records.append({"run": name, **patched, **equal, **seen})
    say("without a bias")
    unbiased = compare_unbiased(base, ids)
    return {
        "gate": judge(records, unbiased),
        "fixture": info.as_dict(),
        "unbiased": unbiased,
        "prompt": {"tokens": ids.shape[1], "new_tokens": NEW_TOKENS},
        "records": records,
    }


def _patched(handle: pasa.PatchHandle | None) -> dict[str, Any]:
    report = None if handle is None else handle.report()
    return {"patched": list(report.patched), "alarms": list(report.alarms)} if report else {"patched": [], "alarms": []}


@torch.no_grad()
def compare_unbiased(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Compare the model as it was published, with policy "auto" and without any patch."""
    before = model(input_ids=ids).logits
    with pasa.patch_pipeline(model, policy="auto") as handle:
        after = model(input_ids=ids).logits
        return {**_patched(handle), "bit_identical": torch.equal(before, after)}


def judge(records: list[dict[str, Any]], unbiased: dict[str, Any]) -> dict[str, Any]:
    """Return the checks on policy "auto"."""
    _, stored, every, auto = records
    checks = {
        "stored_fp16_breaks": stored["nonfinite_logits"] > 0,
        "text_as_all_and_fp32": auto["text"] == every["text"] and auto["tokens_equal_to_fp32"] == auto["tokens"],
        "patched_are_the_biased": auto["patched"] == [f"model.layers.{layer}.self_attn" for layer in OFFSETS],
        "no_alarm": not auto["alarms"] and not unbiased["alarms"],
        "unbiased_is_untouched": unbiased["bit_identical"] and not unbiased["patched"],
    }
    return gate(checks)


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
    name="auto",
    run=run_auto,
    report=lambda result: [auto_table(result), f"{outcome(result)} {origin(result)}"],
    title='policy="auto"',
    needs_models=True,
)
