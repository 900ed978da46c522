"""List the cases that compile the kernels of gradients without a device; ../cases.py has the fields."""

from pasa.ops.attention.triton.backward.centre_kernel import centre_kernel
from pasa.ops.attention.triton.backward.kernel import keys_kernel, queries_kernel, rows_kernel
from pasa.ops.attention.triton.backward.tiles import BACKWARD
from pasa.ops.attention.triton.cases import Case, make_case, on_arch, sizes_of

NOT_FOR_ASCEND = dict.fromkeys(
    ["centre_kernel", "rows_kernel", "keys_kernel", "queries_kernel"],
    "the backward pass: ops/attention/spec/gradients.py serves an NPU",
)


def _backward(arch: int, dim: int, mask: str, causal: bool, features: bool = False) -> list[Case]:
    """Return the cases of the three backward passes of a call, with a window and sinks if it has `features`."""
    tiles = BACKWARD[f"sm_{arch}"][1 << (dim - 1).bit_length()]
    flags = {"MASK": mask, "CAUSAL": causal, "WINDOW": features}
    return [
        make_case(
            kernel,
            f"{kernel.__name__}_sm_{arch}_d{dim}_{mask}" + "_causal" * causal + "_window" * features,
            flags
            | sizes_of(dim, *tile[:2])
            | ({"SPAN": tiles[0][0]} if kernel is keys_kernel else {"HAS_LSE": features})
            | ({"SINKS": features} if kernel is rows_kernel else {}),
            **on_arch(arch, *tile[2:]),
        )
        for kernel, tile in zip((rows_kernel, keys_kernel, queries_kernel), tiles, strict=True)
    ]


NVIDIA_CASES = [
    *(
        case
        for arch, dim, mask in (
            (80, 64, "none"),
            (80, 128, "float"),
            (89, 128, "none"),
            (89, 256, "none"),
            (90, 64, "none"),
            (90, 128, "none"),
            (90, 128, "float"),
            (90, 256, "none"),
        )
        for case in _backward(arch, dim, mask, causal=mask == "none")
    ),
    *(case for arch, dim in ((80, 64), (90, 128)) for case in _backward(arch, dim, "none", True, features=True)),
    make_case(
        centre_kernel,
        "centre",
        {"D": 128, "BLOCK": 256, "HAS_VISIBLE": False},
        options={"num_warps": 4},
    ),
]
