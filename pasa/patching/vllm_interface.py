"""Compare the interface of the installed vLLM with the one that `pasa.patching.vllm` was written for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

TESTED = "vLLM 0.18 to 0.33"
"""The versions whose interfaces scripts/test_vllm.sh has recorded; README.md and CHANGELOG.md name the same."""

READ = (
    "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
    "max_seq_len", "block_table_tensor", "slot_mapping", "causal",
)  # fmt: skip
"""The fields of vLLM's CommonAttentionMetadata that `PasaMetadata.of` reads."""


def installed(name: str = "vLLM") -> str:
    """Return the name and version of the installed vLLM, or of a plugin of it with this name."""
    try:
        return f"{name} {version(name.lower())}"
    except PackageNotFoundError:  # imported from a folder, for example
        return f"an unknown version of {name}"


INSTEAD = "use another --attention-backend"
"""What to do where the backend cannot serve; other platforms of vLLM may ignore that setting."""


def refuse(unsupported: dict[str, bool], advice: str = INSTEAD) -> None:
    """Raise NotImplementedError that names all options which are set and unsupported, and says what to do.

    The message names all of them, because each restart of a server takes minutes.
    """
    if refused := [name for name, is_set in unsupported.items() if is_set]:
        raise NotImplementedError(f"pasa's attention backend does not support {', '.join(refused)}: {advice}")


def refuse_unknown(v1: Any, parts: dict[str, type]) -> None:
    """Raise NotImplementedError if the installed vLLM differs from the interface that these classes were written for.

    Parameters
    ----------
    v1 : module
        vllm.v1.attention.backend
    parts : dict
        vLLM's name of each base class, and the class derived from it.
    """
    differences = class_differences(v1, parts, v1.CommonAttentionMetadata) + _cache_differences(v1)
    refuse_differences(differences, TESTED, installed())


def refuse_differences(differences: list[str], tested: str, here: str, advice: str = INSTEAD) -> None:
    """Raise NotImplementedError that lists the differences between the installed version and the tested ones."""
    if differences:
        raise NotImplementedError(
            f"pasa's attention backend was tested with {tested}. {here} has another interface: "
            f"{'; '.join(differences)}. Install one of the tested versions, or {advice}"
        )


def class_differences(module: Any, parts: dict[str, type], common: Any) -> list[str]:
    """Compare base classes, looked up in a module by their names, with the classes derived from them.

    `common` is the class of the metadata that a builder gets, whose fields must include `READ`.
    """
    differences = [each for name, part in parts.items() for each in _differences(name, getattr(module, name), part)]
    lacking = [name for name in READ if name not in common.__dataclass_fields__]
    return differences + [f"{common.__name__} lacks {name}" for name in lacking]


def _differences(name: str, base: type, part: type) -> Iterator[str]:
    """Yield what a base class of vLLM requires, and the class derived from it does not have or take."""
    for method in sorted(part.__abstractmethods__):  # type: ignore[attr-defined]
        yield f"{name} requires {method}"
    for method in vars(part):
        theirs = getattr(base, method, None)
        if (method.startswith("_") and method != "__init__") or not inspect.isroutine(theirs):
            continue
        expected, taken = ([*inspect.signature(each).parameters] for each in (theirs, getattr(part, method)))
        if taken[: len(expected)] != expected:
            yield f"{name}.{method} takes ({', '.join(expected)})"


def _cache_differences(v1: Any) -> list[str]:
    """Compare the shape that vLLM gives to a layer's cache with the shape that `split_cache` takes."""
    if hasattr(v1.AttentionBackend, "get_kv_cache_shape"):
        return []  # the backend chooses the shape
    try:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, compute_layer_kv_cache_shape_bytes
    except ImportError as error:
        return [str(error)]
    pages, slots, heads, dim = 5, 48, 3, 64  # all different, so that no two dimensions can be confused
    spec = FullAttentionSpec(block_size=slots, num_kv_heads=heads, head_size=dim, dtype=torch.float16)
    shape = tuple(compute_layer_kv_cache_shape_bytes(spec, pages))
    expected = (pages, heads, slots, 2 * dim * torch.float16.itemsize)
    return [] if shape == expected else [f"a cache of {shape} bytes where {expected} was expected"]


def check_spec(spec: Any, advice: str = INSTEAD) -> None:
    """Raise NotImplementedError if a layer's cache cannot be read; `spec` is vLLM's AttentionSpec."""
    keys, values = spec.head_size, getattr(spec, "head_size_v", spec.head_size)
    unsupported = {
        f"dtype={spec.dtype}": spec.dtype != torch.float16,
        f"head_size={keys} and head_size_v={values}": keys != values,
    }
    if refused := [name for name, is_set in unsupported.items() if is_set]:
        refuse({f"a cache with {', '.join(refused)}": True}, f"serve with --dtype float16, or {advice}")


def check_schedule(vllm_config: Any) -> None:
    """Raise NotImplementedError if other requests decide how a prompt is cut; only for batch-invariant engines."""
    cuts = {
        "chunked prefill": (vllm_config.scheduler_config, "enable_chunked_prefill", "--no-enable-chunked-prefill"),
        "prefix caching": (vllm_config.cache_config, "enable_prefix_caching", "--no-enable-prefix-caching"),
    }
    on = {name: flag for name, (where, field, flag) in cuts.items() if getattr(where, field)}
    if on:
        raise NotImplementedError(
            f"VLLM_BATCH_INVARIANT=1 is set, but {' and '.join(on)} would cut a prompt as the other requests of a step "
            f"leave room or have filled the cache, and the cut changes its bits: serve with {' '.join(on.values())}"
        )
