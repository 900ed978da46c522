"""Capture a call in a graph of torch_npu."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WARM_CALLS = 3  # before a capture


def captured(run: Callable[[], Tensor], device: str) -> tuple[Callable[[], None], Tensor]:
    """Return a function that repeats the call, and the tensor that it writes to.

    RuntimeError if torch_npu says that a capture is going on before there is one.
    """
    npu = getattr(torch, torch.device(device).type)
    if npu.is_current_stream_capturing():
        raise RuntimeError("is_current_stream_capturing() is true outside of a capture")
    stream = npu.Stream()
    stream.wait_stream(npu.current_stream())
    with npu.stream(stream):
        for _ in range(WARM_CALLS):
            run()
    npu.current_stream().wait_stream(stream)
    npu.synchronize()
    graph = npu.NPUGraph()
    with npu.graph(graph):
        out = run()
    return graph.replay, out
