"""The largest score that every head of a running model forms, for comparison with what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pasa
from pasa.eval.models.diagnose.probe import find_module

Observed = dict[tuple[str, int], float]


def observe(model_or_pipeline: Any, run: Callable[[], object]) -> Observed:
    """Run a model once, with PASA on the reference backend in the place of its attention.

    Returns
    -------
    dict
        (module, head) -> max |q.k| over the visible pairs of all calls, unscaled. Modules that PASA cannot serve are
        left out.
    """
    found: Observed = {}
    names: list[str] = []
    with pasa.patch_pipeline(model_or_pipeline, backend="reference") as handle:
        hooks = [
            find_module(model_or_pipeline, name).register_forward_pre_hook(lambda *_, name=name: names.append(name))
            for name in handle.report().patched
        ]
        try:
            with pasa.record_diagnostics() as records:
                run()
        finally:
            for hook in hooks:
                hook.remove()
    for name, record in zip(names, records, strict=True):
        for head, score in enumerate(record.max_score_before.amax(0).tolist()):
            found[name, head] = max(score, found.get((name, head), 0.0))
    return found
