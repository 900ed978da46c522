"""Writes the generated parts of pages: the support matrix from the registry, the tables from stored runs.

    python docs/generate.py [--check]

`--check` writes nothing and exits 1 if a file is not what it would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import evidence

from pasa.eval.accuracy.gradients import run as gradients
from pasa.eval.accuracy.rmse import devices, report
from pasa.eval.accuracy.rounding_bias import cost
from pasa.eval.accuracy.rounding_bias import run as bias
from pasa.eval.accuracy.rounding_bias.arithmetic import PLACES
from pasa.eval.check_device import forced
from pasa.eval.check_device import run as check_device
from pasa.eval.kit import experiment
from pasa.eval.kit.device import origin
from pasa.eval.kit.stored import RESULTS, ROOT, pick, stored
from pasa.eval.kit.tables import Table, markdown, percent
from pasa.eval.models.diagnose import report as diagnose_report
from pasa.eval.models.generation import report as generation
from pasa.eval.models.longbench import report as longbench
from pasa.eval.models.longbench import throughput
from pasa.eval.models.perplexity import run as perplexity
from pasa.eval.models.predict import run as predict
from pasa.eval.models.predict import soundness
from pasa.eval.models.rescue import run as rescue
from pasa.eval.models.video import run as video
from pasa.eval.models.video import step
from pasa.eval.models.whole_model import report as whole_model
from pasa.eval.models.whole_model_speed import report as whole_model_speed
from pasa.eval.models.zoo import run as zoo
from pasa.eval.npu import report as npu
from pasa.eval.random_calls import run as calls
from pasa.eval.research.fp8_scaling import overhead
from pasa.eval.research.fp8_scaling import run as fp8
from pasa.eval.research.rl import run as rl
from pasa.eval.speed import choice_run, random_report
from pasa.eval.speed import report as speed_report
from pasa.eval.speed.ring import run as ring
from pasa.eval.speed.watching import run as watching
from pasa.ops.attention.call import FEATURES
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.backends import Backend
from pasa.ops.registry import BACKENDS

PAGES = [page for folder in ("docs", "eval") for page in (ROOT / folder).rglob("*.md")]
MAXIMA = ("two, smaller tail", "near, smaller tail", "blocks, smaller tail", "four, smaller tail")
ROUNDED = (*MAXIMA, "three, smaller tail, one binade", "six, smaller tail, one binade", "random, same tail")
BIASES = [partial(bias.bias_table, fmt="bf16", place=place, cases=ROUNDED) for place in PLACES]
DIAGNOSED = 3  # heads of each model
DIAGNOSIS = ("layer", "head", "peak QKᵀ", "× 65504", "stored", "in FP32", "K", "K′", "bias", "resonance", "phase")
KERNELS = ("pasa-exact", "triton-fp32", "triton-paper-fp16", "triton-paper", "triton-exact")
SHOWN = ("fp32", "partial", "prescaled", "smooth_k", "pasa-paper-fp16", "pasa-paper", "pasa-exact")


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the generated parts of all pages, or check them; 1 if one is not up to date."""
    old = {path: path.read_text(encoding="utf-8") for path in PAGES}
    new = {path: fill(text) for path, text in old.items()}
    asked = sys.argv[1:] if arguments is None else arguments
    if unknown := [each for each in asked if each != "--check"]:
        sys.exit(f"{' '.join(unknown)}: only --check is known; without it the files are written")
    if asked:
        for path in (path for path in new if new[path] != old[path]):
            print(f"{path} differs from the stored runs: python docs/generate.py writes it")
        return int(new != old)
    for path, text in new.items():
        if text != old[path]:
            path.write_text(text, encoding="utf-8")
    return 0


