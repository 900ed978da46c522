"""An attention backend for vllm-ascend, over its own backend and `attention_paged`.

Installing pasa beside vllm-ascend is enough: pasa's plugin for vLLM finds the platform and calls `install`. The backend
then serves where vLLM's own setting asks for it::

    vllm serve ... --attention-backend CUSTOM --dtype float16

vllm-ascend has no registry of backends. Its platform class sets `--attention-backend` to None, and names the backend
class itself. So `install` replaces two methods of that class: one keeps the setting, the other names the class here.
That class, its layers and its metadata builder are derived from vllm-ascend's. A layer keeps all that vllm-ascend does
around attention, such as writing the cache (2, pages, 128, Hkv, D) and KV connectors, and replaces `forward_impl`,
which attends. The builder adds a `PasaMetadata` of the same step.

It is tested with the classes of the versions in `TESTED`, by scripts/test_vllm_ascend.sh, on a CPU: torch_npu is
replaced, and pasa's kernels run on the CPU twin. **No NPU and no engine of vllm-ascend has run it.**

The backend refuses, by name and when the server starts: other versions, machines on which pasa's kernels cannot run,
other dtypes and caches, pages of no multiple of 16 slots, what vllm-ascend serves by another backend (MLA, sparse
attention, the 310P), quantised caches, speculative decoding, context parallelism, batch invariance, and modes of
vllm-ascend that leave out or replace `forward_impl`. ACL graphs of a whole step are not captured, because the builder
tells vLLM that it has no support for them. Graphs in pieces leave attention out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from pasa.ops import envs
from pasa.ops.registry import BACKENDS
from pasa.patching.vllm_interface import check_spec, class_differences, installed, refuse, refuse_differences
from pasa.patching.vllm_layer import LayerOptions, PasaMetadata

NAME = "PasaAscendBackend"
TESTED = ("0.18.0", "0.23.0", "0.23.0.post1")
"""The versions whose interfaces scripts/test_vllm_ascend.sh has recorded."""

TESTED_NAMES = f"vllm-ascend {', '.join(TESTED[:-1])} and {TESTED[-1]}"
PLATFORM = "vllm_ascend.platform"
BACKEND = "vllm_ascend.attention.attention_v1.AscendAttentionBackend"
"""The only one of vllm-ascend's backends that this one is derived from: full attention on Atlas A2."""

SLOTS = 16
"""Pages have a multiple of this number of slots."""

CACHE_QUANTISATION = ("enable_c8_quant", "enable_fa_quant")
"""Attributes of vllm-ascend's quantisation, by which a layer gets another class or its cache another dtype."""

INSTEAD = "serve without --attention-backend CUSTOM"
"""vllm-ascend ignores every other value of that setting."""


def is_platform(platform: object) -> bool:
    """Return whether vLLM's current platform is that of vllm-ascend."""
    return type(platform).__module__ == PLATFORM


@cache
def install(platform: Any) -> None:
    """Let vllm-ascend's platform class choose pasa's backend for `--attention-backend CUSTOM`, and for nothing else."""
    their_check, their_choice = platform.check_and_update_config, platform.get_attn_backend_cls

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        attention = vllm_config.attention_config
        chosen = attention.backend
        if not _is_custom(chosen):
            their_check(vllm_config)
            return
        attention.backend = None  # vllm-ascend does the same, and says that the setting is ignored
        their_check(vllm_config)
        check_config(vllm_config)
        attention.backend = chosen

    def get_attn_backend_cls(cls: type, selected_backend: Any, *arguments: Any, **options: Any) -> str:
        theirs = str(their_choice(selected_backend, *arguments, **options))
        if not _is_custom(selected_backend):
            return theirs
        refuse({f"models and chips that vllm-ascend serves by {theirs}": theirs != BACKEND}, INSTEAD)
        return f"{__name__}.{NAME}"

    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def _is_custom(backend: Any) -> bool:
    return getattr(backend, "name", None) == "CUSTOM"


def check_config(vllm_config: Any) -> None:
    """Raise NotImplementedError if the installed version was not tested, or cannot be served with vLLM's VllmConfig."""
    try:
        here = version("vllm-ascend")
    except PackageNotFoundError:  # imported from a folder, for example
        here = "of an unknown version"
    if here not in TESTED:
        raise NotImplementedError(
            f"pasa's attention backend was tested with {TESTED_NAMES}, and vllm-ascend {here} is installed: install "
            f"one of the tested versions, or {INSTEAD}"
        )
    model, caches, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    unsupported = {
        f"dtype={model.dtype} (serve with --dtype float16)": model.dtype != torch.float16,
        f"kv_cache_dtype={caches.cache_dtype!r}": caches.cache_dtype not in ("auto", "float16"),
        f"block_size={caches.block_size} (no multiple of {SLOTS})": (caches.block_size or SLOTS) % SLOTS != 0,
        "speculative decoding": vllm_config.speculative_config is not None,
        "context parallelism": max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size) > 1,
        "VLLM_BATCH_INVARIANT=1": envs.vllm_batch_invariant(),
        **{f"additional_config {name}={value}": True for name, value in _replacing(vllm_config)},
        **{name: getattr(vllm_config.quant_config, name, False) for name in CACHE_QUANTISATION},
    }
    refuse(unsupported, INSTEAD)


