"""The interfaces of vLLM that scripts/test_vllm.sh has seen, in vllm_interfaces.json, and how they are read.

The ordinary tests make a `vllm` of each of them, so that the adapter keeps to all. To record a new version, run
``PASA_RECORD=1 bash scripts/test_vllm.sh VERSION``.
"""

import abc
import enum
import inspect
import json
import os
import types
from pathlib import Path

from packaging.version import Version

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


def recorded(file=FILE):
    """Return the recorded interfaces, each with the versions that have it."""
    return json.loads(file.read_text("utf-8"))


def signatures(module, methods):
    """Return the parameters of those methods that the classes of a module have; methods: names by class."""
    return {
        f"{name}.{method}": [*inspect.signature(getattr(getattr(module, name), method)).parameters]
        for name, all_methods in methods.items()
        for method in all_methods
        if hasattr(getattr(module, name), method)
    }


def fields(common):
    """Return the public fields of a dataclass, sorted."""
    return sorted(name for name in common.__dataclass_fields__ if name[0] != "_")


def describe(v1):
    """Return the interface of the installed vLLM; v1: its module vllm.v1.attention.backend."""
    return {
        "abstract": [
            f"{name}.{method}" for name in METHODS for method in sorted(getattr(v1, name).__abstractmethods__)
        ],
        "methods": signatures(v1, METHODS),
        "metadata": fields(v1.CommonAttentionMetadata),
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


def check(version, interface, file=FILE):
    """Check that the interface of a version is the recorded one; with PASA_RECORD=1, record it before."""
    if os.environ.get("PASA_RECORD"):
        record(version, interface, file)
    entry = next((each for each in recorded(file) if version in each["versions"]), None)
    assert entry is not None, f"{version} is not in {file.name}"
    assert entry["interface"] == interface


def record(version, interface, file=FILE):
    """Store the interface of a version; versions with the same interface share an entry."""
    entries = recorded(file) if file.exists() else []
    for entry in entries:
        entry["versions"] = [each for each in entry["versions"] if each != version]
    for entry in entries:
        if entry["interface"] == interface:
            entry["versions"].append(version)
            break
    else:
        entries.append({"versions": [version], "interface": interface})
    for entry in entries:
        entry["versions"].sort(key=Version)
    entries = sorted((entry for entry in entries if entry["versions"]), key=lambda entry: Version(entry["versions"][0]))
    file.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")


def modules(interface):
    """Return modules, by their names, of a `vllm` with this interface; none of its methods does anything."""
    v1 = types.ModuleType("vllm.v1.attention.backend")
    for name in METHODS:
        setattr(v1, name, abstract(name, interface))
    v1.CommonAttentionMetadata = dataclass("CommonAttentionMetadata", interface["metadata"])
    v1.AttentionCGSupport = enum.Enum("AttentionCGSupport", interface["cudagraphs"])
    v1.MultipleOf = type("MultipleOf", (), {"__init__": lambda self, base: setattr(self, "base", base)})
    made = {v1.__name__: v1}
    if interface["cache"]:
        cache = types.ModuleType("vllm.v1.kv_cache_interface")
        cache.FullAttentionSpec = types.SimpleNamespace
        cache.compute_layer_kv_cache_shape_bytes = lambda spec, pages: tuple(interface["cache"])
        made[cache.__name__] = cache
    return made


class Slot(enum.Enum):
    """vLLM's names of backends; a path may be registered for each."""

    CUSTOM = None

    def is_overridden(self):
        return self.name in PATHS

    def get_path(self):
        return PATHS[self.name]


PATHS = {}
"""The registered paths, by the names of slots; tests clear it."""


def registry_modules(platform):
    """Return modules, by their names, of a `vllm` with a registry of backends and this current platform."""
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = Slot
    registry.register_backend = lambda slot, path: PATHS.update({slot.name: path})
    backends, platforms = types.ModuleType("vllm.v1.attention.backends"), types.ModuleType("vllm.platforms")
    backends.registry, platforms.current_platform = registry, platform
    return {module.__name__: module for module in (registry, backends, platforms)}


def dataclass(name, fields):
    """Return a class that has these fields, as far as the adapters look."""
    return type(name, (), {"__dataclass_fields__": dict.fromkeys(fields)})


def abstract(name, interface):
    """Return a class with the recorded methods, the abstract ones among them abstract."""
    methods = {}
    for full, parameters in interface["methods"].items():
        owner, method = full.split(".")
        if owner != name:
            continue
        function = _function(parameters)
        if full in interface.get("abstract", ()):
            function = abc.abstractmethod(function)
        methods[method] = staticmethod(function) if name.endswith("AttentionBackend") else function
    return abc.ABCMeta(name, (), methods)


def _function(parameters):
    def function(*arguments, **how): ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(each, kind) for each in parameters])
    return function
