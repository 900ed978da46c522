"""Run everything that only an NPU can tell, and pack the result into one archive."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Annotated, Any

from pasa.eval.check_device.npu import running
from pasa.eval.check_device.npu.archive import pack
from pasa.eval.check_device.npu.stages import DEVIATES, FAILED, HARMLESS, PASSED, STAGES
from pasa.eval.kit import output
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.tables import Table
from pasa.ops.attention.ascend import build_record
from pasa.ops.versions import package_version

ARCHIVE = "pasa-npu-report.zip"
# Seconds after which a stage that hangs is ended: several times what is expected of a device.
LIMITS_S = {"build": 900.0}
LIMIT_S, QUICK_LIMIT_S = 300.0, 180.0
PACKAGES = ("triton", "transformers", "numpy")
NEXT = (
    f"Next: look through {ARCHIVE}, then attach it to an issue of the kind 'Ran on an NPU'. It holds this report, its "
    "JSON and the logs; names of host and user are replaced."
)


def run_check_npu(
    device: Annotated[str, "The NPU."] = "npu:0",
    quick: Annotated[
        bool, "With --npu: three minutes instead of ten, by fewer and smaller calls, and three shapes timed."
    ] = False,
    folder: Path | None = None,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Build the Ascend C kernels and check all that only an NPU can tell; leaves one archive; exit 1 if a check fails.

    A stage that fails does not keep the others from running; without torch_npu none runs. The result holds what is
    `installed`, and `records` of all checks: their stage, name, verdict and detail.
    """
    if device.startswith("npu") and importlib.util.find_spec("torch_npu") is None:
        raise ModuleNotFoundError("no NPU here: torch_npu is not installed (docs/ascend.md)")
    place = Path.cwd() if folder is None else folder
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch, "logs")
        logs.mkdir()
        names = ["build", *STAGES]
        records = []
        for done, name in enumerate(names):
            progress(done, len(names), name)
            limit_s = LIMITS_S.get(name, QUICK_LIMIT_S if quick else LIMIT_S)
            if name == "build":
                records.append(running.build(logs, limit_s))
            else:
                records += running.run_stage(name, device, quick, logs, limit_s)
        checks = {name: all(holds(each) for each in records if each["stage"] == name) for name in names}
        result = {
            "gate": gate(checks), "environment": output.environment(), "device": device, "quick": quick,
            "installed": build_record.installed() | versions(), "records": records,
        }  # fmt: skip
        texts = {
            "report.md": f"# {EXPERIMENT.title}\n\n{EXPERIMENT.markdown(result)}\n",
            "report.json": output.to_json(result),
        }
        pack(place / ARCHIVE, texts, logs)
    return result


def holds(record: dict[str, Any]) -> bool:
    """Return whether a check passed, or found nothing that harms results."""
    return record["verdict"] in (PASSED, HARMLESS)


def versions() -> dict[str, str]:
    """Return the versions of packages that decide on what runs."""
    found = {name: package_version(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version}


def report(result: dict[str, Any]) -> list[Table | str]:
    """Return the verdict, a line for each stage, all that is not as assumed, the times, and what to do next."""
    return [summary(result), stages(result), *differences(result), *times(result), NEXT]


def summary(result: dict[str, Any]) -> str:
    """Return in one sentence what failed, and what is installed."""
    failed = [name for name, passed in result["gate"]["checks"].items() if not passed]
    verdict = f"FAILED: {', '.join(failed)}." if failed else "All stages passed."
    here = ", ".join(f"{name} {version}" for name, version in result["installed"].items())
    return f"{verdict} {result['device']}; {here}; pasa {result['environment']['pasa']}."


def stages(result: dict[str, Any]) -> Table:
    """Return a line for each stage: how many checks passed, differ, deviate and failed."""
    rows = []
    for name in result["gate"]["checks"]:
        verdicts = [each["verdict"] for each in result["records"] if each["stage"] == name]
        rows.append([name, *(str(verdicts.count(each)) for each in (PASSED, HARMLESS, DEVIATES, FAILED))])
    return Table("Stages", ["stage", PASSED, HARMLESS, DEVIATES, FAILED], rows)


def differences(result: dict[str, Any]) -> list[Table]:
    """Return the checks that did not pass, and what they found; probes with what was assumed."""
    rows = [
        [each["stage"], each["name"], each["verdict"], each["detail"], each.get("assumption", "")]
        for each in result["records"]
        if each["verdict"] != PASSED
    ]
    return (
        [Table("Not as assumed", ["stage", "check", "verdict", "found", "assumed"], rows, wraps="found")]
        if rows
        else []
    )


def times(result: dict[str, Any]) -> list[Table]:
    """Return milliseconds of each implementation by shape, with the model's prediction, from overlap to none."""
    timed = [each for each in result["records"] if each.get("ms")]
    if not timed:
        return []
    names = list(dict.fromkeys(name for each in timed for name in each["ms"]))
    rows = []
    for each in timed:
        model = "-" if each["model_ms"] is None else " to ".join(f"{ms:.3f}" for ms in each["model_ms"])
        rows.append(
            [each["name"], *(f"{each['ms'][name]:.3f}" if name in each["ms"] else "-" for name in names), model]
        )
    return [Table("Milliseconds", ["shape", *names, "pasa, modelled"], rows)]


EXPERIMENT = Experiment("npu", run_check_npu, report, "pasa check-device --npu")
