"""The command `pasa bench whole-model`: whole models of published sizes on a GPU, before and after `pasa.to_fp16`."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Annotated, Any

import torch

from pasa.eval.kit import output
from pasa.eval.kit.device import describe
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.options import at_least
from pasa.eval.kit.timing import CudaClock
from pasa.eval.models.whole_model.run import choose
from pasa.eval.models.whole_model_speed.arms import BF16, CONVERTED, FP16, PATCHED, REFERENCE, SOUND_PATCHED
from pasa.eval.models.whole_model_speed.measuring import measure
from pasa.eval.models.whole_model_speed.report import report
from pasa.eval.models.whole_model_speed.subjects import NEEDED, SAMPLE_SEED, SEED, STEPS, SUBJECTS, TOKENS, Record

MOST_TIME = MOST_MEMORY = 1.02  # of plain FP16's with the same attention
LEAST_PSNR = 40.0  # dB


def run_whole_model_speed(
    subjects: Annotated[Sequence[str], f"Models: {', '.join(SUBJECTS)}."] = tuple(SUBJECTS),
    turns: Annotated[int, "Timed turns of each way to run a model."] = 10,
    progress: output.Report = output.silent,
) -> Record:
    """Time whole models on a CUDA device in FP16 after pasa.to_fp16; exit 1 if they are slower or not as in FP32."""
    at_least(1, turns=turns)
    names, device = choose(subjects, SUBJECTS), CudaClock().device
    records: list[Record] = []

    def say(title: str) -> None:
        progress(len(records), len(names), title)

    for name in names:
        records.append({"subject": name, "title": SUBJECTS[name].title, **measure(SUBJECTS[name], device, turns, say)})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "gate": judge(records),
        "settings": {
            "turns": turns,
            "tokens": TOKENS,
            "steps": STEPS,
            "needed": NEEDED,
            "seed": SEED,
            "sample_seed": SAMPLE_SEED,
        },
        "records": records,
        "note": "random weights; nothing was run on an NPU",
        "environment": describe(device, "transformers", "diffusers"),
    }


def judge(records: Sequence[Record]) -> dict[str, Any]:
    """Return the gate: FP16 fails as it is; after `to_fp16` it is finite, near FP32, and costs no time or memory."""
    checks: dict[str, bool] = {}
    for record in records:
        arms = {each["arm"]: each for each in record["arms"]}
        passed = {
            "fixture": 3 * record["fixture"]["blocks_beyond"] >= len(record["fixture"]["peaks"]),
            "fp32_finite": arms[REFERENCE]["nonfinite"] == 0,
            "fp16_fails": all(not _below(arms[arm]["error"], arms[BF16]["error"]) for arm in (FP16, PATCHED)),
            "finite": arms[CONVERTED]["nonfinite"] == 0 and not record["conversion"]["beyond"],
            "error_below_bf16": _below(arms[CONVERTED]["error"], arms[BF16]["error"]),
            "time": all(each["amortised"]["median"] <= MOST_TIME for each in record["overheads"]),
        }
        if "psnr" in arms[REFERENCE]:
            passed["psnr"] = arms[CONVERTED].get("psnr", 0) >= LEAST_PSNR
        if arms[CONVERTED]["bytes"] is not None:
            passed["memory"] = arms[CONVERTED]["bytes"] <= MOST_MEMORY * arms[SOUND_PATCHED]["bytes"]
        checks |= {f"{record['subject']}_{check}": holds for check, holds in passed.items()}
    return gate(checks)


def _below(error: float | None, other: float | None) -> bool:
    """Return whether an error is below another one; that of a result with NaN is None, and never below."""
    return error is not None and other is not None and error < other


EXPERIMENT = Experiment(
    name="whole-model",
    run=run_whole_model_speed,
    report=report,
    title="Whole models of published sizes on a GPU",
    needs_models=True,
)
