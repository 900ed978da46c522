"""The variant `pasa bench speed --random`: random cases, and the ratio of our time to the fastest SDPA backend's.

A case is written when it is done, so a run that stops goes on where it was. Gates are in `judge`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch

from pasa.eval.kit import output
from pasa.eval.kit.device import describe, named_here
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.options import at_least
from pasa.eval.kit.timing import Clock, CudaClock, interleave, quantile, ratio, summary
from pasa.eval.speed import recorded
from pasa.eval.speed.cases import SpeedCase
from pasa.eval.speed.gate import Gate
from pasa.eval.speed.implementations import DEFAULT, IMPLEMENTATIONS, MATH, Implementation
from pasa.eval.speed.random_cases import draw_case
from pasa.eval.speed.random_report import report, slow_table
from pasa.eval.speed.run import NOT_RUN, OK, Entrant, enter, in_graph

Record = dict[str, Any]
PEERS = tuple(each for each in IMPLEMENTATIONS if each.name in ("sdpa-cudnn", "sdpa-flash", "sdpa-efficient"))
NO_PEER = "no SDPA backend"
# The gates: ratios are the peer's device time over ours, in microseconds the host time that ours adds to a call.
LEAST_MEDIAN, LEAST_PERCENTILE, LEAST_RATIO, MOST_HOST_US = 1.0, 0.90, 0.80, 20.0
SAME_RUN = ("device", "driver", "torch", "triton", "cudnn", "pasa", "commit")


def run_random(
    cases: Annotated[int, "Random cases."] = 500,
    seed: Annotated[int, "Seed of the random cases."] = 0,
    part: Annotated[str, 'Cases to run now: "2/3" is the second of three parts.'] = "1/1",
    rounds: Annotated[int, "Timed turns of each implementation."] = 3,
    folder: Path | None = None,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Time random cases beside the fastest SDPA backend; exit 1 if our default is slower or wrong.

    Cases that are in `folder` are not run again, and the result has all that are there. Its ``records`` have a case
    each: ``ratio`` is the device time of the fastest SDPA backend with a right answer, in a CUDA graph, over ours.
    """
    at_least(1, cases=cases, rounds=rounds)
    at_least(0, seed=seed)
    indices = select_part(cases, part)
    clock = CudaClock()
    recorded.layers()  # before the first case, because packages may be missing
    environment = describe(clock.device)
    store = Store(folder, {"seed": seed, "rounds": rounds} | {name: environment.get(name) for name in SAME_RUN})
    with torch.inference_mode():
        for done, index in enumerate(indices):
            if index not in store.records:
                case = draw_case(seed, index)
                progress(done, len(indices), f"{case.name} {case.shape}")
                store.add(index, measure(case, clock, rounds))
                torch.ones(1, device=clock.device).sum().item()  # raises if the case has broken the device
    records = [store.records[index] for index in sorted(store.records) if index < cases]
    settings = {"cases": cases, "seed": seed, "part": part, "rounds": rounds}
    return {
        "note": named_here("measured", clock.device),
        "environment": environment,
        "settings": settings,
        "gate": judge(records),
        "records": records,
    }


def select_part(cases: int, part: str) -> range:
    """Return the indices of a part such as "2/3"; every third case, so that parts take about the same time."""
    first, _, parts = part.partition("/")
    if not (first.isdecimal() and parts.isdecimal() and 1 <= int(first) <= int(parts)):
        raise ValueError(f'part={part!r} must be i/n with 1 <= i <= n, such as "2/3"')
    return range(int(first) - 1, cases, int(parts))


class Store:
    """Records by the index of their case; in a folder they are a file that grows, so that a stopped run can go on.

    ValueError if the folder holds a run whose `identity` differs: numbers of two devices or commits do not mix.
    """

    def __init__(self, folder: Path | None, identity: Record) -> None:
        self.file = folder and folder / "cases.json"
        self.identity = output.jsonable(identity)
        self.records: dict[int, Record] = {}
        if self.file is None or not self.file.is_file():
            return
        kept = output.read_json(self.file)
        changes = [
            f"{name} was {kept['identity'].get(name)!r} and is {value!r}"
            for name, value in self.identity.items()
            if kept["identity"].get(name) != value
        ]
        if changes:
            raise ValueError(f"{folder} holds another run ({'; '.join(changes)}): choose another folder")
        self.records = {int(index): record for index, record in kept["cases"].items()}

    def add(self, index: int, record: Record) -> None:
        """Add a record, and write the file."""
        self.records[index] = output.jsonable(record)
        if self.file is not None:
            output.write_text(self.file, json.dumps({"identity": self.identity, "cases": self.records}, indent=0))


