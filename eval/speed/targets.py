"""Ratios that were set as targets, held against what was measured. They decide nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
CUDNN_FIELD, FLASH_FIELD, FLOOR_FIELD = "to_cudnn", "to_flash", "to_floor"
Targets = dict[tuple[str, str], tuple[float | None, float | None, float | None, float | None]]
TARGETS: Targets = {  # case, way of running: x cuDNN, must and stretch; x flash; time over that of reading K and V
    ("paper", "eager"): (1.0, None, 1.6, None),
    ("paper", "graph"): (1.12, 1.3, 1.6, None),
    ("qwen2-8k", "eager"): (1.04, 1.12, 2.0, None),
    ("qwen2-8k-full", "eager"): (1.0, 1.07, 1.8, None),
    ("svd", "eager"): (1.12, 1.25, 1.6, None),
    ("svd-2", "eager"): (0.95, 1.05, 1.5, None),
    ("decode-1x32k", "graph"): (None, None, None, 1.15),
    ("decode-1x128k", "graph"): (None, None, None, 1.15),
}
PORTABLE: Targets = {  # of the kernels without the one for Hopper: by head dimension, 64 for video
    (case, "eager"): (1.0 if case.startswith("svd") else 0.85, None, 1.3, None)
    for case in ("paper", "qwen2-8k", "qwen2-8k-full", "svd", "svd-2")
}
KERNELS = {"ours": ("pasa", TARGETS), "portable": ("pasa-portable", PORTABLE)}


def judge_targets(records: Sequence[Record]) -> list[Record]:
    """Return an entry per target of a case that was run.

    Returns
    -------
    list of dict
        ``case``, ``how``, ``kernel`` ("ours" or "portable"), ``field`` of the record, ``must``, ``stretch``, ``value``,
        ``by`` and ``verdict``: "stretch", "must", "missed" or "not measured".
    """
    judged = []
    for case, how in dict.fromkeys((each["case"], each["how"]) for each in records):
        for kernel, (name, targets) in KERNELS.items():
            chosen = [e for e in records if (e["case"], e["how"], e["implementation"]) == (case, how, name)]
            cudnn, stretch, flash, floor = targets.get((case, how), (None,) * 4)
            fields = ((CUDNN_FIELD, cudnn, stretch), (FLASH_FIELD, flash, None), (FLOOR_FIELD, floor, None))
            for field, must, more in fields:
                if must is not None:
                    value = chosen[0].get(field) if chosen else None
                    entry = {"case": case, "how": how, "kernel": kernel, "field": field, "must": must, "stretch": more}
                    entry |= {"value": value, "by": None if value is None else name}
                    judged.append(entry | {"verdict": judge(field, value, must, more)})
    return judged


def judge(field: str, value: float | None, must: float, stretch: float | None = None) -> str:
    """Return the verdict; a time over the floor is the better the lower, all else the higher."""
    if value is None:
        return "not measured"
    if stretch is not None and value >= stretch:
        return "stretch"
    return "must" if (value <= must if field == FLOOR_FIELD else value >= must) else "missed"
