"""A few small calls through the Triton kernels of attention, for a tool that watches each of their memory accesses.

    python -m pasa.eval.random_calls.soak.sanitize [NAME ...]
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m pasa.eval.random_calls.soak.sanitize

Run it once without the tool, so that kernels are compiled. Without PyTorch's cache every tensor is an allocation of its
own, and an access beyond its end shows. racecheck knows no mbarrier and initcheck no TMA: `control.py` shows what they
say of a kernel that is right. Nothing is tuned, and beside copies, fills and casts no kernel but ours runs on the
device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import pasa
from pasa.eval import cli
from pasa.eval.random_calls.soak.surroundings import pinned_tile

BOUND = 2.0**-5  # coarse: that a call computes the right thing is for `pasa bench soak` to say

EXACT = pasa.PasaConfig()
PAPER = pasa.PasaConfig(recovery="paper")
ROUNDED = pasa.PasaConfig(recovery="paper", accumulate="fp16")


@dataclass(frozen=True)
class Small:
    """One call; fields as in `families.Family`, `bias` added to 16 channels of Q and K."""

    name: str
    heads: int
    kv_heads: int
    rows: int
    keys: int
    dim: int
    causal: bool = False
    bias: float = 0.0
    mask: str = "none"
    packed: bool = False
    garbage: bool = False
    config: pasa.PasaConfig = EXACT


CALLS = (
    Small("portable-fast", 2, 1, 40, 150, 80, causal=True),
    Small("portable-careful", 2, 1, 40, 150, 80, causal=True, bias=200),
    Small("portable-descriptors", 2, 1, 70, 150, 128, config=pasa.PasaConfig(block_k=64)),
    Small("portable-wide", 1, 1, 40, 150, 256, bias=200),
    Small("portable-bool", 2, 1, 40, 150, 64, causal=True, mask="bool", bias=20),
    Small("portable-float", 2, 1, 40, 150, 72, mask="float"),
    Small("portable-packed", 2, 1, 70, 150, 64, causal=True, bias=200, packed=True),
    Small("paper", 2, 1, 40, 150, 64, mask="float", config=PAPER),
    Small("paper-packed", 2, 1, 40, 150, 80, causal=True, packed=True, config=ROUNDED),
    Small("decode-lanes", 4, 1, 1, 1100, 128),
    Small("decode-lanes-careful", 7, 1, 2, 700, 64, causal=True, bias=200),
    Small("decode-tiles", 8, 1, 5, 700, 128, causal=True, bias=200),
    Small("decode-mask", 2, 1, 3, 300, 256, mask="bool"),
    Small("short", 4, 2, 25, 25, 64, bias=200),
    Small("short-mask", 2, 1, 70, 30, 128, causal=True, mask="float"),
    Small("hopper", 2, 1, 200, 300, 128),
    Small("hopper-shifted", 2, 1, 70, 300, 64, causal=True, bias=200, garbage=True),
    Small("hopper-pair", 28, 1, 900, 260, 128),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the calls of these names, or all; 1 if one is wrong.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    names = list(sys.argv[1:] if arguments is None else arguments)
    known: dict[str, Callable[[torch.device], float]] = {each.name: _runner(each) for each in CALLS}
    known["shift-before"] = shift_before
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {sorted(known)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    errors = {name: known[name](device) for name in names or known}
    for name, error in errors.items():
        print(f"{name:24} error {error:.1e}{'' if error <= BOUND else '  WRONG'}")
    return int(not all(error <= BOUND for error in errors.values()))


def _runner(small: Small) -> Callable[[torch.device], float]:
    return lambda device: run_small(small, device)


def run_small(small: Small, device: torch.device) -> float:
    """Largest error against FP64; infinite if a NaN is missing or too many."""
    q, k, v, mask = draw(small)
    truth = golden(small, q, k, v, mask)
    if small.garbage:  # in the last key, which only the last row sees
        v[..., -1, 3] = torch.nan
        truth[..., -1, 3] = torch.nan
    with pinned_tile(0):
        out = call_packed(small, q, k, v, device) if small.packed else call_dense(small, q, k, v, mask, device)
    found = out.cpu().double()
    if not torch.equal(torch.isnan(found), torch.isnan(truth)):
        return float("inf")
    return float((found - truth).nan_to_num(0.0).abs().max())


def call_dense(small: Small, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, device: torch.device) -> Tensor:
    """Output (1, Hq, Sq, D) of the kernels."""
    q, k, v = (x.to(device) for x in (q, k, v))
    mask = None if mask is None else mask.to(device)
    return pasa.attention(q, k, v, attn_mask=mask, is_causal=small.causal, config=small.config, backend="triton")


def call_packed(small: Small, q: Tensor, k: Tensor, v: Tensor, device: torch.device) -> Tensor:
    """The same, of three packed sequences."""
    q, k, v = (x[0].transpose(0, 1).contiguous().to(device) for x in (q, k, v))
    cu_q, cu_k = (torch.tensor(edges, dtype=torch.int32, device=device) for edges in _edges(small))
    how = {"is_causal": small.causal, "config": small.config, "backend": "triton", "return_lse": True}
    out, _ = pasa.attention_varlen(q, k, v, cu_q, cu_k, small.rows, small.keys, **how)  # type: ignore[arg-type]
    return out.transpose(0, 1).unsqueeze(0)


def draw(small: Small) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v (1, H, S, D) in FP16 and a mask (1, 1, Sq, Skv)."""
    source = torch.Generator().manual_seed(0)
    sizes = (small.heads, small.rows), (small.kv_heads, small.keys), (small.kv_heads, small.keys)
    q, k, v = (torch.randn(1, heads, length, small.dim, generator=source) for heads, length in sizes)
    q[..., :16] += small.bias
    k[..., :16] += small.bias
    mask = None
    if small.mask != "none":
        mask = torch.rand(1, 1, small.rows, small.keys, generator=source) < 0.7
        mask = mask if small.mask == "bool" else torch.where(mask, 0.5, -torch.inf)
    return q.half(), k.half(), v.half(), mask


def _edges(small: Small) -> tuple[list[int], list[int]]:
    """Three sequences, the second without keys."""
    return [0, small.rows // 3, small.rows // 2, small.rows], [0, small.keys // 2, small.keys // 2, small.keys]


def golden(small: Small, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """FP64 attention on the CPU, (1, Hq, Sq, D)."""
    if not small.packed:
        return pasa.golden_attention(q, k, v, attn_mask=mask, is_causal=small.causal)[0]
    out = torch.zeros(q.shape, dtype=torch.float64)
    rows, keys = _edges(small)
    for i in range(len(rows) - 1):
        a, b = slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])
        if a.start < a.stop and b.start < b.stop:
            out[:, :, a] = pasa.golden_attention(q[:, :, a], k[:, :, b], v[:, :, b], is_causal=small.causal)[0]
    return out


def shift_before(device: torch.device) -> float:
    """The kernel that writes K' for an NPU: what K' and the anchors lack of K, which is nothing."""
    from pasa.ops.attention.triton.anchors import shift_exact

    k = (torch.randn(1, 2, 150, 80, generator=torch.Generator().manual_seed(0)) + 20).half()
    shifted, anchor = (x.cpu().float() for x in shift_exact(k.to(device), 128))
    return float((shifted + anchor.repeat_interleave(128, 2)[:, :, :150] - k.float()).abs().max())


if __name__ == "__main__":
    cli.leave(main)
