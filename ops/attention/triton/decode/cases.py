"""List the cases that compile the kernels of decoding without a device; ../cases.py has the fields."""

from pasa.ops.attention.triton.cases import make_case, on_arch, sizes_of
from pasa.ops.attention.triton.decode.kernel import decode_kernel, merge_kernel
from pasa.ops.attention.triton.decode.lanes_kernel import decode_lanes_kernel
from pasa.ops.attention.triton.decode.launch import decode_tiles

NOT_FOR_ASCEND = {
    "decode_kernel": "branches on its data round a GEMM: attention_kernel serves decoding",
    "decode_lanes_kernel": "as decode_kernel",
    "merge_kernel": "goes with decode_kernel",
}
NVIDIA_CASES = [
    *(
        make_case(
            decode_kernel,
            f"decode_{arch}_{rows}x{dim}_{mask}" + "_exact" * exact,
            {"MASK": mask, "CAUSAL": mask == "none", "EXACT": exact, "PDL": arch == 90}
            | sizes_of(dim, rows, tile.block_n),
            **on_arch(arch, tile.warps, tile.stages, stack=4100),
        )
        for arch, rows, dim, mask in (
            (89, 32, 128, "none"),
            (89, 32, 256, "none"),
            (90, 16, 128, "bool"),
            (90, 32, 128, "none"),
            (90, 32, 256, "none"),
            (90, 64, 128, "none"),
            (90, 128, 128, "none"),
        )
        for exact, tile in zip((False, True), decode_tiles(f"sm_{arch}", dim, rows), strict=True)
    ),
    *(
        make_case(
            decode_kernel,
            f"decode_{dim}_window_{cap}_cap" + "_exact" * exact,
            {"MASK": "none", "CAUSAL": True, "EXACT": exact, "PDL": True, "WINDOW": True, "CAP": cap}
            | sizes_of(dim, 16, 32),
            **on_arch(90, 4, 2 if exact else 3),
        )
        for dim, cap, exact in ((128, "none", False), (128, "none", True), (256, "low", False))
    ),
    *(
        make_case(
            decode_lanes_kernel,
            f"lanes_{arch}_d{dim}" + "_exact" * exact,
            {"EXACT": exact, "CAUSAL": True, "LANES": 4, "PDL": arch == 90} | sizes_of(dim, 16, 2048 // dim),
            **on_arch(arch, 1 if exact else 4, 1 if exact else {80: 4, 89: 2, 90: 3}[arch]),
        )
        for arch in (80, 89, 90)
        for dim in (64, 128)
        for exact in (False, True)
    ),
    *(
        make_case(
            merge_kernel,
            f"merge_{splits}x{columns}" + "_sinks" * sinks,
            {
                "SINKS": sinks,
                "MAXIMA": sinks,
                "NATS": False,
                "D": dim,
                "D_PAD": dim,
                "BLOCK_M": 16,
                "SPLITS": splits,
                "PDL": False,
            }
            | {"COLUMNS": columns, "DROPPED": dropped, "SHARED_FRAME": splits == 128},
            options={"num_warps": warps},
            stack=stack,
        )
        for dim, splits, columns, dropped, warps, stack, sinks in (
            (128, 128, 32, 0, 4, 0, False),
            (128, 128, 32, 0, 4, 0, True),
            (128, 64, 64, 13, 4, 0, True),
            (
                128,
                256,
                128,
                13,
                16,
                320,
                False,
            ),  # on sm_80 offsets are computed twice, the second time in the largest score's frame
            (128, 512, 128, 16, 16, 1500, False),
            (256, 256, 256, 13, 16, 1500, False),
        )
    ),
]
