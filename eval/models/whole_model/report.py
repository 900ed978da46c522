"""Tables and sentences of `pasa eval whole-model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import outcome
from pasa.eval.kit.gemma_model import NOTICE
from pasa.eval.kit.tables import Column, Table, percent, short
from pasa.eval.models.whole_model.arms import ARMS, BF16, CONVERTED, REFERENCE, UNCONVERTED, WRITTEN

Result = dict[str, Any]
Record = dict[str, Any]


def change(perplexity: float | None, base: float | None) -> float | None:
    """Return by how many percent a perplexity differs from `base`; None if one is not finite."""
    return None if perplexity is None or base is None else 100 * (perplexity / base - 1)


def table(result: Result, name: str) -> Table:
    """Return a row for each way to run a model."""
    runs = [each for each in result["runs"] if each["model"] == name]
    base = runs[0]["perplexity"]

    def compared(text: Callable[[Record], str]) -> Column:
        """Return a column that is empty for FP32 and for runs that have no perplexity."""
        return lambda run: "-" if run["arm"] == REFERENCE or run["perplexity"] is None else text(dict(run))

    columns: Mapping[str, Column] = {
        "run": lambda run: ARMS[run["arm"]].title,
        "first non-finite module": lambda run: run["first_nonfinite"]["module"] if run["first_nonfinite"] else "none",
        "non-finite logits": lambda run: percent(run["nonfinite_logits"]),
        "largest residual": lambda run: "inf" if run["residual_peak"] is None else f"{run['residual_peak']:,.0f}",
        "perplexity": ("perplexity", ",.4f"),
        "change": compared(lambda run: f"{change(run['perplexity'], base):+.4f} %"),
        "top-1 as FP32": compared(lambda run: f"{100 * run['top1_agreement']:.2f} %"),
        "mean KL": compared(lambda run: short(run["kl"])),
        "greedy tokens as FP32": compared(lambda run: _greedy(run, result["settings"]["new_tokens"])),
    }
    settings = result["settings"]
    title = f"{result['titles'][name]}, {settings['tokens']:,} tokens of an essay in chunks of {settings['chunk']:,}"
    note = f"Change: of the perplexity, from FP32's. KL: nats per token, from FP32's distribution.{_rounding(runs[0])}"
    return Table.of(title, runs, columns, note)


def _rounding(base: Record) -> str:
    """Return what FP16's logits cost even if all else were FP32's."""
    rounded = base.get("rounded_logits")
    if not rounded:
        return ""
    return (
        f" FP32's own logits rounded to FP16: top-1 {100 * rounded['top1_agreement']:.2f} %, mean KL "
        f"{short(rounded['kl'])}."
    )


def _greedy(run: Record, total: int) -> str:
    gap = "" if run["greedy_gap"] is None else f", then FP32's two best are {run['greedy_gap']:.2g} nats apart"
    return f"{run['greedy_equal']} of {total}{gap}"


def verdict(result: Result) -> str:
    """Return the outcome: where FP16 overflows, and how near to FP32 the converted models are."""
    sentences = []
    for name, title in result["titles"].items():
        arms = {each["arm"]: each for each in result["runs"] if each["model"] == name}
        sentences += [*_overflow(title, arms), *_conversion(title, arms)]
    return " ".join([*sentences, outcome(result)])


def _overflow(title: str, arms: Mapping[str, Record]) -> list[str]:
    """Return a sentence if FP16 is not finite without a conversion."""
    broken = [arm for arm in UNCONVERTED if arm in arms and arms[arm]["first_nonfinite"]]
    if not broken:
        return []
    modules = ", ".join(dict.fromkeys(arms[arm]["first_nonfinite"]["module"] for arm in broken))
    patched = ", with patched attention as well" if broken == list(UNCONVERTED) else ""
    return [
        f"{title}: the residual stream reaches {arms[REFERENCE]['residual_peak']:,.0f}, and FP16 ends at 65,504. In "
        f"FP16 the first module that is not finite is {modules}{patched}."
    ]


def _conversion(title: str, arms: Mapping[str, Record]) -> list[str]:
    """Return a sentence for each conversion, in memory and on disk, whose result is finite."""
    sentences, bf16 = [], arms.get(BF16)
    for arm, name in ((CONVERTED, "after pasa.to_fp16"), (WRITTEN, "written by pasa to-fp16 and loaded without pasa")):
        ours = arms.get(arm)
        if ours is None or not ours["kl"]:
            continue
        times = f", KL divergence {bf16['kl'] / ours['kl']:,.0f} times below BF16's" if bf16 and bf16["kl"] else ""
        sentences.append(
            f"{title} {name}: {100 * ours['top1_agreement']:.2f} % of the top tokens are FP32's{_gap(ours)}, "
            f"perplexity {change(ours['perplexity'], arms[REFERENCE]['perplexity']):+.4f} %{times}."
        )
    return sentences


def _gap(run: Record) -> str:
    gaps = run.get("top1_gaps")
    return f" ({len(gaps)} differ, where FP32's two best are at most {gaps[-1]:.2g} nats apart)" if gaps else ""


def tables(result: Result) -> str:
    """Return the tables of all models, for a page."""
    return "\n\n".join(table(result, name).captioned() for name in result["titles"])


def report(result: Result) -> list[Table | str]:
    """Return the verdict, a table for each model, where the numbers come from, and the terms of the weights."""
    terms = [f"{NOTICE}."] if "gemma" in result["titles"] else []
    return [verdict(result), *(table(result, name) for name in result["titles"]), origin(result), *terms]
