"""Emulate a chip that saturates: every FP16 result beyond the range becomes 65504, and NaN becomes 0 (Ascend 310P)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Saturating(TorchDispatchMode):
    """Replace infinity and NaN in FP16 results of torch's operators while the mode is active.

    Results that are infinite because an operand was are replaced too, since the chip has no infinity.
    FP32 results are left unchanged, because no document says whether they saturate.

    Attributes
    ----------
    replaced : Counter
        Numbers that were replaced, by the name of the operator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replaced: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and replace what is not finite in its FP16 results."""
        results = func(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if not isinstance(x, torch.Tensor) or x.dtype != torch.float16:
                continue
            count = int((~torch.isfinite(x)).sum())
            if count:
                self.replaced[func.overloadpacket.__name__] += count
                x.copy_(torch.nan_to_num(x))
        return results
