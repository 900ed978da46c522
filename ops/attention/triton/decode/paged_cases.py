"""List the cases for which the paged kernels are compiled without a device, in the form of cases.py."""

from pasa.ops.attention.triton.cases import Case, _case, _on, _sizes
from pasa.ops.attention.triton.decode.paged_anchored_kernel import decode_anchored_paged_kernel
from pasa.ops.attention.triton.decode.paged_kernel import decode_lanes_paged_kernel, decode_paged_kernel
from pasa.ops.attention.triton.paged.kernel import page_anchors_kernel, write_pages_kernel

NOT_FOR_ASCEND = {
    "decode_paged_kernel": "as decode_kernel: pages are gathered for attention_kernel",
    "decode_lanes_paged_kernel": "as decode_paged_kernel",
    "decode_anchored_paged_kernel": "as decode_paged_kernel",
    "write_pages_kernel": "torch's index_put_ serves an NPU",
    "page_anchors_kernel": "as write_pages_kernel",
}

DIM = {"D": 128, "D_PAD": 128}


def _bf16(case: Case) -> Case:
    """Return the case with a BF16 cache, which is converted to FP16 as it is read."""
    return case | {
        "name": f"{case['name']}_bf16",
        "signature": case["signature"] | dict.fromkeys(["p_k", "p_v"], "*bf16"),
    }


CASES = [
    *(
        _case(
            decode_paged_kernel,
            f"paged_{arch}_{rows}x{dim}_of_{page}" + "_careful" * careful,
            {"TILED": rows == 128, "CAUSAL": rows == 128, "PAGE": page, "GRAIN": 64, "LANES": 1, "CAREFUL": careful}
            | {"PDL": arch == 90}
            | _sizes(dim, rows, 32 if careful or arch < 90 else 64),
            **_on(arch, 8 if rows == 128 and arch == 90 else 4, 3 if careful or arch == 89 else 5, stack=4100),
        )
        for arch, rows, dim, page in (
            (80, 16, 256, 16),
            (89, 64, 256, 16),
            (90, 16, 128, 48),
            (90, 128, 128, 16),
            (90, 128, 128, 128),
        )
        for careful in (False, True)
    ),
    *(
        _case(
            decode_lanes_paged_kernel,
            f"lanes_{arch}_d{dim}_of_{page}" + "_anchored" * anchored,
            {"ANCHORED": anchored, "LANES": 4, "PAGE": page, "PDL": arch == 90} | _sizes(dim, 16, 2048 // dim),
            **_on(arch, 4, 5 if arch == 89 else 7),
        )
        for arch, dim, page in ((80, 128, 16), (89, 128, 128), (90, 64, 16), (90, 128, 16), (90, 128, 128))
        for anchored in (False, True)
    ),
    *(
        _case(
            decode_anchored_paged_kernel,
            f"anchored_{arch}_d{dim}_of_{page}" + "_exact" * exact,
            {"EXACT": exact, "LANES": 4, "PAGE": page, "PDL": arch == 90} | _sizes(dim, 16, 2048 // dim),
            **_on(arch, 4, 5 if arch == 89 else 9),
        )
        for arch, dim, page in ((80, 128, 16), (89, 128, 128), (90, 64, 32), (90, 128, 16), (90, 128, 128))
        for exact in (False, True)
    ),
]
WRITING = [
    _case(write_pages_kernel, "write_pages", {"HEADS_PAD": 8, "PAGE": 16, "ANCHORED": True} | DIM),
    *(
        _case(
            page_anchors_kernel,
            f"page_anchors_{page}",
            {"PAGE": page, "PAGE_PAD": page, "WIDTH": width} | DIM,
            options={"num_warps": warps},
        )
        for page, width, warps in ((16, 128, 2), (128, 64, 4), (256, 32, 4))
    ),
]
NVIDIA_CASES = [
    *CASES,
    *WRITING,
    *(_bf16(case) for case in CASES if case["architectures"] == [90] and "_of_16" in case["name"]),
]
