"""The interfaces of vLLM that scripts/test_vllm.sh has seen, in vllm_interfaces.json, and how they are read.

The ordinary tests make a `vllm` of each of them, so that the adapter keeps to all. To record a new version, run
``PASA_RECORD=1 bash scripts/test_vllm.sh VERSION``.
"""

import abc
import enum
import inspect
import json
import types
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
METHODS = {
    "AttentionBackend": (
        "get_name", "get_impl_cls", "get_builder_cls", "get_kv_cache_shape", "get_supported_kernel_block_sizes",
        "get_supported_head_sizes", "supports_sink", "supports_sliding_window", "supported_kv_cache_layouts",
        "supports_device_cpu_query_lens_mismatch",
    ),
    "AttentionImpl": ("__init__", "forward"),
    "AttentionMetadataBuilder": ("__init__", "build", "build_for_cudagraph_capture"),
}  # fmt: skip
"""The methods that the adapter defines, or by whose presence it decides."""


def recorded():
    """Return the recorded interfaces, each with the versions that have it."""
    return json.loads(FILE.read_text("utf-8"))


def describe(v1):
    """Return the interface of the installed vLLM; v1: its module vllm.v1.attention.backend."""
    methods = {
        f"{name}.{method}": [*inspect.signature(getattr(getattr(v1, name), method)).parameters]
        for name, all_methods in METHODS.items()
        for method in all_methods
        if hasattr(getattr(v1, name), method)
    }
    return {
        "abstract": [
            f"{name}.{method}" for name in METHODS for method in sorted(getattr(v1, name).__abstractmethods__)
        ],
        "methods": methods,
        "metadata": sorted(name for name in v1.CommonAttentionMetadata.__dataclass_fields__ if name[0] != "_"),
        "cudagraphs": sorted(v1.AttentionCGSupport.__members__),
        "cache": _cache(v1),
    }


def _cache(v1):
    """Return the shape in bytes of a cache of 5 pages, 48 slots, 3 heads and dimension 64; None if backends choose."""
    if hasattr(v1.AttentionBackend, "get_kv_cache_shape"):
        return None
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, compute_layer_kv_cache_shape_bytes

    spec = FullAttentionSpec(block_size=48, num_kv_heads=3, head_size=64, dtype=torch.float16)
    return [*compute_layer_kv_cache_shape_bytes(spec, 5)]


def record(version, interface):
    """Store the interface of a version; versions with the same interface share an entry."""
    entries = recorded() if FILE.exists() else []
    for entry in entries:
        entry["versions"] = [each for each in entry["versions"] if each != version]
    for entry in entries:
        if entry["interface"] == interface:
            entry["versions"].append(version)
            break
    else:
        entries.append({"versions": [version], "interface": interface})
    for entry in entries:
        entry["versions"].sort(key=number)
    entries = sorted((entry for entry in entries if entry["versions"]), key=lambda entry: number(entry["versions"][0]))
    FILE.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")


def number(version):
    """Return a version as numbers, which sort."""
    return [int(part) for part in version.split("+")[0].split(".")]


def modules(interface):
    """Return modules, by their names, of a `vllm` with this interface; none of its methods does anything."""
    v1 = types.ModuleType("vllm.v1.attention.backend")
    for name in METHODS:
        setattr(v1, name, _abstract(name, interface))
    v1.CommonAttentionMetadata = type("Common", (), {"__dataclass_fields__": dict.fromkeys(interface["metadata"])})
    v1.AttentionCGSupport = enum.Enum("AttentionCGSupport", interface["cudagraphs"])
    v1.MultipleOf = type("MultipleOf", (), {"__init__": lambda self, base: setattr(self, "base", base)})
    made = {v1.__name__: v1}
    if interface["cache"]:
        cache = types.ModuleType("vllm.v1.kv_cache_interface")
        cache.FullAttentionSpec = types.SimpleNamespace
        cache.compute_layer_kv_cache_shape_bytes = lambda spec, pages: tuple(interface["cache"])
        made[cache.__name__] = cache
    return made


def _abstract(name, interface):
    """Return a class with the recorded methods, the abstract ones among them abstract."""
    methods = {}
    for full, parameters in interface["methods"].items():
        owner, method = full.split(".")
        if owner != name:
            continue
        function = _function(parameters)
        if full in interface["abstract"]:
            function = abc.abstractmethod(function)
        methods[method] = staticmethod(function) if name == "AttentionBackend" else function
    return abc.ABCMeta(name, (), methods)


def _function(parameters):
    def function(*arguments, **how): ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(each, kind) for each in parameters])
    return function
