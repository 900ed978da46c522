"""An attention backend for vLLM's V1 engine, over `attention_paged` and `write_pages`.

The backend is tested against the classes and cache views of vLLM 0.14, 0.28 to 0.31 and 0.33 (their
modules `vllm.v1.attention.backend`, in scripts/test_vllm.sh). It has not been run inside an engine.
Register it in every process of the engine before a model is loaded, for example from an entry point
`vllm.general_plugins`::

    from pasa.patching import vllm
    vllm.register()  # then: vllm serve ... --attention-backend CUSTOM --dtype float16

Up to vLLM 0.28 a backend chooses the shape of its cache, here (2, pages, slots of a page, Hkv, D).
From 0.29 on vLLM gives every backend (pages, Hkv, slots of a page, 2 D), in any order in memory. A
vLLM that asks for something else is refused by name.

The backend refuses, by name: ALiBi, sliding windows, soft caps, attention sinks, quantised caches
and outputs, encoders. From 0.28 on, vLLM itself refuses adaptive verification, context parallelism
and batch invariance, because this backend does not declare them as supported. CUDA graphs of a
whole step are for batches of single-token decodes; vLLM captures other batches in pieces. Page
anchors are not used, because vLLM plans no memory for them and pages that a KV connector fills
would lack them. A backend that owns both memory and connector can pass anchors to `attend_layer`.

vllm-ascend ignores `--attention-backend CUSTOM`. Its platform chooses among its own backends, so a
model served there does not run PASA. An Ascend backend gets the same arguments under other names.
In `npu_fused_infer_attention_score` with layout "TND", `query` is q; `key` and `value`, viewed as
(pages, block_size, Hkv, D), are the caches; `block_table` has the same name; `actual_seq_lengths`
is cu_seqlens_q without its leading 0; `actual_seq_lengths_kv` is seq_lens; sparse_mode 3 is
is_causal. On an NPU, pages are first gathered and lengths read back to the host, because no Ascend C
kernel of this project reads pages.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from pasa.ops.registry import BACKENDS
from pasa.paged import attention_paged, write_pages

NAME = "PasaAttentionBackend"

TESTED = "vLLM 0.14, 0.28 to 0.31 and 0.33"
"""The versions that scripts/test_vllm.sh tests; README.md and CHANGELOG.md name the same."""


def register() -> None:
    """Register the backend with vLLM under the name CUSTOM.

    Raises
    ------
    ImportError
        vLLM is not installed, or its V1 engine has no registry of backends.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError(
            "pasa.patching.vllm.register needs a vLLM with vllm.v1.attention.backends.registry in this environment "
            f"({error})"
        ) from error

    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{NAME}")


def __getattr__(name: str) -> Any:
    """Make the backend class when vLLM looks it up by name, because its base classes need vLLM."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return backend_class()


@dataclass
class PasaMetadata:
    """The metadata of a batch, shared by all layers; `decodes` sequences of one query come first, then the others.

    Attributes
    ----------
    tokens, decodes, max_query_len, max_seq_len : int
    block_table, seq_lens : Tensor
        Rows of all sequences, decodes first.
    slot_mapping : Tensor (tokens,)
    cu_seqlens_q : Tensor, optional
        Cumulative query lengths of the sequences after the decodes, from 0; None if all sequences are decodes.
    causal : bool
    """

    tokens: int
    decodes: int
    max_query_len: int
    max_seq_len: int
    block_table: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor | None
    causal: bool

    @classmethod
    def of(cls, common: Any) -> PasaMetadata:
        """Convert vLLM's CommonAttentionMetadata; only lengths that are on the host are read, so nothing waits."""
        if not isinstance(common.causal, bool):
            raise NotImplementedError("causal is a Tensor: sequences of one batch must be alike")
        decodes = common.num_reqs
        if common.max_query_len > 1:
            longer = common.query_start_loc_cpu.diff() != 1
            decodes = int(longer.int().argmax()) if bool(longer.any()) else decodes
        rest = None if decodes == common.num_reqs else common.query_start_loc[decodes:] - decodes
        sizes = (common.num_actual_tokens, decodes, common.max_query_len, common.max_seq_len)
        return cls(*sizes, common.block_table_tensor, common.seq_lens, common.slot_mapping, rest, common.causal)

    def attend(
        self, q: Tensor, caches: tuple[Tensor, Tensor], scale: float, out: Tensor, key_anchors: Tensor | None = None
    ) -> None:
        """Attend with queries (tokens, Hq, D), and write the result into `out` of the same shape."""
        d, longest = self.decodes, self.max_seq_len
        if d:
            out[:d] = attention_paged(
                q[:d], *caches, self.block_table[:d], self.seq_lens[:d], max_seqlen_k=longest, scale=scale,
                key_anchors=key_anchors,
            )  # fmt: skip
        if self.cu_seqlens_q is not None:
            out[d:] = attention_paged(
                q[d:], *caches, self.block_table[d:], self.seq_lens[d:], cu_seqlens_q=self.cu_seqlens_q,
                max_seqlen_q=self.max_query_len, max_seqlen_k=longest, is_causal=self.causal, scale=scale,
            )  # fmt: skip


