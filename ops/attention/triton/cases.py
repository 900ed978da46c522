"""Describe cases for which kernels are compiled without a device, and list those of the kernels that families share.

scripts/lower_triton_ascend.py, which documents the fields, and
tests/ops/attention/triton/test_compiles_for_nvidia.py read the lists of all families. Nothing reads them at run time.
"""

from typing import Any

from pasa.ops.attention.triton.anchor_kernel import anchor_kernel, shift_kernel
from pasa.ops.attention.triton.centre_kernel import TILE, centre_kernel
from pasa.ops.attention.triton.rounding_kernel import rounding_kernel
from pasa.ops.attention.triton.tile_math import SLICE

Case = dict[str, Any]

TYPES = {
    **dict.fromkeys(
        ["p_q", "p_k", "p_v", "p_out", "p_bias", "p_anchor", "p_anchors", "p_frame", "p_shifted", "p_column"], "*fp16"
    ),
    **dict.fromkeys(["p_extremes", "p_shared"], "*fp16"),
    **dict.fromkeys(["p_k_cache", "p_v_cache"], "*fp16"),
    "p_offset": "*fp64",
    **dict.fromkeys(["p_lse", "p_norm", "p_norms", "p_part", "p_state", "p_bound", "p_low", "p_x"], "*fp32"),
    **dict.fromkeys(["p_tile", "p_table", "p_cu_q", "p_cu_k", "p_first_block", "p_block", "p_cu", "p_slot"], "*i32"),
    **dict.fromkeys(["p_framed", "p_marked", "p_order", "p_counts", "p_top_bits", "p_last"], "*i32"),
    **dict.fromkeys(["p_mask", "p_copy", "p_visible", "p_seen", "p_empty", "p_states"], "*u8"),
    "p_totals": "*i64",
    **dict.fromkeys(["p_grad", "p_g", "p_scaled", "p_centred", "p_dq", "p_dk", "p_dv"], "*fp16"),
    **dict.fromkeys(["p_grad_lse", "p_unit", "p_largest", "p_top", "p_log", "p_shift", "p_centre"], "*fp32"),
    **dict.fromkeys(["p_sink", "p_of_sink"], "*fp32"),
    **dict.fromkeys(["scale", "ratio", "epsilon", "reach", "factor", "diagonal", "off_diagonal"], "fp32"),
}


# Features of calls, off unless a case has them; kernels that lack one do not get its constant.
OFF: Case = {"WINDOW": False, "CAP": "none", "SINKS": False, "MAXIMA": False, "STEP": 1}


def make_case(kernel: Any, name: str, constexprs: Case, **fields: Any) -> Case:
    """Return a case. Strides of tokens, heads and batches are multiples of 16, as D is; a mask's last stride is 1."""
    names, mask = kernel.arg_names, constexprs.get("MASK", "none")
    constexprs = {name: off for name, off in OFF.items() if name in names} | constexprs
    types = TYPES | (dict.fromkeys(["p_mask", "p_copy"], "*fp16") if mask == "float" else {})
    if constexprs.get("DESCRIPTORS"):
        tile = f"tensordesc<fp16[1, 1, {constexprs['BLOCK_N']}, {constexprs['D']}]>"
        types |= dict.fromkeys(["p_k", "p_v", "p_shifted"], tile)
    return {
        "name": name,
        "kernel": kernel,
        "signature": {n: kind for n, kind in types.items() if n in names},
        "constexprs": constexprs | ({} if mask == "none" else {"stride_mask_n": 1}),
        "aligned": [n for n in names if n.startswith(("stride_q", "stride_k", "stride_v", "stride_o"))],
        **fields,
    }


def sizes_of(dim: int, block_m: int, block_n: int) -> Case:
    """Return the compile-time sizes of a tile."""
    return {"D": dim, "D_PAD": 1 << (dim - 1).bit_length(), "BLOCK_M": block_m, "BLOCK_N": block_n}


def on_arch(arch: int, warps: int, stages: int, **fields: Any) -> Case:
    """Return the fields of a case for one architecture."""
    return {"architectures": [arch], "options": {"num_warps": warps, "num_stages": stages}, **fields}


def wide(case: Case) -> Case:
    """Return the case with output in FP32, to be rounded by a separate launch."""
    return case | {"signature": case["signature"] | {"p_out": "*fp32"}}


ON_ASCEND = {dim: sizes_of(dim, 64, 128) for dim in (64, 80, 128)} | {256: sizes_of(256, 32, 64)}  # as in tiles.py


def _shift(name: str, dim: int, width: int, *, exact: bool, visible: bool, packed: bool = False, **fields: Any) -> Case:
    flags = {"D": dim, "WIDTH": width, "BLOCK": 128, "EXACT": exact, "GEMM": not exact}
    return make_case(shift_kernel, name, flags | {"HAS_VISIBLE": visible, "VARLEN": packed}, **fields)


def _rounding(name: str, dim: int, dropped: int, **fields: Any) -> Case:
    flags = {"D": dim, "D_PAD": 1 << (dim - 1).bit_length(), "BLOCK_M": min(16, 2048 // dim), "DROPPED": dropped}
    case = make_case(rounding_kernel, name, flags, **fields)
    return case | {"signature": case["signature"] | ({"p_out": "*bf16"} if dropped == 16 else {})}


ASCEND_CASES = [
    *(_rounding(f"rounding_d{dim}_to_{23 - dropped}_bits", dim, dropped) for dim in ON_ASCEND for dropped in (13, 16)),
    *(
        _shift(
            f"{'anchors' if exact else 'matrix'}_d{dim}" + "_visible" * visible, dim, 32, exact=exact, visible=visible
        )
        for exact in (True, False)
        for dim in (80, 128)
        for visible in (False, True)
    ),
    _shift("anchors_packed", 128, 32, exact=True, visible=False, packed=True),
]
NOT_FOR_ASCEND = dict.fromkeys(
    ("anchor_kernel", "centre_kernel"), "finds out what only GPU launches ask for: shift_kernel serves an NPU"
)
NVIDIA_CASES = [
    _rounding("rounding", 128, 16, architectures=[90]),
    *(
        make_case(
            anchor_kernel,
            "anchors" + "_early" * early,
            {"D": 128, "D_PAD": 128, "WIDTH": SLICE, "BLOCK": 128, "HAS_VISIBLE": False, "CHECK_VALUES": True}
            | {"VARLEN": False, "MARKED": early, "EARLY": early},
            options={"num_warps": 8},
            **({"architectures": [90]} if early else {}),
        )
        for early in (False, True)
    ),
    *(
        make_case(
            centre_kernel,
            f"centre_d{dim}" + (f"_{kind}" if kind else ""),
            {"D": dim, "D_PAD": dim, "BLOCK": max(64, TILE.value // dim), "PARTS": 2}
            | {"HAS_VISIBLE": kind == "visible", "VARLEN": kind == "packed", "EARLY": False},
            options={"num_warps": max(2, dim // 64)},
        )
        for dim, kind in ((64, ""), (64, "visible"), (128, "packed"), (256, ""), (256, "visible"))
    ),
    _shift("matrix", 128, 128, exact=False, visible=False, options={"num_warps": 8}),
]
