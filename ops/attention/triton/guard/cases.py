"""List the cases that compile the guards without a device; ../cases.py has the fields."""

from pasa.ops.attention.triton.cases import make_case
from pasa.ops.attention.triton.guard.kernel import bias_kernel, finish_kernel, scan_kernel, shift_columns_kernel

NOT_FOR_ASCEND = {
    "scan_kernel": "guards CUDA's fused attention: on an NPU torch operators guard torch_npu's",
    "shift_columns_kernel": "as scan_kernel",
    "finish_kernel": "as scan_kernel",
    "bias_kernel": "as scan_kernel",
}
ARCHITECTURES = (70, 75, 80, 89, 90)  # no matrix product, so GPUs without tensor cores as well
COLUMNS, WHOLE = ({"D": 128, "WIDTH": width, "BLOCK": block} for width, block in ((64, 256), (16, 2048)))
NVIDIA_CASES = [
    make_case(
        scan_kernel,
        "scan",
        {"HAS_SEEN": True} | COLUMNS,
        options={"num_warps": 4},
        architectures=ARCHITECTURES,
    ),
    *(
        make_case(
            shift_columns_kernel,
            f"shift_columns_{'whole' if whole else 'scanned'}",
            {"HAS_SEEN": not whole, "WHOLE": whole, "PARTS": 32} | (WHOLE if whole else COLUMNS),
            options={"num_warps": 8},
            architectures=ARCHITECTURES,
        )
        for whole in (False, True)
    ),
    *(
        make_case(
            bias_kernel,
            f"bias_{mask}" + "_and_keys" * marks,
            {"MASK": mask, "MARK_KEYS": marks, "BLOCK_M": 8, "BLOCK_N": 512},
            architectures=ARCHITECTURES,
        )
        for mask in ("bool", "float")
        for marks in (False, True)
    ),
    *(
        make_case(
            finish_kernel,
            f"finish_{mask}_d{dim}_{rows}" + "_early" * early + f"_{looks}" * bool(looks),
            {
                "MASK": mask,
                "SCANNED": looks == "scanned",
                "EMPTY": mask == "bool",
                "QUERIES": not early,
                "VALUES": looks == "values",
                "D": dim,
                "D_PAD": dim,
                "BLOCK_L": 4 * rows if rows > 1 else 1,
                "BLOCK_R": (4 if early else 2) * rows if rows > 1 else 1,
                "BLOCK_M": rows,
                "BLOCK_N": 4096 // dim,
                "PDL": early,
            },
            options={"maxnreg": 64},
            architectures=(90,) if early else ARCHITECTURES,
        )
        for mask, dim, rows, early, looks in (
            *(("none", 128, 16, False, "scanned"), ("none", 128, 16, False, ""), ("none", 128, 1, False, "")),
            *(("bool", 64, 32, False, "scanned"), ("float", 256, 8, False, "scanned"), ("float", 256, 8, False, "")),
            *(("none", 128, 16, True, each) for each in ("scanned", "values", "")),
            *(("none", 128, 1, True, ""), ("bool", 128, 16, True, "")),
        )
    ),
]
