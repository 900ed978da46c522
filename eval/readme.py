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
from pasa.eval.accuracy.gradients import report as gradients_report
from pasa.eval.accuracy.rmse import report
from pasa.eval.accuracy.rounding_bias import cost_report
from pasa.eval.accuracy.rounding_bias import report as rounding_report
from pasa.eval.kit import output
from pasa.eval.kit.device import origin
from pasa.eval.kit.stored import ROOT, stored, table
from pasa.eval.kit.tables import Table, percent
from pasa.eval.models.diagnose import report as diagnose_report
from pasa.eval.models.diagnose import words
from pasa.eval.models.longbench import report as longbench_report
from pasa.eval.models.longbench import throughput as throughput_report
from pasa.eval.models.perplexity import run as perplexity_run
from pasa.eval.models.predict import paper
from pasa.eval.models.predict import report as predict_report
from pasa.eval.models.rescue import run as rescue_run
from pasa.eval.models.video import run as video_run
from pasa.eval.models.video import step as video_step
from pasa.eval.models.zoo import report as zoo_report
from pasa.eval.npu import report as npu_report
from pasa.eval.random_calls.fuzz import report as fuzz_report
from pasa.eval.random_calls.soak import report as soak_report
from pasa.eval.research.fp8_scaling import overhead_report
from pasa.eval.research.fp8_scaling import report as fp8_report
from pasa.eval.speed import readme as speed_readme
from pasa.eval.speed.ring import report as ring_report
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
DIAGNOSED = 3  # heads of each model
DIAGNOSIS = ("layer", "head", "peak QKᵀ", "× 65504", "stored", "in FP32", "K", "K′", "bias", "resonance", "phase")
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


def rmse() -> str:
    """Worst RMSE over the seeds, overflow mode "inf", and how many tiles ours kept in FP32."""
    result = stored("rmse")
    records = [each for each in result["records"] if each["overflow"] == "inf"]
    rows = []
    for case in result["cases"]:
        own = {name: [r for r in records if r["case"] == case["name"] and r["arithmetic"] == name] for name in SHOWN}
        rescued = max(r["scores_rescued_share"] for r in own["pasa-exact"])
        rows.append([case["name"], *(_error(own[name]) for name in SHOWN), percent(rescued)])
    shape = ", ".join(map(str, result["shape"]))
    caption = (
        f"RMSE against FP64 (Eq. 19) on the paper's 15 cases (x0, Am), shape ({shape}), worst of "
        f"{len(result['seeds'])} seeds; NaN: share of the output. {_origin(result)}"
    )
    return f"{caption}\n\n{table(['case', *(f'`{name}`' for name in SHOWN), 'tiles in FP32'], rows)}"


def _error(records: Sequence[dict[str, Any]]) -> str:
    nan = max(each["nonfinite_share"] for each in records)
    return f"NaN {percent(nan)}" if nan else f"{max(each['rmse'] for each in records):.1e}"


def _report_table(name: str, title: str) -> str:
    """One of the tables that `pasa bench rmse` prints."""
    result = stored(name)
    found = next(each for each in report.tables(result) if each.title.startswith(title))
    return f"{found.note} {_origin(result)}\n\n{table(found.header, found.rows)}"


def _origin(result: dict[str, Any]) -> str:
    machine = result["environment"]
    return f"({machine['processor']}; torch {machine['torch']}, pasa {machine['pasa']}, commit {machine['commit']}.)"


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
    note = f"{words.meanings(DIAGNOSIS)} {output.NOTE[0].upper()}{output.NOTE[1:]}."
    said = [
        f"`{name}`: {result['model']}. {words.verdict(result)} {words.cost(result['runs'])} {words.origin(result)}"
        for name, result in results.items()
    ]
    return "\n\n".join([note, table(["model", *DIAGNOSIS], rows), *said])


def predicted(name: str) -> str:
    """A test of the predictions."""
    result = stored(name)
    [found] = predict_report.tables(result)
    said = f"{predict_report.verdict(result)} {predict_report.origin(result)}"
    return f"{found.note}\n\n{table(found.header, found.rows)}\n\n{said}"


