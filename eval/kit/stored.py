"""Load the stored results from which `docs/generate.py` writes the tables of README.md."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Maps names of stored runs to their files. A name is not always that of the command: "bias" is the large-bias part of
# `pasa bench rmse`, and "rounding" is the result of `pasa eval bias`.
RESULTS = {
    "rmse": ROOT / "eval/accuracy/rmse/results/rmse.json",
    "bias": ROOT / "eval/accuracy/rmse/results/large_bias.json",
    "sides": ROOT / "eval/accuracy/rmse/results/sides.json",
    "rescue": ROOT / "eval/models/rescue/results/demo.json",
    "kernels": ROOT / "eval/accuracy/rmse/results/kernels.json",
    "speed": ROOT / "eval/speed/results/speed.json",
    "paged": ROOT / "eval/speed/results/paged/speed.json",
    "grid_prefill": ROOT / "eval/speed/results/choice/prefill.json",
    "grid_padded": ROOT / "eval/speed/results/choice/padded.json",
    "grid_decode": ROOT / "eval/speed/results/choice/decode.json",
    "grid_few": ROOT / "eval/speed/results/choice/few.json",
    "grid_prefill_more": ROOT / "eval/speed/results/choice/prefill_more.json",
    "grid_decode_more": ROOT / "eval/speed/results/choice/decode_more.json",
    "grid_drawn": ROOT / "eval/speed/results/choice/drawn.json",
    "grid_drawn_more": ROOT / "eval/speed/results/choice/drawn_more.json",
    "grid_drawn_rest": ROOT / "eval/speed/results/choice/drawn_rest.json",
    "random": ROOT / "eval/speed/results/random/random.json",
    "guards": ROOT / "eval/speed/results/guards/speed.json",
    "data": ROOT / "eval/speed/results/data/speed.json",
    "counters": ROOT / "eval/speed/results/counters.json",
    "fuzz": ROOT / "eval/random_calls/results/fuzz.json",
    "fuzz_reference": ROOT / "eval/random_calls/results/reference/fuzz.json",
    "fuzz_npu": ROOT / "eval/random_calls/results/npu/fuzz.json",
    "soak": ROOT / "eval/random_calls/results/soak.json",
    "soak_sdpa": ROOT / "eval/random_calls/results/sdpa/soak.json",
    "npu_model": ROOT / "eval/npu/results/npu_model.json",
    "video": ROOT / "eval/models/video/results/video.json",
    "step": ROOT / "eval/models/video/results/step/video.json",
    "diagnose_published": ROOT / "eval/models/diagnose/results/published/diagnose.json",
    "diagnose_embedded": ROOT / "eval/models/diagnose/results/embedded/diagnose.json",
    "diagnose_tiny": ROOT / "eval/models/diagnose/results/tiny/diagnose.json",
    "longbench": ROOT / "eval/models/longbench/results/longbench.json",
    "longbench_fp16": ROOT / "eval/models/longbench/results/fp16_model/longbench.json",
    "throughput": ROOT / "eval/models/longbench/results/model.json",
    "perplexity": ROOT / "eval/models/perplexity/results/ppl.json",
    "whole_gemma": ROOT / "eval/models/whole_model/results/gemma/whole_model.json",
    "whole_amplified": ROOT / "eval/models/whole_model/results/amplified/whole_model.json",
    "whole_smollm2": ROOT / "eval/models/whole_model/results/smollm2/whole_model.json",
    "gradients": ROOT / "eval/accuracy/gradients/results/gradients.json",
    "rounding": ROOT / "eval/accuracy/rounding_bias/results/bias.json",
    "rounding_cost": ROOT / "eval/accuracy/rounding_bias/results/unbiased.json",
    "ring": ROOT / "eval/speed/ring/results/ring.json",
    "zoo": ROOT / "eval/models/zoo/results/zoo.json",
    "watching": ROOT / "eval/speed/watching/results/watch.json",
    "predict": ROOT / "eval/models/predict/results/predict.json",
    "soundness": ROOT / "eval/models/predict/results/soundness.json",
    "auto": ROOT / "eval/models/predict/results/auto.json",
    "overhead": ROOT / "eval/research/fp8_scaling/results/predict.json",
    "rl": ROOT / "eval/research/rl/results/rl.json",
    "fp8": ROOT / "eval/research/fp8_scaling/results/fp8.json",
}
# Runs of one command on several devices or models, each in a folder of its own: "hostile on cpu", and so on.
IN_FOLDERS = ("eval/accuracy/rmse", "eval/check_device", "eval/models/whole_model_speed", "eval/models/generation")
RESULTS |= {
    f"{path.stem} on {path.parent.name}": path
    for folder in IN_FOLDERS
    for path in sorted((ROOT / folder / "results").glob("*/*.json"))
}


def stored(name: str) -> dict[str, Any]:
    """Return the result of a stored run, by its name in `RESULTS`."""
    result: dict[str, Any] = json.loads(RESULTS[name].read_text(encoding="utf-8"))
    return result


def pick(records: Iterable[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """Return the records whose fields have all of these values."""
    return [each for each in records if fields.items() <= each.items()]
