"""Draw rescue.svg, the README's picture, from the stored run of `pasa demo`.

    python docs/assets/draw_rescue.py [--check]

`--check` writes nothing and exits 1 if the picture is not that of the stored run.
"""

from __future__ import annotations

import json
import sys
import textwrap
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUN = HERE.parent.parent / "eval" / "models" / "rescue" / "results" / "demo.json"
PICTURE = HERE / "rescue.svg"
WIDTH, LINE, CHARACTERS = 860, 20, 80  # pixels, pixels a line, characters a line
SANS = "system-ui, -apple-system, 'Segoe UI', sans-serif"
MONO = "ui-monospace, 'Cascadia Mono', 'DejaVu Sans Mono', Menlo, monospace"
RED, GREEN, GREY, INK, PAPER = "#b3261e", "#1b6e3c", "#5f6368", "#1f1f1f", "#ffffff"


def text(
    x: int, y: int, content: str, *, size: int = 14, colour: str = INK, family: str = SANS, bold: bool = False
) -> str:
    """Return one line of text."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-family="{family}" font-size="{size}"{weight} fill="{colour}">'
        f"{escape(content)}</text>"
    )


def panel(y: int, colour: str, title: str, lines: list[str], note: str) -> tuple[str, int]:
    """Return a box with a title, an answer and a note, and the height that it takes."""
    height = 62 + LINE * len(lines)
    parts = [
        f'<rect x="16" y="{y}" width="{WIDTH - 32}" height="{height}" rx="8" fill="{PAPER}" stroke="{colour}"/>',
        f'<rect x="16" y="{y}" width="6" height="{height}" rx="3" fill="{colour}"/>',
        text(36, y + 24, title, colour=colour, bold=True),
        *(text(36, y + 48 + LINE * i, line, family=MONO) for i, line in enumerate(lines)),
        text(36, y + height - 12, note, size=12, colour=GREY),
    ]
    return "\n".join(parts), height


def draw(result: dict[str, Any]) -> str:
    """Return the picture of a stored run."""
    proof, runs, prompt = result["proof"], result["runs"], result["prompt"]
    failing, rescued = runs["fp16"], runs["fp16_pasa"]
    machine = result["environment"]
    broken = [f"{failing['text']}   [stopped: {failing['stopped']}]"]
    answer = textwrap.wrap(rescued["text"], CHARACTERS)
    perplexities = f"perplexity {proof['perplexity_pasa']:.2f}, in FP32 {proof['perplexity_fp32']:.2f}"
    top, first = panel(
        64,
        RED,
        "FP16, the model's own attention",
        broken,
        f"{100 * proof['fp16_nonfinite_logits']:.0f} % of the logits are NaN, so token 0 is printed. "
        "Qwen2's token 0 is “!”: there the same failure reads !!!!",
    )
    bottom, second = panel(
        76 + first,
        GREEN,
        "FP16 with pasa.patch_pipeline(model)",
        answer,
        f"{proof['tokens_equal_to_fp32']} of {proof['tokens_fp32']} tokens are those of FP32; {perplexities}",
    )
    height = 76 + first + second + 54
    head = f"“Summarize the text above.”  One model, one prompt of {prompt['tokens']:,} tokens"
    scores = (
        f"Its scores reach {proof['max_score_before']:,.0f}, FP16 ends at {proof['fp16_max']:,.0f}; "
        f"{proof['layers_that_overflow']} of {proof['layers']} layers overflow."
    )
    model = result["model"].partition(" (")[0]
    origin = (
        f"{model}, biased to overflow. pasa emulated on a CPU ({machine['processor']}; torch {machine['torch']}, "
        f"commit {machine['commit']})."
    )
    title = f"The same prompt in FP16 and in FP16 with pasa. FP16: {broken[0]} pasa: {rescued['text']}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#f6f7f9"/>',
            text(16, 28, head, size=16, bold=True),
            text(16, 50, scores, colour=GREY),
            top,
            bottom,
            text(16, height - 34, origin, size=12, colour=GREY),
            text(16, height - 14, "Command: pasa demo. No NPU has run it.", size=12, colour=GREY),
            "</svg>\n",
        ]
    )


def main() -> int:
    """Write the picture, or check it."""
    picture = draw(json.loads(RUN.read_text(encoding="utf-8")))
    if sys.argv[1:] == ["--check"]:
        return int(PICTURE.read_text(encoding="utf-8") != picture)
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