def attend_layer(
    metadata: PasaMetadata | None,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Tensor,
    output: Tensor,
    scale: float,
    key_anchors: Tensor | None = None,
) -> Tensor:
    """Run one layer of a step: write new keys and values into their pages, then attend. Padding rows stay unchanged.

    Parameters
    ----------
    metadata : PasaMetadata, optional
        None while vLLM profiles its memory; `output` is then filled with 0.
    query : Tensor (tokens or more, Hq, D)
    key, value : Tensor (tokens or more, Hkv, D), optional
        None if the layer reads another layer's cache.
    kv_cache : Tensor (2, pages, slots of a page, Hkv, D) or (pages, Hkv, slots of a page, 2 D)
        The last stride is 1, the others are free.
    output : Tensor (tokens or more, Hq, D) or (..., Hq * D)
    key_anchors : Tensor (pages, Hkv, D), optional
        Anchors of kv_cache's pages. Pass them only if every write to the pages goes through this function, because
        the guarantee against overflow then depends on them; see `write_pages`.

    Raises
    ------
    NotImplementedError
        The cache has another shape.
    """
    if metadata is None:
        return output.fill_(0)
    n = metadata.tokens
    caches = split_cache(kv_cache, query.shape[-1])
    if key is not None and value is not None:
        write_pages(key[:n], value[:n], *caches, metadata.slot_mapping[:n], key_anchors)
    metadata.attend(query[:n], caches, scale, output.view(query.shape)[:n], key_anchors)
    return output


def split_cache(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return views (pages, slots of a page, Hkv, D) of the keys and the values of one layer.

    Raises
    ------
    NotImplementedError
        The cache has another shape than those of the vLLM versions in `TESTED`.
    """
    if kv_cache.dim() == 5 and kv_cache.shape[0] == 2 and kv_cache.shape[-1] == head_dim:
        return kv_cache[0], kv_cache[1]
    if kv_cache.dim() == 4 and kv_cache.shape[-1] == 2 * head_dim:
        keys, values = kv_cache.transpose(1, 2).split(head_dim, -1)
        return keys, values
    raise NotImplementedError(
        f"kv_cache {tuple(kv_cache.shape)} is neither (2, pages, slots, Hkv, {head_dim}) nor (pages, Hkv, slots, "
        f"{2 * head_dim}), the caches of {TESTED}; {_version()} is installed"
    )


def _version() -> str:
    try:
        return f"vLLM {version('vllm')}"
    except PackageNotFoundError:  # imported from a folder, for example
        return "an unknown version of vLLM"


def _refuse_unknown(parts: dict[str, type]) -> None:
    """Raise NotImplementedError if vLLM requires methods that these classes lack."""
    lacking = [f"{name}.{method}" for name, part in parts.items() for method in sorted(part.__abstractmethods__)]  # type: ignore[attr-defined]
    if lacking:
        raise NotImplementedError(
            f"pasa's attention backend is tested with {TESTED}; {_version()} also asks for {', '.join(lacking)}"
        )


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
        vLLM is not installed, or older than 0.14.
    NotImplementedError
        The installed vLLM has another interface.
    """
    try:
        from vllm.v1.attention import backend as v1
    except ImportError as error:
        raise ImportError(f"pasa's attention backend needs vLLM 0.14 or newer ({error})") from error

    implementation, builder = _implementation(v1), _builder(v1)
    chooses_shape = hasattr(v1.AttentionBackend, "get_kv_cache_shape")
    if not chooses_shape and not hasattr(v1.AttentionBackend, "supported_kv_cache_layouts"):
        raise NotImplementedError(
            f"pasa's attention backend is tested with {TESTED}; {_version()} has caches of another kind"
        )

    class Backend(v1.AttentionBackend):  # type: ignore[misc]
        """The properties by which vLLM decides whether it can use this backend."""

        supported_dtypes = [torch.float16]  # noqa: RUF012 - as in vLLM's base class
        supported_kv_cache_dtypes = ["auto", "float16"]  # noqa: RUF012

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
        def supports_device_cpu_query_lens_mismatch(cls) -> bool:
            return False  # PasaMetadata counts decodes by the lengths on the host

    if chooses_shape:
        Backend.get_kv_cache_shape = staticmethod(_kv_cache_shape)
        abc.update_abstractmethods(Backend)
    _refuse_unknown({"AttentionBackend": Backend, "AttentionImpl": implementation, "AttentionMetadataBuilder": builder})
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
        ) -> None:
            unsupported = {
                "alibi_slopes": alibi_slopes is not None,
                f"sliding_window={sliding_window}": sliding_window is not None,
                f"kv_cache_dtype={kv_cache_dtype!r}": kv_cache_dtype not in ("auto", "float16"),
                f"logits_soft_cap={logits_soft_cap}": bool(logits_soft_cap),
                f"attn_type={attn_type!r}": attn_type != "decoder",
                "sinks": sinks is not None,
            }
            if refused := [name for name, is_set in unsupported.items() if is_set]:
                raise NotImplementedError(f"pasa's attention backend does not support {', '.join(refused)}")
            self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
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
            return attend_layer(attn_metadata, query, *new, kv_cache, output, self.scale)

    return Implementation


def _builder(v1: Any) -> type:
    class Builder(v1.AttentionMetadataBuilder):  # type: ignore[misc]
        """Makes the `PasaMetadata` of each step."""

        _cudagraph_support = v1.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        reorder_batch_threshold = 1  # vLLM then puts single-token decodes first

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PasaMetadata:
            return PasaMetadata.of(common_attn_metadata)

    return Builder
