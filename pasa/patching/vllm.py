"""An attention backend for vLLM's V1 engine, over `attention_paged` and `write_pages`.

Installing pasa beside vLLM is enough: vLLM calls `plugin` in each of its processes, by the entry point
`vllm.general_plugins`. The backend then runs under the name CUSTOM::

    vllm serve ... --attention-backend CUSTOM --dtype float16

It is tested with the classes and caches of vLLM 0.18 to 0.33, and in whole engines of 0.18, 0.28, 0.29 and 0.33 on a
CPU, by scripts/test_vllm.sh. No GPU has run it in an engine.

Up to vLLM 0.28 a backend chooses the shape of its cache, here (2, pages, slots of a page, Hkv, D). From 0.29 on vLLM
gives every backend (pages, Hkv, slots of a page, 2 D), in any order in memory. Which of the two the installed vLLM has
is found out when the engine starts, together with the arguments and fields that the backend relies on. If they are
unknown, the engine stops there with an error that names them.

The backend refuses, by name: ALiBi, quantised caches and outputs, encoders, attention that is not causal, and values of
another head dimension than keys. From 0.28 on, vLLM itself refuses adaptive verification and context parallelism,
because this backend does not declare them as supported. With VLLM_BATCH_INVARIANT=1, layers run with
``PasaConfig(batch_invariant=True)``, and the engine must attend to a prompt in one step: the backend refuses chunked
prefill and prefix caching, by which other requests decide how a prompt is cut. Older versions accept only backends of
their own in that mode. CUDA graphs of a whole step are for batches in which all sequences have equally many queries,
which includes speculative decoding. vLLM captures other batches in pieces. Page anchors are not used, because vLLM
has no memory for them (0.18) or leaves that memory out of its views, so that pages that a KV connector fills
could lack them. A backend that owns both memory and connector can pass anchors to `attend_layer`.

vLLM's platform for CPUs ignores `--attention-backend CUSTOM` and runs its own backend. On Ascend NPUs the same setting
selects the backend of `pasa.patching.vllm_ascend`.
"""

from __future__ import annotations

import abc
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pasa.config import PasaConfig
from pasa.ops import envs
from pasa.ops.registry import BACKENDS
from pasa.patching import vllm_ascend
from pasa.patching.vllm_interface import READ, TESTED, check_schedule, check_spec, refuse_unknown
from pasa.patching.vllm_layer import LayerOptions, PasaMetadata, attend_layer, split_cache

__all__ = [
    "NAME", "READ", "TESTED", "LayerOptions", "PasaMetadata", "attend_layer", "backend_class", "plugin", "register",
    "split_cache",
]  # fmt: skip

NAME = "PasaAttentionBackend"


def plugin() -> None:
    """Register the backend when vLLM loads its plugins, unless another package has taken the name CUSTOM.

    vLLM calls this in every process, whatever backend is selected. So nothing here stops a vLLM that pasa cannot serve.
    """
    try:
        slot, platform = _registry().AttentionBackendEnum.CUSTOM, _platform()
    except ImportError as error:
        warnings.warn(f"pasa's attention backend was not registered: {error}", stacklevel=2)
        return
    if not vllm_ascend.is_platform(platform) and slot.is_overridden() and slot.get_path() != _path():
        warnings.warn(
            f"pasa's attention backend was not registered, because {slot.get_path()} has taken vLLM's name CUSTOM: "
            "set the environment variable VLLM_PLUGINS=pasa to load no other plugin",
            stacklevel=2,
        )
        return
    register()


def register() -> None:
    """Register the backend with vLLM under the name CUSTOM, also if another backend had that name.

    On an Ascend NPU, where vllm-ascend does not look into vLLM's registry, this is `pasa.patching.vllm_ascend.install`.

    Raises
    ------
    ImportError
        vLLM is not installed, or its V1 engine has no registry of backends.
    """
    registry, platform = _registry(), _platform()
    if vllm_ascend.is_platform(platform):
        platform_class: Any = type(platform)
        vllm_ascend.install(platform_class)
    else:
        registry.register_backend(registry.AttentionBackendEnum.CUSTOM, _path())


def _platform() -> Any:
    """Return vLLM's current platform, an object whose class says for which device it chooses backends."""
    from vllm.platforms import current_platform

    return current_platform


def _registry() -> Any:
    """Return vLLM's module with the registry of attention backends."""
    try:
        from vllm.v1.attention.backends import registry
    except ImportError as error:
        raise ImportError(
            "pasa.patching.vllm.register needs a vLLM with vllm.v1.attention.backends.registry in this environment "
            f"({error})"
        ) from error
    return registry


def _path() -> str:
    return f"{__name__}.{NAME}"


