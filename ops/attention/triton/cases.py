"""List the cases for which the kernels are compiled without a device.

scripts/lower_triton_ascend.py, which documents the fields, and
tests/ops/attention/triton/test_compiles_for_nvidia.py read the list. Nothing else imports this module.
"""

from typing import Any

from pasa.ops.attention.triton.anchor_kernel import anchor_kernel, shift_kernel
from pasa.ops.attention.triton.backward.centre_kernel import centre_kernel
from pasa.ops.attention.triton.backward.kernel import keys_kernel, queries_kernel, rows_kernel
from pasa.ops.attention.triton.backward.tiles import BACKWARD
from pasa.ops.attention.triton.decode.kernel import decode_kernel, merge_kernel
from pasa.ops.attention.triton.decode.lanes_kernel import decode_lanes_kernel
from pasa.ops.attention.triton.paper.kernel import paper_kernel
from pasa.ops.attention.triton.prefill.kernel import attention_kernel
from pasa.ops.attention.triton.prefill.mask_kernel import mask_tiles_kernel
from pasa.ops.attention.triton.rounding_kernel import rounding_kernel
from pasa.ops.attention.triton.short.kernel import short_kernel
from pasa.ops.attention.triton.tile_math import SLICE
from pasa.ops.attention.triton.watch.kernel import watch_kernel, watch_totals_kernel

Case = dict[str, Any]

TYPES = {
    **dict.fromkeys(["p_q", "p_k", "p_v", "p_out", "p_anchor", "p_anchors", "p_frame", "p_shifted"], "*fp16"),
    **dict.fromkeys(["p_k_cache", "p_v_cache"], "*fp16"),
    "p_offset": "*fp64",
    **dict.fromkeys(["p_lse", "p_norm", "p_norms", "p_part", "p_state", "p_low", "p_x"], "*fp32"),
    **dict.fromkeys(["p_tile", "p_table", "p_cu_q", "p_cu_k", "p_first_block", "p_block", "p_cu", "p_slot"], "*i32"),
    **dict.fromkeys(["p_framed", "p_marked", "p_order", "p_counts", "p_most", "p_last"], "*i32"),
    **dict.fromkeys(["p_mask", "p_visible", "p_seen"], "*u8"),
    "p_totals": "*i64",
    **dict.fromkeys(["p_grad", "p_g", "p_scaled", "p_centred", "p_dq", "p_dk", "p_dv"], "*fp16"),
    **dict.fromkeys(["p_grad_lse", "p_unit", "p_largest", "p_top", "p_log", "p_shift", "p_centre"], "*fp32"),
    **dict.fromkeys(["scale", "epsilon", "reach", "factor", "diagonal", "off_diagonal"], "fp32"),
}


def _case(kernel: Any, name: str, constexprs: Case, **fields: Any) -> Case:
    """Return a case. Strides of tokens, heads and batches are multiples of 16, as D is; a mask's last stride is 1."""
    names, mask = kernel.arg_names, constexprs.get("MASK", "none")
    types = TYPES | ({"p_mask": "*fp16"} if mask == "float" else {})
    if constexprs.get("DESCRIPTORS"):
        types |= dict.fromkeys(["p_k", "p_v"], f"tensordesc<fp16[1, 1, {constexprs['BLOCK_N']}, {constexprs['D']}]>")
    return {
        "name": name,
        "kernel": kernel,
        "signature": {n: kind for n, kind in types.items() if n in names},
        "constexprs": constexprs | ({} if mask == "none" else {"stride_mask_n": 1}),
        "aligned": [n for n in names if n.startswith(("stride_q", "stride_k", "stride_v", "stride_o"))],
        **fields,
    }


def _sizes(dim: int, block_m: int, block_n: int) -> Case:
    return {"D": dim, "D_PAD": 1 << (dim - 1).bit_length(), "BLOCK_M": block_m, "BLOCK_N": block_n}


def _attention(name: str, sizes: Case, mask: str = "none", causal: bool = True, **over: Any) -> Case:
    """Return a case of the attention kernel, reading precomputed K' as on an NPU unless `over` changes that."""
    flags = {"SHIFT": "before", "FAST": False, "GUARDED": False, "CLEAN": True, "DESCRIPTORS": False}
    flags |= {"ANCHOR_BLOCK": 128, "OVERLAP": False, "LISTED": False, "LOOP": True, "DROPPED": 0}
    flags |= {"MASK": mask, "CAUSAL": causal, "VARLEN": False} | sizes
    fields = {key: over.pop(key) for key in ("options", "architectures", "stack") if key in over}
    return _case(attention_kernel, name, flags | over, **fields)