def paper_tables() -> str:
    """Gamma and alpha; solved here and now, so nothing is stored."""
    found = predict_report.paper_table(paper.run_paper_tables())
    return f"{found.note}\n\n{table(found.header, found.rows)}"


def fp8() -> str:
    """Scale factors in transients of the trained model; the verdict is on the synthetic weights as well."""
    result = stored("fp8")
    trained = [each for each in result["records"] if each["model"] != "synthetic"]
    found = fp8_report.transient_table({**result, "records": trained})
    said = f"{fp8_report.verdict(result)} {predict_report.origin(result)}"
    return f"{found.note}\n\n{table(found.header, found.rows)}\n\n{said}"


def kernels() -> str:
    """The paper's cases on the Triton kernels of a GPU."""
    result = stored("kernels")
    names = ("pasa-exact", "triton-fp32", "triton-paper-fp16", "triton-paper", "triton-exact")
    rows = []
    for case in result["cases"]:
        own = [[r for r in result["records"] if r["case"] == case["name"] and r["arithmetic"] == n] for n in names]
        rows.append([case["name"], *map(_error, own)])
    machine = result["environment"]
    caption = (
        f"RMSE against FP64, worst of {len(result['seeds'])} seeds; `pasa-exact` is the emulation, `triton-*` are "
        "kernels. "
        f"({machine['device']}; torch {machine['torch']}, triton {machine['triton']}, commit {machine['commit']}.)"
    )
    return f"{caption}\n\n{table(['case', *(f'`{name}`' for name in names)], rows)}"


def soak() -> str:
    """Random calls against FP64."""
    result = stored("soak")
    return f"{soak_report.verdict(result)} {soak_report.origin(result)}"


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


def rounding() -> str:
    """Bias of BF16 outputs by rule, in both places of rounding."""
    result = stored("rounding")
    found = [rounding_report.bias_table(result, "bf16", place, cases=ROUNDED) for place in result["places"]]
    return "\n\n".join([*map(_titled, found), f"{rounding_report.verdict(result)} {rounding_report.origin(result)}"])


PARTS: dict[str, Callable[[], str]] = {
    "support": support,
    "evidence": evidence.overview,
    "rmse": rmse,
    "damage": lambda: _report_table("rmse", "Overflow"),
    "bias": lambda: _report_table("bias", "Q and K share"),
    "sides": lambda: _report_table("sides", "Which side"),
    "rescue": rescue,
    "video": video,
    "step": step,
    "diagnose": diagnose,
    "soundness": partial(predicted, "soundness"),
    "auto": partial(predicted, "auto"),
    "paper_tables": paper_tables,
    "fp8": fp8,
    "overhead": lambda: overhead_report.summary(stored("overhead")),
    "overhead_table": lambda: overhead_report.section(stored("overhead")),
    "longbench": longbench,
    "longbench_fp16": partial(longbench, "longbench_fp16"),
    "throughput": throughput,
    "perplexity": perplexity,
    "speed": speed_readme.speed,
    "decode": speed_readme.decode,
    "paged": speed_readme.paged,
    "kernels": kernels,
    "soak": soak,
    "fuzz": lambda: f"{fuzz_report.verdict(stored('fuzz'))} {fuzz_report.origin(stored('fuzz'))}",
    "gradients": lambda: gradients_report.summary(stored("gradients")),
    "npu_model": npu_model,
    "rounding": rounding,
    "rounding_cost": lambda: cost_report.summary(stored("rounding_cost")),
    "rounding_cost_table": lambda: cost_report.section(stored("rounding_cost")),
    "ring": lambda: ring_report.to_markdown(stored("ring")),
    "zoo": lambda: zoo_report.to_markdown(stored("zoo")),
    "watching": lambda: watching.summary(stored("watching")),
    "watching_table": lambda: watching.EXPERIMENT.markdown(stored("watching")),
}

if __name__ == "__main__":
    sys.exit(main())
