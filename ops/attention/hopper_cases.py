"""What the Hopper kernel is compiled for; apart from compile_cases.py because triton-ascend has no Gluon."""

from typing import Any

from pasa.ops.attention.hopper_kernel import attention_kernel

# What a launch of Triton 3.6 calls the type of a tensor map; the layout is that of hopper_launch.TILE.
TENSOR_MAP = (
    "tensordesc<fp16[1, 1, {rows}, {dim}],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4, "
    "transposed=False, fp4_padded=False, cga_layout=[])>"
)


def _case(dim: int, half_limit: float) -> dict[str, Any]:
    types = {f"{x}_desc": TENSOR_MAP.format(rows=64 if x in "qo" else 128, dim=dim) for x in "qkvo"}
    types |= {"p_anchors": "*fp16", "p_stats": "*fp32", "p_lse": "*fp32", "scale_log2": "fp32"}
    return {
        "name": f"hopper_d{dim}_" + ("half" if half_limit else "single"),
        "kernel": attention_kernel,
        "signature": types,
        "constexprs": {"CAUSAL": True, "RAGGED": True, "HALF_LIMIT": half_limit, "STAGES": 2 if dim == 128 else 3},
        "options": {"num_warps": 4},
        "architectures": [90],
    }


NVIDIA_CASES = [_case(64, 64.0), _case(128, 64.0), _case(128, 0.0)]
