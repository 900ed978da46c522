"""Looks at every attention call of a running model, of transformers and of diffusers alike.

A patched model attends through one operator, ``torch.ops.pasa.attention``. A dispatch mode sees its queries and keys;
hooks on the patched modules tell whose they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pasa
from pasa.eval.diagnose.statistics import HeadStatistics, head_statistics


class Findings:
    """What was seen, by module.

    Attributes
    ----------
    calls : dict of str to int
        Attention calls of each module.
    heads : dict of str to list of HeadStatistics
        Of each module's heads, that call in which the head's scores were largest.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.heads: dict[str, list[HeadStatistics]] = {}

    def add(self, module: str, found: list[HeadStatistics]) -> None:
        """Take in one call."""
        self.calls[module] = self.calls.get(module, 0) + 1
        known = self.heads.setdefault(module, found)
        self.heads[module] = [max(pair, key=lambda head: head.max_score) for pair in zip(known, found, strict=True)]

    def worst(self) -> list[tuple[str, int, HeadStatistics]]:
        """(module, head, statistics) of all heads, largest score first."""
        entries = [(name, index, head) for name, heads in self.heads.items() for index, head in enumerate(heads)]
        return sorted(entries, key=lambda entry: -entry[2].max_score)


@contextmanager
def probe(model_or_pipeline: Any, **patch: Any) -> Iterator[Findings]:
    """Patch a model and look at all attention that runs inside the context.

    Parameters
    ----------
    model_or_pipeline, patch
        As :func:`pasa.patch_pipeline` takes them: a `policy` chooses the modules. So the model computes what it
        computes with PASA, without overflow, and the numbers are those of healthy activations.

    Yields
    ------
    Findings
        Filled while the model runs.

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        As :func:`pasa.patch_pipeline`.
    """
    findings, running = Findings(), list[str]()
    with pasa.patch_pipeline(model_or_pipeline, **patch) as handle:
        hooks = []
        for name in handle.report().patched:
            module = find_module(model_or_pipeline, name)
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: _left(running), always_call=True))
        try:
            with _Watch(findings, running):
                yield findings
        finally:
            for hook in hooks:
                hook.remove()


def find_module(model_or_pipeline: Any, name: str) -> torch.nn.Module:
    """The module that a patch report calls `name`."""
    if isinstance(model_or_pipeline, torch.nn.Module):
        return model_or_pipeline.get_submodule(name)
    if hasattr(model_or_pipeline, "components"):
        component, _, path = name.partition(".")
        module: torch.nn.Module = model_or_pipeline.components[component].get_submodule(path)
        return module
    return find_module(model_or_pipeline.model, name)


def _left(running: list[str]) -> None:
    running.pop()


class _Watch(TorchDispatchMode):
    """Hands the queries and keys of every attention call to `findings`, under the name of the innermost module."""

    def __init__(self, findings: Findings, running: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.findings, self.running = findings, running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.pasa.attention.default and self.running:
            self.findings.add(self.running[-1], head_statistics(args[0], args[1]))
        return func(*args, **(kwargs or {}))
