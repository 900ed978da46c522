"""Shows the result of the rescue to a person."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

TITLES = {
    "fp32_base": "FP32, before the injection",
    "fp32": "FP32, same weights as below",
    "fp16": "FP16, the model's own attention",
    "fp16_pasa": "FP16, PASA (emulated)",
}


def render(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the result of :func:`pasa.eval.models.rescue.run.run_rescue`: verdict, runs, layers, texts."""
    console = console or Console()
    console.print(_runs(result))
    for name in ("fp32", "fp16", "fp16_pasa"):
        run = result["runs"][name]
        note = "" if run["stopped"] == "length" else f"  [stopped: {run['stopped']}]"
        console.print(Panel(Text(run["text"].strip() + note), title=TITLES[name], title_align="left"))
    console.print(_layers(result))
    console.print(Text(verdict(result)))


def verdict(result: dict[str, Any]) -> str:
    """Return the outcome in a few plain sentences made of the measured numbers."""
    proof = result["proof"]
    change = proof["perplexity_change_percent"]
    moved = "perplexity not finite" if change is None else f"perplexity {change:+.4f} % from FP32's"
    return (
        f"Scores reach {proof['max_score_before']:,.0f} ({proof['layers_that_overflow']} of {proof['layers']} layers "
        f"beyond FP16's {proof['fp16_max']:,.0f}); with PASA no stored score exceeds {proof['max_score_after']:,.1f} "
        f"({proof['tiles_in_fp32']:,} of {proof['tiles']:,} tiles were kept in FP32).\n"
        f"Plain FP16: {100 * proof['fp16_nonfinite_logits']:.0f} % of the logits are not numbers. "
        f"PASA: {100 * proof['pasa_nonfinite_logits']:.0f} %, "
        f"{proof['tokens_equal_to_fp32']} of {proof['tokens_fp32']} greedy tokens equal to FP32, {moved}."
    )


def _runs(result: dict[str, Any]) -> Table:
    prompt = result["prompt"]
    table = Table(title=f"{result['model']}: {prompt['tokens']} prompt tokens, up to {prompt['new_tokens']} new ones")
    for heading in ("run", "perplexity of the prompt", "logits not finite", "prefill s", "decode s"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for name, run in result["runs"].items():
        perplexity = "not finite" if run["perplexity"] is None else f"{run['perplexity']:.4f}"
        share = f"{100 * run['nonfinite_logits']:.1f} %"
        table.add_row(TITLES[name], perplexity, share, f"{run['prefill_s']:.1f}", f"{run['decode_s']:.1f}")
    return table


def _layers(result: dict[str, Any]) -> Table:
    table = Table(title="largest |q.k| of the prefill, per layer")
    for heading in ("layer", "as FP16 attention would store it", "as PASA stores it", "tiles kept in FP32"):
        table.add_column(heading, justify="right")
    for index, layer in enumerate(result["layers"]):
        before, after = layer["max_score_before"], layer["max_score_after"]
        table.add_row(str(index), f"{before:,.0f}", f"{after:,.2f}", f"{layer['rescued_tiles']}/{layer['tiles']}")
    return table
