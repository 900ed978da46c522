"""Call the fused attention of a device, so that no score can overflow on it.

Each function takes FP16 q (B, Hq, Sq, D) and k, v (B, Hkv, Skv, D) and returns the output in FP16 and the log-sum-exp
(B, Hq, Sq) in FP32. A bias is added to the scaled scores; `causal` means that row i sees keys 0 to i.

torch's own functions are called below `torch.nn.functional`, so a program that replaces
`F.scaled_dot_product_attention`, or activates another flash implementation, is not called back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pasa.ops.attention.call import capturing
from pasa.ops.attention.sdpa import npu
from pasa.ops.devices import ASCEND_310P, npu_chip, warm
from pasa.ops.recording import unrecorded

Fused: TypeAlias = Callable[[Tensor, Tensor, Tensor, "Tensor | None", bool, float], tuple[Tensor, Tensor]]
ALIGNED = 8  # elements: CUDA's kernels want rows of q, k, v and bias that start at multiples of 16 bytes
CUDNN = torch._scaled_dot_product_cudnn_attention  # the same operator in torch.ops takes the host longer
MOST_BLOCKS = 2**16 - 1  # along the second and the third axis of a CUDA grid
FP32_ROWS = 2**26  # scores of one call that forms all of them in FP32: 256 MiB


class ScoreFormat(NamedTuple):
    """State how a device's fused attention keeps scores, and how that is known.

    Attributes
    ----------
    kind : str
        "a": FP32, so no guard of scores is needed. "b": q.k in FP16, the softmax in FP32; Q is scaled down. "c": FP16,
        or unknown; q, k and v are handed over in FP32.
    source : str
    """

    kind: str
    source: str


UNKNOWN = ScoreFormat("c", "not known; q, k and v are handed over in FP32")
FORMATS: dict[str, ScoreFormat] = {
    "cpu": ScoreFormat("a", "torch's flash attention for CPUs keeps scores in FP32 (run here)"),
    "cuda": ScoreFormat("a", "cuDNN and memory-efficient attention keep scores in FP32 (run on an H200)"),
    "npu": ScoreFormat("b", "torch_npu's attention may keep q.k in FP16 (its documentation does not say; not run)"),
}
"""Maps device types to what is known of them. A device that is not listed is `UNKNOWN`."""
ON_310P = ScoreFormat(
    "c",
    "the vendor's attention is not listed for this chip; q, k and v are handed over in FP32, with Q scaled down "
    "because no documentation says that products stay FP32 (not run)",
)
"""Replaces the entry of NPUs on an Ascend 310P. Its cube multiplies FP16 alone, and a q.k stored in FP16 would be cut
off at 65504 without a trace (docs/ascend/310p.md)."""


def score_format(device: str) -> ScoreFormat:
    """Return how the fused attention of a device type keeps its scores."""
    if device == "cuda" and torch.version.hip is not None:
        return UNKNOWN  # ROCm calls its devices cuda, but its kernels are others
    if device == "npu" and npu_chip().startswith(ASCEND_310P):
        return ON_310P
    return FORMATS.get(device, UNKNOWN)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, *, repeatable: bool = False
) -> tuple[Tensor, Tensor]:
    """Attend by the device's fused attention, or by FP32 where its scores may be FP16.

    `repeatable`: not by cuDNN, which may give a single query row other bits when the same call is repeated.
    """
    device = q.device.type
    listed = score_format(device)
    kind = listed.kind
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # kernels do not look at this stride
    if kind == "a" and device == "cpu":
        return _cpu(q, k, v, bias, causal, scale)
    if kind == "a" and device == "cuda":
        return _cuda(q, k, v, bias, causal, scale, repeatable)
    if kind == "b" and npu.serves(q, bias) and not capturing(q):
        out, lse = npu.npu_attention(q, k, v, bias, causal, scale)
        if bool(out.isfinite().all()):  # no documentation says that scaled scores are FP32; infinite ones leave NaN
            return out, lse
    if listed is ON_310P and not capturing(q):
        q, scale = npu.scaled_down(q, k, scale)
    return _in_fp32(q, k, v, bias, causal, scale)


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    bias = None if bias is None else _additive(bias, q.dtype)
    if bias is not None and bias.dtype not in (torch.float16, torch.float32):
        bias = bias.float()
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out, lse


def _cuda(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, repeatable: bool
) -> tuple[Tensor, Tensor]:
    """Attend by cuDNN, or by memory-efficient attention, or in FP32: the first that the settings of torch allow.

    Flash attention is left out: at scores of 1e6 nats its outputs leave the range of the values.
    """
    if bias is not None and bias.dtype in (torch.float32, torch.bfloat16):
        # The kernels add a bias in the dtype of q only. FP16 would round this one by up to half a nat, and in FP32 they
        # multiply it by log2(e), so that the lowest number becomes -inf.
        return _in_fp32(q, k, v, bias, causal, scale)
    dim = q.shape[-1]
    q, k, v = (_aligned_rows(x) for x in (q, k, v))
    bias = None if bias is None else _aligned(bias, k.shape[2]).expand(*q.shape[:3], k.shape[2])
    if not repeatable and cudnn_serves(q, k, v, bias, causal):
        out, lse = call_cudnn(q, k, v, bias, causal, scale)
        return out[..., :dim], lse
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    fits = q.shape[1] <= MOST_BLOCKS  # else its launch fails
    if fits and torch.backends.cuda.can_use_efficient_attention(_params(q, k, v, bias, causal, False)):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, causal, scale=scale
        )
        return out[..., :dim], lse[..., : q.shape[2]]
    out, lse = _in_fp32(q, k, v, bias, causal, scale)
    return out[..., :dim], lse


def cudnn_serves(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> bool:
    """Return whether cuDNN can serve tensors with aligned rows, and torch's settings allow it.

    Single rows of more entries or heads than a CUDA grid has place for are left out, because its kernel for them fails.
    """
    if q.shape[2] == 1 and max(q.shape[:2]) > MOST_BLOCKS:
        return False
    params = _params(q, k, v, bias, causal, q.shape[1] != k.shape[1])
    return q.is_cuda and torch.backends.cuda.can_use_cudnn_attention(params)


def cudnn_allowed() -> bool:
    """Return whether torch's settings, which a program may change between calls, let cuDNN serve a call."""
    return torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()


