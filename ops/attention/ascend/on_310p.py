"""Call the Ascend C kernels for the Ascend 310P (ascend_c/310p.md), which compute the exact recovery alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pasa.ops.attention.call import Call

if TYPE_CHECKING:
    from pasa.ops.backends import Request

ARCHITECTURE = "dav-2002"  # the compiler's name
LACKING = ("paged caches", "windows", "sinks", "max logits", "diagnostics")  # features of the kernels for Atlas A2
ROW_STEP = 16  # rows of a fractal, which the kernel takes as a whole: kFractal in ascend_c/tiling/tiling.h


def attend(call: Call, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Launch the kernels; q, k and v are FP16 and contiguous, with a head dimension that is a multiple of 16.

    The chip saturates whatever `overflow` asks for. No number of the exact recovery does, so results
    are the same. A single query row sees all keys, so the heads that share a key head become the rows
    of one tile.
    """
    kernels, heads, rows = torch.ops.pasa, q.shape[1], q.shape[2]
    keys, *references = kernels.npu_310p_shift(k, lengths, call.scale)
    values = kernels.npu_310p_lay_out(v, lengths)
    if single := rows == 1:
        q = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
    count = q.shape[2]
    whole = torch.nn.functional.pad(q, (0, 0, 0, -count % ROW_STEP)).contiguous()
    is_causal = call.is_causal and not single
    out, lse = kernels.npu_310p_attention(
        whole, keys, values, *references, lengths, count, k.shape[2], is_causal, call.scale
    )
    out, lse = out[:, :, :count], lse[:, :, :count]
    return (out.reshape(-1, heads, 1, q.shape[3]), lse.reshape(-1, heads, 1)) if single else (out, lse)


def refusals(request: Request) -> list[str]:
    """Return every reason why this chip or its kernels cannot serve a request."""
    reasons = []
    if request.dtype == torch.bfloat16:
        reasons.append("an Ascend 310P has no BF16: convert q, k and v to torch.float16")
    if request.options.recovery != "exact":
        reasons.append(f"the kernels for the Ascend 310P have no recovery {request.options.recovery}, only exact")
    if request.options.softmax != "safe":
        reasons.append(f"the kernels for the Ascend 310P have no softmax {request.options.softmax}, only safe")
    lacking = [name for name in LACKING if name in request.features]
    if request.mask != "none":
        lacking.append("masks")
    return reasons + [f"the kernels for the Ascend 310P have no {name}" for name in lacking]
