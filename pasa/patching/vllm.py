"""An attention backend for vLLM's V1 engine, over `attention_paged` and `write_pages`.

Tested against the classes and cache views of vLLM 0.14, 0.28 to 0.31 and 0.33 (their modules
`vllm.v1.attention.backend`, in scripts/test_vllm.sh); not run inside an engine. In every process of
the engine, before a model is loaded (from an entry point `vllm.general_plugins`, say)::

    from pasa.patching import vllm
    vllm.register()  # then: vllm serve ... --attention-backend CUSTOM --dtype float16

Up to vLLM 0.28 a backend chooses the shape of its cache: (2, pages, slots of a page, Hkv, D) here.
From 0.29 on vLLM gives every backend (pages, Hkv, slots of a page, 2 D), in any order in memory. A
vLLM that asks for something else is refused by name.

What is refused, by name: ALiBi, sliding windows, soft caps, attention sinks, quantised caches and
outputs, encoders. Adaptive verification, context parallelism and batch invariance are refused by
vLLM itself (from 0.28 on), because this backend does not say that it supports them. CUDA graphs of
a whole step are for batches of single-token decodes; vLLM captures other batches in pieces. Anchors
of pages are left out: vLLM plans no memory for them, and pages that a KV connector fills would lack
them. A backend that owns both can give them to `attend_layer`.

vllm-ascend ignores `--attention-backend CUSTOM`: its platform chooses among its own backends, so a
model served there does not run PASA. An Ascend backend has the same arguments at hand under other
names. Of `npu_fused_infer_attention_score` with layout "TND", `query` is q; `key` and `value`, seen
as (pages, block_size, Hkv, D), are the caches; `block_table` is itself; `actual_seq_lengths` is
cu_seqlens_q without its leading 0; `actual_seq_lengths_kv` is seq_lens; sparse_mode 3 is is_causal.
On an NPU pages are gathered first, and lengths read back: no Ascend C kernel here reads pages.
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
"""What scripts/test_vllm.sh runs; README.md and CHANGELOG.md say the same."""


def register() -> None:
    """Make the backend vLLM's CUSTOM one.

    Raises
    ------
    ImportError
        Without vLLM, or with one whose V1 engine has no such registry.
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
    """vLLM looks the class up by its name; it exists where vLLM does."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return backend_class()


@dataclass
class PasaMetadata:
    """A batch, the same for all layers: `decodes` sequences of one query first, then the others.

    Attributes
    ----------
    tokens, decodes, max_query_len, max_seq_len : int
    block_table, seq_lens : Tensor
        Of all sequences.
    slot_mapping : Tensor (tokens,)
    cu_seqlens_q : Tensor, optional
        Of the sequences behind the decodes, from 0.
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
        """From vLLM's CommonAttentionMetadata. Reads lengths on the host alone."""
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
        """Queries (tokens, Hq, D), into `out`."""
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
    """One layer of a step: put new keys and values into their pages, then attend. Rows of padding are left alone.

    Parameters
    ----------
    metadata : PasaMetadata, optional
        None while vLLM measures memory: `output` becomes 0.
    query : Tensor (tokens or more, Hq, D)
    key, value : Tensor (tokens or more, Hkv, D), optional
        None where the layer reads another layer's cache.
    kv_cache : Tensor (2, pages, slots of a page, Hkv, D) or (pages, Hkv, slots of a page, 2 D)
        Of any strides but the last, which is 1.
    output : Tensor (tokens or more, Hq, D) or (..., Hq * D)
    key_anchors : Tensor (pages, Hkv, D), optional
        Of kv_cache's pages, if every write to them comes through here: the guarantee then rests on it, see
        `write_pages`.

    Raises
    ------
    NotImplementedError
        For a cache of another shape.
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
        For a cache of another shape than those of the vLLM versions in `TESTED`.
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
    except PackageNotFoundError:  # from a folder, say
        return "an unknown version of vLLM"


def _refuse_unknown(parts: dict[str, type]) -> None:
    """NotImplementedError if vLLM asks its backends for methods that these classes lack."""
    lacking = [f"{name}.{method}" for name, part in parts.items() for method in sorted(part.__abstractmethods__)]  # type: ignore[attr-defined]
    if lacking:
        raise NotImplementedError(
            f"pasa's attention backend is tested with {TESTED}; {_version()} also asks for {', '.join(lacking)}"
        )


def _kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
) -> tuple[int, ...]:
    """Return the shape of a layer's cache, where vLLM lets a backend choose it (until 0.28)."""
    return (2, num_blocks, block_size, num_kv_heads, head_size)


@cache
def backend_class() -> type:
    """Return the class of the backend, over vLLM's own.

    Raises
    ------
    ImportError
        Without vLLM, or with one before 0.14.
    NotImplementedError
        With a vLLM whose interface is another.
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
        """What vLLM asks before it chooses."""

        supported_dtypes = [torch.float16]  # noqa: RUF012 - as vLLM has it
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
            return [v1.MultipleOf(16)]  # of any spec: what else a spec can ask for is refused elsewhere

        @classmethod
        def get_supported_head_sizes(cls) -> list[int]:
            return list(range(8, BACKENDS["triton"].head_dims[1] + 1, 8))

        @classmethod
        def supports_device_cpu_query_lens_mismatch(cls) -> bool:
            return False  # PasaMetadata finds decodes by the lengths on the host

    if chooses_shape:
        Backend.get_kv_cache_shape = staticmethod(_kv_cache_shape)
        abc.update_abstractmethods(Backend)
    _refuse_unknown({"AttentionBackend": Backend, "AttentionImpl": implementation, "AttentionMetadataBuilder": builder})
    Backend.__name__ = Backend.__qualname__ = NAME
    return Backend


def _implementation(v1: Any) -> type:
    class Implementation(v1.AttentionImpl):  # type: ignore[misc]
        """One layer."""

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
            wanted = {
                "alibi_slopes": alibi_slopes is not None,
                f"sliding_window={sliding_window}": sliding_window is not None,
                f"kv_cache_dtype={kv_cache_dtype!r}": kv_cache_dtype not in ("auto", "float16"),
                f"logits_soft_cap={logits_soft_cap}": bool(logits_soft_cap),
                f"attn_type={attn_type!r}": attn_type != "decoder",
                "sinks": sinks is not None,
            }
            if refused := [name for name, given in wanted.items() if given]:
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
        """Metadata of a step."""

        _cudagraph_support = v1.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        reorder_batch_threshold = 1  # vLLM then puts single-token decodes first

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PasaMetadata:
            return PasaMetadata.of(common_attn_metadata)

    return Builder
