"""Names the argument that hands a language model its cache, which differs between versions of transformers."""

from __future__ import annotations

import inspect
from typing import Any


def cache_name(model: Any) -> str:
    """Return the name of a causal model's cache, as an argument and in its output.

    transformers 5.24 renamed it from ``past_key_values``, and warns of the old name, which ends with 5.40.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
