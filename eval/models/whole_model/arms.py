"""The language models that are run, and the ways in which they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import pasa
from pasa.eval.kit.embedded_model import load_model, require_built_in
from pasa.eval.kit.gemma_model import load_gemma, require_gemma
from pasa.eval.kit.residual_fixture import amplify_residual
from pasa.eval.models.to_fp16.run import run_to_fp16

AMPLIFICATION = 16
"""SmolLM2's residual stream reaches 25,487; times 16 it is beyond 4 x 65504 in 17 of 30 layers."""


@dataclass(frozen=True)
class Subject:
    """A language model: its title, what loads it, what its installation lacks, and whether it overflows FP16."""

    title: str
    load: Callable[[], tuple[Any, Any]]
    require: Callable[[], None]
    overflows: bool


def load_amplified() -> tuple[Any, Any]:
    """Return SmolLM2 with a residual stream that FP16 cannot hold, and its tokenizer."""
    model, tokenizer = load_model()
    return amplify_residual(model, AMPLIFICATION), tokenizer


def require_smollm2() -> None:
    """Raise FileNotFoundError with the command that installs SmolLM2."""
    require_built_in(model=True, text=False)


SUBJECTS = {
    "gemma": Subject("Gemma-3-270m", load_gemma, require_gemma, overflows=True),
    "smollm2": Subject("SmolLM2-135M-Instruct", load_model, require_smollm2, overflows=False),
    "amplified": Subject(
        f"SmolLM2-135M-Instruct, residual stream times {AMPLIFICATION}", load_amplified, require_smollm2, overflows=True
    ),
}


@contextmanager
def patched(model: Any, _: Any) -> Iterator[Any]:
    """Yield the model in FP16, with attention that cannot overflow."""
    with pasa.patch_pipeline(model.half()):
        yield model


@contextmanager
def converted(model: Any, _: Any) -> Iterator[Any]:
    """Yield the model as `pasa.to_fp16` converts it."""
    pasa.to_fp16(model)
    yield model


@contextmanager
def written(model: Any, tokenizer: Any) -> Iterator[Any]:
    """Yield what transformers alone loads from the folder that `pasa to-fp16` writes."""
    with TemporaryDirectory() as folder:
        source, out = Path(folder, "fp32"), Path(folder, "fp16")
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        run_to_fp16(str(source), str(out), skip_check=True)
        yield type(model).from_pretrained(out, dtype=torch.float16).eval().to(model.device)


@dataclass(frozen=True)
class Arm:
    """A way to run a model: its title in tables, and a context that turns an FP32 model and its tokenizer into it."""

    title: str
    prepare: Callable[[Any, Any], Any]


REFERENCE, BF16, CONVERTED, WRITTEN = "fp32", "bf16", "to-fp16", "written"
UNCONVERTED = ("fp16", "fp16-patched")
ARMS = {
    REFERENCE: Arm("FP32", lambda model, _: nullcontext(model)),
    BF16: Arm("BF16", lambda model, _: nullcontext(model.bfloat16())),
    "fp16": Arm("FP16, as it is", lambda model, _: nullcontext(model.half())),
    "fp16-patched": Arm("FP16, patched attention", patched),
    CONVERTED: Arm("FP16, pasa.to_fp16", converted),
    WRITTEN: Arm("FP16, written by pasa to-fp16", written),
}
