"""Tables and sentences of `pasa bench model`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import outcome
from pasa.eval.kit.tables import Column, Table, number, short
from pasa.eval.models.generation.accuracy import BATCH, FACTOR, PROMPT, TOKENS
from pasa.eval.models.generation.measuring import NEW, NEW_TOKENS, NEW_TURNS
from pasa.eval.models.generation.runs import COMPILED, PASA, PLAIN, SDPA

Result = dict[str, Any]
Record = dict[str, Any]
GIB = 2**30
SHOWN = 20  # kernels and functions in a table
LONGEST_NAME = 90  # letters of a kernel's name


def report(result: Result) -> list[Table | str]:
    """Return the verdict, the tables, and where the numbers come from."""
    tables = time_table(result), new_length_table(result), accuracy_table(result)
    return [verdict(result), *tables, *absences(result), origin(result)]


def summary(result: Result) -> str:
    """Return the verdict, the table of times and where they come from, for a page."""
    tables = time_table(result), new_length_table(result)
    return "\n\n".join([verdict(result), *(each.captioned() for each in tables), origin(result)])


def verdict(result: Result) -> str:
    """Return the range of the ratios, and which checks fail."""
    texts = []
    for way in dict.fromkeys(record["way"] for record in result["records"]):
        runs = [record["runs"][PASA] for record in result["records"] if record["way"] == way]
        timed = [each for each in runs if each.get("token_ratio") is not None]
        if timed:
            prompt, token = (_span([each[f"{phase}_ratio"] for each in timed]) for phase in ("prompt", "token"))
            texts.append(f"{way}: a prompt takes {prompt} times as long as with SDPA, a token {token} times")
        new = [each for each in timed if each.get(f"{NEW}token_ratio") is not None]
        if new:
            prompt, token = (_span([each[f"{NEW}{phase}_ratio"] for each in new]) for phase in ("prompt", "token"))
            texts.append(f"where lengths are new: a prompt {prompt} times, a token {token} times")
    said = f"With patched attention, {'; '.join(texts)}. " if texts else ""
    return f"{said}{len(result['records'])} cases are done. {outcome(result)}"


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"


def _rows(result: Result) -> Iterator[Record]:
    for record in result["records"]:
        for name, run in record["runs"].items():
            yield {"case": record["case"], "attention": name, **run}


def time_table(result: Result) -> Table:
    """Return a row for each case and attention."""
    settings = result["settings"]
    columns: dict[str, Column] = {
        "prompt x batch, way": "case",
        "attention": "attention",
        "prompt ms": ("prompt_median_ms", ".1f"),
        "x SDPA": ("prompt_ratio", ".3f"),
        "enqueued ms": ("prompt_host_ms", ".1f"),
        "ms a token": ("token_median_ms", ".2f"),
        "p20 to p80": lambda each: _between(each, "token"),
        "x SDPA, token": ("token_ratio", ".3f"),
        "kernels ms": ("kernel_ms", ".2f"),
        "GiB": lambda each: number(each.get("added_bytes") and each["added_bytes"] / GIB, ".2f"),
    }
    bias = f" {settings['bias']} is added to q and k in one channel." if settings["bias"] else ""
    note = (
        f"{settings['config']}, {settings['layers']} layers, random weights (seed {settings['seed']}), FP16, greedy "
        f"`generate` of transformers, {settings['new_tokens']} new tokens, at most {settings['turns']} turns in random "
        f"order.{spreads(result)}{bias} {COMPILED}: with a static cache, which transformers compiles for decoding. "
        "Times are those of the device's clock, and include its waiting for the host; kernels: what the kernels of a "
        "step take together. Enqueued: after so long the host has read the prompt. x SDPA: median of the turns' ratios "
        "to the unpatched model; below 1 patched is faster. GiB: the most that a call allocates beside the weights."
    )
    return Table.of("Generation", _rows(result), columns, note)


def new_length_table(result: Result) -> Table:
    """Return a row for each plain case and attention: the times of prompts whose length no call had before."""
    columns: dict[str, Column] = {
        "prompt x batch, way": "case",
        "attention": "attention",
        "prompt ms": (f"{NEW}prompt_median_ms", ".1f"),
        "x SDPA": (f"{NEW}prompt_ratio", ".3f"),
        "enqueued ms": (f"{NEW}prompt_host_ms", ".1f"),
        "ms a token": (f"{NEW}token_median_ms", ".2f"),
        "p20 to p80": lambda each: _between(each, f"{NEW}token"),
        "x SDPA, token": (f"{NEW}token_ratio", ".3f"),
    }
    note = (
        f"The same with prompts that are a little longer, so that no call before had their lengths, and {NEW_TOKENS} "
        f"new tokens: {NEW_TURNS} turns. So it is for a user, for whom every prompt and every token has another "
        "length. In the table above all turns have the same lengths, and what is prepared for a length is there "
        "already."
    )
    rows = [each for each in _rows(result) if each["case"].endswith(PLAIN)]
    return Table.of("Lengths that are new", rows, columns, note)


def spreads(result: Result) -> str:
    """Return a sentence on the spread of the scores of all heads."""
    found = result["spreads"]
    if not found:
        return ""
    low, middle, high, most = (f"{found[share]:.1f}" for share in ("0.1", "0.5", "0.9", "1"))
    return f" Scores of a head spread by {middle} nats (median; p10 {low}, p90 {high}, largest {most})."


def _between(record: Any, phase: str) -> str:
    low, high = (record.get(f"{phase}_{share}_ms") for share in ("p20", "p80"))
    return "-" if low is None else f"{low:.2f} to {high:.2f}"


def accuracy_table(result: Result) -> Table:
    """Return a row for each attention, way and kind of prompt that was judged."""
    columns: dict[str, Column] = {
        "attention": "attention",
        "way": lambda each: f"{each['way']}{', padded' if each['padded'] else ''}",
        "relative error": lambda each: "-" if each["error"] is None else short(each["error"]),
        "limit": lambda each: short(each["limit"]) if each["limit"] and each["attention"] == PASA else "-",
        "not finite": lambda each: "-" if each["nonfinite"] is None else str(each["nonfinite"]),
        "tokens as FP32": lambda each: "-" if each["equal"] is None else f"{each['equal']} of {each['of']}",
    }
    note = (
        f"Logits of {BATCH} prompts of {PROMPT} tokens and {TOKENS} new ones, beside FP32 without TF32, on a model of "
        "the same width with few layers; up to the first token that differs, with its logits. Limit: "
        f"{FACTOR:g} times the error of the unpatched model in FP16."
    )
    return Table.of("Accuracy", result["accuracy"], columns, note)


def absences(result: Result) -> list[str]:
    """Return what did not run, once per reason."""
    cases: dict[tuple[str, str], list[str]] = {}
    for each in _rows(result):
        if each["why"]:
            cases.setdefault((each["attention"], each["why"]), []).append(each["case"])
    for each in result["accuracy"]:
        if each["why"]:
            cases.setdefault((each["attention"], each["why"]), []).append(f"accuracy, {each['way']}")
    return [f"{name}: not run on {'; '.join(dict.fromkeys(on))}: {why}" for (name, why), on in cases.items()]


def profile_report(result: Result) -> list[Table | str]:
    """Return for each case a table of the sums, one of the kernels, and one of the host's functions."""
    parts: list[Table | str] = []
    for case in dict.fromkeys(record["case"] for record in result["records"]):
        records = [each for each in result["records"] if each["case"] == case]
        ran = [each for each in records if not each["why"]]
        parts += [_sums(case, records, result)]
        parts += [_entries(f"{case}: {kind}", kind, ran, result) for kind in ("kernels", "functions") if ran]
        parts += [f"{each['attention']}: not run: {each['why']}" for each in records if each["why"]]
    return [*parts, origin(result)]


