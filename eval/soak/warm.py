"""Compiles what the cases need in several processes at once; Triton keeps it on disk for the run that follows."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from pasa.eval.soak.cases import draw_case, make_inputs
from pasa.eval.soak.families import draw_families
from pasa.eval.soak.run import TRITON, Progress, call


def warm_up(cases: int, seed: int, jobs: int, small: bool = False, progress: Progress | None = None) -> int:
    """Run every case once, unjudged, families shared out over `jobs` processes; how many ran."""
    families = draw_families(seed)
    order = sorted(range(len(families)), key=lambda number: -families[number].dim)  # wide ones take longest
    context = multiprocessing.get_context("spawn")  # a fork would share the device's state
    ran = 0
    with ProcessPoolExecutor(jobs, context) as pool:
        futures = [pool.submit(warm_family, cases, seed, small, number) for number in order]
        for done, future in enumerate(as_completed(futures)):
            ran += future.result()
            if progress is not None:
                progress(done + 1, len(order), "compiling")
    return ran


def warm_family(cases: int, seed: int, small: bool, number: int) -> int:
    """Run the cases of one family; how many ran."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = draw_families(seed)[number].name
    ran = 0
    for index in range(cases):
        case = draw_case(seed, index, small)
        if case.family.name != name:
            continue
        try:
            with torch.inference_mode():
                call(case, make_inputs(case, device), TRITON)
            ran += 1
        except Exception:  # the run that follows raises it again, and tells
            continue
    return ran
