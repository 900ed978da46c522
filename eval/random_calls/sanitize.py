"""A few small calls through the Triton kernels of attention, for a tool that watches each of their memory accesses.

    python -m pasa.eval.random_calls.sanitize [NAME ...]
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m pasa.eval.random_calls.sanitize

Run it once without the tool, so that kernels are compiled. Without PyTorch's cache every tensor is an allocation of its
own, and an access beyond its end shows. racecheck knows no mbarrier and initcheck no TMA: `control.py` shows what they
say of a kernel that is right. Nothing is tuned, and beside copies, fills and casts no kernel but ours runs on the
device: results are judged on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from pasa.eval.kit.exits import leave
from pasa.eval.random_calls import attention, kernels
from pasa.eval.random_calls.backends import TRITON
from pasa.eval.random_calls.cases import broken
from pasa.eval.random_calls.faults import SEED, Params
from pasa.eval.random_calls.inputs import make
from pasa.eval.random_calls.judge import count_faults
from pasa.eval.random_calls.truth import find_truth

BOUND = 2.0**-5  # coarse: that a call computes the right thing is for `pasa bench soak` to say
SIZES = ("heads", "groups", "rows", "keys", "dim")
PAPER = {"recovery": "paper"}
CALLS: dict[str, tuple[tuple[int, ...], Params]] = {
    "portable-fast": ((1, 2, 40, 150, 80), {"causal": True}),
    "portable-careful": ((1, 2, 40, 150, 80), {"causal": True, "bias": 200}),
    "portable-descriptors": ((1, 2, 70, 150, 128), {"block_k": 64}),
    "portable-wide": ((1, 1, 40, 150, 256), {"bias": 200}),
    "portable-bool": ((1, 2, 40, 150, 64), {"causal": True, "mask": "bool", "bias": 20}),
    "portable-float": ((1, 2, 40, 150, 72), {"mask": "float"}),
    "portable-packed": ((1, 2, 70, 150, 64), {"causal": True, "bias": 200, "packed": True}),
    "paper": ((1, 2, 40, 150, 64), {"mask": "float", **PAPER}),
    "paper-packed": ((1, 2, 40, 150, 80), {"causal": True, "packed": True, "accumulate": "fp16", **PAPER}),
    "decode-lanes": ((1, 4, 1, 1100, 128), {}),
    "decode-lanes-careful": ((1, 7, 2, 700, 64), {"causal": True, "bias": 200}),
    "decode-tiles": ((1, 8, 5, 700, 128), {"causal": True, "bias": 200}),
    "decode-mask": ((1, 2, 3, 300, 256), {"mask": "bool"}),
    "short": ((2, 2, 25, 25, 64), {"bias": 200}),
    "short-mask": ((1, 2, 70, 30, 128), {"causal": True, "mask": "float"}),
    "hopper": ((1, 2, 200, 300, 128), {}),
    "hopper-shifted": ((1, 2, 70, 300, 64), {"causal": True, "bias": 200, "garbage": "value", "where": "hidden"}),
    "hopper-pair": ((1, 28, 900, 260, 128), {}),
}
"""Key heads, query heads for each, rows, keys and head dim; `bias` is added to 16 channels of Q and K."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the calls of these names, or all; 1 if one is wrong.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    known = [*CALLS, "shift-before"]
    names = list(sys.argv[1:] if arguments is None else arguments) or known
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {sorted(known)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wrong = {name: shift_before(device) if name == "shift-before" else run(name, device) for name in names}
    for name, bounds in wrong.items():
        print(f"{name:24} {'WRONG: ' + ', '.join(bounds) if bounds else 'right'}")
    return int(any(wrong.values()))


def run(name: str, device: torch.device) -> list[str]:
    """Return the bounds that a call breaks."""
    sizes, how = CALLS[name]
    params: Params = attention.SIMPLEST | {"backend": TRITON, "tile": 0, "poisoned": False, "lse": True, SEED: 0}
    params |= dict(zip(SIZES, sizes, strict=True)) | how
    if how.get("packed"):  # the second of three sequences has no keys
        (rows, keys), third = (params["rows"], params["keys"]), params["rows"] // 3
        params["row_lengths"] = [third, rows // 2 - third, rows - rows // 2]
        params["key_lengths"] = [keys // 2, 0, keys - keys // 2]
    call = make(params)
    for x in (call.q, call.k):
        x[..., :16] += how.get("bias", 0)
    out, lse = (x.cpu() for x in kernels.attend(params, call.to(device)))
    truth = find_truth(call, fp16_scores=False)
    error = (out.double() - truth.out).abs().where(~truth.bad, 0.0).max()
    return broken(count_faults(truth, out, lse) | {"error": float(error) / BOUND})


def shift_before(device: torch.device) -> list[str]:
    """Run the kernel that writes K' for an NPU: K' and the anchors lack nothing of K."""
    from pasa.ops.attention.triton.anchor_launch import shift_exact

    k = (torch.randn(1, 2, 150, 80, generator=torch.Generator().manual_seed(0)) + 20).half()
    shifted, anchor = (x.cpu().float() for x in shift_exact(k.to(device), 128))
    left = shifted + anchor.repeat_interleave(128, 2)[:, :, :150] - k.float()
    return ["error"] if float(left.abs().max()) > 0 else []


if __name__ == "__main__":
    leave(main)
