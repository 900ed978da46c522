"""Probes of what the Ascend C kernels for the Ascend 310P assume and no document promises.

`PROBES` is the list of what is unverified until it has run on a 310P. Probes of calls that both chips
make are those of Atlas A2 (`probes.py`).
"""

from __future__ import annotations

from typing import Any

import torch

import pasa
from pasa.eval.check_device.npu import calls, probes
from pasa.eval.check_device.npu.finding import Finding, same_bits
from pasa.ops.devices import ASCEND_310P

CORES = {f"{ASCEND_310P}1": (10,), f"{ASCEND_310P}3": (8,)}  # AI cores, of the platform files
LARGEST_HALF, LARGEST_FLOAT = 65504.0, torch.finfo(torch.float32).max
TO_INTEGERS = 1.5 * 2.0**23  # FractalKeys::ToIntegers of ascend_c/kernel/310p/fractals.h


# ---- the vector unit


def check_saturation(device: str) -> Finding:
    """Check that FP16 products beyond 65504 become that number, of either sign."""
    x = torch.full((calls.NUMBERS,), 300.0)
    above, below = (calls.vector(calls.HALF_PRODUCT, x, y, device) for y in (x, -x))
    right = bool((above == LARGEST_HALF).all()) and bool((below == -LARGEST_HALF).all())
    return Finding(not right, f"{float(above[0])} and {float(below[0])}")


def check_float_overflow(device: str) -> Finding:
    """Check that FP32 quotients beyond the largest number are infinite; the kernels do as well if they saturate."""
    found = calls.vector(calls.DIV, torch.full((calls.NUMBERS,), 1e38), torch.full((calls.NUMBERS,), 0.1), device)
    gives = float(found[0])
    return Finding(gives != torch.inf, f"{gives:.3g}", harmless=gives == LARGEST_FLOAT)


def check_half_rounding(device: str) -> Finding:
    """Check that CAST_NONE rounds FP32 to the nearest FP16 number, and halves of its digits to even."""
    (x,) = calls.normal("rounding", 1, calls.NUMBERS)
    x[::3] = 1 + (2 * torch.arange(len(x[::3])) + 1) * 2.0**-11 % 1  # halfway between two FP16 numbers
    return same_bits(calls.vector(calls.HALF_PRODUCT, x, torch.ones_like(x), device), x.half().float())


def check_sums(device: str) -> Finding:
    """Check that FP32 sums are rounded to nearest, so that one with 1.5 x 2^23 has no digits behind the point."""
    (x,) = 1000 * calls.normal("sums", 1, calls.NUMBERS)
    x[::3] = torch.arange(len(x[::3])) + 0.5
    return same_bits(calls.vector(calls.SUM, x, torch.full_like(x, TO_INTEGERS), device), x + TO_INTEGERS)


def check_subnormal_results(device: str) -> Finding:
    """Check that vector calls keep the digits of subnormal FP16 numbers, which K' may need."""
    x = torch.arange(calls.NUMBERS) % 1024 * 2.0**-24
    return same_bits(calls.vector(calls.HALF_PRODUCT, x, torch.ones_like(x), device), x)


# ---- the cube unit


def check_subnormal_operands(device: str) -> Finding:
    """Check that Mmad multiplies subnormal FP16 numbers: weights 18 nats below the largest are some."""
    a, b = calls.small_integers("subnormal", 32, 64), calls.small_integers("subnormal too", 48, 64)
    small = a * 2.0**-20
    return same_bits(calls.product(small, b, device)[0], small.float() @ b.float().mT)


def check_l0c_to_ub(device: str) -> Finding:
    """Check that a product comes from L0C to UB as the fractals that it is."""
    a, b = calls.small_integers("L0C", 64, 128), calls.small_integers("L0C too", 128, 128)
    return same_bits(calls.product(a, b, device)[0], a.float() @ b.float().mT)


def check_ub_to_l1(device: str) -> Finding:
    """Check that an operand that the vector unit lays out is the one that is loaded in pieces of 32 bytes."""
    a, b = calls.small_integers("L1", 40, 128), calls.small_integers("L1 too", 64, 128)
    pieces, laid_out, _ = calls.product(a, b, device)
    return same_bits(laid_out, pieces)


# ---- the attention kernels


def check_rows_without_keys(device: str) -> Finding:
    """Check that rows without keys have outputs of 0, and log-sum-exps of -infinity that stay so in memory.

    Both kernels are called: that of decoding takes 60 rows of two heads, but not if largest scores are asked for.
    """
    q, k, v = (x.to(device) for x in calls.attention_inputs("no keys", 60, 20))
    how: dict[str, Any] = {"is_causal": True, "backend": "npu", "return_lse": True}
    decoded, prefilled = pasa.attention(q, k, v, **how), pasa.attention(q, k, v, **how, return_max_logits=True)
    wrong = {}
    for name, results in (("decoding", decoded), ("prefill", prefilled)):
        out, lse = (x.cpu()[:, :, :40] for x in results[:2])
        wrong[name] = int((lse != -torch.inf).sum()) + int((out != 0).any(-1).sum())
    return Finding(any(wrong.values()), ", ".join(f"{name}: {n} of 160 results differ" for name, n in wrong.items()))


def check_chip(device: str) -> Finding:
    """Compare the chip's name and AI cores with those of the platform files."""
    return probes.compare_cores(CORES, device)


SHARED = (
    ("Exp", "Ln", "Div", "Compare bits", "Compare NaN", "order of sums", "rows behind a tile", "Fill"),
    ("two accumulators", "alignment", "stream order", "capture"),
)
PROBES: probes.Probes = {
    **{name: probes.PROBES[name] for name in SHARED[0]},
    "saturation": ("FP16 results beyond 65504 become that number", check_saturation),
    "FP32 overflow": ("FP32 results beyond the largest number are infinite", check_float_overflow),
    "rounding to FP16": ("CAST_NONE rounds FP32 to the nearest FP16 number, half to even", check_half_rounding),
    "FP32 sums": ("sums are rounded to nearest, half to even", check_sums),
    "subnormal results": ("vector calls keep subnormal FP16 numbers", check_subnormal_results),
    "subnormal operands": ("Mmad multiplies subnormal FP16 numbers", check_subnormal_operands),
    "L0C to UB": ("a copy from L0C to UB moves whole fractals of 1 KiB", check_l0c_to_ub),
    "UB to L1": ("And with strides makes fractals, and a copy to L1 leaves gaps there", check_ub_to_l1),
    "rows without keys": ("a log-sum-exp of -infinity, written as bits, stays so", check_rows_without_keys),
    "repeated launches": ("events order the units of a core; launches follow each other",
                          probes.check_repeated_launches),
    "merged parts": ("a launch sees the parts of decoded keys that the one before it stored",
                     probes.check_merged_parts),
    "chip": ("the runtime names the chip and its AI cores as the platform files do", check_chip),
    **{name: probes.PROBES[name] for name in SHARED[1]},
}  # fmt: skip
"""Each probe by name: what the kernels assume, and the function that compares the device with it."""


def for_library() -> probes.Probes:
    """Return the probes for the chip of the library."""
    return PROBES if calls.is_310p() else probes.PROBES
