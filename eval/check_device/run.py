"""Checks each device of the machine, and compares its attention with what pasa lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch

import pasa
from pasa.eval.check_device import hostile
from pasa.eval.check_device.score_format import measure_format
from pasa.eval.kit import output
from pasa.eval.kit.device import device_name, torch_devices
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.options import stages
from pasa.eval.kit.tables import Column, Table, number
from pasa.eval.kit.timing import Call, added_cost
from pasa.ops import registry
from pasa.ops.attention.sdpa.fused import score_format
from pasa.ops.backends import Backend, Request

TIMED = ((1, 8, 512, 64), (1, 8, 2048, 64))  # shapes of q, k and v
TURNS, CALLS = 5, 10  # timed turns, and calls of a turn; one on the CPU
CLASSES = {"a": "keeps scores in FP32", "b": "keeps q.k in FP16, the softmax in FP32", "c": "keeps scores in FP16"}
NEXT = "Next: attach check-device.json to an issue (pasa check-device --json check-device.json)."


def run_check_device(
    device: Annotated[str | None, "A device, such as cuda:0, or a type; default: every device."] = None,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Check each device: are backends right and fast, and is torch's attention as listed; exit 1 if one is wrong."""
    places = [at for at in torch_devices() if device in (None, at, torch.device(at).type)]
    if not places:
        raise ValueError(f"device={device!r} is not here: choose among {', '.join(torch_devices())}")
    names = {at: [each for each in registry.BACKENDS.values() if serves(each, at)] for at in places}
    stage = stages(progress, len(hostile.cases()) * sum(map(len, names.values())))
    devices, records = [], []
    for at in places:
        listed, server = score_format(torch.device(at).type), registry.server(torch.device(at).type)
        about = {"device": at, "name": device_name(at), "server": server and server.name}
        known = {"listed": None if listed.kind == "c" else listed.kind, "source": listed.source}  # (c): not known
        devices.append(about | known | measure_format(at))
        for backend in names[at]:
            checked = check(backend, at, stage)
            timed = [] if checked["failure"] else time_backend(backend.name, at, devices[-1]["refusal"] is None)
            records.append({"device": at, "backend": backend.name, **checked, "times": timed})
    passed = gate({f"{each['backend']} on {each['device']}": each["passed"] for each in records})
    return {"gate": passed, "devices": devices, "records": records}


def serves(backend: Backend, device: str, dim: int = 64, mask: str = "none") -> bool:
    """Return whether a backend takes FP16 calls on a device without being named."""
    return not backend.refusals(Request(torch.device(device).type, torch.float16, dim, mask))


def check(
    backend: Backend, device: str, stage: Callable[[str], None], cases: Sequence[hostile.Case] | None = None
) -> dict[str, Any]:
    """Run the hostile inputs that a backend takes; return counts, and the largest error with its case."""
    record: dict[str, Any] = {"passed": False, "calls": 0, **dict.fromkeys(("faults", "outside", "error"), 0.0)}
    record |= {"worst": "", "failure": ""}
    for case in hostile.cases() if cases is None else cases:
        stage(f"{backend.name} on {device}: {case[0]}")
        if not serves(backend, device, case[2][-1], hostile.MASKS[case[1]].requested):
            continue
        record["calls"] += 1
        try:
            measured = hostile.measure(case, backend.name, device)
        except Exception as error:  # of any kind: it is what the check reports
            return record | {"failure": output.error_line(error), "worst": str(case)}
        if measured["error"] > record["error"]:
            record |= {"error": measured["error"], "worst": str(case)}
        record |= {name: record[name] + measured[name] for name in ("faults", "outside")}
    return record | {"passed": not record["faults"] and not record["outside"] and record["error"] <= 1}


def time_backend(name: str, device: str, beside_torch: bool) -> list[dict[str, Any]]:
    """Time a backend, in turns with torch's attention unless that refuses FP16."""
    times: list[dict[str, Any]] = []
    place = torch.device(device)
    for shape in TIMED:
        q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).half().to(place) for i in range(3))
        ours = Call(partial(pasa.attention, q, k, v, backend=name))
        theirs = Call(partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)) if beside_torch else ours
        try:
            cost = added_cost(theirs, ours, TURNS, 1 if place.type == "cpu" else CALLS, place)
        except RuntimeError as error:  # such as too little memory, or a shape that torch's attention refuses
            times.append({"keys": shape[2], "ms": None, "ratio": None, "failure": output.error_line(error)})
            continue
        ratio = 1 + cost["cost_percent"] / 100 if beside_torch else None
        times.append({"keys": shape[2], "ms": cost["extended_ms"], "ratio": ratio})
    return times


def report(result: dict[str, Any]) -> list[Table | str]:
    """Return the verdict on each device, a table of the backends, and what to do next."""
    unlisted = any(each["listed"] != each["class"] for each in result["devices"])
    verdicts = [verdict(each, result["records"]) for each in result["devices"]]
    return [*verdicts, table(result), *([NEXT] if unlisted else [])]


def table(result: dict[str, Any]) -> Table:
    """Return a row for each backend on each device."""
    columns: dict[str, Column] = {
        **{name: name for name in ("device", "backend", "calls")},
        **{name: (name, ".0f") for name in ("faults", "outside")},
        "error": ("error", ".2f"),
        "time / SDPA's": lambda each: ", ".join(number(time["ratio"], ".2f") for time in each["times"]) or "-",
    }
    note = (
        "Faults: elements that are NaN, infinite, or not 0 in rows without keys. Outside: elements beyond the values "
        "that their row sees, by 2^-10 max |V|. Error: the largest; 1 is 4 times that of attention with FP32 scores, "
        f"plus 2^-10 max |V|. Time: forward, {' and '.join(str(shape[2]) for shape in TIMED)} keys."
    )
    return Table.of("pasa check-device", result["records"], columns, note)


def verdict(device: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """Return the class of a device's attention, how many backends are right and who serves; then what is wrong."""
    at, measured, listed = device["device"], device["class"], device["listed"]
    records = [each for each in records if each["device"] == at]
    wrong = [each for each in records if not each["passed"]]
    ratio = next((e["times"][-1]["ratio"] for e in records if e["backend"] == device["server"] and e["times"]), None)
    what = f"class ({measured}): torch's attention {CLASSES[measured]}"
    if device["refusal"]:
        what = f"torch {torch.__version__} refuses FP16 attention ({device['refusal']}): install a newer torch"
    pace = "" if ratio is None else f" at {ratio:.1f} times the time of SDPA"
    counts = f"{len(records) - len(wrong)} backends right, {len(wrong)} wrong"
    agrees = "The measurement agrees" if listed == measured else "The measurement DISAGREES"
    known = f"pasa lists class ({listed}): {device['source']}. {agrees}" if listed else "pasa does not list this device"
    lines = [f"{at}: {what}. {counts}; pasa serves `{device['server']}`{pace}.", f"  {known}."]
    for each in wrong:
        numbers = f"{each['faults']:.0f} faults, {each['outside']:.0f} outside, error {number(each['error'], '.2f')}"
        lines.append(f"  WRONG: {each['backend']}, {each['failure'] or numbers}; worst: {each['worst']}")
    return "\n".join(lines)


EXPERIMENT = Experiment("check-device", run_check_device, report, "pasa check-device")
