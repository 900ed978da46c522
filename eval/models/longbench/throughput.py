"""Shows a stored run of an earlier `pasa bench model`, which timed one prompt and waited for every token.

`pasa bench model` is now pasa.eval.models.generation; when a run of it is stored, this file goes.
"""

from __future__ import annotations

from typing import Any

from pasa.eval.kit.device import origin
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.tables import Table, number, percent
from pasa.eval.models.generation.run import run_model


def table(result: dict[str, Any]) -> Table:
    """Return a row for every measurement."""
    return Table.of(
        f"{result['config']}, random weights",
        result["records"],
        {
            "attention": lambda each: (
                f"{each['attention']}, {each['tokens']:,} tokens" + (f", bias {each['bias']}" if each["bias"] else "")
            ),
            "prefill s": ("prefill_s", ".4g"),
            "prefill tokens/s": ("prefill_tokens_per_s", ",.0f"),
            "decode tokens/s": ("decode_tokens_per_s", ",.1f"),
            "peak GiB": lambda each: number(each["peak_bytes"] and each["peak_bytes"] / 2**30, ".2f"),
            "logits not finite": lambda each: percent(each["nonfinite_logits"]),
        },
        f"FP16, batch 1, medians of {result['settings']['rounds']} rounds, decoding without a CUDA graph. Bias: a "
        "number added to q and k, so that its square is added to every score.",
    )


EARLIER = Experiment(
    name="model",
    run=run_model,
    report=lambda result: [table(result), origin(result)],
    title="Prefill, decode and memory of a whole model",
)
