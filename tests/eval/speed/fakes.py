"""A clock without a device, and implementations that run on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pasa
from pasa.eval.kit.timing import Call
from pasa.eval.speed.cases import Inputs, SpeedCase
from pasa.eval.speed.implementations import Implementation

SPEED = {"sdpa-cudnn": 2.0, "sdpa-flash": 5.0, "pasa": 1.6, "triton-fp32": 2.5, "pasa-portable": 2.2}
TINY = SpeedCase("tiny", 1, 4, 2, 150, 150, 32, causal=True, graphed=True)
TINY_DECODE = SpeedCase("decode", 1, 4, 2, 3, 300, 32, decode=True)
TINY_BIASED = dataclasses.replace(TINY, name="tiny+constant", data="constant", graphed=False)


class Timed:
    """A function with its duration."""

    def __init__(self, function: Callable[[], Tensor], milliseconds: float) -> None:
        self.function, self.milliseconds = function, milliseconds

    def __call__(self) -> Tensor:
        return self.function()


class FakeClock:
    """A clock that takes each call's duration from the call itself; keeps a log."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.log: list[tuple[Any, int, bool]] = []

    def times(self, call: Call, count: int, cold: bool) -> list[float]:
        with call.scope():
            call.run()
        self.log.append((call.run, count, cold))
        # The first call of a turn is slow: it must not count.
        return [100.0, *[getattr(call.run, "milliseconds", 1.0)] * (count - 1)]

    def host_us(self, call: Call) -> float:
        return 30.0

    def workspace(self, call: Call) -> int:
        return 1000

    def graph(self, call: Call) -> Call:
        return dataclasses.replace(call, run=Timed(call.run, getattr(call.run, "milliseconds", 1.0) / 2))


def implementation(
    name: str, config: pasa.PasaConfig, alter: Callable[[Tensor], Tensor] = lambda out: out
) -> Implementation:
    """The reference backend under another name."""

    def attend(inputs: Inputs) -> Tensor:
        q, k, v = inputs.q, inputs.k, inputs.v
        return alter(pasa.attention(q, k, v, **inputs.visibility, config=config, backend="reference"))

    def prepare(inputs: Inputs) -> dict[str, Call]:
        return {
            "slow": Call(Timed(lambda: attend(inputs), 10 * SPEED.get(name, 1.0))),
            "fast": Call(Timed(lambda: attend(inputs), SPEED.get(name, 1.0))),
        }

    return Implementation(name, f"{name}, emulated", prepare, config, shifted=config.precision == "pasa")


def refuse(inputs: Inputs) -> dict[str, Call]:
    """A backend that cannot run."""
    raise RuntimeError("No available kernel.\nAborting execution.")


def absent(inputs: Inputs) -> dict[str, Call]:
    """A package that is not there."""
    raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")


FP32 = pasa.PasaConfig(precision="fp32")
ENTRANTS = (
    implementation("sdpa-cudnn", FP32),
    implementation("sdpa-flash", FP32),
    Implementation("sdpa-efficient", "", refuse),
    Implementation("flash-attn", "", absent),
    implementation("pasa", pasa.PasaConfig()),
    implementation("pasa-paper", pasa.PasaConfig(recovery="paper"), lambda out: out + 0.1),
    implementation("pasa-portable", pasa.PasaConfig()),
)
BANDWIDTH = 1e9
