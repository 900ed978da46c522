"""FP16 attention that cannot overflow: PASA operators for Ascend NPUs, with an exact reference.

Public names are resolved on first use. Importing the package only registers the schema of
``torch.ops.pasa.*`` with PyTorch: it probes no device, writes no file and prints nothing.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

# A later `import pasa.attention` would replace a lazy function by the module of that name, so these are not lazy.
from pasa.attention import attention, attention_varlen, backends
from pasa.paged import attention_paged, write_pages
from pasa.scaled_dot_product import scaled_dot_product_attention

if TYPE_CHECKING:
    from pasa.config import PasaConfig as PasaConfig
    from pasa.context_parallel import gather_sequence as gather_sequence
    from pasa.context_parallel import ring_attention as ring_attention
    from pasa.context_parallel import shard_sequence as shard_sequence
    from pasa.diagnostics import record_diagnostics as record_diagnostics
    from pasa.fp16 import Fp16Handle as Fp16Handle
    from pasa.fp16 import to_fp16 as to_fp16
    from pasa.ops.attention.spec.exact_fp64 import golden_attention as golden_attention
    from pasa.ops.numerics.shifting import optimal_beta as optimal_beta
    from pasa.ops.numerics.shifting import shifting_matrix as shifting_matrix
    from pasa.patching import PatchHandle as PatchHandle
    from pasa.patching import patch_pipeline as patch_pipeline
    from pasa.patching.registration import register as register
    from pasa.prediction import predict_overflow as predict_overflow
    from pasa.watching import watch as watch

__version__ = "0.1.0"

_LAZY = {
    "PasaConfig": "pasa.config",
    "gather_sequence": "pasa.context_parallel",
    "ring_attention": "pasa.context_parallel",
    "shard_sequence": "pasa.context_parallel",
    "record_diagnostics": "pasa.diagnostics",
    "Fp16Handle": "pasa.fp16",
    "to_fp16": "pasa.fp16",
    "golden_attention": "pasa.ops.attention.spec.exact_fp64",
    "optimal_beta": "pasa.ops.numerics.shifting",
    "shifting_matrix": "pasa.ops.numerics.shifting",
    "PatchHandle": "pasa.patching",
    "patch_pipeline": "pasa.patching",
    "register": "pasa.patching.registration",
    "watch": "pasa.watching",
    "predict_overflow": "pasa.prediction",
}

__all__ = [
    "__version__",
    "attention",
    "attention_paged",
    "attention_varlen",
    "backends",
    "scaled_dot_product_attention",
    "write_pages",
    *sorted(_LAZY),
]

logging.getLogger("pasa").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pasa' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
