"""The ways in which a model is run: in which precision its weights are, and what surrounds a call."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import pasa
from pasa.eval.kit.memory import added_peak, held_bytes
from pasa.eval.models.whole_model_speed.subjects import SAMPLE_SEED, Phases, Record, Subject
from pasa.fp16 import counting

NEVER = 2**62
REFERENCE, BF16, FP16, PATCHED = "fp32", "bf16", "fp16", "fp16-patched"
SOUND, SOUND_PATCHED, CONVERTED, COUNTING = "sound", "sound-patched", "to-fp16", "to-fp16-counting"


@dataclass
class Prepared:
    """A model in some precision: the bytes that it holds on the device, and what its preparation says."""

    model: Any
    held: int | None = None
    record: Record = field(default_factory=dict)


def cast(model: Any, dtype: torch.dtype, wide: tuple[str, ...] = ()) -> Any:
    """Round the parameters, as `from_pretrained` does; those with `wide` in their names become FP32.

    Buffers keep their precision, such as the frequencies of rotary embeddings, which no checkpoint holds.
    """
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if set(wide) & set(name.split(".")) else dtype)
    return model


def prepare(name: str, original: Any, subject: Subject, device: torch.device) -> Prepared:
    """Return a copy of the original in the precision `name`.

    Peaks are measured on an input that is not timed. Only so can a value of the timed ones pass the margin.
    """
    before = held_bytes(device)
    if name == CONVERTED:
        sample = subject.sample(subject.inputs(original, SAMPLE_SEED))
        with added_peak(device) as peak:
            prepared = Prepared(copy.deepcopy(original))
            started = time.perf_counter()
            handle = pasa.to_fp16(prepared.model, sample)
            seconds = time.perf_counter() - started
        prepared.record = {"seconds": seconds, "peak_bytes": peak.bytes, "handle": handle}
    else:
        prepared = Prepared(copy.deepcopy(original))
        PRECISIONS[name](prepared.model)
    gc.collect()
    after = held_bytes(device)
    prepared.held = None if after is None or before is None else after - before
    return prepared


def patched(model: Any) -> None:
    """Round the parameters to FP16, and patch attention."""
    pasa.patch_pipeline(cast(model, torch.float16))


PRECISIONS: dict[str, Callable[[Any], Any]] = {
    REFERENCE: partial(cast, dtype=torch.float32),
    BF16: partial(cast, dtype=torch.bfloat16),
    FP16: partial(cast, dtype=torch.float16),
    PATCHED: patched,
    SOUND: partial(cast, dtype=torch.float16),
    SOUND_PATCHED: patched,
    "fp16-wo": partial(cast, dtype=torch.float16, wide=("wo",)),
}


def memory(prepared: Prepared, run: Callable[[], object], device: torch.device) -> int | None:
    """Return the bytes of a model and of what a run of it allocates; None without a GPU."""
    with added_peak(device) as peak:
        run()
    return None if peak.bytes is None or prepared.held is None else prepared.held + peak.bytes


@contextmanager
def counting_every(passes: int) -> Iterator[None]:
    """Let scaled models compare values with the margin in one forward pass of this many."""
    saved, counting.EVERY = counting.EVERY, passes
    try:
        yield
    finally:
        counting.EVERY = saved


def upcast(run: Callable[..., Phases], model: Any, *arguments: Any) -> Phases:
    """Convert a model to FP32 for a run and back, as the pipelines of diffusers do with `force_upcast`."""
    phases = list(run(cast(model, torch.float32), *arguments))
    cast(model, torch.float16)
    yield from phases


def as_it_is(run: Callable[..., Phases], *arguments: Any) -> Phases:
    """Run the model."""
    return run(*arguments)


@dataclass(frozen=True)
class Arm:
    """A way to run a model.

    Attributes
    ----------
    title : str
    precision : str
        Name of the prepared model.
    every : int
        Values are compared with the margin in one forward pass of this many.
    call : callable
        Calls the subject's `run` with its arguments.
    judged, timed : bool
        Whether results are compared with FP32's, and whether time and memory are measured. Infinities change the time
        of attention that computes rows again, so that a model that overflows is no measure of time.
    """

    title: str
    precision: str
    every: int = NEVER
    call: Callable[..., Phases] = as_it_is
    judged: bool = True
    timed: bool = True


ARMS = {
    REFERENCE: Arm("FP32", REFERENCE),
    BF16: Arm("BF16", BF16),
    FP16: Arm("FP16", FP16, timed=False),
    PATCHED: Arm("FP16, patched attention", PATCHED, timed=False),
    SOUND: Arm("FP16, smaller weights", SOUND, judged=False),
    SOUND_PATCHED: Arm("FP16, smaller weights, patched attention", SOUND_PATCHED, judged=False),
    CONVERTED: Arm("FP16, pasa.to_fp16", CONVERTED),
    COUNTING: Arm("the same, counting", CONVERTED, every=1, judged=False),
    "fp16-wo": Arm("FP16, wo in FP32 (transformers)", "fp16-wo"),
    "upcast": Arm("FP16, upcast to FP32 (diffusers)", FP16, call=upcast),
}
"""`SOUND` is the model before its weights were enlarged: plain FP16 that does not overflow, without hooks."""
COMMON = (REFERENCE, BF16, FP16, PATCHED, SOUND, SOUND_PATCHED, CONVERTED, COUNTING)
