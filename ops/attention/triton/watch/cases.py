"""List the cases that compile the counters of sampled rows without a device; ../cases.py has the fields."""

from pasa.ops.attention.triton.cases import make_case, sizes_of
from pasa.ops.attention.triton.watch.kernel import watch_kernel, watch_totals_kernel

NOT_FOR_ASCEND = {
    "watch_kernel": "torch operations count on an NPU",
    "watch_totals_kernel": "goes with watch_kernel",
}
NVIDIA_CASES = [
    *(
        make_case(
            watch_kernel,
            f"watch_d{dim}_{m}_{mask}",
            {"MASK": mask, "CAUSAL": True, "STRIDE": 1021} | sizes_of(dim, m, 64),
            options={"num_warps": 4, "num_stages": 2 if dim > 128 else 3},
            architectures=[before, 90],
        )
        for before, dim, m, mask in (
            (80, 64, 64, "none"),
            (89, 128, 16, "none"),
            (89, 128, 64, "none"),
            (80, 128, 64, "bool"),
            (89, 256, 64, "none"),
        )
    ),
    make_case(watch_totals_kernel, "watch_totals", {"STRIDE": 1021, "BLOCK_M": 64}, options={"num_warps": 1}),
]
