"""Perplexity by precision and by the constant that is added to all scores: who overflows, and who loses accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from pasa.eval.accuracy.precisions import REFERENCE, Subject, parse_precisions
from pasa.eval.kit import output
from pasa.eval.kit.embedded_model import find_essays, require_built_in
from pasa.eval.models.rescue.measure import token_losses
from pasa.eval.models.rescue.run import DEFAULT_OFFSET, ESSAY, FP16_MAX, PERPLEXITY_PERCENT, machine, pick_device

DEFAULT_PRECISIONS = ("fp32", "bf16", "bf16-eager", "fp16-sdpa", "fp16-eager", "pasa")
DEFAULT_OFFSETS = (0, 4096, DEFAULT_OFFSET)
"""As it is; where FP16 holds every score, and BF16 rounds it to 16 or 32; beyond FP16."""


def run_perplexity(
    model: str | None = None,
    text: str | None = None,
    *,
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    offsets: Sequence[float] | None = None,
    tokens: int = 2048,
    window: int = 1024,
    stride: int = 512,
    half: bool | None = None,
    progress: output.Report | None = None,
) -> dict[str, Any]:
    """Measure the perplexity of a text in every precision, for every offset.

    Parameters
    ----------
    model : str, optional
        Folder of a causal language model. Default: the built-in one.
    text : str, optional
        File to read (UTF-8). Default: the essay that the demonstration reads.
    precisions : sequence of str
        Names in :data:`pasa.eval.accuracy.precisions.PRECISIONS`.
    offsets : sequence of float, optional
        Constants added to every score by weights alone, which change no perplexity in exact arithmetic. Default:
        ``DEFAULT_OFFSETS`` for the built-in model, 0 for `model`.
    tokens : int
        Length of the text, from its beginning.
    window, stride : int
        Each token is predicted once, from at least ``window - stride`` tokens before it, where there are so many.
    half
        As :class:`pasa.eval.accuracy.precisions.Subject` takes it.
    progress : callable, optional
        Called with (windows done, windows, what comes next).

    Returns
    -------
    dict
        JSON-able: ``perplexities`` (records by offset and precision; None where it is not finite), ``gate``,
        ``settings``, ``environment``.

    Raises
    ------
    FileNotFoundError, ValueError
        A model, text, precision or number that cannot be used.
    """
    chosen = list(DEFAULT_OFFSETS if offsets is None and model is None else offsets or (0,))
    names = parse_precisions(precisions, injected=any(chosen))
    if not 1 <= stride <= window:
        raise ValueError(f"stride={stride} is outside 1..window={window}")
    require_built_in(model=model is None, text=text is None)
    device = pick_device()
    records: list[dict[str, Any]] = []
    report = progress or (lambda done, total, label: None)
    for offset in chosen:
        subject = Subject(model, offset, device, half=half)
        ids = _ids(subject, text, tokens)
        spans = list(windows(len(ids), window, stride))
        for name in names:
            before, total = len(records) * len(spans), len(chosen) * len(names) * len(spans)
            tell = partial(_tell, report, before, total, f"{name}, offset {offset:,.0f}")
            with subject.model(name) as prepared:
                records.append({"offset": offset, "precision": name, **measure(prepared, ids, spans, tell)})
    return {
        "experiment": "perplexity",
        "gate": judge(records),
        "model": subject.name,
        "text": text or f"{ESSAY} (essay)",
        "titles": subject.titles(names),
        "settings": {"tokens": len(ids), "window": window, "stride": stride, "offsets": chosen},
        "perplexities": records,
        "note": subject.note(names),
        "environment": machine(device),
    }


def _tell(report: output.Report, before: int, total: int, label: str, number: int) -> None:
    report(before + number, total, label)


def windows(total: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, first): tokens begin..end-1 are read, and those from `first` on are predicted.

    Every token but the very first is predicted in exactly one window.
    """
    ends = [min(window, total)]
    while ends[-1] < total:
        ends.append(min(ends[-1] + stride, total))
    for previous, end in pairwise([1, *ends]):
        yield max(0, end - window), end, previous


@torch.no_grad()
def measure(
    model: Any, ids: torch.Tensor, spans: Sequence[tuple[int, int, int]], report: Callable[[int], None]
) -> dict[str, Any]:
    """Perplexity over `spans` of ids (n,), mean loss in nats, share of non-finite logits, seconds."""
    started, losses, nonfinite = time.perf_counter(), [], []
    for number, (begin, end, first) in enumerate(spans):
        report(number)
        piece = ids[begin:end].to(model.device)
        own, share = token_losses(model(input_ids=piece[None], use_cache=False).logits[0], piece)
        losses.append(own[first - begin - 1 :])
        nonfinite.append(share)
    loss = torch.cat(losses).double().mean()
    return {
        "perplexity": float(loss.exp()) if loss.exp().isfinite() else None,
        "loss": float(loss) if loss.isfinite() else None,
        "nonfinite_logits": sum(nonfinite) / len(nonfinite),
        "seconds": time.perf_counter() - started,
    }


def _ids(subject: Subject, text: str | None, tokens: int) -> torch.Tensor:
    """The first tokens of the text (n,)."""
    if tokens < 2:
        raise ValueError(f"tokens={tokens} is below 2")
    path = find_essays()[ESSAY] if text is None else Path(text)
    ids = torch.tensor(subject.tokenizer(path.read_text(encoding="utf-8")).input_ids)
    if len(ids) < tokens:
        raise ValueError(f"{path.name} has {len(ids)} tokens, fewer than tokens={tokens}")
    return ids[:tokens]


def judge(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What must hold, as named booleans, where the precision in question was run.

    FP32's perplexity is finite; PASA's is, and within `PERPLEXITY_PERCENT` of FP32's on the same weights, for every
    offset; FP16 with stored scores has none beyond `FP16_MAX`.
    """

    base = {each["offset"]: each["perplexity"] for each in records if each["precision"] == REFERENCE}
    checks = {"reference_finite": None not in base.values()}
    rescued = [each for each in records if each["precision"] == "pasa"]
    if rescued:
        checks["pasa_finite"] = all(each["perplexity"] is not None for each in rescued)
        checks["pasa_near_fp32"] = all(checks.values()) and all(
            abs(each["perplexity"] / base[each["offset"]] - 1) <= PERPLEXITY_PERCENT / 100 for each in rescued
        )
    failing = [each for each in records if each["precision"] == "fp16-eager" and abs(each["offset"]) > FP16_MAX]
    if failing:
        checks["fp16_breaks"] = all(each["perplexity"] is None for each in failing)
    return {"passed": all(checks.values()), "checks": checks}