def __getattr__(name: str) -> Any:
    """Make the backend class when vLLM looks it up by name, because its base classes need vLLM."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return backend_class()


def _kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
) -> tuple[int, ...]:
    """Return the shape of a layer's cache, for versions in which vLLM lets a backend choose it (until 0.28)."""
    return (2, num_blocks, block_size, num_kv_heads, head_size)


@cache
def backend_class() -> type:
    """Return the backend class, derived from the base classes of the installed vLLM.

    Raises
    ------
    ImportError
        vLLM is not installed, or has no such classes.
    NotImplementedError
        The installed vLLM has another interface.
    """
    try:
        from vllm.v1.attention import backend as v1
    except ImportError as error:
        raise ImportError(f"pasa's attention backend needs one of {TESTED} ({error})") from error

    implementation, builder = _implementation(v1), _builder(v1)

    class Backend(v1.AttentionBackend):  # type: ignore[misc]
        """The properties by which vLLM decides whether it can use this backend."""

        supported_dtypes = [torch.float16]  # noqa: RUF012 - as in vLLM's base class
        supported_kv_cache_dtypes = ["auto", "float16"]  # noqa: RUF012
        accept_output_buffer = True  # early versions otherwise expect `forward` to allocate its output

        @staticmethod
        def get_name() -> str:
            return "CUSTOM"

        @staticmethod
        def get_impl_cls() -> type:
            return implementation

        @staticmethod
        def get_builder_cls() -> type:
            return builder

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
            return [v1.MultipleOf(16)]  # for any spec; other requirements of a spec are checked elsewhere

        @classmethod
        def get_supported_head_sizes(cls) -> list[int]:
            return list(range(8, BACKENDS["triton"].head_dims[1] + 1, 8))

        @classmethod
        def supports_sink(cls) -> bool:
            return True

        @classmethod
        def supports_sliding_window(cls) -> bool:
            return True

        @classmethod
        def supports_batch_invariance(cls) -> bool:
            return True

        @classmethod
        def supports_device_cpu_query_lens_mismatch(cls) -> bool:
            return False  # PasaMetadata counts decodes by the lengths on the host

    if hasattr(v1.AttentionBackend, "get_kv_cache_shape"):
        Backend.get_kv_cache_shape = staticmethod(_kv_cache_shape)
        abc.update_abstractmethods(Backend)
    parts = {"AttentionBackend": Backend, "AttentionImpl": implementation, "AttentionMetadataBuilder": builder}
    refuse_unknown(v1, parts)
    Backend.__name__ = Backend.__qualname__ = NAME
    return Backend


def _implementation(v1: Any) -> type:
    class Implementation(v1.AttentionImpl):  # type: ignore[misc]
        """The attention of one layer; it refuses options that PASA does not support."""

        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int | None = None,
            alibi_slopes: list[float] | None = None,
            sliding_window: int | None = None,
            kv_cache_dtype: str = "auto",
            logits_soft_cap: float | None = None,
            attn_type: str = "decoder",
            kv_sharing_target_layer_name: str | None = None,
            sinks: Tensor | None = None,
            **others: Any,
        ) -> None:
            self.options = LayerOptions.of(
                scale, sliding_window, logits_soft_cap, sinks,
                alibi_slopes=alibi_slopes, kv_cache_dtype=kv_cache_dtype, attn_type=attn_type, others=others,
            )  # fmt: skip
            if envs.vllm_batch_invariant():
                self.options.config = PasaConfig(batch_invariant=True)
            self.num_heads, self.head_size, self.scale = num_heads, head_size, self.options.scale
            self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
            self.kv_cache_dtype = kv_cache_dtype
            self.writes = kv_sharing_target_layer_name is None

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor | None,
            value: Tensor | None,
            kv_cache: Tensor,
            attn_metadata: PasaMetadata | None,
            output: Tensor,
            output_scale: Tensor | None = None,
            output_block_scale: Tensor | None = None,
        ) -> Tensor:
            if output_scale is not None or output_block_scale is not None:
                raise NotImplementedError("pasa's attention backend does not quantise its output")
            new = (key, value) if self.writes else (None, None)
            return attend_layer(attn_metadata, query, *new, kv_cache, output, self.options)

    return Implementation


def _builder(v1: Any) -> type:
    class Builder(v1.AttentionMetadataBuilder):  # type: ignore[misc]
        """Makes the `PasaMetadata` of each step."""

        _cudagraph_support = v1.AttentionCGSupport.UNIFORM_BATCH
        reorder_batch_threshold = 1  # vLLM then puts single-token decodes first

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            check_spec(kv_cache_spec)
            if envs.vllm_batch_invariant():
                check_schedule(vllm_config)
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PasaMetadata:
            return PasaMetadata.of(common_attn_metadata)

    return Builder
