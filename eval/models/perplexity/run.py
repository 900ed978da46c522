"""Perplexity by precision and by the constant that is added to all scores: who overflows, and who loses accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

import torch

from pasa.eval.kit import output
from pasa.eval.kit.device import describe, origin, pick_device
from pasa.eval.kit.embedded_model import find_essays, require_built_in
from pasa.eval.kit.experiment import Experiment, gate, outcome
from pasa.eval.kit.model_folder import check_language_model
from pasa.eval.kit.options import at_least
from pasa.eval.kit.tables import Table, number
from pasa.eval.models.precisions import REFERENCE, Subject, parse_precisions
from pasa.eval.models.rescue.run import DEFAULT_OFFSET, ESSAY, PERPLEXITY_PERCENT, token_losses
from pasa.ops.numerics.formats import FP16_MAX

DEFAULT_PRECISIONS = ("fp32", "bf16", "bf16-eager", "fp16-sdpa", "fp16-eager", "pasa")
DEFAULT_OFFSETS = (0, 4096, DEFAULT_OFFSET)
"""As it is; where FP16 holds every score, and BF16 rounds it to 16 or 32; beyond FP16."""


def run_perplexity(
    model: Annotated[str | None, "Folder of a causal language model (default: a built-in model)."] = None,
    text: Annotated[str | None, "UTF-8 file to read (default: an essay)."] = None,
    precisions: Annotated[Sequence[str], "As for pasa eval longbench; fp32 is always added."] = DEFAULT_PRECISIONS,
    offsets: Annotated[Sequence[int] | None, "Constants to add to scores (0,4096,131072; 0 with --model)."] = None,
    tokens: Annotated[int, "Length of the text in tokens."] = 2048,
    window: Annotated[int, "Tokens in a window."] = 1024,
    stride: Annotated[int, "Tokens from the start of a window to the next."] = 512,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Measure the perplexity of a long text in several precisions; exit 1 if PASA's differs from FP32's.

    Each token is predicted once, from at least ``window - stride`` tokens before it, where there are so many. A
    perplexity that is not finite is None.
    """
    chosen = list(DEFAULT_OFFSETS if offsets is None and model is None else offsets or (0,))
    names = parse_precisions(precisions, injected=any(chosen))
    at_least(2, tokens=tokens)
    if not 1 <= stride <= window:
        raise ValueError(f"stride={stride} is outside 1..window={window}")
    if model is not None:
        check_language_model(model)
    require_built_in(model=model is None, text=text is None)
    device = pick_device()
    records: list[dict[str, Any]] = []
    for offset in chosen:
        subject = Subject(model, offset, device)
        ids = _ids(subject, text, tokens)
        for name in names:
            progress(len(records), len(chosen) * len(names), f"{name}, offset {offset:,.0f}")
            with subject.model(name) as prepared:
                records.append({"offset": offset, "precision": name, **measure(prepared, ids, window, stride)})
    return {
        "gate": judge(records),
        "model": subject.name,
        "text": text or f"{ESSAY} (essay)",
        "titles": subject.titles(names),
        "settings": {"tokens": tokens, "window": window, "stride": stride, "offsets": chosen},
        "perplexities": records,
        "note": subject.note(names),
        "environment": describe(device, "transformers"),
    }


def windows(total: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, first): tokens begin..end-1 are read, and those from `first` on are predicted, each once."""
    ends = [min(window, total)]
    while ends[-1] < total:
        ends.append(min(ends[-1] + stride, total))
    for previous, end in pairwise([1, *ends]):
        yield max(0, end - window), end, previous


@torch.no_grad()
def measure(model: Any, ids: torch.Tensor, window: int, stride: int) -> dict[str, Any]:
    """Return the perplexity of ids (n,), their mean loss in nats, and the share of non-finite logits."""
    losses, nonfinite = [], []
    for begin, end, first in windows(len(ids), window, stride):
        piece = ids[begin:end].to(model.device)
        loss, share = token_losses(model(input_ids=piece[None], use_cache=False).logits[0], piece)
        losses.append(loss[first - begin - 1 :])
        nonfinite.append(share)
    mean = torch.cat(losses).double().mean()
    return {
        "perplexity": float(mean.exp()) if mean.exp().isfinite() else None,
        "loss": float(mean) if mean.isfinite() else None,
        "nonfinite_logits": sum(nonfinite) / len(nonfinite),
    }


def _ids(subject: Subject, text: str | None, tokens: int) -> torch.Tensor:
    path = find_essays()[ESSAY] if text is None else Path(text)
    ids = torch.tensor(subject.tokenizer(output.read_text(path)).input_ids)
    if len(ids) < tokens:
        raise ValueError(f"{path.name} has {len(ids)} tokens, fewer than tokens={tokens}")
    return ids[:tokens]


def judge(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the gate, with a check for each precision that was run.

    FP32's perplexity is finite; PASA's is, and within `PERPLEXITY_PERCENT` of FP32's on the same weights, for every
    offset; FP16 with stored scores has none beyond `FP16_MAX`.
    """
    base = {each["offset"]: each["perplexity"] for each in records if each["precision"] == REFERENCE}
    checks = {"reference_finite": None not in base.values()}
    if rescued := [each for each in records if each["precision"] == "pasa"]:
        checks["pasa_finite"] = all(each["perplexity"] is not None for each in rescued)
        checks["pasa_near_fp32"] = all(checks.values()) and all(
            abs(each["perplexity"] / base[each["offset"]] - 1) <= PERPLEXITY_PERCENT / 100 for each in rescued
        )
    if failing := [each for each in records if each["precision"] == "fp16-eager" and abs(each["offset"]) > FP16_MAX]:
        checks["fp16_breaks"] = all(each["perplexity"] is None for each in failing)
    return gate(checks)


def table(result: dict[str, Any]) -> Table:
    """Return a row for every precision, two columns for every offset."""
    settings, titles = result["settings"], result["titles"]
    offsets = settings["offsets"]
    measured = {(each["precision"], each["offset"]): each["perplexity"] for each in result["perplexities"]}
    base = measured[REFERENCE, offsets[0]]
    rows = []
    for name, title in titles.items():
        values = [measured[name, offset] for offset in offsets]
        shown = ["not finite" if value is None else f"{value:,.4f}" for value in values]
        changes = [number(None if None in (value, base) else value - base, "+,.4f") for value in values]
        rows.append([title, *chain.from_iterable(zip(shown, changes, strict=True))])
    title = "Perplexity of {tokens:,} tokens of {text}, windows of {window:,}, stride {stride:,}: {model}"
    note = (
        "Offset: constant added to every score q.k, which changes nothing in exact arithmetic. Change: difference from "
        f"{titles[REFERENCE]} at offset {offsets[0]:,.0f}."
    )
    header = ["precision", *chain.from_iterable((f"offset {offset:,.0f}", "change") for offset in offsets)]
    return Table(title.format(**settings, **result), header, rows, note)


EXPERIMENT = Experiment(
    name="ppl",
    run=run_perplexity,
    report=lambda result: [outcome(result), table(result), origin(result)],
    title="Perplexity by precision",
    needs_models=True,
)
