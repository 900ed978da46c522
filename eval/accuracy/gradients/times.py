"""Time of forward and backward on a CUDA device beside torch's flash attention, and of every kernel of ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pasa
from pasa.eval.kit.timing import Call, Clock, Rounds, interleave, ratio, summary
from pasa.eval.speed.cases import SpeedCase
from pasa.eval.speed.implementations import FLASH

OURS = "pasa"
PARTS = {"forward": 1.0, "forward + backward": 3.5}  # of `SpeedCase.flops`: two products forward, five backward
PROFILED = 5  # calls
NAME_LENGTH = 60  # of a kernel: templates of torch's go on for lines
Record = dict[str, Any]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SHAPES = (
    SpeedCase("4x12x1024x64", 4, 12, 12, 1024, 1024, 64, causal=True),
    SpeedCase("1x28x8192x128", 1, 28, 28, 8192, 8192, 128, causal=True),
    SpeedCase("1x28/4x8192x128", 1, 28, 4, 8192, 8192, 128, causal=True),
)


def calls(shape: SpeedCase, device: torch.device) -> dict[str, dict[str, Call]]:
    """Return what is timed, by part and implementation."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = shape.inputs(device)
    grad = torch.randn_like(inputs.q)
    grouped = shape.heads != shape.kv_heads

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return pasa.attention(q, k, v, is_causal=True, backend="triton")

    def forward(attend: Attend, tensors: list[Tensor], _: Tensor) -> Tensor:
        with torch.no_grad():
            return attend(tensors[0], tensors[1], tensors[2])

    def both(attend: Attend, tensors: list[Tensor], grad: Tensor) -> Tensor:
        return torch.autograd.grad(attend(tensors[0], tensors[1], tensors[2]), tensors, grad)[0]

    def call(function: Callable[..., Tensor], attend: Attend, scope: Any = nullcontext) -> Call:
        copy = inputs.copy()  # a peer may write into its inputs
        copies = [x.requires_grad_() for x in (copy.q, copy.k, copy.v)]
        return Call(partial(function, attend, copies, grad.clone()), scope)

    scope = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
    return {
        part: {OURS: call(function, ours), FLASH: call(function, flash, scope)}
        for part, function in zip(PARTS, (forward, both), strict=True)
    }


def measure(
    clock: Clock,
    rounds: int,
    profile: Callable[[Call], list[Record]],
    progress: Callable[[int, str], None],
) -> dict[str, list[Record]]:
    """Time all shapes eagerly and in CUDA graphs, and the kernels of a forward and backward pass of ours."""
    times: list[Record] = []
    kernels: list[Record] = []
    for index, shape in enumerate(SHAPES):
        progress(index, shape.name)
        for part, eager in calls(shape, clock.device).items():
            graphed = {name: clock.graph(call) for name, call in eager.items()}
            host = {name: round(clock.host_us(call)) for name, call in eager.items()}
            for how, timed in (("eager", eager), ("graph", graphed)):
                taken_by, _ = interleave(clock, timed, rounds)
                times += [
                    {"shape": shape.name, "part": part, "how": how, "implementation": name}
                    | _numbers(taken, taken_by[FLASH], PARTS[part] * shape.flops)
                    | ({"host_us": host[name]} if how == "eager" else {})
                    for name, taken in taken_by.items()
                ]
            if part == list(PARTS)[-1]:
                kernels += [{"shape": shape.name} | each for each in profile(eager[OURS])]
    return {"times": times, "kernels": kernels}


def _numbers(taken: Rounds, flash: Rounds, flops: float) -> dict[str, float]:
    times = summary(taken)
    return times | {"tflops": flops / times["median_ms"] * 1e-9, "to_flash": ratio(taken, flash)}


def kernel_times(call: Call) -> list[Record]:
    """Return milliseconds per call of each kernel and its launches, the longest first; empty without a profiler."""
    from torch.profiler import ProfilerActivity, profile

    call.run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            call.run()
        torch.cuda.synchronize()
    records = [
        {
            "kernel": each.key[:NAME_LENGTH],
            "ms": each.self_device_time_total / PROFILED * 1e-3,
            "launches": each.count / PROFILED,
        }
        for each in profiled.key_averages()
        if each.device_type.name == "CUDA" and each.self_device_time_total > 0
    ]
    return sorted(records, key=lambda record: -record["ms"])
