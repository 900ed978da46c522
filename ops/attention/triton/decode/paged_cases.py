"""List the cases that compile the kernels that decode from pages without a device; ../cases.py has the fields."""

from pasa.ops.attention.triton.cases import Case, make_case, on_arch, sizes_of
from pasa.ops.attention.triton.decode.paged_anchored_kernel import decode_anchored_paged_kernel
from pasa.ops.attention.triton.decode.paged_kernel import decode_lanes_paged_kernel, decode_paged_kernel

NOT_FOR_ASCEND = {
    "decode_paged_kernel": "as decode_kernel: pages are gathered for attention_kernel",
    "decode_lanes_paged_kernel": "as decode_paged_kernel",
    "decode_anchored_paged_kernel": "as decode_paged_kernel",
}


def _bf16(case: Case) -> Case:
    """Return the case with a BF16 cache, which is converted to FP16 as it is read."""
    return case | {
        "name": f"{case['name']}_bf16",
        "signature": case["signature"] | dict.fromkeys(["p_k", "p_v"], "*bf16"),
    }


CASES = [
    *(
        make_case(
            decode_paged_kernel,
            f"paged_{arch}_{rows}x{dim}_of_{page}" + "_exact" * exact,
            {"TILED": rows == 128, "CAUSAL": rows == 128, "PAGE": page, "GRAIN": 64, "EXACT": exact}
            | {"PDL": arch == 90}
            | sizes_of(dim, rows, 32 if exact or arch < 90 else 64),
            **on_arch(arch, 8 if rows == 128 and arch == 90 else 4, 3 if exact or arch == 89 else 5, stack=4100),
        )
        for arch, rows, dim, page in (
            (80, 16, 256, 16),
            (89, 64, 256, 16),
            (90, 16, 128, 48),
            (90, 128, 128, 16),
            (90, 128, 128, 128),
        )
        for exact in (False, True)
    ),
    *(
        make_case(
            decode_paged_kernel,
            f"paged_90_window_{rows}x{dim}_{cap}_cap" + "_exact" * exact,
            {"TILED": rows > 16, "CAUSAL": rows > 16, "PAGE": 16, "GRAIN": 64, "EXACT": exact}
            | {"PDL": True, "WINDOW": True, "CAP": cap}
            | sizes_of(dim, rows, 32 if exact else 64),
            **on_arch(90, 8 if rows == 128 else 4, 3 if exact else 5, stack=4100),
        )
        for rows, dim, cap, exact in (
            (16, 128, "none", False),
            (16, 128, "none", True),
            (128, 128, "none", False),
            (16, 64, "high", False),
        )
    ),
    *(
        make_case(
            decode_lanes_paged_kernel,
            f"lanes_{arch}_d{dim}_of_{page}" + "_bare" * bare + "_exact" * exact,
            {"ANCHORED": not bare, "EXACT": exact, "LANES": 4, "PAGE": page, "PDL": arch == 90}
            | sizes_of(dim, 16, 2048 // dim),
            **on_arch(arch, 1 if exact else 4, 1 if exact else {80: 7, 89: 3, 90: 5}[arch]),
        )
        for arch, dim, page in ((80, 128, 16), (89, 128, 128), (90, 64, 16), (90, 128, 16), (90, 128, 128))
        for bare, exact in ((False, False), (False, True), (True, False))
    ),
    *(
        make_case(
            decode_anchored_paged_kernel,
            f"anchored_{arch}_d{dim}_of_{page}" + "_exact" * exact,
            {"EXACT": exact, "LANES": 4, "PAGE": page, "PDL": arch == 90} | sizes_of(dim, 16, 2048 // dim),
            **on_arch(arch, 4, 5 if arch == 89 else 9),
        )
        for arch, dim, page in ((80, 128, 16), (89, 128, 128), (90, 64, 32), (90, 128, 16), (90, 128, 128))
        for exact in (False, True)
    ),
    *(  # of batch-invariant calls
        make_case(
            kernel,
            f"{name}_fixed" + "_exact" * exact,
            {"EXACT": exact, "PAGE": 16, "PDL": True, "LEAST": 1024} | flags,
            **on_arch(90, *options[exact]),
        )
        for name, kernel, flags, options in (
            (
                "lanes_90_d128_of_16",
                decode_lanes_paged_kernel,
                {"ANCHORED": True, "LANES": 4} | sizes_of(128, 16, 16),
                ((4, 5), (1, 1)),
            ),
            (
                "paged_90_128x128_of_16",
                decode_paged_kernel,
                {"TILED": True, "CAUSAL": True, "GRAIN": 64} | sizes_of(128, 128, 64),
                ((8, 5), (8, 3)),
            ),
        )
        for exact in (False, True)
    ),
]
NVIDIA_CASES = [
    *CASES,
    *(_bf16(case) for case in CASES if case["architectures"] == [90] and "_of_16" in case["name"]),
]
