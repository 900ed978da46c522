"""List the cases that compile the kernel of the published algorithm without a device; ../cases.py has the fields."""

from typing import Any

from pasa.ops.attention.triton.cases import Case, make_case, on_arch, sizes_of, wide
from pasa.ops.attention.triton.paper.kernel import paper_kernel


def _paper(name: str, sizes: Case, mask: str = "none", clean: bool = True, **over: Any) -> Case:
    flags = {"MASK": mask, "CAUSAL": True, "VARLEN": False, "ROUND": False, "CLEAN": clean, "DROPPED": 0}
    flags |= sizes
    fields = {key: over.pop(key) for key in ("options", "architectures", "stack") if key in over}
    return make_case(paper_kernel, name, flags | over, **fields)


ASCEND_CASES = [
    *(wide(_paper(f"paper_d{dim}_wide", sizes_of(dim, 32 if dim == 256 else 64, 128))) for dim in (64, 128, 256)),
    *(_paper(f"paper_d{dim}_{mask}", sizes_of(dim, 64, 128), mask) for dim in (64, 128) for mask in ("none", "float")),
    *(_paper(f"paper_d256_{mask}", sizes_of(256, 32, 128), mask) for mask in ("none", "float")),
    *(_paper(f"paper_d{dim}_rounded_packed", sizes_of(dim, 64, 128), VARLEN=True, ROUND=True) for dim in (64, 128)),
]
NVIDIA_CASES = [
    _paper("paper_sm_80_d256", sizes_of(256, 64, 128), clean=False, **on_arch(80, 8, 1)),
    _paper("paper_sm_89_d128", sizes_of(128, 64, 128), clean=False, **on_arch(89, 8, 1)),
    _paper("paper_sm_90_d128", sizes_of(128, 128, 128), clean=False, **on_arch(90, 8, 2)),
    _paper("paper_sm_90_d128_unbiased", sizes_of(128, 128, 128), clean=False, DROPPED=13, **on_arch(90, 8, 2)),
    _paper("paper_sm_90_d256", sizes_of(256, 128, 128), clean=False, **on_arch(90, 8, 1, stack=2600)),
]
