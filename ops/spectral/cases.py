"""List the cases for which the half-step kernel is compiled without a device; see ops/attention/triton/cases.py."""

from typing import Any

from pasa.ops.spectral.half_step_kernel import half_step_kernel

TYPES = {
    "p_weight": "*bf16",
    **dict.fromkeys(["p_y", "p_out", "p_square"], "*fp32"),
    **dict.fromkeys(["columns", "pieces"], "i32"),
}
NOT_FOR_ASCEND = {"half_step_kernel": "torch products serve an NPU"}
NVIDIA_CASES: list[dict[str, Any]] = [
    {
        "name": f"half_step_d{dim}_group{group}",
        "kernel": half_step_kernel,
        "signature": TYPES,
        "constexprs": {"GROUP": group, "BLOCK_G": 16, "DIM": dim, "BLOCK_C": 8192 // dim},
        "aligned": ["columns"],
        "options": {"num_warps": 4, "num_stages": 3},
    }
    for dim, group in ((32, 1), (64, 1), (128, 8), (256, 1))
]
