"""Draws cases, runs them on one backend, judges them."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeAlias

import torch
from torch import Tensor

import pasa
from pasa.eval.kit.device import describe
from pasa.eval.random_calls.soak import judge
from pasa.eval.random_calls.soak.cases import REPEAT_EVERY, Inputs, SoakCase, draw_case, make_inputs
from pasa.eval.random_calls.soak.judge import Result
from pasa.eval.random_calls.soak.layouts import HEADS_LAST
from pasa.eval.random_calls.soak.masks import visible
from pasa.eval.random_calls.soak.order import find_moved
from pasa.eval.random_calls.soak.surroundings import pinned_tile, poison
from pasa.eval.random_calls.soak.truth import find_truth, plain
from pasa.eval.speed.parts import one_line

SCHEMA = 1
NOTE = "random calls on the device named here; nothing was run on an NPU"
REFERENCE, TRITON = "reference", "triton"
COUNTED = ("group", "data", "values", "mask", "garbage", "dtype", "layout", "recovery", "accumulate", "dim")
Progress: TypeAlias = Callable[[int, int, str], None]
Record: TypeAlias = dict[str, Any]


def run_soak(
    cases: int = 2000,
    seed: int = 0,
    backend: str = TRITON,
    only: int | None = None,
    small: bool = False,
    jobs: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Judge random calls on the current CUDA device, or on the CPU without one.

    Parameters
    ----------
    cases : int
        How many; indices count from 0.
    seed : int
    backend : str
        One of `pasa.backends()`.
    only : int, optional
        The index of the one case to run.
    small : bool
        Sizes for Triton's interpreter.
    jobs : int
        Processes to share the families: each compiles kernels of its own, which takes most of the time.
    progress : callable, optional
        Called with (done, total, what comes next or is done).

    Returns
    -------
    dict
        JSON-able: ``counts`` by kind, ``worst`` ratio to every bound and its case, all ``failures``, ``gate``, and with
        `only` that ``case`` and its numbers.

    Raises
    ------
    ValueError
        For fewer than one case or job, a negative index or an unknown backend.
    NotImplementedError
        If the backend cannot run here.
    """
    for name, value, least in (("cases", cases, 1), ("jobs", jobs, 1), ("seed", seed, 0), ("only", only, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    _check_backend(backend)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    drawn = [draw_case(seed, index, small) for index in ([only] if only is not None else range(cases))]
    run = _judge(drawn, backend, progress) if jobs == 1 else _judge_in_processes(drawn, backend, jobs, progress)
    records = sorted(run, key=lambda record: record["index"])
    what = {
        "backend": backend,
        "seed": seed,
        "cases": len(drawn),
        "small": small,
        "jobs": jobs,
        "repeat_every": REPEAT_EVERY,
    }
    result = {"schema": SCHEMA, "experiment": "soak", "note": NOTE, "environment": describe(device), "duration_s": 0.0}
    result |= what | conclude(drawn, records)
    if only is not None:
        result["case"] = records[0]
    return result | {"duration_s": round(time.perf_counter() - started, 1)}


def _judge(drawn: Sequence[SoakCase], backend: str, progress: Progress | None = None) -> Iterator[Record]:
    """Run cases one after the other, until a kernel breaks the device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for done, case in enumerate(drawn):
        if progress is not None:
            progress(done, len(drawn), f"{case.index}: {case.family.name}, {case.data}")
        with torch.inference_mode():
            record = run_case(case, backend, device)
        yield record
        if record["fatal"]:
            return


def _judge_in_processes(
    drawn: Sequence[SoakCase], backend: str, jobs: int, progress: Progress | None
) -> Iterator[Record]:
    """Likewise, a family to a process; the end as soon as one has broken the device."""
    families = defaultdict(list)
    for case in drawn:
        families[case.family].append(case)
    wide_first = sorted(families, key=lambda family: -family.dim)  # they take longest to compile
    done = 0
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:  # a fork shares the device's state
        futures = {pool.submit(_judge_alone, families[family], backend): family for family in wide_first}
        for future in as_completed(futures):
            try:
                records = future.result()
            except BrokenProcessPool as error:  # a process died and took the others with it; what they told is kept
                records = [describe_failed(families[futures[future]][0], error) | {"fatal": True}]
            yield from records
            done += len(records)
            if progress is not None:
                progress(done, len(drawn), records[-1]["family"])
            if records[-1]["fatal"]:
                pool.shutdown(cancel_futures=True)
                return


def _judge_alone(drawn: Sequence[SoakCase], backend: str) -> list[Record]:
    """What one of several processes does."""
    torch.set_num_threads(1)
    return list(_judge(drawn, backend))


def _check_backend(name: str) -> None:
    known = {status.name: status for status in pasa.backends()}
    if name not in known:
        raise ValueError(f"backend={name!r} is not one of {sorted(known)}")
    if not known[name].available:
        raise NotImplementedError(f"backend {name} cannot run here: {known[name].reason}")


def conclude(drawn: Sequence[SoakCase], records: Sequence[Record]) -> dict[str, Any]:
    """Counts, the worst number of every bound, failures and the verdict."""
    worst: dict[str, dict[str, Any]] = {}
    for record in records:
        for name, value in record["measures"].items():
            entry = worst.setdefault(name, {"value": 0.0, "index": None, "judged": 0})
            entry["judged"] += 1
            if entry["index"] is None or not value <= entry["value"]:
                entry |= {"value": value, "index": record["index"]}
    failed = [record for record in records if record["failed"]]
    counts = {name: dict(Counter(str(record[name]) for record in records).most_common()) for name in COUNTED}
    stopped = len(records) < len(drawn)
    verdict = {"passed": not failed and not stopped, "failed": len(failed), "run": len(records), "stopped": stopped}
    ordered = {name: worst[name] for name in judge.WHAT if name in worst}
    return {"gate": verdict, "worst": ordered, "counts": counts, "failures": failed}


def run_case(case: SoakCase, backend: str, device: torch.device) -> Record:
    """Description, numbers, and the names of the bounds that do not hold."""
    try:
        measures = measure(case, make_inputs(case, device), backend)
    except Exception as error:  # whatever a kernel or its compiler raises is what the soak is for
        fatal = "CUDA error" in str(error) or isinstance(error, getattr(torch, "AcceleratorError", ()))
        return describe_failed(case, error) | {"fatal": fatal}
    failed = judge.failures(measures)
    return _describe(case) | {"measures": measures, "failed": failed}


def describe_failed(case: SoakCase, error: Exception) -> Record:
    """The record of a case that gave no numbers."""
    return _describe(case) | {"failed": ["raised"], "why": one_line(error)}


def _describe(case: SoakCase) -> Record:
    return case.describe() | {"group": case.family.group, "measures": {}, "failed": [], "why": "", "fatal": False}


def measure(case: SoakCase, inputs: Inputs, backend: str) -> dict[str, float]:
    """Run a case, twice if it is to be repeated, and judge it."""
    found = call(case, inputs, backend)
    whole = plain(case, inputs)
    truth = find_truth(whole)
    wrong = found.out.shape != truth.out.shape or found.lse.shape != truth.lse.shape
    wrong = wrong or found.out.dtype != inputs.q.dtype or found.lse.dtype != torch.float32
    if wrong:
        return {"shape": 1.0}
    measures = {"shape": 0.0} | judge.judge(case, truth, found, backend == REFERENCE)
    if case.repeated:
        measures["repeat"] = judge.differing(found, call(case, inputs, backend))
    if backend != REFERENCE and _comparable(case):
        emulated = emulate(case, inputs)
        measures |= judge.compare(case, truth, found, emulated, None)
        if judge.failures(measures):  # what takes longer than the call is asked only where it is needed
            measures |= judge.compare(case, truth, found, emulated, find_moved(whole, truth))
    return measures


def _comparable(case: SoakCase) -> bool:
    """Whether its error may be held against the emulation's."""
    return case.emulated and case.garbage == "none" and case.ordinary


def call(case: SoakCase, inputs: Inputs, backend: str) -> Result:
    """Attention and its log-sum-exp, (B, H, S, ...)."""
    family = case.family
    config = pasa.PasaConfig(recovery=family.recovery, accumulate=family.accumulate, block_k=family.block_k)
    with pinned_tile(family.tile), poison(case.poisoned):
        if inputs.cu_q is not None and inputs.cu_k is not None:
            out, lse = pasa.attention_varlen(
                inputs.q, inputs.k, inputs.v, inputs.cu_q, inputs.cu_k, max(case.rows), max(case.keys),
                is_causal=family.causal, scale=case.scale, return_lse=True, config=config, backend=backend,
            )  # fmt: skip
            return Result(out.transpose(0, 1).unsqueeze(0), lse.T.unsqueeze(0))
        layout = "NHD" if family.layout == HEADS_LAST else "HND"
        out, lse = pasa.attention(
            inputs.q, inputs.k, inputs.v, attn_mask=inputs.mask, is_causal=family.causal, scale=case.scale,
            tensor_layout=layout, return_lse=True, config=config, backend=backend,
        )  # fmt: skip
    return Result(out.transpose(1, 2) if layout == "NHD" else out, lse)


def emulate(case: SoakCase, inputs: Inputs) -> Result:
    """The reference. Exact outputs of the kernels are summed in FP32 with either `accumulate`. It removes keys that no
    query sees, so that its blocks hold other keys than a kernel's, and the published recovery errs otherwise: one more
    query, which sees every key, keeps them in."""
    if case.family.recovery == "exact":
        wide = dataclasses.replace(case.family, accumulate="fp32")
        return call(dataclasses.replace(case, family=wide), inputs, REFERENCE)
    if inputs.mask is None:
        return call(case, inputs, REFERENCE)
    call_as = plain(case, inputs)
    q, k, mask = call_as.q, call_as.k, call_as.mask
    seen = visible(mask, call_as.causal, 0, q.shape[2], k.shape[2], k.shape[2] - q.shape[2], q.device)
    shape = (*q.shape[:3], k.shape[2])
    added = torch.zeros((), device=q.device) if mask is None or mask.dtype == torch.bool else mask.float()
    full = added.expand(shape).masked_fill(~seen.expand(shape), -torch.inf)
    full = torch.cat([full, torch.zeros_like(full[:, :, :1])], 2)
    config = pasa.PasaConfig(recovery="paper", accumulate=case.family.accumulate, block_k=case.family.block_k)
    tensors: list[Tensor] = [x.to(inputs.q.dtype) for x in (torch.cat([q, q[:, :, :1]], 2), k, call_as.v)]
    out, lse = pasa.attention(*tensors, attn_mask=full, return_lse=True, config=config, backend=REFERENCE)
    return Result(out[:, :, :-1], lse[:, :, :-1])
