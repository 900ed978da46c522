"""Stands in for torch_npu: its headers while the library is built, and for a process that imports it an NPU whose
tensors are the CPU's.

FAKE_DEVIATION names one thing that this NPU does otherwise: here "capture", "alignment", "vendor_scores",
"vendor_masks" or "vendor_lse"; other names are those of tests/ascend_c/programs/fake_device.h.
"""

import contextlib
import dataclasses
import os
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVIATION = os.environ.get("FAKE_DEVIATION")
MASK_SIDE = 2048


def npu_fused_infer_attention_score(
    q, k, v, *, num_heads, num_key_value_heads, input_layout, scale, atten_mask=None, sparse_mode=0, inner_precise=0,
    softmax_lse_flag=False,
):  # fmt: skip
    """Attend as documented, with q.k stored in FP16 before it is scaled in FP32."""
    assert (num_heads, num_key_value_heads, input_layout) == (q.shape[1], k.shape[1], "BNSD")
    k, v = (x.float().repeat_interleave(num_heads // num_key_value_heads, 1) for x in (k, v))
    scores = (q.float() @ k.mT).half().float() * scale
    if inner_precise == 1 or DEVIATION == "vendor_scores":
        scores = scores.half().float()
    if sparse_mode == 2:
        assert atten_mask.shape == (MASK_SIDE, MASK_SIDE)
        atten_mask = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    if atten_mask is not None:
        scores = scores.masked_fill(atten_mask, -torch.inf)
    weights = scores.softmax(-1)
    if inner_precise == 2 and DEVIATION != "vendor_masks":
        weights = weights.nan_to_num(0.0)
    lse = scores.logsumexp(-1, keepdim=True)
    return (weights @ v).half(), lse.expand(-1, -1, -1, 8) if DEVIATION == "vendor_lse" else lse


class NPUGraph:
    """Record the operators of a capture, and repeat them into the tensors that they wrote."""

    def __init__(self):
        self.recorded = []

    def replay(self):
        for function, arguments, keywords, results in self.recorded if DEVIATION != "capture" else ():
            for old, new in zip(tree_leaves(results), tree_leaves(function(*arguments, **keywords)), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)


@contextlib.contextmanager
def graph(into):
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, arguments=(), keywords=None):
            results = function(*arguments, **(keywords or {}))
            into.recorded.append((function, arguments, keywords or {}, results))
            return results

    with Recorder():
        yield


def aligned_empty(*size, _empty=torch.empty, **how):
    """Allocate bytes at a multiple of 512, as torch_npu is said to do."""
    if how.get("dtype") is not torch.uint8 or len(size) != 1:
        return _empty(*size, **how)
    whole = _empty(size[0] + 512, **how)
    return whole[-whole.data_ptr() % 512 :][: size[0]]


def serve_on_cpu():
    """Let the CPU be an NPU, for the backend and for what torch_npu adds to torch."""
    from pasa.ops import registry
    from pasa.ops.attention.ascend import backend

    registry.BACKENDS["npu"] = dataclasses.replace(
        registry.BACKENDS["npu"], devices=("cpu",), missing=backend.library_error
    )
    torch.npu = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 0, get_device_name=lambda: "Ascend910B3"
    )
    torch.cpu.is_current_stream_capturing = lambda: False
    torch.cpu.NPUGraph, torch.cpu.graph = NPUGraph, graph
    if DEVIATION != "alignment":
        torch.empty = aligned_empty


if __name__ == "torch_npu":  # a test loads this file by another name, for single functions
    serve_on_cpu()
