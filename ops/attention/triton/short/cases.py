"""List the cases that compile the kernel of short sequences without a device; ../cases.py has the fields."""

from pasa.ops.attention.triton.cases import make_case, sizes_of
from pasa.ops.attention.triton.short.kernel import short_kernel

NOT_FOR_ASCEND = {"short_kernel": "as decode_kernel"}
NVIDIA_CASES = [
    *(
        make_case(
            short_kernel,
            f"short_d{dim}_{m}x{n}_{mask}" + "_8_warps" * (warps == 8) + "_causal" * causal + "_blocks" * (stages > 1),
            {"MASK": mask, "CAUSAL": causal, "DROPPED": dropped, "WHOLE": stages == 1} | sizes_of(dim, m, n) | features,
            options={"num_warps": warps, "num_stages": stages},
            architectures=[before, 90],
            stack=2000,  # the restart with an anchor for each block spills
        )
        for before, dim, m, n, warps, stages, mask, causal, dropped, features in (
            (80, 64, 32, 32, 1, 1, "none", False, 0, {}),
            (89, 64, 64, 64, 4, 1, "none", True, 0, {}),
            (80, 128, 32, 32, 8, 3, "bool", True, 0, {}),
            (89, 128, 16, 16, 1, 1, "bool", False, 13, {}),
            (80, 128, 64, 32, 4, 1, "none", False, 0, {}),
            (80, 256, 16, 16, 4, 1, "float", True, 16, {}),
            (89, 256, 32, 16, 4, 1, "none", False, 0, {}),
            (80, 128, 32, 32, 4, 1, "none", True, 13, {"WINDOW": True, "SINKS": True, "MAXIMA": True}),
            (89, 64, 32, 32, 1, 1, "bool", False, 0, {"CAP": "high", "SINKS": True}),
            (89, 128, 16, 64, 4, 2, "none", False, 0, {}),
            (89, 64, 16, 64, 4, 3, "none", False, 0, {}),
            (80, 72, 16, 32, 4, 3, "bool", False, 0, {"STEP": 8}),
            (89, 128, 64, 32, 4, 3, "float", True, 0, {"WINDOW": True}),
            (89, 256, 32, 32, 4, 2, "bool", True, 0, {}),
            (80, 256, 32, 32, 8, 2, "none", False, 0, {}),
            (80, 256, 16, 32, 8, 2, "none", True, 0, {}),
            (80, 128, 16, 32, 8, 1, "none", True, 0, {}),
            (89, 64, 16, 256, 8, 1, "bool", False, 0, {}),
            (80, 128, 16, 256, 8, 1, "none", True, 0, {}),
            (89, 80, 16, 128, 4, 1, "none", False, 0, {"STEP": 8}),
            (80, 256, 16, 128, 8, 1, "float", False, 0, {"WINDOW": True, "SINKS": True}),
            (80, 128, 16, 256, 8, 1, "none", False, 13, {"CAP": "low", "MAXIMA": True}),
            (80, 128, 32, 256, 8, 1, "none", True, 0, {}),
            (89, 64, 32, 256, 8, 1, "none", True, 0, {}),
            (80, 128, 32, 128, 4, 1, "bool", False, 0, {}),
        )
    ),
    *(
        make_case(
            short_kernel,
            f"short_d{dim}_{m}x{n}_crowded",
            {"MASK": "none", "CAUSAL": False, "DROPPED": 0, "WHOLE": stages == 1} | sizes_of(dim, m, n),
            options={"num_warps": 4, "num_stages": stages, "maxnreg": registers},
            architectures=[80, 90],
            stack=2000,
        )
        for dim, m, n, stages, registers in ((128, 16, 16, 1, 128), (128, 16, 32, 2, 168))
    ),
]
