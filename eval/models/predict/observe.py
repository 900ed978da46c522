"""Records the largest score of every head of a running model, for comparison with its prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pasa.eval.models.diagnose.probe import attention_calls
from pasa.ops.attention.spec.diagnostics import FIELDS

Observed = dict[tuple[str, int | None], float]


def observe(model_or_pipeline: Any, run: Callable[[], object]) -> Observed:
    """Run a model once with its attention replaced by PASA on the reference backend.

    Returns
    -------
    dict
        (module, head) -> max |q.k| over the visible pairs of all calls, unscaled. Modules that PASA cannot serve are
        left out.
    """
    largest: Observed = {}

    def keep(module: str, q: Tensor, k: Tensor, counts: Tensor) -> None:
        for head, score in enumerate(counts[..., FIELDS.index("max_score_before")].amax(0).tolist()):
            largest[module, head] = max(score, largest.get((module, head), 0.0))

    with attention_calls(model_or_pipeline, keep):
        run()
    return largest
