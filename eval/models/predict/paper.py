"""Tables 2 and 3 of the paper that the bounds come from, and where its digits are not those of its equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pasa import concentration

DELTA, SEQ_LEN = 1e-6, 1024


@dataclass(frozen=True)
class PaperModel:
    """One row as printed: d, d_h, N = layers x heads; gamma, improvement (table 2); alpha_min (table 3)."""

    name: str
    hidden: int
    head_dim: int
    heads: int
    gamma: str
    gain: str
    alpha: str


MODELS = (
    PaperModel("GPT-2 XL", 1600, 64, 1200, "2.98", "8", "0.074"),
    PaperModel("Mistral-7B", 4096, 128, 1024, "2.26", "14", "0.035"),
    PaperModel("Llama-2-13B", 5120, 128, 1600, "2.28", "18", "0.028"),
    PaperModel("Llama-2-70B", 8192, 128, 5120, "2.32", "28", "0.018"),
)


def run_paper_tables() -> dict[str, Any]:
    """Solve equations (12) and (13) for the paper's models.

    Returns
    -------
    dict
        JSON-able: ``models``, each with what is printed, what is solved, and the fields that differ when the solution
        is rounded to the printed digits.
    """
    rows = []
    for model in MODELS:
        gamma = concentration.typicality(model.head_dim, model.heads, SEQ_LEN, DELTA)
        solved = {
            "gamma": gamma,
            "gain": concentration.concentration_gain(model.hidden, model.head_dim, gamma),
            "alpha": concentration.minimum_alpha(model.hidden, model.head_dim, model.heads, SEQ_LEN, DELTA),
        }
        printed = {name: getattr(model, name) for name in solved}
        differ = [name for name, value in solved.items() if same_digits(value, printed[name]) != printed[name]]
        shape = {name: getattr(model, name) for name in ("name", "hidden", "head_dim", "heads")}
        rows.append({**shape, "printed": printed, "solved": solved, "differ": differ})
    return {"experiment": "paper-tables", "delta": DELTA, "seq_len": SEQ_LEN, "models": rows}


def same_digits(value: float, printed: str) -> str:
    """The value with as many decimals as the printed one."""
    return f"{value:.{len(printed.partition('.')[2])}f}"
