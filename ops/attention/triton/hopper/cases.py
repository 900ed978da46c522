"""List the cases for which the Hopper kernel is compiled without a device.

They are not in cases.py because triton-ascend does not have Gluon.
"""

from typing import Any

from pasa.ops.attention.triton.cases import make_case
from pasa.ops.attention.triton.centre_kernel import TILE, centre_kernel
from pasa.ops.attention.triton.hopper.exact_kernel import exact_kernel
from pasa.ops.attention.triton.hopper.launch import CENTRE_WARPS, KEY_BOX, STAGES
from pasa.ops.attention.triton.hopper.plain_kernel import plain_kernel
from pasa.ops.attention.triton.kernel_call import STEP
from pasa.ops.attention.triton.tiles import hopper_pad

# The type of a tensor map in a launch of Triton 3.6; the layout is that of hopper/launch.SWIZZLE.
TENSOR_MAP = (
    "tensordesc<fp16[1, 1, {rows}, {dim}],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4, "
    "transposed=False, fp4_padded=False, cga_layout=[])>"
)


def _case(
    name: str, dim: int, kernel: Any, causal: bool = True, warpgroups: int = 3, dropped: int = 0
) -> dict[str, Any]:
    plain = kernel is plain_kernel
    names = ["q", "k", *(["shifted"] if plain else []), "v", "o"]
    pad = hopper_pad(dim)
    types = {f"{x}_desc": TENSOR_MAP.format(rows=64 if x in "qo" else KEY_BOX[pad], dim=pad) for x in names}
    types |= {"p_norms": "*fp32", "p_anchors": "*fp16", "p_marked": "*i32", "p_lse": "*fp32"}
    types["scale_log2"] = "fp32"
    flags = {"CAUSAL": causal, "RAGGED": causal, "STAGES": STAGES[pad], "DROPPED": dropped, "DIM": dim}
    if pad == 256:
        warpgroups = 2
    return {
        "name": f"hopper_d{dim}_{name}",
        "kernel": kernel,
        "signature": types,
        "constexprs": flags | {"WARPGROUPS": warpgroups},
        "options": {"num_warps": 4},
        "architectures": [90],
    }


def _centre(dim: int) -> dict[str, Any]:
    pad = hopper_pad(dim)
    sizes = {"D": dim, "D_PAD": pad, "BLOCK": TILE.value // pad, "PARTS": 1, "STEP": STEP}
    flags = {"HAS_VISIBLE": False, "VARLEN": False, "EARLY": True}
    options = {"num_warps": CENTRE_WARPS}
    return make_case(centre_kernel, f"hopper_d{dim}_centre", sizes | flags, options=options, architectures=[90])


NVIDIA_CASES = [
    *(_centre(dim) for dim in (32, 40, 64, 72, 80, 128, 192, 256)),
    *(_case("plain", dim, plain_kernel) for dim in (64, 128, 192, 256)),
    *(_case("exact", dim, exact_kernel) for dim in (64, 128, 256)),
    *(_case("plain_full", dim, plain_kernel, causal=False) for dim in (64, 128, 256)),
    _case("plain_full_pair", 128, plain_kernel, causal=False, warpgroups=2),
    *(_case("exact_full", dim, exact_kernel, causal=False) for dim in (64, 256)),
    *(_case("plain_unbiased", dim, plain_kernel, dropped=13) for dim in (64, 128, 256)),
    *(_case("plain_full_bf16", dim, plain_kernel, causal=False, dropped=16) for dim in (64, 128, 256)),
    _case("plain_full_pair_unbiased", 128, plain_kernel, causal=False, warpgroups=2, dropped=13),
    *(_case("exact_unbiased", dim, exact_kernel, dropped=dropped) for dim, dropped in ((64, 16), (128, 13), (256, 13))),
    _case("exact_full_bf16", 256, exact_kernel, causal=False, dropped=16),
    *(_case("plain_unbiased", dim, plain_kernel, dropped=13) for dim in (40, 80)),
    *(_case("exact", dim, exact_kernel) for dim in (32, 40, 72, 80)),
]
