"""Writes the generated parts of READMEs: the support matrix from the registry, the tables from stored runs.

    python -m pasa.eval.readme [--check]

`--check` writes nothing and exits 1 if a file is not what it would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pasa.eval import evidence
from pasa.eval.accuracy.gradients import run as gradients
from pasa.eval.accuracy.rmse import report
from pasa.eval.accuracy.rounding_bias import cost
from pasa.eval.accuracy.rounding_bias import run as bias
from pasa.eval.accuracy.rounding_bias.arithmetic import PLACES
from pasa.eval.kit import output
from pasa.eval.kit.device import origin
from pasa.eval.kit.stored import ROOT, pick, stored, table
from pasa.eval.kit.tables import Table, percent
from pasa.eval.models.diagnose import report as diagnose_report
from pasa.eval.models.longbench import report as longbench_report
from pasa.eval.models.longbench import throughput as throughput_report
from pasa.eval.models.perplexity import report as perplexity_report
from pasa.eval.models.predict import auto, paper, soundness
from pasa.eval.models.predict import run as prediction
from pasa.eval.models.rescue.report import TITLES
from pasa.eval.models.video import report as video_report
from pasa.eval.models.video import step_report
from pasa.eval.models.zoo import run as zoo
from pasa.eval.npu import report as npu_report
from pasa.eval.random_calls.fuzz import report as fuzz_report
from pasa.eval.random_calls.soak import report as soak_report
from pasa.eval.research.fp8_scaling import overhead
from pasa.eval.research.fp8_scaling import run as fp8_run
from pasa.eval.speed import readme as speed_readme
from pasa.eval.speed.ring import run as ring
from pasa.eval.speed.watching import run as watching
from pasa.ops.registry import BACKENDS, Backend

FILES = (
    "README.md",
    "eval/accuracy/rounding_bias/README.md",
    "eval/speed/watching/README.md",
    "eval/research/fp8_scaling/README.md",
    "eval/models/zoo/README.md",
)
MAXIMA = ("two, smaller tail", "near, smaller tail", "blocks, smaller tail", "four, smaller tail")
ROUNDED = (*MAXIMA, "three, smaller tail, one binade", "six, smaller tail, one binade", "random, same tail")
BIASES = [partial(bias.bias_table, fmt="bf16", place=place, cases=ROUNDED) for place in PLACES]
DIAGNOSED = 3  # heads of each model
DIAGNOSIS = ("layer", "head", "peak QKᵀ", "× 65504", "stored", "in FP32", "K", "K′", "bias", "resonance", "phase")
KERNELS = ("pasa-exact", "triton-fp32", "triton-paper-fp16", "triton-paper", "triton-exact")
SHOWN = ("fp32", "partial", "prescaled", "smooth_k", "pasa-paper-fp16", "pasa-paper", "pasa-exact")


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite `FILES`, or check them; 1 if one is not up to date."""
    old = {ROOT / name: (ROOT / name).read_text(encoding="utf-8") for name in FILES}
    new = {path: fill(text) for path, text in old.items()}
    asked = sys.argv[1:] if arguments is None else arguments
    if unknown := [each for each in asked if each != "--check"]:
        sys.exit(f"{' '.join(unknown)}: only --check is known; without it the files are written")
    if asked:
        for path in (path for path in new if new[path] != old[path]):
            print(f"{path} is not of the stored runs: python -m pasa.eval.readme writes it")
        return int(new != old)
    for path, text in new.items():
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
        ("masks", [", ".join(b.masks) for b in backends]),
        ("precision", [", ".join(b.precisions) for b in backends]),
        ("recovery", [", ".join(b.recoveries) for b in backends]),
        ("softmax", [", ".join(b.softmaxes) for b in backends]),
        ("keys per block", [", ".join(map(str, b.block_ks)) or "1 to 65536" for b in backends]),
        ("packed sequences", ["yes" if b.varlen else "no" for b in backends]),
        ("paged caches", ["no" if b.paged is None else " ".join(b.paged.values()) or "yes" for b in backends]),
        ("diagnostics", ["yes" if b.diagnostics else "no" for b in backends]),
    ]
    return table(
        ["backend", *(f"`{backend.name}`" for backend in backends)], [[name, *values] for name, values in rows]
    )


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


def rescue() -> str:
    """Return the runs of the demonstration, without the times of an emulation."""
    result = stored("rescue")
    runs = rescue_run.run_table(result)
    shown = table(runs.header[:3], [row[:3] for row in runs.rows])
    return f"{runs.title}. {rescue_run.verdict(result)} {origin(result)}\n\n{shown}"


def video() -> str:
    """Return a clip with and without PASA."""
    result = stored("video")
    return f"{video_run.run_table(result).captioned()}\n\n{video_run.verdict(result)} {origin(result)}"


def _titled(found: Table) -> str:
    """A table under its title and note."""
    return f"{found.title}. {found.note}\n\n{table(found.header, found.rows)}"