def fill(text: str) -> str:
    """The text with every generated part made anew.

    Raises
    ------
    KeyError
        For a marker that names no part.
    """
    return re.sub(
        r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{PARTS[match[2]]()}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def support() -> str:
    """The capability records of all backends, a column each."""
    backends = sorted(BACKENDS.values(), key=lambda backend: -backend.priority)
    rows = [
        ("state", [backend.label for backend in backends]),
        ("devices", [_devices(backend) for backend in backends]),
        ("dtypes", [", ".join(str(dtype).removeprefix("torch.") for dtype in b.dtypes) for b in backends]),
        ("head dim", [f"{b.head_dims[0]} to {b.head_dims[1]}" for b in backends]),
        ("masks", ["; ".join([", ".join(b.masks), *_limits(b, "masks")]) for b in backends]),
        *((f"`{option.name}`", [_values(b, option.name) for b in backends]) for option in fields(AttentionOptions)),
        *((feature, [_feature(backend, feature) for backend in backends]) for feature in FEATURES),
    ]
    return markdown(
        ["backend", *(f"`{backend.name}`" for backend in backends)], [[name, *values] for name, values in rows]
    )


def _values(backend: Backend, option: str) -> str:
    values = backend.values(option)
    return "any" if values is None else ", ".join(map(str, values))


def _feature(backend: Backend, feature: str) -> str:
    """Return whether a backend serves a feature, and with which option values if not with all."""
    if feature not in backend.features:
        return "no"
    return "; ".join(_limits(backend, feature)) or "yes"


def _limits(backend: Backend, feature: str) -> list[str]:
    """Return the option values that a backend serves a feature with, where it does not with all."""
    options = backend.feature_options.get(feature, {}).items()
    return [f"`{name}` {', '.join(map(str, values))}" for name, values in options]


def _devices(backend: Backend) -> str:
    chosen = ", ".join(backend.devices) or "any"
    return f"{chosen}; {', '.join(backend.devices_by_name)} by name" if backend.devices_by_name else chosen


def rmse(result: dict[str, Any]) -> Table:
    """Return the worst RMSE over the seeds, and how many tiles ours kept in FP32."""
    shown = report.rmse_table(result["records"], SHOWN, gates=False)
    ours = pick(result["records"], overflow="inf", arithmetic="pasa-exact")
    rows = [
        [*row, percent(max(each["scores_rescued_share"] for each in pick(ours, case=row[0])))] for row in shown.rows
    ]
    note = f"The paper's 15 cases, shape ({', '.join(map(str, result['shape']))}). {shown.note}"
    return Table(shown.title, [*shown.header, "tiles in FP32"], rows, note)


def block(name: str, *makers: Callable[[dict[str, Any]], Table | str]) -> Callable[[], str]:
    """Return a writer of tables and sentences of a stored run, and of where its numbers come from."""

    def write() -> str:
        result = stored(name)
        parts = [make(result) for make in makers]
        return "\n\n".join([*(part if isinstance(part, str) else part.captioned() for part in parts), origin(result)])

    return write


def each_device(name: str, *makers: Callable[[dict[str, Any]], Table | str]) -> Callable[[], str]:
    """Return a writer that does what `block` does, for the run of a command on each device."""

    def write() -> str:
        return "\n\n".join(block(run, *makers)() for run in RESULTS if run.startswith(f"{name} on "))

    return write


def diagnose() -> str:
    """Return the worst heads of the built-in models, and the verdict on each model."""
    results = {name: stored(f"diagnose_{name}") for name in ("published", "embedded", "tiny")}
    heads = {name: diagnose_report.head_table(result, DIAGNOSIS, DIAGNOSED) for name, result in results.items()}
    rows = [[name, *row] for name, table in heads.items() for row in table.rows]
    verdicts = [
        f"`{name}`: {result['model']}. {diagnose_report.verdict(result)} {diagnose_report.cost(result)} "
        f"{origin(result)}"
        for name, result in results.items()
    ]
    return "\n\n".join([diagnose_report.meanings(DIAGNOSIS), markdown(["model", *DIAGNOSIS], rows), *verdicts])


def transients(result: dict[str, Any]) -> Table:
    """Return scale factors in transients of the trained model; the verdict is on the synthetic weights as well."""
    trained = [each for each in result["records"] if each["model"] != "synthetic"]
    return fp8.transient_table({**result, "records": trained})


def kernels(result: dict[str, Any]) -> Table:
    """Return the paper's cases on the Triton kernels of a GPU."""
    shown = report.rmse_table(result["records"], KERNELS, gates=False)
    note = f"{shown.note} pasa-exact is the emulation, triton-* are kernels."
    return Table(shown.title, shown.header, shown.rows, note)


def random_calls(name: str) -> str:
    """Return what random calls of kernels or of the whole API showed."""
    result = stored(name)
    return f"{calls.verdict(result)} {origin(result)}"


def generate_model() -> str:
    """Return what a whole model takes to generate, on each device where a run is stored."""
    runs = [stored(name) for name in RESULTS if name.startswith("model on ")]
    return "\n\n".join(map(generation.summary, runs)) or "Not measured yet: no run is stored."


def npu_model() -> str:
    """Return precision allocations on an NPU, modelled; the page says what the names stand for."""
    result = stored("npu_model")
    return "\n\n".join([npu.range_table(result).captioned(), npu.claim(result), origin(result)])


def npu_default() -> str:
    """Return the modelled speed of the default on an NPU, and its range if one rate of the model is off."""
    result = stored("npu_model")
    said = []
    for name, data in (("exact", "without anchors"), ("exact, anchors", "with anchors")):
        ratios = [each["ratio_lazy"] for each in pick(result["records"], allocation=name)]
        changed = pick(result["sensitivity"], allocation=name)
        low, high = min(each["lowest_to_lazy"] for each in changed), max(each["highest_to_lazy"] for each in changed)
        said.append(
            f"{min(ratios):.2f} to {max(ratios):.2f} on keys {data} ({low:.2f} to {high:.2f} if one rate is off)"
        )
    return (
        f"Modelled, as times the speed of FP32 scores in the same kernel: {' and '.join(said)}. Tiles that have to be "
        f"kept in FP32 make it slower."
    )


PARTS: dict[str, Callable[[], str]] = {
    "support": support,
    "evidence": evidence.overview,
    "rmse": block("rmse", rmse),
    "damage": block("rmse", report.damage_table),
    "bias": block("bias", report.bias_table),
    "sides": block("sides", report.sides_table),
    "backends": each_device("backends", devices.backend_table, devices.backend_verdict),
    "layers": each_device("layers", devices.layer_table),
    "hostile": each_device("hostile", forced.setting_table, experiment.outcome),
    "check_device": each_device("check_device", check_device.table),
    "rescue": block("rescue", rescue.run_table, rescue.verdict),
    "video": block("video", video.run_table, video.verdict),
    "step": block("step", step.table),
    "diagnose": diagnose,
    "soundness": lambda: soundness.EXPERIMENT.markdown(stored("soundness")),
    "auto": lambda: soundness.AUTO.markdown(stored("auto")),
    "paper_tables": lambda: predict.PAPER_TABLES.markdown(predict.run_paper_tables()),
    "rl": block("rl", experiment.outcome, rl.table),
    "fp8": lambda: f"{transients(stored('fp8')).captioned()}\n\n{fp8.verdict(stored('fp8'))}",
    "overhead": lambda: overhead.summary(stored("overhead")),
    "overhead_table": lambda: overhead.EXPERIMENT.markdown(stored("overhead")),
    "longbench": block("longbench", longbench.precision_table, longbench.verdict),
    "longbench_fp16": block("longbench_fp16", longbench.precision_table, longbench.verdict),
    "throughput": block("throughput", throughput.table),
    "generation": generate_model,
    "perplexity": block("perplexity", perplexity.table),
    "whole_gemma": block("whole_gemma", whole_model.tables, whole_model.verdict),
    "whole_amplified": block("whole_amplified", whole_model.tables, whole_model.verdict),
    "whole_smollm2": block("whole_smollm2", whole_model.tables, whole_model.verdict),
    "whole_model_speed": lambda: whole_model_speed.combine(
        [stored(name) for name in RESULTS if name.startswith("whole_model on ")]
    ),
    "speed": speed_report.readme_speed,
    "decode": speed_report.readme_decode,
    "paged": speed_report.readme_paged,
    "guards": speed_report.readme_guards,
    "data": speed_report.readme_data,
    "grid_prefill": block("grid_prefill", choice_run.grid_table),
    "grid_padded": block("grid_padded", choice_run.grid_table),
    "grid_decode": block("grid_decode", choice_run.grid_table),
    "grid_few": block("grid_few", choice_run.grid_table),
    "grid_prefill_more": block("grid_prefill_more", choice_run.grid_table),
    "grid_decode_more": block("grid_decode_more", choice_run.grid_table),
    "grid_drawn": block("grid_drawn", choice_run.grid_table),
    "grid_drawn_more": block("grid_drawn_more", choice_run.grid_table),
    "grid_drawn_rest": block("grid_drawn_rest", choice_run.grid_table),
    "random_speed": block("random", random_report.ratio_table, random_report.progress),
    "kernels": block("kernels", kernels),
    "soak": partial(random_calls, "soak"),
    "soak_sdpa": partial(random_calls, "soak_sdpa"),
    "fuzz": partial(random_calls, "fuzz"),
    "fuzz_reference": partial(random_calls, "fuzz_reference"),
    "fuzz_npu": partial(random_calls, "fuzz_npu"),
    "gradients": lambda: gradients.summary(stored("gradients")),
    "npu_model": npu_model,
    "npu_default": npu_default,
    "npu_decoding": lambda: npu.decoding_table(stored("npu_model")).captioned(),
    "npu_prefill": lambda: npu.prefill_table(stored("npu_model")).captioned(),
    "npu_calibration": lambda: npu.series_table(stored("npu_model")).captioned(),
    "npu_shares": lambda: npu.share_table(stored("npu_model")).captioned(),
    "npu_sensitivity": lambda: npu.sensitivity_table(stored("npu_model")).captioned(),
    "rounding": block("rounding", *BIASES, bias.verdict),
    "rounding_cost": lambda: cost.summary(stored("rounding_cost")),
    "rounding_cost_table": lambda: cost.EXPERIMENT.markdown(stored("rounding_cost")),
    "ring": lambda: ring.table(stored("ring")).captioned(),
    "zoo": lambda: zoo.summary(stored("zoo")),
    "watching": lambda: watching.summary(stored("watching")),
    "watching_table": lambda: watching.EXPERIMENT.markdown(stored("watching")),
}

if __name__ == "__main__":
    sys.exit(main())
