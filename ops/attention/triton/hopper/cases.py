"""List the cases for which the Hopper kernel is compiled without a device.

They are not in cases.py because triton-ascend does not have Gluon.
"""

from typing import Any

from pasa.ops.attention.triton.hopper.kernel import attention_kernel
from pasa.ops.attention.triton.hopper.launch import STAGES

# The type of a tensor map in a launch of Triton 3.6; the layout is that of hopper/launch.SWIZZLE.
TENSOR_MAP = (
    "tensordesc<fp16[1, 1, {rows}, {dim}],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4, "
    "transposed=False, fp4_padded=False, cga_layout=[])>"
)


def _case(
    name: str, dim: int, second: bool, causal: bool = True, warpgroups: int = 3, dropped: int = 0
) -> dict[str, Any]:
    types = {f"{x}_desc": TENSOR_MAP.format(rows=64 if x in "qo" else 128, dim=dim) for x in "qkvo"}
    types |= {"p_norms": "*fp32", "p_anchors": "*fp16", "p_marked": "*i32", "p_lse": "*fp32", "scale_log2": "fp32"}
    flags = {"CAUSAL": causal, "RAGGED": causal, "SECOND": second, "WARPGROUPS": warpgroups, "STAGES": STAGES[dim]}
    flags["DROPPED"] = dropped
    return {
        "name": f"hopper_d{dim}_{name}",
        "kernel": attention_kernel,
        "signature": types,
        "constexprs": flags,
        "options": {"num_warps": 4},
        "architectures": [90],
    }


NVIDIA_CASES = [
    *(_case("first", dim, False) for dim in (64, 128)),
    *(_case("second", dim, True) for dim in (64, 128)),
    *(_case("full", dim, False, causal=False) for dim in (64, 128)),
    _case("full_pair", 128, False, causal=False, warpgroups=2),
    _case("second_full", 64, True, causal=False),
    *(_case("first_unbiased", dim, False, dropped=13) for dim in (64, 128)),
    *(_case("full_bf16", dim, False, causal=False, dropped=16) for dim in (64, 128)),
    _case("full_pair_unbiased", 128, False, causal=False, warpgroups=2, dropped=13),
    *(_case("second_unbiased", dim, True, dropped=dropped) for dim, dropped in ((64, 16), (128, 13))),
]
