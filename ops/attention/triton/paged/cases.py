"""List the cases that compile the kernels that write pages without a device; ../cases.py has the fields."""

from pasa.ops.attention.triton.cases import make_case
from pasa.ops.attention.triton.paged.kernel import page_anchors_kernel, write_pages_kernel

NOT_FOR_ASCEND = {
    "write_pages_kernel": "torch's index_put_ serves an NPU",
    "page_anchors_kernel": "as write_pages_kernel",
}
DIM = {"D": 128, "D_PAD": 128}
NVIDIA_CASES = [
    make_case(write_pages_kernel, "write_pages", {"HEADS_PAD": 8, "PAGE": 16, "ANCHORED": True} | DIM),
    *(
        make_case(
            page_anchors_kernel,
            f"page_anchors_{page}",
            {"PAGE": page, "PAGE_PAD": page, "WIDTH": width} | DIM,
            options={"num_warps": warps},
        )
        for page, width, warps in ((16, 128, 2), (128, 64, 4), (256, 32, 4))
    ),
]
