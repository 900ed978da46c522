"""The interfaces of vllm-ascend that scripts/test_vllm_ascend.sh has seen, in vllm_ascend_interfaces.json.

The ordinary tests make the modules of vllm-ascend of each of them, so that the adapter keeps to all. To record a new
version, run ``PASA_RECORD=1 bash scripts/test_vllm_ascend.sh VERSION``.
"""

import enum
import types
from pathlib import Path

from tests.pasa.patching import vllm_interfaces

FILE = Path(__file__).with_suffix(".json")
METHODS = {
    "AscendAttentionBackend": (
        "get_name", "get_impl_cls", "get_builder_cls", "get_kv_cache_shape", "get_supported_kernel_block_sizes",
    ),
    "AscendAttentionBackendImpl": ("__init__", "forward", "forward_impl", "reshape_and_cache"),
    "AscendAttentionMetadataBuilder": ("__init__", "build", "build_for_graph_capture", "get_cudagraph_support"),
}  # fmt: skip
"""The methods that the adapter defines, inherits and relies on, or by which its own are called."""

PLATFORM = {"NPUPlatform": ("check_and_update_config", "get_attn_backend_cls")}
SHAPE = (5, 128, 3, 64)
"""Pages, slots, heads and dimension of a cache: all different, so that no two can be confused."""


def recorded():
    """Return the recorded interfaces, each with the versions that have it."""
    return vllm_interfaces.recorded(FILE)


def describe(attention, common, platform, registered, chosen):
    """Return the interface of the installed vllm-ascend.

    attention, platform: its modules; common: its class of CommonAttentionMetadata; registered: what it registers with
    vLLM under the name CUSTOM; chosen: the backend that its platform names for `--attention-backend CUSTOM`.
    """
    return {
        "methods": vllm_interfaces.signatures(attention, METHODS) | vllm_interfaces.signatures(platform, PLATFORM),
        "metadata": vllm_interfaces.fields(common),
        "cache": [*attention.AscendAttentionBackend.get_kv_cache_shape(*SHAPE)],
        "block_sizes": attention.AscendAttentionBackend.get_supported_kernel_block_sizes(),
        "registered": registered,
        "chosen": chosen,
    }


def modules(interface):
    """Return modules, by their names, of a `vllm_ascend` with this interface, and what it needs of a `vllm`."""
    attention = types.ModuleType("vllm_ascend.attention.attention_v1")
    for name in METHODS:
        setattr(attention, name, vllm_interfaces.abstract(name, interface))
    attention.AscendAttentionBackend.get_kv_cache_shape = staticmethod(lambda *sizes: tuple(interface["cache"]))
    utils = types.ModuleType("vllm_ascend.attention.utils")
    utils.AscendCommonAttentionMetadata = vllm_interfaces.dataclass(
        "AscendCommonAttentionMetadata", interface["metadata"]
    )
    platform = types.ModuleType("vllm_ascend.platform")
    platform.NPUPlatform = _platform(interface)
    package = types.ModuleType("vllm_ascend.attention")
    package.attention_v1, package.utils = attention, utils
    v1 = types.ModuleType("vllm.v1.attention.backend")
    v1.AttentionCGSupport = enum.Enum("AttentionCGSupport", ["NEVER", "ALWAYS"])
    made = {module.__name__: module for module in (attention, utils, package, platform, v1)}
    return made | {name: types.ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm_ascend")}


def _platform(interface):
    """Return a platform that sets the chosen backend to None, and names its own whatever is chosen."""

    class NPUPlatform:
        @classmethod
        def check_and_update_config(cls, vllm_config):
            vllm_config.attention_config.backend = None
            vllm_config.checked = True

        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            return attn_selector_config or interface["chosen"]

    NPUPlatform.__module__ = "vllm_ascend.platform"
    return NPUPlatform
