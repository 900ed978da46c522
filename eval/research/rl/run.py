"""The command `pasa eval rl`: a toy GRPO with one FP16 arithmetic for rollout and training, beside BF16 and eager FP16.

A case is one arithmetic on one model: SmolLM2-135M as it is, or with a constant added to all scores, which changes
nothing in exact arithmetic and is beyond FP16.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.cases_file import CasesFile
from pasa.eval.kit.device import describe, origin, pick_device
from pasa.eval.kit.embedded_model import load_model, require_built_in
from pasa.eval.kit.experiment import Experiment, gate, outcome
from pasa.eval.kit.options import Minutes, at_least
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.kit.tables import Column, Table, short
from pasa.eval.research.rl.rollout import register_pages
from pasa.eval.research.rl.training import ARMS, RATE, Policy, train

Record = dict[str, Any]
MODELS = {"plain": 0, "injected": 131072}  # what is added to every score: twice FP16's largest number, rounded up
PROMPT = "The best thing about {} is"
SUBJECTS = ("summer", "winter", "music", "water", "school", "money", "games", "books")
LETTER = "e"  # the reward is the share of new tokens with this letter
SEED = 0
MOST_KL = 0.1  # mismatch of FP16 with PASA on the plain model, of that of BF16 with SDPA
PASA, BF16, EAGER = ARMS
LEAST_KL = 1e-12  # nats: smaller ones are drawn there, because a logarithmic axis has no 0
COLORS = dict(zip(ARMS, ("tab:blue", "tab:orange", "tab:green"), strict=True))


def run_rl(
    steps: Annotated[int, "Steps of each case."] = 12,
    prompts: Annotated[int, "Prompts of a step."] = 1,
    group: Annotated[int, "Completions of each prompt."] = 8,
    new_tokens: Annotated[int, "Tokens of each completion."] = 16,
    rate: Annotated[float, "Learning rate of AdamW."] = RATE,
    minutes: Minutes = None,
    folder: Path | None = None,
    progress: output.Report = output.silent,
) -> Record:
    """Train a small model by GRPO in FP16 with PASA, in BF16 and in eager FP16; exit 1 if FP16 with PASA loses a step.

    Cases that are in `folder` are not run again. The result has ``records``, one for each model and arithmetic, with
    a curve of every quantity.
    """
    at_least(1, steps=steps, prompts=prompts, new_tokens=new_tokens)
    at_least(2, group=group)
    require_built_in(model=True, text=False)
    device = pick_device()
    sizes = {"steps": steps, "prompts": prompts, "group": group, "new_tokens": new_tokens, "rate": rate}
    settings = sizes | {"letter": LETTER, "models": MODELS, "seed": SEED}
    environment = describe(device, "transformers")
    kept = CasesFile(folder, settings, environment)
    pasa.register()
    register_pages()
    load = cache(load_model)

    @cache
    def model_of(name: str) -> Any:
        model = load()[0]
        return inject_overflow(model, MODELS[name])[0] if MODELS[name] else model

    def measure(case: str) -> Record:
        model, arm = case.split(", ")
        tokenizer = load()[1]
        policy = Policy(model_of(model), ARMS[arm], device, rate)
        batches, good = make_batches(tokenizer, prompts), letters(tokenizer, policy.model.config.vocab_size)
        each = train(policy, batches, good.to(device), steps, group, new_tokens, SEED)
        return summary(model, arm, each)

    names = [f"{model}, {arm}" for model in MODELS for arm in ARMS]
    records = kept.fill(names, measure, minutes, progress)
    return {
        "settings": settings,
        "gate": judge(records),
        "records": records,
        "note": NOTES[device.type],
        "environment": environment,
    }


NOTES = {
    "cpu": "run on a CPU: linear layers multiply in FP32 and round once, as a GPU does; backend `sdpa` serves pasa",
    "cuda": "run on the GPU named here",
    "npu": "run on the NPU named here",
}


def make_batches(tokenizer: Any, prompts: int) -> list[Tensor]:
    """Return batches (prompts, S) of equally long prompts, which together have every subject once or more."""
    texts = [PROMPT.format(subject) for subject in SUBJECTS]
    ids = torch.cat([tokenizer(text, return_tensors="pt").input_ids for text in texts])  # fails if lengths differ
    cycled = ids.repeat(prompts, 1)
    return list(cycled.split(prompts))


def letters(tokenizer: Any, vocabulary: int) -> Tensor:
    """Return which tokens (vocabulary,) have the letter of the reward in their text."""
    return torch.tensor([LETTER in tokenizer.decode([token]) for token in range(vocabulary)])


def summary(model: str, arm: str, steps: Sequence[Record]) -> Record:
    """Return the record of a case."""

    def mean(name: str, part: slice = slice(None)) -> float | None:
        values = [each[name] for each in steps[part] if each[name] is not None]
        return statistics.fmean(values) if values else None

    quarter = max(1, len(steps) // 4)
    return {
        "model": model,
        "arm": arm,
        "steps": len(steps),
        "lost": sum(each["lost"] for each in steps),
        "skipped": sum(each["skipped"] for each in steps),
        "kl": mean("kl"),
        "largest": max((each["largest"] for each in steps if each["largest"] is not None), default=None),
        "first_reward": mean("reward", slice(quarter)),
        "last_reward": mean("reward", slice(-quarter, None)),
        "curves": {name: [each[name] for each in steps] for name in ("reward", "kl", "largest")},
    }


def judge(records: Sequence[Record]) -> Record:
    """Return the gate of the cases that are done."""
    by_case = {(each["model"], each["arm"]): each for each in records}
    checks: dict[str, bool] = {"every case is done": len(by_case) == len(MODELS) * len(ARMS)}

    def compare(name: str, cases: Sequence[tuple[str, str]], holds: Callable[..., bool]) -> None:
        if all(case in by_case for case in cases):
            checks[name] = holds(*(by_case[case] for case in cases))

    compare(
        f"plain: the mismatch of {PASA} is at most {MOST_KL:g} of that of {BF16}",
        [("plain", PASA), ("plain", BF16)],
        lambda ours, theirs: ours["kl"] is not None and ours["kl"] <= MOST_KL * theirs["kl"],
    )
    for model in MODELS:
        compare(f"{model}: {PASA} loses and skips no step", [(model, PASA)], lambda x: x["lost"] + x["skipped"] == 0)
    compare(
        f"injected: {EAGER} loses steps, so the test means something", [("injected", EAGER)], lambda x: x["lost"] > 0
    )
    return gate(checks)


def report(result: Record) -> list[Table | str]:
    """Return the verdict, the table of all cases, and where they were run."""
    return [outcome(result), table(result), origin(result)]


def table(result: Record) -> Table:
    """Return a row for each case."""
    settings = result["settings"]
    columns: dict[str, Column] = {
        "model": "model",
        "arithmetic": lambda each: ARMS[each["arm"]].title,
        "KL a token": lambda each: "-" if each["kl"] is None else short(each["kl"]),
        "largest ratio": lambda each: "-" if each["largest"] is None else f"{math.exp(each['largest']):.2f}",
        "lost": "lost",
        "skipped": "skipped",
        "reward at first": ("first_reward", ".2f"),
        "at last": ("last_reward", ".2f"),
    }
    note = (
        f"{settings['steps']} steps of {settings['prompts']} x {settings['group']} completions of "
        f"{settings['new_tokens']} tokens. KL: of the trainer's next-token distribution from the rollout's, before "
        "each update, in nats. Largest ratio: of a sampled token's two probabilities. Lost: steps in which a logit was "
        "not finite. Skipped: steps whose scaled gradients were not finite. Reward: share of new tokens with the "
        f"letter {settings['letter']!r}, mean over the first and the last quarter of the steps. Injected: "
        f"{settings['models']['injected']} added to all scores."
    )
    return Table.of("Rollout and training", result["records"], columns, note)


def figures(result: Record, folder: Path) -> list[Path]:
    """Draw mismatch and reward over the steps; a line for each arithmetic, a column for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.2), layout="constrained")
    axes = figure.subplots(2, len(MODELS), sharex=True)
    for column, model in enumerate(MODELS):
        for record in (each for each in result["records"] if each["model"] == model):
            label, color = ARMS[record["arm"]].title, COLORS[record["arm"]]
            for row, name in enumerate(("kl", "reward")):
                values = [math.nan if each is None else max(each, LEAST_KL) for each in record["curves"][name]]
                lost = f" ({record['lost']} steps lost)" if record["lost"] else ""
                axes[row][column].plot(range(1, len(values) + 1), values, color=color, label=label + lost)
        axes[0][column].set(yscale="log", title=f"{model} model", ylabel="KL a token, nats")
        axes[1][column].set(xlabel="step", ylabel="reward")
        axes[0][column].legend(fontsize=7)
    path = folder / "rl.png"
    figure.savefig(path, dpi=110)
    return [path]


EXPERIMENT = Experiment(
    "rl",
    run_rl,
    report,
    "One FP16 arithmetic for rollout and training",
    figures=figures,
    needs_models=True,
    resume="start again with the same --output-dir to go on",
)