def _replacing(vllm_config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the options of vllm-ascend that are on and run a model without its attention classes, or skip keys."""
    extra = vllm_config.additional_config or {}
    for name in ("xlite_graph_config", "enable_hamming_sparse"):
        value = extra.get(name)
        if value.get("enabled") if isinstance(value, dict) else value:
            yield name, value


def __getattr__(name: str) -> Any:
    """Make the backend class when vLLM looks it up by name, because its base classes need vllm-ascend."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return backend_class()


@cache
def backend_class() -> type:
    """Return the backend class, derived from the classes of the installed vllm-ascend.

    Raises
    ------
    ImportError
        vllm-ascend is not installed, or has no such classes.
    NotImplementedError
        The installed vllm-ascend has another interface.
    """
    from vllm_ascend.attention import attention_v1 as theirs
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

    implementation, builder = _implementation(theirs), _builder(theirs)

    class Backend(theirs.AscendAttentionBackend):  # type: ignore[misc]
        """Keeps the properties and the cache of vllm-ascend's backend."""

        @staticmethod
        def get_impl_cls() -> type:
            return implementation

        @staticmethod
        def get_builder_cls() -> type:
            return builder

    parts = {
        "AscendAttentionBackend": Backend,
        "AscendAttentionBackendImpl": implementation,
        "AscendAttentionMetadataBuilder": builder,
    }
    differences = class_differences(theirs, parts, AscendCommonAttentionMetadata) + _cache_differences(theirs)
    refuse_differences(differences, TESTED_NAMES, installed("vllm-ascend"), INSTEAD)
    Backend.__name__ = Backend.__qualname__ = NAME
    return Backend


def _cache_differences(theirs: Any) -> list[str]:
    pages, slots, heads, dim = 5, 128, 3, 64  # all different, so that no two dimensions can be confused
    shape = tuple(theirs.AscendAttentionBackend.get_kv_cache_shape(pages, slots, heads, dim))
    expected = (2, pages, slots, heads, dim)
    return [] if shape == expected else [f"a cache of {shape} numbers where {expected} was expected"]


def _implementation(theirs: Any) -> type:
    class Implementation(theirs.AscendAttentionBackendImpl):  # type: ignore[misc]
        """The attention of one layer; vllm-ascend's `forward` writes the cache and calls `forward_impl`."""

        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int,
            alibi_slopes: list[float] | None,
            sliding_window: int | None,
            kv_cache_dtype: str,
            logits_soft_cap: float | None,
            attn_type: str,
            kv_sharing_target_layer_name: str | None,
            sinks: Tensor | None = None,
            **kwargs: Any,
        ) -> None:
            self.options = LayerOptions.of(
                scale, sliding_window, logits_soft_cap, sinks,
                alibi_slopes=alibi_slopes, kv_cache_dtype=kv_cache_dtype, attn_type=attn_type, others=kwargs,
                advice=INSTEAD,
            )  # fmt: skip
            super().__init__(
                num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
                logits_soft_cap, attn_type, kv_sharing_target_layer_name, sinks,
            )  # fmt: skip

        def __setattr__(self, name: str, value: Any) -> None:
            # vllm-ascend's quantisation of caches replaces the class of a layer, and some versions announce it nowhere.
            refuse({f"a layer that is turned into {value}": name == "__class__"}, INSTEAD)
            super().__setattr__(name, value)

        def forward_impl(
            self,
            query: Tensor,
            key: Tensor | None,
            value: Tensor | None,
            kv_cache: tuple[Tensor, ...],
            attn_metadata: Any,
            output: Tensor,
        ) -> Tensor:
            step, caches = attn_metadata.pasa, (self.key_cache, self.value_cache)
            check_caches(caches, self.num_kv_heads, self.head_size)
            n = step.tokens
            step.attend(query[:n], caches, self.options, output.view(query.shape)[:n])
            return output

    return Implementation


def check_caches(caches: tuple[Tensor, Tensor], heads: int, dim: int) -> None:
    """Raise NotImplementedError unless keys and values are FP16 of shape (pages, slots, heads, dim)."""
    for x in caches:
        if x.dim() != 4 or x.shape[1] % SLOTS or x.shape[2:] != (heads, dim) or x.dtype != torch.float16:
            raise NotImplementedError(
                f"pasa's attention backend got a cache {tuple(x.shape)} of {x.dtype} where (pages, a multiple of "
                f"{SLOTS}, {heads}, {dim}) of torch.float16 was expected: {INSTEAD}"
            )


def check_kernels(device: torch.device) -> None:
    """Raise NotImplementedError if pasa's kernels cannot run on an NPU, because all other backends are much slower."""
    why = BACKENDS["npu"].missing() if device.type == "npu" else None
    if why is not None:
        raise NotImplementedError(f"pasa's attention backend needs its kernels for NPUs. {why}, or {INSTEAD}")


def _builder(theirs: Any) -> type:
    from vllm.v1.attention.backend import AttentionCGSupport

    class Builder(theirs.AscendAttentionMetadataBuilder):  # type: ignore[misc]
        """Makes vllm-ascend's metadata of each step, with a `PasaMetadata` as its attribute `pasa`."""

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            check_spec(kv_cache_spec, INSTEAD)
            check_kernels(device)
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            # vllm-ascend's replay of a whole graph updates the arguments of its own kernels.
            return AttentionCGSupport.NEVER

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.pasa = PasaMetadata.of(without_padding(common_attn_metadata), INSTEAD)
            return metadata

    return Builder


def without_padding(common: Any) -> Any:
    """Return the metadata without the sequences that vllm-ascend appends until queries add up to the padded tokens.

    Such a sequence begins behind the last token. It may have no entry in `seq_lens` and in the block table.
    """
    n = int((common.query_start_loc_cpu[: common.num_reqs] < common.num_actual_tokens).sum())
    starts = {name: getattr(common, name)[: n + 1] for name in ("query_start_loc", "query_start_loc_cpu")}
    rows = {name: getattr(common, name)[:n] for name in ("seq_lens", "block_table_tensor")}
    return dataclasses.replace(common, num_reqs=n, **starts, **rows)
