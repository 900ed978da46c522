"""Looks at every attention call of a running model, of transformers and of diffusers alike.

A patched model attends through one operator, ``torch.ops.pasa.attention``. A dispatch mode sees its queries and keys;
hooks on the patched modules tell whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pasa
from pasa.eval.models.diagnose.findings import Findings
from pasa.patching import Policy

Seen = Callable[[str, int], None]


@contextmanager
def probe(
    model_or_pipeline: Any, *, policy: Policy = "all", config: pasa.PasaConfig | None = None, seen: Seen | None = None
) -> Iterator[Findings]:
    """Patch a model and look at all attention that runs inside the context.

    The model computes what it computes with PASA on the reference backend, without overflow, so the numbers are those
    of healthy activations. Compiled models run eagerly meanwhile: a captured graph would not tell whose call it is.
    A patch that is in force with the very same settings ends with the context; one with others is refused.

    Parameters
    ----------
    model_or_pipeline, policy, config
        As :func:`pasa.patch_pipeline` takes them: a policy chooses the modules.
    seen : callable, optional
        Called with the module's name and the number of its call after each call.

    Yields
    ------
    Findings
        Filled while the model runs.

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        As :func:`pasa.patch_pipeline`.
    """
    running: list[str] = []
    with pasa.patch_pipeline(model_or_pipeline, policy=policy, config=config, backend="reference") as handle:
        findings, hooks = Findings(handle.report()), []
        for name in findings.report.patched:
            module = find_module(model_or_pipeline, name)
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: _left(running), always_call=True))
        try:
            # Recording makes the operator count; the watch takes the counts from its output.
            with (
                torch.compiler.set_stance("force_eager"),
                pasa.record_diagnostics() as records,
                _Watch(findings, running, records, seen),
            ):
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

    def __init__(self, findings: Findings, running: list[str], records: list[Any], seen: Seen | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.findings, self.running, self.records, self.seen = findings, running, records, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.pasa.attention.default and self.running:
            module = self.running[-1]
            self.records.clear()  # a table per batch entry and head: gigabytes, over the steps of a video
            self.findings.add(module, args[0], args[1], result[2])
            if self.seen is not None:
                self.seen(module, self.findings.calls[module])
        return result
