"""List the cases that compile the kernels of whole sequences without a device; ../cases.py has the fields."""

from typing import Any

from pasa.ops.attention.triton.cases import ON_ASCEND, Case, make_case, on_arch, sizes_of, wide
from pasa.ops.attention.triton.prefill.kernel import attention_kernel
from pasa.ops.attention.triton.prefill.mask_kernel import mask_tiles_kernel, order_tiles_kernel


def _attention(name: str, sizes: Case, mask: str = "none", causal: bool = True, **over: Any) -> Case:
    """Return a case of the attention kernel, reading precomputed K' as on an NPU unless `over` changes that."""
    flags = {"SHIFT": "before", "FAST": False, "GUARDED": False, "CLEAN": True, "DESCRIPTORS": False}
    flags |= {"ANCHOR_BLOCK": 128, "PART": 64, "OVERLAP": False, "LISTED": False, "LOOP": True, "DROPPED": 0}
    flags |= {"MASK": mask, "CAUSAL": causal, "VARLEN": False} | sizes
    fields = {key: over.pop(key) for key in ("options", "architectures", "stack") if key in over}
    case = make_case(attention_kernel, name, flags | over, **fields)
    strides = [name for name in ("stride_mask_b", "stride_mask_h", "stride_mask_m") if over.get("LISTED")]
    return case | {"aligned": case["aligned"] + strides}


def _on_ascend(dim: int, mask: str, causal: bool = True) -> Case:
    """Return the sizes of the tile that an NPU gets for a mask, as `tiles.fit_ascend` has them."""
    return ON_ASCEND[dim] | ({"BLOCK_M": 32} if mask == "float" and causal else {})


FAST: Case = {"SHIFT": "none", "FAST": True, "GUARDED": True, "CLEAN": False, "LOOP": False}
PLAIN = FAST | {"GUARDED": False}
EXACT: Case = {"SHIFT": "here", "GUARDED": True, "CLEAN": False}
ON_HOPPER: Case = {"DESCRIPTORS": True, "OVERLAP": True}
WINDOWED: Case = {"WINDOW": True, "SINKS": True, "MAXIMA": True}


