"""Records every attention call of a running model, of transformers and of diffusers alike.

A patched model attends through one operator, ``torch.ops.pasa.attention``. A dispatch mode sees its queries and keys;
hooks on the patched modules tell whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pasa
from pasa.eval.models.diagnose.maps import HeadMaps, head_pictures
from pasa.eval.models.diagnose.statistics import MODULES, head_statistics
from pasa.ops.attention.spec.diagnostics import FIELDS
from pasa.patching import Policy
from pasa.patching.handle import PatchReport

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
        self.offer(
            module, worst, call, new[worst]["max_score"], q[entry, worst], k[entry, worst * k.shape[1] // q.shape[1]]
        )

    def offer(self, module: str, head: int, call: int, max_score: float, q: Tensor, k: Tensor) -> None:
        """Keep pictures of a head, q (S, D) and k (Skv, D), if it is worse than those that are kept."""
        others = [each for each in self.maps if each.module != module]
        rivals = [each for each in self.maps if each.module == module] or self.maps[MODULES - 1 :]
        if all(max_score > each.max_score for each in rivals):
            new = HeadMaps(module, head, call, max_score, head_pictures(q, k))
            self.maps = sorted([*others, new], key=lambda each: -each.max_score)[:MODULES]

    def worst(self) -> list[Record]:
        """Return the records of all heads with their ``module`` and ``head``, largest score first."""
        entries = [
            {"module": name, "head": index, **head}
            for name, heads in self.heads.items()
            for index, head in enumerate(heads)
        ]
        return sorted(entries, key=lambda each: -float(each["max_score"]))

    def uncalled(self) -> list[str]:
        """Return the probed modules that never ran."""
        return [name for name in self.report.patched if name not in self.calls]


def _with_counts(numbers: Record, counts: Tensor, call: int) -> Record:
    """Return the record of one head in one call; counts (B, len(FIELDS))."""
    column = dict(zip(FIELDS, counts.unbind(-1), strict=True))
    return {
        **numbers,
        "max_score": max(numbers["max_score"], float(column["max_score_before"].max())),
        "call": call,
        "stored": float(column["max_score_after"].max()),
        "rescued_tiles": int(column["rescued_tiles"].sum()),
        "tiles": int(column["tiles"].sum()),
    }


def _joined(known: Record, later: Record) -> Record:
    """Return the record of a head over its calls so far and a later one."""
    totals = {name: known[name] + later[name] for name in ("rescued_tiles", "tiles")}
    worse = later if later["max_score"] > known["max_score"] else known
    return {**worse, "stored": max(known["stored"], later["stored"]), **totals}


@contextmanager
def probe(
    model_or_pipeline: Any, *, policy: Policy = "all", seen: Callable[[str, int], None] = lambda module, call: None
) -> Iterator[Findings]:
    """Patch a model, and fill the findings with what attention does inside the context.

    After each call `seen` is called with the module's name and the number of its call; for the rest see
    :func:`attention_calls`.
    """

    def add(module: str, q: Tensor, k: Tensor, counts: Tensor) -> None:
        findings.add(module, q, k, counts)
        seen(module, findings.calls[module])

    with attention_calls(model_or_pipeline, add, policy=policy) as report:
        findings = Findings(report)
        yield findings


@contextmanager
def attention_calls(
    model_or_pipeline: Any, on_call: Callable[[str, Tensor, Tensor, Tensor], None], *, policy: Policy = "all"
) -> Iterator[PatchReport]:
    """Patch a model and hand all attention that runs inside the context to a function.

    The model computes what it computes with PASA on the reference backend, without overflow, so the numbers are those
    of healthy activations. Compiled models run eagerly meanwhile: a captured graph would not tell whose call it is.
    A patch that is in force with the very same settings ends with the context; one with others is refused, as
    :func:`pasa.patch_pipeline` does. A policy chooses the modules. The function takes the module's name,
    q (B, Hq, S, D), k (B, Hkv, Skv, D) and the operator's counts (B, Hq, len(FIELDS)).
    """
    running: list[str] = []
    with pasa.patch_pipeline(model_or_pipeline, policy=policy, backend="reference") as handle:
        report, hooks = handle.report(), []
        for name in report.patched:
            module = find_module(model_or_pipeline, name)
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: _leave(running), always_call=True))
        try:
            # Recording makes the operator count; the dispatch mode takes the counts from its output.
            with (
                torch.compiler.set_stance("force_eager"),
                pasa.record_diagnostics() as records,
                _Recorder(on_call, running, records),
            ):
                yield report
        finally:
            for hook in hooks:
                hook.remove()


def _leave(running: list[str]) -> None:
    running.pop()


class _Recorder(TorchDispatchMode):
    """Hands the queries and keys of every attention call on, under the name of the innermost module."""

    def __init__(self, on_call: Callable[..., None], running: list[str], records: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_call, self.running, self.records = on_call, running, records

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.pasa.attention.default and self.running:
            self.records.clear()  # a table for each batch entry and head: gigabytes, over the steps of a video
            self.on_call(self.running[-1], args[0], args[1], result[2])
        return result


def find_module(model_or_pipeline: Any, name: str) -> torch.nn.Module:
    """Return the module that a patch report calls `name`."""
    if isinstance(model_or_pipeline, torch.nn.Module):
        return model_or_pipeline.get_submodule(name)
    if hasattr(model_or_pipeline, "components"):
        component, _, path = name.partition(".")
        return find_module(model_or_pipeline.components[component], path)
    return find_module(model_or_pipeline.model, name)
