"""Records every attention call of a running model, of transformers and of diffusers alike.

A patched model attends through one operator, ``torch.ops.pasa.attention``. A dispatch mode sees its queries and keys;
hooks on the patched modules tell whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.kit.attention_calls import AttentionCalls
from pasa.eval.models.diagnose.maps import HeadMaps, head_pictures
from pasa.eval.models.diagnose.statistics import head_statistics
from pasa.ops.attention.spec.diagnostics import FIELDS
from pasa.patching.handle import PatchReport

MODULES = 3  # whose worst head is drawn; heads of one module often look the same
Record = dict[str, Any]


class Findings:
    """Counts and samples of a model's attention, by module.

    Attributes
    ----------
    report : PatchReport
        The modules that are probed, and those that are not.
    calls, broken : dict of str to int
        Attention calls of each module, and those left out because a query or key was not finite.
    heads : dict of str to list of dict
        For each head the numbers of `head_statistics` in the call in which its scores were largest (``max_score`` is
        over all pairs that a mask leaves and over the sampled pairs that it hides); the number of that ``call``, from
        1; and of all calls: ``stored``, the largest magnitude of a score as PASA stored it (infinite where one of
        weight 0 was stored as -infinity), ``rescued_tiles``, kept in FP32, and ``tiles``.
    maps : list of HeadMaps
        Matrices of the worst head of the `MODULES` worst modules, worst first.
    """

    def __init__(self, report: PatchReport) -> None:
        self.report = report
        self.calls: dict[str, int] = {}
        self.heads: dict[str, list[Record]] = {}
        self.broken: dict[str, int] = {}
        self.maps: list[HeadMaps] = []

    def add(self, module: str, q: Tensor, k: Tensor, counts: Tensor) -> None:
        """Add one call: q (B, Hq, S, D), k (B, Hkv, Skv, D), and the operator's counts (B, Hq, len(FIELDS))."""
        call = self.calls[module] = self.calls.get(module, 0) + 1
        if not all(bool(torch.isfinite(x).all()) for x in (q, k)):
            self.broken[module] = self.broken.get(module, 0) + 1
            return
        new = [_with_counts(*each, call) for each in zip(head_statistics(q, k), counts.unbind(1), strict=True)]
        known = self.heads.get(module)
        self.heads[module] = [_joined(*pair) for pair in zip(known, new, strict=True)] if known else new
        worst = max(range(len(new)), key=lambda head: new[head]["max_score"])
        entry = int(counts[:, worst, FIELDS.index("max_score_before")].argmax())
        matrices = q[entry, worst], k[entry, worst * k.shape[1] // q.shape[1]]
        self.offer(module, worst, call, new[worst]["max_score"], *matrices)

    def offer(self, module: str, head: int, call: int, max_score: float, q: Tensor, k: Tensor) -> None:
        """Keep pictures of a head, q (S, D) and k (Skv, D), if it is worse than those that are kept."""
        others = [each for each in self.maps if each.module != module]
        rivals = [each for each in self.maps if each.module == module] or self.maps[MODULES - 1 :]
        if all(max_score > each.max_score for each in rivals):
            new = HeadMaps(module, head, call, max_score, head_pictures(q, k))
            self.maps = sorted([*others, new], key=lambda each: -each.max_score)[:MODULES]

    def worst(self) -> list[Record]:
        """Return the records of all heads with their ``module`` and ``head``, largest score first."""
        heads = [
            {"module": name, "head": head, **record}
            for name, records in self.heads.items()
            for head, record in enumerate(records)
        ]
        return sorted(heads, key=lambda each: -float(each["max_score"]))


def _with_counts(numbers: Record, counts: Tensor, call: int) -> Record:
    """Return the record of one head in one call; counts (B, len(FIELDS))."""
    largest, total = (dict(zip(FIELDS, each.tolist(), strict=True)) for each in (counts.amax(0), counts.sum(0)))
    tiles = {name: int(total[name]) for name in ("rescued_tiles", "tiles")}
    max_score = max(numbers["max_score"], largest["max_score_before"])
    return {**numbers, "max_score": max_score, "call": call, "stored": largest["max_score_after"], **tiles}


def _joined(known: Record, later: Record) -> Record:
    """Return the record of a head over its calls so far and a later one."""
    totals = {name: known[name] + later[name] for name in ("rescued_tiles", "tiles")}
    worse = later if later["max_score"] > known["max_score"] else known
    return {**worse, "stored": max(known["stored"], later["stored"]), **totals}


@contextmanager
def probe(model_or_pipeline: Any) -> Iterator[Findings]:
    """Patch a model as :func:`attention_calls` does, and fill the findings with what attention does inside."""
    with attention_calls(model_or_pipeline, lambda *call: findings.add(*call)) as report:
        findings = Findings(report)
        yield findings


@contextmanager
def attention_calls(
    model_or_pipeline: Any, on_call: Callable[[str, Tensor, Tensor, Tensor], None]
) -> Iterator[PatchReport]:
    """Patch a model and hand all attention that runs inside the context to a function.

    The model computes what it computes with PASA on the reference backend, without overflow, so the numbers are those
    of healthy activations. Compiled models run eagerly meanwhile: a captured graph would not tell whose call it is.
    A patch that is in force with the very same settings ends with the context; one with others is refused, as
    :func:`pasa.patch_pipeline` does. The function takes the name of the innermost module, q (B, Hq, S, D),
    k (B, Hkv, Skv, D) and the operator's counts (B, Hq, len(FIELDS)).
    """
    running: list[str] = []

    def leave(*call: Any) -> None:
        running.pop()

    def hand_on(q: Tensor, k: Tensor, counts: Tensor) -> None:
        if running:
            records.clear()  # a table for each batch entry and head: gigabytes, over the steps of a video
            on_call(running[-1], q, k, counts)

    with pasa.patch_pipeline(model_or_pipeline, backend="reference") as handle, ExitStack() as stack:
        report = handle.report()
        for name in report.patched:
            module = find_module(model_or_pipeline, name)
            enter = module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
            stack.callback(enter.remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        records = stack.enter_context(pasa.record_diagnostics())
        stack.enter_context(AttentionCalls(hand_on, counts=True))
        yield report


def find_module(model_or_pipeline: Any, name: str) -> torch.nn.Module:
    """Return the module that a patch report calls `name`: in a pipeline of diffusers, the component comes first."""
    if hasattr(model_or_pipeline, "components"):
        component, _, name = name.partition(".")
        model_or_pipeline = model_or_pipeline.components[component]
    elif not isinstance(model_or_pipeline, torch.nn.Module):
        model_or_pipeline = model_or_pipeline.model
    module: torch.nn.Module = model_or_pipeline.get_submodule(name)
    return module