def _paper(name: str, sizes: Case, mask: str = "none", clean: bool = True, **over: Any) -> Case:
    flags = {"MASK": mask, "CAUSAL": True, "VARLEN": False, "ROUND": False, "CLEAN": clean, "DROPPED": 0}
    flags |= sizes
    fields = {key: over.pop(key) for key in ("options", "architectures", "stack") if key in over}
    return _case(paper_kernel, name, flags | over, **fields)


def _shift(name: str, dim: int, width: int, *, exact: bool, visible: bool, packed: bool = False, **fields: Any) -> Case:
    flags = {"D": dim, "WIDTH": width, "BLOCK": 128, "EXACT": exact, "GEMM": not exact}
    return _case(shift_kernel, name, flags | {"HAS_VISIBLE": visible, "VARLEN": packed}, **fields)


def _wide(case: Case) -> Case:
    """Return the case with output in FP32, to be rounded by a separate launch."""
    return case | {"signature": case["signature"] | {"p_out": "*fp32"}}


def _rounding(name: str, dim: int, dropped: int, **fields: Any) -> Case:
    flags = {"D": dim, "D_PAD": 1 << (dim - 1).bit_length(), "BLOCK_M": min(16, 2048 // dim), "DROPPED": dropped}
    case = _case(rounding_kernel, name, flags, **fields)
    return case | {"signature": case["signature"] | ({"p_out": "*bf16"} if dropped == 16 else {})}


ON_ASCEND = {dim: _sizes(dim, 64, 128) for dim in (64, 80, 128)} | {256: _sizes(256, 32, 64)}  # as in tiles.py


def _on_ascend(dim: int, mask: str, causal: bool = True) -> Case:
    """Return the sizes of the tile that an NPU gets for a mask, as `tiles.fit_ascend` has them."""
    return ON_ASCEND[dim] | ({"BLOCK_M": 32} if mask == "float" and causal else {})


ASCEND_CASES = [
    *(
        _attention(f"d{dim}_{mask}" + "_causal" * causal, _on_ascend(dim, mask, causal), mask, causal)
        for dim in ON_ASCEND
        for mask in ("none", "bool", "float")
        for causal in (False, True)
    ),
    *(_attention(f"d{dim}_packed", ON_ASCEND[dim], VARLEN=True) for dim in (64, 128, 256)),
    *(_attention(f"d{dim}_16_rows", _sizes(dim, 16, 128)) for dim in (64, 128)),
    _attention("d256_16_rows", _sizes(256, 16, 64)),
    *(_attention(f"d{dim}_fp32", ON_ASCEND[dim], SHIFT="none", FAST=True) for dim in (64, 128)),
    *(
        _wide(_attention(f"d{dim}_{mask}_wide", _on_ascend(dim, mask), mask))
        for dim in ON_ASCEND
        for mask in ("none", "float")
    ),
    *(_wide(_paper(f"paper_d{dim}_wide", _sizes(dim, 32 if dim == 256 else 64, 128))) for dim in (64, 128, 256)),
    *(_rounding(f"rounding_d{dim}_to_{23 - dropped}_bits", dim, dropped) for dim in ON_ASCEND for dropped in (13, 16)),
    *(_paper(f"paper_d{dim}_{mask}", _sizes(dim, 64, 128), mask) for dim in (64, 128) for mask in ("none", "float")),
    *(_paper(f"paper_d256_{mask}", _sizes(256, 32, 128), mask) for mask in ("none", "float")),
    *(_paper(f"paper_d{dim}_rounded_packed", _sizes(dim, 64, 128), VARLEN=True, ROUND=True) for dim in (64, 128)),
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
NOT_FOR_ASCEND = {
    **dict.fromkeys(
        ["centre_kernel", "rows_kernel", "keys_kernel", "queries_kernel"],
        "the backward pass: ops/attention/spec/gradients.py serves an NPU",
    ),
    "anchor_kernel": "finds out what only GPU launches ask for: shift_kernel serves an NPU",
    "decode_kernel": "branches on its data round a GEMM: attention_kernel serves decoding",
    "decode_lanes_kernel": "as decode_kernel",
    "mask_tiles_kernel": "lists tiles for loops that an NPU goes through whole",
    "merge_kernel": "goes with decode_kernel",
    "short_kernel": "as decode_kernel",
    "watch_kernel": "torch operations count on an NPU",
    "watch_totals_kernel": "goes with watch_kernel",
}

FAST: Case = {"SHIFT": "none", "FAST": True, "GUARDED": True, "CLEAN": False, "LOOP": False}
PLAIN = FAST | {"GUARDED": False}
CAREFUL: Case = {"SHIFT": "here", "GUARDED": True, "CLEAN": False}
ON_HOPPER: Case = {"DESCRIPTORS": True, "OVERLAP": True}


def _on(arch: int, warps: int, stages: int, **fields: Any) -> Case:
    return {"architectures": [arch], "options": {"num_warps": warps, "num_stages": stages}, **fields}


def _backward(arch: int, dim: int, mask: str, causal: bool) -> list[Case]:
    """Return the cases of the three backward passes of a call."""
    tiles = BACKWARD[f"sm_{arch}"][1 << (dim - 1).bit_length()]
    flags = {"MASK": mask, "CAUSAL": causal}
    return [
        _case(
            kernel,
            f"{kernel.__name__}_sm_{arch}_d{dim}_{mask}" + "_causal" * causal,
            flags | _sizes(dim, *tile[:2]) | ({"SPAN": tiles[0][0]} if kernel is keys_kernel else {"HAS_LSE": False}),
            **_on(arch, *tile[2:]),
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
    _case(
        centre_kernel,
        "centre",
        {"D": 128, "BLOCK": 256, "HAS_VISIBLE": False},
        options={"num_warps": 4},
    ),
    _attention("sm_80_d64", _sizes(64, 128, 64), **FAST, **_on(80, 4, 3)),
    _attention("sm_80_d128", _sizes(128, 128, 64), **FAST, **_on(80, 8, 3)),
    _attention("sm_89_d128", _sizes(128, 128, 32), **FAST, **_on(89, 8, 2)),
    _attention("sm_89_d256", _sizes(256, 64, 32), **FAST, **_on(89, 8, 1)),
    _attention("sm_90_d64", _sizes(64, 128, 64), **FAST, DESCRIPTORS=True, **_on(90, 4, 3, stack=0)),
    *(
        _attention(f"sm_90_d128_{stages}", _sizes(128, 64, 64), **FAST, **ON_HOPPER, **_on(90, 4, stages, stack=0))
        for stages in (2, 3)
    ),
    _attention("sm_90_d128_packed", _sizes(128, 64, 64), VARLEN=True, **FAST, OVERLAP=True, **_on(90, 4, 3)),
    _attention("sm_90_d128_fp32", _sizes(128, 128, 64), **PLAIN, DESCRIPTORS=True, **_on(90, 8, 2)),
    _attention("sm_80_d64_unbiased", _sizes(64, 128, 64), DROPPED=13, **FAST, **_on(80, 4, 3)),
    _attention("sm_90_d128_bf16", _sizes(128, 64, 64), DROPPED=16, **FAST, **ON_HOPPER, **_on(90, 4, 3, stack=0)),
    _attention("sm_90_d128_careful_unbiased", _sizes(128, 64, 64), DROPPED=13, **CAREFUL, **_on(90, 4, 1)),
    _attention("sm_90_d256", _sizes(256, 128, 64), **FAST, **_on(90, 8, 2)),
    _attention("sm_90_d256_few_rows", _sizes(256, 64, 64), **FAST, **_on(90, 4, 2, stack=1200)),
    _attention("sm_90_d128_careful", _sizes(128, 64, 64), **CAREFUL, **_on(90, 4, 1)),
    *(
        _attention(
            f"sm_90_d128_listed_{mask}" + "_careful" * (flags is CAREFUL),
            _sizes(128, 64, 64),
            mask,
            **flags,
            LISTED=True,
            **_on(90, 4, stages, stack=2300),  # the exact pass needs 2256, as q.frame of every row is in registers
        )
        for mask, flags, stages in (("bool", FAST | ON_HOPPER, 2), ("bool", CAREFUL, 1), ("float", CAREFUL, 1))
    ),
    *(
        _case(
            mask_tiles_kernel,
            f"tiles_of_{mask}_mask",
            {"MASK": mask, "CAUSAL": False, "BLOCK_M": 64, "BLOCK_N": 64, "TILES": 4},
            options={"num_warps": 4},
        )
        for mask in ("bool", "float")
    ),
    *(
        _attention(
            f"sm_90_d{d}_careful_{m}x{n}",
            _sizes(d, m, n),
            **CAREFUL,
            **_on(90, m // 16, 1, stack=2000 if n == 32 else 2500),
        )
        for d, n in ((160, 32), (256, 32), (256, 64))
        for m in (64, 128)
    ),
    _rounding("rounding", 128, 16, architectures=[90]),
    _paper("paper_sm_80_d256", _sizes(256, 64, 128), clean=False, **_on(80, 8, 1)),
    _paper("paper_sm_89_d128", _sizes(128, 64, 128), clean=False, **_on(89, 8, 1)),
    _paper("paper_sm_90_d128", _sizes(128, 128, 128), clean=False, **_on(90, 8, 2)),
    _paper("paper_sm_90_d128_unbiased", _sizes(128, 128, 128), clean=False, DROPPED=13, **_on(90, 8, 2)),
    _paper("paper_sm_90_d256", _sizes(256, 128, 128), clean=False, **_on(90, 8, 1, stack=2600)),
    *(
        _case(
            anchor_kernel,
            "anchors" + "_early" * early,
            {"D": 128, "D_PAD": 128, "WIDTH": SLICE, "BLOCK": 128, "HAS_VISIBLE": False, "CHECK_VALUES": True}
            | {"VARLEN": False, "EARLY": early},
            options={"num_warps": 8},
            **({"architectures": [90]} if early else {}),
        )
        for early in (False, True)
    ),
    _shift("matrix", 128, 128, exact=False, visible=False, options={"num_warps": 8}),
    *(
        _case(
            decode_kernel,
            f"decode_{rows}" + "_careful" * careful,
            {"MASK": "none", "CAUSAL": True, "CAREFUL": careful, "PDL": False}
            | _sizes(128, rows, 32 if careful else 64),
            options={"num_warps": 8 if rows == 128 else 4, "num_stages": 2 if careful else 3},
            architectures=[90],
            stack=4100,
        )
        for rows in (16, 64, 128)
        for careful in (False, True)
    ),
    *(
        _case(
            decode_lanes_kernel,
            f"lanes_{arch}_d{dim}" + "_anchored" * anchored,
            {"ANCHORED": anchored, "CAUSAL": True, "LANES": 4, "PDL": arch == 90} | _sizes(dim, 16, 2048 // dim),
            **_on(arch, 4, 3 if arch == 89 else 4),
        )
        for arch in (80, 89, 90)
        for dim in (64, 128)
        for anchored in (False, True)
    ),
    *(
        _case(
            merge_kernel,
            f"merge_{splits}x{columns}",
            {"NATS": False, "D": dim, "D_PAD": dim, "BLOCK_M": 16, "SPLITS": splits, "PDL": False}
            | {"COLUMNS": columns, "DROPPED": dropped, "ALIKE": splits == 128},
            options={"num_warps": warps},
            stack=stack,
        )
        for dim, splits, columns, dropped, warps, stack in (
            (128, 128, 32, 0, 4, 0),
            (
                128,
                256,
                128,
                13,
                16,
                320,
            ),  # on sm_80 offsets are computed twice, the second time in the largest score's frame
            (128, 512, 128, 16, 16, 1500),
            (256, 256, 256, 13, 16, 1500),
        )
    ),
    *(
        _case(
            short_kernel,
            f"short_d{dim}_{m}x{n}_{mask}" + "_causal" * causal,
            {"MASK": mask, "CAUSAL": causal, "DROPPED": dropped} | _sizes(dim, m, n),
            options={"num_warps": warps, "num_stages": 1},
            architectures=[before, 90],
        )
        for before, dim, m, n, warps, mask, causal, dropped in (
            (80, 64, 32, 32, 1, "none", False, 0),
            (89, 64, 64, 64, 4, "none", True, 0),
            (89, 128, 16, 16, 1, "bool", False, 13),
            (80, 128, 64, 32, 4, "none", False, 0),
            (80, 256, 16, 16, 4, "float", True, 16),
            (89, 256, 64, 16, 4, "none", False, 0),
        )
    ),
    *(
        _case(
            watch_kernel,
            f"watch_d{dim}_{m}_{mask}",
            {"MASK": mask, "CAUSAL": True, "STRIDE": 1021} | _sizes(dim, m, 64),
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
    _case(watch_totals_kernel, "watch_totals", {"STRIDE": 1021, "BLOCK_M": 64}, options={"num_warps": 1}),
]
