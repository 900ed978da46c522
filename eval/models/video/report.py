"""Shows a video regression to a person, in the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.tables import Table, markdown, short

if TYPE_CHECKING:
    from pasa.eval.models.video.metrics import Frames


def run_table(result: dict[str, Any]) -> Table:
    """A row for every clip; distances are those to FP32 on the same weights."""
    rows = []
    perceived = any(run.get("lpips") for run in result["runs"].values())
    for run in result["runs"].values():
        compared = "reference" in run
        rows.append(
            [
                run["title"],
                str(run["nonfinite_frames"]),
                str(run["black_frames"]),
                _worst(run["psnr"], ".1f") if compared else "-",
                _worst(run["ssim"], ".5f") if compared else "-",
                short(run["rmse"]) if compared else "-",
                short(run["rmse_to_no_bias"]) if "rmse_to_no_bias" in run else "-",
                "-" if not compared or run["temporal_rmse"] is None else short(run["temporal_rmse"]),
                *([_perceived(run)] if perceived else []),
            ]
        )
    header = ["run", "broken", "black", "PSNR dB", "SSIM", "RMSE", "to no bias", "temporal"]
    header += ["LPIPS"] if perceived else []
    return Table(_title(result), header, rows, _note(result))


def _title(result: dict[str, Any]) -> str:
    settings = result["settings"]
    return (
        f"{result['model']}: {settings['frames']} frames of {settings['width']} x {settings['height']}, "
        f"{settings['steps']} steps, seed {settings['seed']}"
    )


def _note(result: dict[str, Any]) -> str:
    """How to read the table."""
    reasons = sorted({run["lpips_missing"] for run in result["runs"].values() if run.get("lpips_missing")})
    sentences = [
        "Broken, black: number of frames. Distances are those to FP32 on the same weights; PSNR and SSIM of the worst "
        "frame, temporal: RMSE of the change from frame to frame",
        *(["To no bias: RMSE to FP32 before the bias; FP32 itself is compared with that"] if result["fixture"] else []),
        f"Models in {result['settings']['model_dtype']}, attention in FP16",
        result["note"],
        *(f"No LPIPS: {reason}" for reason in reasons),
    ]
    return ". ".join(sentences) + "."


def _worst(values: list[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(min(known), form) if len(known) == len(values) else "not finite"


def _perceived(run: dict[str, Any]) -> str:
    values = run.get("lpips")
    return "-" if values is None else "not finite" if None in values else short(max(values))


def verdict(result: dict[str, Any]) -> str:
    """What the exit status says, with the numbers."""
    gate, scores, fixture = result["gate"], result["scores"], result["fixture"]
    parts = []
    if fixture:
        parts.append(
            f"A bias of {fixture['bias']} in q and k of {fixture['modules']} spatial attentions adds "
            f"{fixture['offset']:,} to every score"
        )
    if scores:
        parts.append(
            f"the largest |Q K^T| is {scores['max_score_before']:,.0f}, and {scores['max_score_after']:,.1f} as PASA "
            "stores it"
        )
    if gate["error_ratio_without_bias"] is not None:
        parts.append(f"without the bias PASA's error is {gate['error_ratio_without_bias']:.3f} x that of FP16 scores")
    for run in result["runs"].values():
        if first := run["first_nonfinite"]:
            parts.append(f"{run['title']}: first broken is {first['module']}, call {first['call']} of its model")
    failed = [name for name, passed in gate["checks"].items() if not passed]
    outcome = "All checks hold." if gate["passed"] else f"FAILED: {', '.join(failed)}."
    return f"{'; '.join(parts)}. {outcome}" if parts else outcome


def origin(result: dict[str, Any]) -> str:
    """Where and with what it was run."""
    machine = result["environment"]
    return (
        f"({machine['device']}, {machine['processor']}, threads: {machine['threads']}; torch {machine['torch']}, "
        f"diffusers {machine['diffusers']}, pasa {machine['pasa']}, commit {machine['commit']}.)"
    )


def render(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the table and the verdict."""
    console = console or Console()
    run_table(result).show(console)
    console.print(Text(verdict(result)))


def save(result: dict[str, Any], clips: Mapping[str, Frames], folder: Path, fps: int) -> None:
    """Write ``video.json``, ``video.md`` and the clips."""
    from pasa.eval.models.video import media

    stored = output.to_json(result)
    found = run_table(result)
    parts = [f"# {found.title}", found.note, markdown(found.header, found.rows), verdict(result), origin(result)]
    output.write_text(folder / "video.json", stored)
    output.write_text(folder / "video.md", "\n\n".join([*parts, "![Contact sheet](video.png)"]) + "\n")
    media.save(clips, next(iter(clips)), folder, fps)