def measure(
    case: SpeedCase,
    clock: Clock,
    rounds: int,
    ours: Implementation = DEFAULT,
    peers: Sequence[Implementation] = PEERS,
    last: Implementation = MATH,
) -> Record:
    """Return the record of a case; `last` is a peer that is timed only where no other has a right answer."""
    described = {"kind": "decode" if case.decode else "prefill", "padded": case.padded, "data": case.data}
    record: Record = {"case": case.name, "shape": case.shape, **described, "status": OK, "why": ""}
    try:
        inputs = case.inputs(clock.device)
        accuracy = Gate(case, inputs)
    except Exception as error:  # out of memory, or the device has failed
        return record | {"status": NOT_RUN, "why": f"inputs and FP64 truth: {output.error_line(error)}"}

    def entered(each: Implementation) -> tuple[Record, Entrant]:
        eager, call = enter(case, each, inputs, accuracy, clock)
        return eager, in_graph(eager, call, clock)

    own, (captured, our_call) = entered(ours)
    if our_call is None:
        return record | {name: captured[name] for name in ("status", "why", "rmse", "rmse_limit") if name in captured}
    made = [entered(each) for each in peers]
    if not any(call for _, (_, call) in made):
        made.append(entered(last))
    calls = {eager["implementation"]: call for eager, (_, call) in made if call}
    if not calls:
        why = "; ".join(f"{eager['implementation']}: {graphed['why']}" for eager, (graphed, _) in made)
        return record | {"status": NO_PEER, "why": why}
    return record | _compare(clock, own, our_call, {each["implementation"]: each for each, _ in made}, calls, rounds)


def _compare(
    clock: Clock, own: Record, call: Any, eager: dict[str, Record], peers: dict[str, Any], rounds: int
) -> Record:
    """Return times and ratio of our call and the fastest peer in CUDA graphs, and the host time of eager calls."""
    try:
        times, _ = interleave(clock, {own["implementation"]: call, **peers}, rounds)
    except Exception as error:  # the call ran before, so the device has failed
        return {"status": NOT_RUN, "why": f"while timed: {output.error_line(error)}"}
    us = {name: 1e3 * summary(each)["median_ms"] for name, each in times.items()}
    name, fastest = own["implementation"], min(peers, key=lambda each: us[each])
    host_us, peer_host_us = own["host_us"], eager[fastest]["host_us"]
    return {
        "ratio": ratio(times[name], times[fastest]),
        "us": us[name],
        "peer": fastest,
        "variant": eager[fastest]["variant"],
        "peer_us": us[fastest],
        "host_us": host_us,
        "peer_host_us": peer_host_us,
        "added_host_us": host_us - peer_host_us,
        "rmse": own["rmse"],
        "rmse_limit": own["rmse_limit"],
    }


def judge(records: Sequence[Record]) -> dict[str, Any]:
    """Return the gate: right answers, the distribution of the ratios, and the host time that is added to any call."""
    ratios = sorted(each["ratio"] for each in records if "ratio" in each)
    found = {"median": quantile(ratios, 0.5), "percentile": quantile(ratios, 0.01)} if ratios else {}
    checks = {
        "accuracy": all(each["status"] in (OK, NO_PEER) for each in records),
        "median": bool(ratios) and found["median"] >= LEAST_MEDIAN,
        "1st percentile": bool(ratios) and found["percentile"] >= LEAST_PERCENTILE,
        "minimum": bool(ratios) and ratios[0] >= LEAST_RATIO,
        "host time": all(each.get("added_host_us", 0.0) <= MOST_HOST_US for each in records),
    }
    return gate(checks)


EXPERIMENT = Experiment(
    name="random",
    run=run_random,
    report=report,
    title="Speed on random cases on a CUDA device",
    resume="start again with the same --output-dir to go on",
    appendix=lambda result: [slow_table(result, bound=float("inf"))],
)
