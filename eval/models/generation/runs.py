"""A model under one attention, and the moments at which `generate` of transformers has its tokens."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import pasa
from pasa.eval.kit.timing import now

PASA, SDPA = "pasa", "sdpa"
PLAIN, COMPILED = "plain", "compiled"
MOST_VERSIONS = 64  # of a compiled function


@dataclass(frozen=True)
class Attention:
    """An attention of a model: transformers' name, what surrounds a call, and whether the model is patched."""

    implementation: str
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    patched: bool = False


ATTENTIONS = {
    PASA: Attention("sdpa", patched=True),
    SDPA: Attention("sdpa"),
    "sdpa-flash": Attention("sdpa", partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)),
    "sdpa-cudnn": Attention("sdpa", partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)),
    "eager": Attention("eager"),
}
WAYS: dict[str, dict[str, Any]] = {PLAIN: {}, COMPILED: {"cache_implementation": "static"}}
"""Options of `generate`: with a static cache, transformers compiles the model for decoding."""


class Marks:
    """A logits processor that notes when the logits of each step are there, and changes nothing.

    `on_step` is called with the number of each step, 0 for the prompt.
    """

    def __init__(self, device: torch.device, on_step: Callable[[int], None] | None = None) -> None:
        self.device, self.on_step = device, on_step
        self.host: list[float] = []
        self.events: list[torch.cuda.Event] = []

    def note(self) -> None:
        """Note the time of the host, and of the device when it is here."""
        self.host.append(time.perf_counter())
        if self.device.type == "cuda":
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note a step."""
        self.note()
        if self.on_step is not None:
            self.on_step(len(self.host) - 2)
        return scores

    def host_ms(self) -> list[float]:
        """Return the milliseconds between the host's marks."""
        return [1e3 * (b - a) for a, b in zip(self.host, self.host[1:], strict=False)]

    def ms(self) -> list[float]:
        """Return the milliseconds between the device's marks; on a CPU, which waits for nobody, those of the host."""
        pairs = zip(self.events, self.events[1:], strict=False)
        return [a.elapsed_time(b) for a, b in pairs] if self.events else self.host_ms()


@dataclass(frozen=True)
class Prompts:
    """Token ids (B, S) and the mask of their padding (B, S), whose rows begin with 0 where they are padded."""

    ids: Tensor
    mask: Tensor

    @classmethod
    def draw(cls, batch: int, tokens: int, padded: bool, vocabulary: int, device: torch.device) -> Prompts:
        """Draw ids; with `padded`, up to half of each row but the first is padding, at the left."""
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(vocabulary, (batch, tokens), generator=generator)
        padding = torch.randint(tokens // 2 + 1, (batch,), generator=generator) * padded
        padding[0] = 0
        mask = (torch.arange(tokens) >= padding[:, None]).long()
        return cls(ids.to(device), mask.to(device))


@dataclass
class Run:
    """A model that generates with one attention in one way; its parameters are shared with all other runs."""

    model: Any
    attention: Attention
    way: str

    @classmethod
    def of(cls, original: Any, attention: str, way: str) -> Run:
        """Return a run on a copy of a model that shares its parameters and buffers."""
        made = ATTENTIONS[attention]
        shared = {id(tensor): tensor for tensor in (*original.parameters(), *original.buffers())}
        model = copy.deepcopy(original, shared)
        model.set_attn_implementation(made.implementation)
        if made.patched:
            pasa.patch_pipeline(model)
        return cls(model, made, way)

    def generate(self, prompts: Prompts, tokens: int, marks: Marks, **options: Any) -> Any:
        """Write so many tokens greedily, and wait for the device."""
        with self.attention.scope(), _many_versions(self.way):
            now(prompts.ids.device)
            marks.note()
            made = self.model.generate(
                input_ids=prompts.ids,
                attention_mask=prompts.mask,
                do_sample=False,
                max_new_tokens=tokens,
                pad_token_id=0,
                logits_processor=[marks],
                **WAYS[self.way],
                **_compile_options(self.way, prompts.ids.device),
                **options,
            )
            now(prompts.ids.device)
        return made

    def first(self, prompts: Prompts, tokens: int, marks: Marks, **options: Any) -> Any:
        """Generate for the first time; raise RuntimeError if the model should have been compiled and was not.

        Code that torch has compiled for one backend of SDPA runs for the others as well, since no guard asks for it.
        """
        if self.way == COMPILED and self.attention.scope is not nullcontext:
            raise NotImplementedError("compiled code keeps the backend of SDPA for which it was compiled first")
        before = compiled_graphs()
        made = self.generate(prompts, tokens, marks, **options)
        if self.way == COMPILED and compiled_graphs() == before:
            raise RuntimeError("generate compiled nothing, although the cache is static")
        return made


def _compile_options(way: str, device: torch.device) -> dict[str, Any]:
    """Return what makes transformers compile on a CPU, where it does not by itself; graphs are only traced there."""
    if way == PLAIN or device.type != "cpu":
        return {}
    from transformers import CompileConfig

    config = CompileConfig(backend="eager", mode="default")
    config._compile_all_devices = True
    return {"compile_config": config}


@contextmanager
def _many_versions(way: str) -> Iterator[None]:
    """Let torch compile a version for every attention: all run the same functions, and beyond 8 it compiles none."""
    if way == PLAIN:
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=MOST_VERSIONS):
        yield


def forget_compiled() -> None:
    """Drop all compiled code."""
    import torch._dynamo

    torch._dynamo.reset()


def compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    import torch._dynamo

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