def longbench(name: str = "longbench") -> str:
    """Return long prompts in every precision."""
    result = stored(name)
    shown = longbench_report.precision_table(result).captioned()
    return f"{shown}\n\n{longbench_report.verdict(result)} {origin(result)}"


def throughput() -> str:
    """A whole model's prefill, decode and memory."""
    return throughput_report.table(stored("throughput")).captioned()


def perplexity() -> str:
    """What storing scores costs."""
    result = stored("perplexity")
    return f"{perplexity_run.table(result).captioned()}\n\n{origin(result)}"


def diagnose() -> str:
    """The worst heads of the built-in models, and what is said of them."""
    results = {name: stored(f"diagnose_{name}") for name in ("published", "embedded", "tiny")}
    heads = {name: diagnose_report.head_table(result, DIAGNOSIS, DIAGNOSED) for name, result in results.items()}
    rows = [[name, *row] for name, found in heads.items() for row in found.rows]
    note = f"{diagnose_report.meanings(DIAGNOSIS)} {output.NOTE[0].upper()}{output.NOTE[1:]}."
    said = [
        f"`{name}`: {result['model']}. {diagnose_report.verdict(result)} {diagnose_report.cost(result)} "
        f"{diagnose_report.origin(result)}"
        for name, result in results.items()
    ]
    return "\n\n".join([note, table(["model", *DIAGNOSIS], rows), *said])


def fp8() -> str:
    """Scale factors in transients of the trained model; the verdict is on the synthetic weights as well."""
    result = stored("fp8")
    trained = [each for each in result["records"] if each["model"] != "synthetic"]
    found = fp8_run.transient_table({**result, "records": trained})
    return f"{found.note}\n\n{table(found.header, found.rows)}\n\n{fp8_run.verdict(result)}"


def kernels(result: dict[str, Any]) -> Table:
    """Return the paper's cases on the Triton kernels of a GPU."""
    shown = report.rmse_table(result["records"], KERNELS, gates=False)
    note = f"{shown.note} pasa-exact is the emulation, triton-* are kernels."
    return Table(shown.title, shown.header, shown.rows, note)


def random_calls(name: str) -> str:
    """Random calls of kernels or of the whole API, against FP64."""
    result = stored(name)
    return f"{calls_report.verdict(result)} {calls_report.origin(result)}"


def npu_model() -> str:
    """Precision allocations on an NPU, modelled."""
    result = stored("npu_model")
    found = npu_report.range_table(result)
    text = f"{found.note}\n\n{table(found.header, found.rows)}"
    return f"{text}\n\n{npu_report.claim(result)}\n\n{npu_report.origin(result)}"


def step() -> str:
    """Return a denoising step of the full-size video UNet."""
    result = stored("step")
    return f"{video_step.table(result).captioned()}\n\n{origin(result)}"


PARTS: dict[str, Callable[[], str]] = {
    "support": support,
    "evidence": evidence.overview,
    "rmse": block("rmse", rmse),
    "damage": block("rmse", report.damage_table),
    "bias": block("bias", report.bias_table),
    "sides": block("sides", report.sides_table),
    "rescue": rescue,
    "video": video,
    "step": step,
    "diagnose": diagnose,
    "soundness": lambda: soundness.EXPERIMENT.markdown(stored("soundness")),
    "auto": lambda: auto.EXPERIMENT.markdown(stored("auto")),
    "paper_tables": lambda: paper.EXPERIMENT.markdown(paper.run_paper_tables()),
    "fp8": fp8,
    "overhead": lambda: overhead.summary(stored("overhead")),
    "overhead_table": lambda: overhead.EXPERIMENT.markdown(stored("overhead")),
    "longbench": longbench,
    "longbench_fp16": partial(longbench, "longbench_fp16"),
    "throughput": throughput,
    "perplexity": perplexity,
    "speed": speed_readme.speed,
    "decode": speed_readme.decode,
    "paged": speed_readme.paged,
    "kernels": block("kernels", kernels),
    "soak": soak,
    "fuzz": lambda: f"{fuzz_report.verdict(stored('fuzz'))} {fuzz_report.origin(stored('fuzz'))}",
    "gradients": lambda: gradients.summary(stored("gradients")),
    "npu_model": npu_model,
    "rounding": block("rounding", *BIASES, bias.verdict),
    "rounding_cost": lambda: cost.summary(stored("rounding_cost")),
    "rounding_cost_table": lambda: cost.EXPERIMENT.markdown(stored("rounding_cost")),
    "ring": lambda: ring_report.to_markdown(stored("ring")),
    "zoo": lambda: zoo.summary(stored("zoo")),
    "watching": lambda: watching.summary(stored("watching")),
    "watching_table": lambda: watching.EXPERIMENT.markdown(stored("watching")),
}

if __name__ == "__main__":
    sys.exit(main())