ASCEND_CASES = [
    *(
        _attention(f"d{dim}_{mask}" + "_causal" * causal, _on_ascend(dim, mask, causal), mask, causal)
        for dim in ON_ASCEND
        for mask in ("none", "bool", "float")
        for causal in (False, True)
    ),
    *(_attention(f"d{dim}_packed", ON_ASCEND[dim], VARLEN=True) for dim in (64, 128, 256)),
    *(_attention(f"d{dim}_16_rows", sizes_of(dim, 16, 128)) for dim in (64, 128)),
    _attention("d256_16_rows", sizes_of(256, 16, 64)),
    *(_attention(f"d{dim}_fp32", ON_ASCEND[dim], SHIFT="none", FAST=True) for dim in (64, 128)),
    *(_attention(f"d{dim}_window", ON_ASCEND[dim], **WINDOWED) for dim in (64, 128, 256)),
    *(
        wide(_attention(f"d{dim}_{mask}_wide", _on_ascend(dim, mask), mask))
        for dim in ON_ASCEND
        for mask in ("none", "float")
    ),
]
NOT_FOR_ASCEND = {
    "mask_tiles_kernel": "lists tiles for loops that an NPU goes through whole",
    "order_tiles_kernel": "as mask_tiles_kernel",
}
NVIDIA_CASES = [
    _attention("sm_80_d64", sizes_of(64, 128, 64), **FAST, **on_arch(80, 4, 3)),
    _attention("sm_80_d128", sizes_of(128, 128, 64), **FAST, **on_arch(80, 8, 3)),
    _attention("sm_89_d128", sizes_of(128, 128, 32), **FAST, **on_arch(89, 8, 2)),
    _attention("sm_89_d256", sizes_of(256, 64, 32), **FAST, **on_arch(89, 8, 1)),
    _attention("sm_90_d64", sizes_of(64, 128, 64), **FAST, DESCRIPTORS=True, **on_arch(90, 4, 3, stack=0)),
    *(
        _attention(
            f"sm_90_d128_{stages}", sizes_of(128, 64, 64), **FAST, **ON_HOPPER, **on_arch(90, 4, stages, stack=0)
        )
        for stages in (2, 3)
    ),
    _attention("sm_90_d128_packed", sizes_of(128, 64, 64), VARLEN=True, **FAST, OVERLAP=True, **on_arch(90, 4, 3)),
    _attention("sm_90_d128_fp32", sizes_of(128, 128, 64), **PLAIN, DESCRIPTORS=True, **on_arch(90, 8, 2)),
    _attention("sm_90_d128_window", sizes_of(128, 64, 64), **FAST, **ON_HOPPER, **WINDOWED, **on_arch(90, 4, 3)),
    _attention("sm_90_d128_window_exact", sizes_of(128, 64, 64), **EXACT, **WINDOWED, **on_arch(90, 4, 1)),
    _attention("sm_89_d64_window", sizes_of(64, 128, 64), **FAST, **WINDOWED, **on_arch(89, 4, 2)),
    *(
        _attention(
            f"sm_90_d{dim}_{cap}_cap",
            sizes_of(dim, 128, 64),
            **PLAIN,
            **WINDOWED,
            CAP=cap,
            **on_arch(90, 8, 2, stack=1600),
        )
        for dim, cap in ((128, "high"), (256, "low"))
    ),
    _attention(
        "sm_80_d128_cap_bool", sizes_of(128, 128, 64), "bool", **PLAIN, CAP="low", **on_arch(80, 8, 3, stack=2300)
    ),
    _attention("sm_80_d64_unbiased", sizes_of(64, 128, 64), DROPPED=13, **FAST, **on_arch(80, 4, 3)),
    _attention("sm_90_d128_bf16", sizes_of(128, 64, 64), DROPPED=16, **FAST, **ON_HOPPER, **on_arch(90, 4, 3, stack=0)),
    _attention("sm_90_d128_exact_unbiased", sizes_of(128, 64, 64), DROPPED=13, **EXACT, **on_arch(90, 4, 1)),
    *(
        _attention(
            "sm_90_d256" + "_full" * (not causal), sizes_of(256, 128, 64), "none", causal, **FAST, **on_arch(90, 8, 2)
        )
        for causal in (True, False)
    ),
    _attention("sm_90_d256_few_rows", sizes_of(256, 64, 64), **FAST, **on_arch(90, 4, 2, stack=1200)),
    _attention("sm_90_d128_exact", sizes_of(128, 64, 64), **EXACT, **on_arch(90, 4, 1)),
    *(
        _attention(
            f"sm_90_d128_listed_{mask}" + "_exact" * (flags is EXACT),
            sizes_of(128, 64, 64),
            mask,
            **flags,
            LISTED=True,
            **on_arch(90, 4, stages, stack=stack),  # the exact pass has q.frame of every row in registers
        )
        for mask in ("bool", "float")
        for flags, stages, stack in ((FAST | ON_HOPPER, 2, 100), (EXACT, 1, 400))
    ),
    *(
        _attention(
            f"sm_90_d256_listed_{mask}" + "_exact" * (flags is EXACT),
            sizes_of(256, 128, 64),
            mask,
            **flags,
            LISTED=True,
            **on_arch(90, 8, stages, stack=stack),  # few tiles need the exact pass
        )
        for mask in ("bool", "float")
        for flags, stages, stack in ((FAST, 2, 100), (EXACT, 1, 2000))
    ),
    *(
        make_case(
            mask_tiles_kernel,
            f"tiles_of_{mask}_mask" + "_window" * window + "_copied" * copied,
            {"MASK": mask, "CAUSAL": window, "WINDOW": window, "BLOCK_M": 128, "BLOCK_N": 64, "TILES": tiles}
            | {"LOADED": 32, "COUNTED": 16, "COPY": copied},
            options={"num_warps": 4},
            stack=0,
        )
        for mask, tiles, window in (("bool", 4, False), ("float", 2, False), ("bool", 4, True))
        for copied in (False, True)
    ),
    *(
        make_case(
            order_tiles_kernel,
            "order_of_tiles" + "_early" * early,
            {"BLOCK": 1024, "PDL": early},
            options={"num_warps": 4},
            **({"architectures": [90]} if early else {}),
        )
        for early in (False, True)
    ),
    *(
        _attention(
            f"sm_90_d{d}_exact_{m}x{n}",
            sizes_of(d, m, n),
            **EXACT,
            **on_arch(90, m // 16, 1, stack=2000 if n == 32 else 2500),
        )
        for d, n in ((160, 32), (256, 32), (256, 64))
        for m in (64, 128)
    ),
]
