"""Describes the machine of a measurement, and says where the numbers of a result come from."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import Any

import torch

from pasa.eval.kit.output import environment, processor
from pasa.ops.devices import device_types
from pasa.ops.versions import package_version

VERSIONS = ("torch", "triton", "transformers", "diffusers", "cuda", "cudnn", "pasa")
QUERIES = {"driver": "driver_version", "power_limit_w": "power.limit", "sm_clock_max_mhz": "clocks.max.sm"}


def describe(device: torch.device, *packages: str) -> dict[str, Any]:
    """Return `output.environment` with the device, its driver and limits, and the versions that decide on speed."""
    machine = environment() | {name: package_version(name) for name in ("triton", *packages)}
    if device.type != "cuda":
        return machine | {"device": str(device)}
    properties = torch.cuda.get_device_properties(device)
    return machine | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": int(properties.L2_cache_size),
        "memory_bytes": int(properties.total_memory),
        "cuda": torch.version.cuda,
        "cudnn": _cudnn(),
        **_ask_driver(device.index or 0),
    }


def origin(result: dict[str, Any]) -> str:
    """Return where the numbers of a result come from: its note, the machine, the versions, the commit."""
    machine = result["environment"]
    texts = {"device": "{}", "power_limit_w": "{} W", "driver": "driver {}", "processor": "{}"}
    place = ", ".join(text.format(machine[name]) for name, text in texts.items() if machine.get(name))
    named = [f"{name} {machine[name]}" for name in VERSIONS if machine.get(name)]
    note = result.get("note", "")
    return (
        f"{note[:1].upper()}{note[1:]} ({place}; {', '.join(named)}, commit {machine['commit'] or 'unknown'}).".lstrip()
    )


def named_here(what: str, device: torch.device) -> str:
    """Return the note that numbers come from the device of the result, and whether that is an NPU."""
    return f"{what} on the device named here" + ("" if device.type == "npu" else "; nothing was run on an NPU")


def _cudnn() -> str | None:
    """Return the version as 9.15.1: from 9 on the number is major * 10000 + minor * 100 + patch."""
    number = torch.backends.cudnn.version()
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _ask_driver(index: int) -> dict[str, str | None]:
    """Return what only nvidia-smi knows; None where it is not installed."""
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(QUERIES.values())}"]
    command.append("--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        fields = [field.strip() for field in done.stdout.splitlines()[0].split(",")]
        return dict(zip(QUERIES, fields, strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return dict.fromkeys(QUERIES)


def pick_device() -> torch.device:
    """Return the first accelerator that answers, else the CPU."""
    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu

        if torch_npu.npu.is_available():
            return torch.device("npu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def torch_devices() -> list[str]:
    """Return every device by its number, such as "cuda:0", and the CPU."""
    kinds = [*(name for name in device_types() if name != "cpu"), "xpu", "mps"]
    counts = {name: getattr(getattr(torch, name, None), "device_count", lambda: 0)() for name in kinds}
    return ["cpu", *(f"{name}:{i}" for name, count in counts.items() for i in range(count))]


def find_device(name: str) -> torch.device:
    """Return the device of a name such as "cuda" or "cuda:0"; raise ValueError if it is not here."""
    if not {name, f"{name}:0"} & {*torch_devices()}:
        raise ValueError(f"device={name!r} is not here: choose among {', '.join(torch_devices())}")
    return torch.device(name)


def timed_kind(name: str) -> str:
    """Return "cuda" or "npu", the kind of a device whose calls can be timed.

    Raises
    ------
    ValueError
        For a device of another kind, and for a GPU that is not the current one.
    """
    if name not in ("cuda", "cuda:0") and name.partition(":")[0] != "npu":
        raise ValueError(f"device={name!r} has no clock: name cuda (CUDA_VISIBLE_DEVICES picks a GPU) or npu:0")
    return name.partition(":")[0]


def device_name(device: str) -> str:
    """Return the product's name, or that of the processor where torch does not name the device."""
    name = getattr(getattr(torch, torch.device(device).type), "get_device_name", None)
    return processor() if name is None else str(name(device))