def call_cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by cuDNN to tensors that it is known to serve."""
    out, lse, *_ = CUDNN(q, k, v, bias, True, 0.0, causal, False, scale=scale)
    return out, lse.squeeze(-1) if lse.dim() == 4 else lse


def warm_up(device: torch.device) -> None:
    """Call cuDNN once in a thread, if the settings of torch allow it, so that a CUDA graph may capture its later calls.

    The first call of a thread on a device allocates memory by cudaMalloc, which invalidates a capture.
    """
    if is_warm(device):
        return
    with unrecorded():
        x = torch.zeros(1, 1, ALIGNED, 64, dtype=torch.float16, device=device)
        if cudnn_serves(x, x, x, None, False):
            call_cudnn(x, x, x, None, False, 1.0)
            warm.devices = warm.devices | {device}


def is_warm(device: torch.device) -> bool:
    """Return whether `warm_up` has called cuDNN in this thread."""
    return device in warm.devices


def has_aligned_rows(x: Tensor) -> bool:
    """Return whether the rows of q, k or v start at addresses that CUDA's kernels assume."""
    strides_fit = x.stride(-1) == 1 and all(stride % ALIGNED == 0 for stride in (*x.stride()[:-1], x.shape[-1]))
    return strides_fit and x.data_ptr() % (2 * ALIGNED) == 0


def _params(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, grouped: bool
) -> torch.backends.cuda.SDPAParams:
    return torch.backends.cuda.SDPAParams(q, k, v, bias, 0.0, causal, grouped)


def _aligned_rows(x: Tensor) -> Tensor:
    """Return q, k or v with rows that start at aligned addresses, as the kernels assume; copied where they do not.

    cuDNN gives wrong numbers, without an error, for tensors that start between such addresses.
    """
    missing = -x.shape[-1] % ALIGNED
    if missing:
        return torch.nn.functional.pad(x, (0, missing))
    return x if has_aligned_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _aligned(bias: Tensor, keys: int) -> Tensor:
    """Return the bias in FP16 with strides that are multiples of ALIGNED, also those of dimensions of size 1."""
    fits = bias.stride(-1) == 1 and not any(stride % ALIGNED for stride in bias.stride()[:-1])
    if fits and bias.dtype == torch.float16 and bias.data_ptr() % (2 * ALIGNED) == 0:
        return bias
    shape = (*bias.shape[:-1], keys + -keys % ALIGNED)
    rows = torch.empty(shape, dtype=torch.float16, device=bias.device)[..., :keys]
    return rows.fill_(-torch.inf).masked_fill_(bias, 0.0) if bias.dtype == torch.bool else rows.copy_(bias)


def _additive(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask (True = keep) as numbers to add; other masks as they are."""
    if bias.dtype != torch.bool:
        return bias
    return torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill(~bias, -torch.inf)


def _in_fp32(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to FP32 copies by matrix products and a softmax, in chunks of rows: no intermediate number is FP16."""
    group, (rows, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    wide_k, wide_v = k.float().unsqueeze(2), v.float().unsqueeze(2)
    step = max(1, FP32_ROWS // (q.shape[0] * q.shape[1] * keys))
    bias = None if bias is None else _additive(bias, torch.float32).float().expand(*q.shape[:3], keys)
    outs, lses = [], []
    for start in range(0, rows, step):
        part = q[:, :, start : start + step].float().unflatten(1, (-1, group))
        scores = part @ wide_k.mT * scale
        if causal:
            ahead = (
                torch.arange(keys, device=q.device)
                > torch.arange(start, start + part.shape[3], device=q.device)[:, None]
            )
            scores = scores.masked_fill(ahead, -torch.inf)
        if bias is not None:
            scores = scores + bias[:, :, start : start + step].unflatten(1, (-1, group))
        lse = scores.logsumexp(-1, keepdim=True)
        weights = torch.softmax(scores, -1)
        outs.append((weights @ wide_v).flatten(1, 2))
        lses.append(lse.squeeze(-1).flatten(1, 2))
    return torch.cat(outs, 2).to(q.dtype), torch.cat(lses, 2)
