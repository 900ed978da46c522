"""Times of one case: every attention generates in turn, in random order, after a run that is not counted."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch

from pasa.eval.kit.memory import added_peak
from pasa.eval.kit.output import error_line
from pasa.eval.kit.timing import Rounds, ratio, summary
from pasa.eval.models.generation.profiling import kernels
from pasa.eval.models.generation.runs import PASA, PLAIN, SDPA, Marks, Prompts, Run, compiled_graphs, forget_compiled

Record = dict[str, Any]
OK, FAILED, NOT_RUN = "ok", "failed gate", "not run"
LEAST_TURNS, MOST_SECONDS = 3, 120.0  # turns end after so many seconds, but not before so many of them
NEW_TURNS, NEW_TOKENS = 3, 4  # with prompts of lengths that are new to every attention, and so many tokens
PROMPT, TOKEN, NEW = "prompt", "token", "new_"


@dataclass(frozen=True)
class Case:
    """Prompts of a length in a batch, and the way in which they are answered."""

    tokens: int
    batch: int
    padded: bool
    way: str

    @property
    def name(self) -> str:
        """Return such as ``8192 x 8 padded, compiled``."""
        return f"{self.tokens} x {self.batch}{' padded' if self.padded else ''}, {self.way}"


@dataclass
class Times:
    """Milliseconds of one attention: a list for each turn, of the prompt and of each token after the first.

    `host` is the time after which the host has enqueued the prompt.
    """

    prompt: Rounds = field(default_factory=list)
    token: Rounds = field(default_factory=list)
    host: Rounds = field(default_factory=list)


def measure(case: Case, original: Any, attentions: Sequence[str], turns: int, new_tokens: int) -> Record:
    """Return the record of a case, with a record for each attention in ``runs``."""
    forget_compiled()
    prompts = Prompts.draw(case.batch, case.tokens, case.padded, original.config.vocab_size, original.device)
    runs: dict[str, Run] = {}
    records: dict[str, Record] = {}
    for name in attentions:
        records[name] = _warm(case, original, name, prompts, new_tokens, runs)
    compiled = compiled_graphs()
    times = take_turns(runs, lambda turn, place: prompts, turns, new_tokens)
    compiled = compiled_graphs() - compiled
    for name, own in times.items():
        records[name] |= _describe(own, times.get(SDPA))
    if case.way == PLAIN:
        longer = partial(_longer_prompts, case, original, new_tokens, len(runs))
        if PASA in runs:
            _compile_kinds_of_lengths(runs[PASA], case, longer(NEW_TURNS, 0).ids.shape[1])
        times_of_new = take_turns(runs, longer, NEW_TURNS, NEW_TOKENS)
        for name, own in times_of_new.items():
            described = _describe(own, times_of_new.get(SDPA))
            records[name] |= {NEW + key: each for key, each in described.items()}
    del runs
    forget_compiled()
    free(original.device)
    return {"case": case.name, **vars(case), "turns": _turns(times), "compiled_while_timed": compiled, "runs": records}


def _warm(case: Case, original: Any, name: str, prompts: Prompts, new_tokens: int, runs: dict[str, Run]) -> Record:
    """Let an attention generate twice: for its memory, and for the time of its kernels. Add its run, if it can run."""
    record: Record = {"status": OK, "why": ""}
    free(original.device)
    try:
        run = Run.of(original, name, case.way)
        with added_peak(original.device) as peak:
            run.first(prompts, new_tokens, Marks(original.device))
        record["added_bytes"] = peak.bytes
        entries = kernels(run, prompts, new_tokens)
        record["kernel_ms"] = 1e-3 * sum(each.us for each in entries) if original.device.type == "cuda" else None
        runs[name] = run
    except Exception as error:  # out of memory, or a backend of torch refuses a mask
        record |= {"status": NOT_RUN, "why": error_line(error)}
    return record


def _longer_prompts(case: Case, original: Any, new_tokens: int, runs: int, turn: int, place: int) -> Prompts:
    """Return prompts that are a little longer than in the other turns; no other call has keys of these lengths."""
    tokens = case.tokens + new_tokens + (turn * runs + place) * (NEW_TOKENS + 1)
    return Prompts.draw(case.batch, tokens, case.padded, original.config.vocab_size, original.device)


def _compile_kinds_of_lengths(run: Run, case: Case, least: int) -> None:
    """Let a run generate from prompts of at least so many tokens, until all its kernels are compiled.

    Triton compiles them once for lengths that are multiples of 16, once for other multiples of 4, and once for others.
    """
    config, device = run.model.config, run.model.device
    first = -(-least // 16) * 16
    for tokens in (first, first + 4, first + 9, first + 13):  # and the tokens after the last two have all kinds
        run.generate(
            Prompts.draw(case.batch, tokens, case.padded, config.vocab_size, device), NEW_TOKENS, Marks(device)
        )


def take_turns(
    runs: dict[str, Run], prompts_of: Callable[[int, int], Prompts], turns: int, new_tokens: int
) -> dict[str, Times]:
    """Let all runs generate in each turn, in random order, so that drift affects all alike.

    `prompts_of` returns the prompts of a turn and a place in its order.
    """
    times = {name: Times() for name in runs}
    started = time.monotonic()
    for turn in range(turns if runs else 0):
        if turn >= LEAST_TURNS and time.monotonic() - started > MOST_SECONDS:
            break
        for place, name in enumerate(Random(turn).sample(list(runs), len(runs))):
            prompts = prompts_of(turn, place)
            marks = Marks(prompts.ids.device)
            runs[name].generate(prompts, new_tokens, marks)
            prompt, *steps = marks.ms()
            times[name].prompt.append([prompt])
            times[name].token.append(steps)
            times[name].host.append(marks.host_ms()[:1])
    return times


def _turns(times: dict[str, Times]) -> int:
    return min((len(each.prompt) for each in times.values()), default=0)


def _describe(own: Times, base: Times | None) -> Record:
    """Return medians and quantiles in milliseconds, and ratios to the time of SDPA; those are medians of the turns'."""
    record: Record = {"prompt_host_ms": summary(own.host)["median_ms"]}
    for phase, ours, theirs in ((PROMPT, own.prompt, base and base.prompt), (TOKEN, own.token, base and base.token)):
        taken = summary(ours)
        record |= {f"{phase}_{name}": taken[name] for name in ("median_ms", "p20_ms", "p80_ms")}
        record[f"{phase}_ratio"] = ratio(theirs, ours) if theirs else None
    return record


def free(device: torch.device) -> None:
    """Return memory that nobody holds to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