def _sums(case: str, records: Sequence[Record], result: Result) -> Table:
    layers = int(result["settings"]["layers"])
    columns: dict[str, Column] = {
        "attention": "attention",
        "ms a token": lambda each: number(each.get("us") and 1e-3 * each["us"], ".2f"),
        "us a layer": lambda each: number(each.get("us") and each["us"] / layers, ".1f"),
        "of it kernels": lambda each: number(each.get("us") and each["kernels_us"] / layers, ".1f"),
        "not kernels": lambda each: number(each.get("us") and (each["us"] - each["kernels_us"]) / layers, ".1f"),
    }
    note = "A step of decoding without a profiler; kernels by torch's profiler. Between them the device waits."
    return Table.of(case, records, columns, note)


def _entries(title: str, kind: str, records: Sequence[Record], result: Result) -> Table:
    """Return a row for each kernel or function: microseconds a layer by attention, the largest differences first.

    The difference is that of the first two attentions, patched and not.
    """
    layers = int(result["settings"]["layers"])
    tables = {each["attention"]: {entry["name"]: entry for entry in each[kind]} for each in records}
    names = dict.fromkeys(name for table in tables.values() for name in table)

    def of_layer(attention: str, name: str, field: str) -> float:
        return float(tables.get(attention, {}).get(name, {field: 0.0})[field]) / layers

    def difference(name: str) -> float:
        return math.fabs(of_layer(PASA, name, "us") - of_layer(SDPA, name, "us"))

    rows = [
        [name[:LONGEST_NAME], *(f"{of_layer(a, name, 'us'):.2f} ({of_layer(a, name, 'calls'):.2g})" for a in tables)]
        for name in sorted(names, key=difference, reverse=True)[:SHOWN]
    ]
    note = "Microseconds a layer that it takes itself, and in brackets calls a layer; largest differences first."
    if kind == "functions":
        note += " Python's profiler makes short calls look longer than they are. Waiting for the device is included."
    return Table(title, [kind[:-1], *tables], rows, note, wraps=kind[:-1])
