"""The variant `pasa bench speed --random`: random cases, and the ratio of our time to the fastest SDPA backend's.

A case is written when it is done, so a run that stops goes on where it was. Gates are in `judge`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch

from pasa.eval.kit import output
from pasa.eval.kit.cases_file import CasesFile
from pasa.eval.kit.device import describe, named_here
from pasa.eval.kit.experiment import Experiment, gate
from pasa.eval.kit.options import Minutes, at_least
from pasa.eval.kit.timing import Call, Clock, CudaClock, interleave, quantile, ratio, summary
from pasa.eval.speed import recorded
from pasa.eval.speed.cases import SpeedCase
from pasa.eval.speed.gate import Gate
from pasa.eval.speed.implementations import DEFAULT, MATH, Implementation, select_implementations
from pasa.eval.speed.random_cases import draw_case
from pasa.eval.speed.random_report import report, slow_table
from pasa.eval.speed.run import NOT_RUN, OK, enter, in_graph

Record = dict[str, Any]
PEERS = select_implementations(("sdpa-cudnn", "sdpa-flash", "sdpa-efficient"))
OTHERS = select_implementations(("flash-attn-3", "flash-attn-4", "sageattention"))  # shown, and part of no gate
NO_PEER = "no SDPA backend"
# The gates: ratios are the peer's device time over ours, in microseconds the host time that ours adds to a call.
LEAST_MEDIAN, LEAST_PERCENTILE, LEAST_RATIO, MOST_HOST_US = 1.0, 0.90, 0.80, 20.0


def run_random(
    cases: Annotated[int, "Random cases."] = 500,
    seed: Annotated[int, "Seed of the random cases."] = 0,
    minutes: Minutes = None,
    rounds: Annotated[int, "Timed turns of each implementation."] = 3,
    folder: Path | None = None,
    progress: output.Report = output.silent,
) -> dict[str, Any]:
    """Time random cases beside the fastest SDPA backend; exit 1 if our default is slower or wrong, or cases are left.

    Cases that are in `folder` are not run again, and the result has all that are there. Its ``records`` have a case
    each: ``ratio`` is the device time of the fastest SDPA backend with a right answer, in a CUDA graph, over ours.
    """
    at_least(1, cases=cases, rounds=rounds)
    at_least(0, seed=seed)
    clock = CudaClock()
    recorded.layers()  # before the first case, because packages may be missing
    environment = describe(clock.device)
    kept = CasesFile(folder, {"seed": seed, "rounds": rounds}, environment)

    drawn = {case.name: case for case in (draw_case(seed, index) for index in range(cases))}

    def use_device() -> None:
        """Raise if a case has broken the device."""
        torch.ones(1, device=clock.device).sum().item()

    with torch.inference_mode():
        records = kept.fill(
            list(drawn), lambda name: measure(drawn[name], clock, rounds), minutes, progress, use_device
        )
    settings = {"cases": cases, "seed": seed, "rounds": rounds}
    verdict = judge(records, cases)
    note = named_here("measured", clock.device)
    return {"note": note, "environment": environment, "settings": settings, "gate": verdict, "records": records}


def measure(
    case: SpeedCase,
    clock: Clock,
    rounds: int,
    ours: Implementation = DEFAULT,
    peers: Sequence[Implementation] = PEERS,
    last: Implementation = MATH,
    others: Sequence[Implementation] = OTHERS,
) -> Record:
    """Return the record of a case; `last` is a peer that is timed only where no other has a right answer.

    `others` are timed beside, and never count as the peer.
    """
    described = {"kind": "decode" if case.decode else "prefill", "padded": case.padded, "data": case.data}
    record: Record = {"case": case.name, "shape": case.shape, **described, "status": OK, "why": ""}
    try:
        inputs = case.inputs(clock.device)
        accuracy = Gate(case, inputs)
    except Exception as error:  # out of memory, or the device has failed
        return record | {"status": NOT_RUN, "why": f"inputs and FP64 truth: {output.error_line(error)}"}
    eager: dict[str, Call] = {}  # of those that also run in a CUDA graph
    graphs: dict[str, Call] = {}

    def enter_both(each: Implementation) -> Record:
        entered, call = enter(case, each, inputs, accuracy, clock)
        captured, graph = in_graph(entered, call, clock)
        if call and graph:
            eager[each.name], graphs[each.name] = call, graph
        return captured

    own = enter_both(ours)
    if ours.name not in graphs:
        return record | {name: own[name] for name in ("status", "why", "rmse", "rmse_limit") if name in own}
    made = [enter_both(each) for each in peers]
    if not graphs.keys() & {each.name for each in peers}:
        made.append(enter_both(last))
    rivals = [each for each in made if each["implementation"] in graphs]
    if not rivals:
        why = "; ".join(f"{each['implementation']}: {each['why']}" for each in made)
        return record | {"status": NO_PEER, "why": why}
    beside = {each.name: enter_both(each) for each in others}
    try:
        return record | _compare(clock, own, rivals, beside, eager, graphs, rounds)
    except Exception as error:  # the calls ran before, so the device has failed
        return record | {"status": NOT_RUN, "why": f"while timed: {output.error_line(error)}"}


def _compare(
    clock: Clock,
    own: Record,
    rivals: Sequence[Record],
    beside: Mapping[str, Record],
    eager: Mapping[str, Call],
    graphs: Mapping[str, Call],
    rounds: int,
) -> Record:
    """Return times and ratio of our call and the fastest peer in CUDA graphs, and the same of their eager calls."""
    times, _ = interleave(clock, graphs, rounds)
    us = {name: 1e3 * summary(each)["median_ms"] for name, each in times.items()}
    ours, fastest = own["implementation"], min(rivals, key=lambda each: us[each["implementation"]])
    peer = fastest["implementation"]
    both = {name: eager[name] for name in (ours, peer)}
    waiting, _ = interleave(clock, both, rounds, cold=False)  # a read before each call would hide the host's time
    host_us = host_times(clock, both, rounds)
    return {
        "ratio": ratio(times[ours], times[peer]),
        "us": us[ours],
        "peer": peer,
        "variant": fastest["variant"],
        "peer_us": us[peer],
        "eager_ratio": ratio(waiting[ours], waiting[peer]),
        "host_us": statistics.median(host_us[ours]),
        "peer_host_us": statistics.median(host_us[peer]),
        "added_host_us": statistics.median(a - b for a, b in zip(host_us[ours], host_us[peer], strict=True)),
        "rmse": own["rmse"],
        "rmse_limit": own["rmse_limit"],
        "others": {name: us.get(name) for name in beside},
        "others_why": {name: each["why"] for name, each in beside.items() if each["why"]},
    }


def host_times(clock: Clock, calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return what the host takes to enqueue each call, in microseconds, by rounds of random order.

    Readings of two calls that are taken seconds apart differ by more than the gate allows.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in Random(turn).sample(list(calls), len(calls)):
            taken[name].append(clock.host_us(calls[name]))
    return taken


def judge(records: Sequence[Record], cases: int) -> dict[str, Any]:
    """Return the gate: right answers, the distribution of the ratios, the host time added to any call, no case left."""
    ratios = sorted(each["ratio"] for each in records if "ratio" in each)
    found = {"median": quantile(ratios, 0.5), "percentile": quantile(ratios, 0.01)} if ratios else {}
    checks = {
        "every case": len(records) == cases,
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
