"""An attention backend for vLLM's V1 engine, over `attention_paged` and `write_pages`.

Contract-tested against a description of vLLM's interface (module `vllm.v1.attention.backend`); not run inside vLLM. In
every process of the engine, before a model is loaded (from an entry point `vllm.general_plugins`, say)::

    from pasa.patching import vllm
    vllm.register()  # then: vllm serve ... --attention-backend CUSTOM --dtype float16

What is refused, by name: ALiBi, sliding windows, soft caps, attention sinks, quantised caches and outputs, encoders.
CUDA graphs of a whole step are for batches of single-token decodes; vLLM captures other batches in pieces.
Anchors of pages are left out: vLLM plans no memory for them, and pages that a KV connector fills would lack them. A
backend that owns both can give them to `attend_layer`.

An Ascend backend has the same at hand under other names. Of `npu_fused_infer_attention_score` with layout "TND",
`query` is q; `key` and `value`, seen as (pages, block_size, Hkv, D), are the caches; `block_table` is itself;
`actual_seq_lengths` is cu_seqlens_q without its leading 0; `actual_seq_lengths_kv` is seq_lens; sparse_mode 3 is
is_causal. On an NPU pages are gathered first, and lengths read back: no Ascend C kernel here reads pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pasa.ops.registry import BACKENDS
from pasa.paged import attention_paged, write_pages

NAME = "PasaAttentionBackend"


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
    kv_cache : Tensor (2, pages, slots of a page, Hkv, D)
    output : Tensor (tokens or more, Hq, D) or (..., Hq * D)
    key_anchors : Tensor (pages, Hkv, D), optional
        Of kv_cache's pages, if every write to them comes through here: the guarantee then rests on it, see
        `write_pages`.
    """
    if metadata is None:
        return output.fill_(0)
    n = metadata.tokens
    caches = kv_cache[0], kv_cache[1]
    if key is not None and value is not None:
        write_pages(key[:n], value[:n], *caches, metadata.slot_mapping[:n], key_anchors)
    metadata.attend(query[:n], caches, scale, output.view(query.shape)[:n], key_anchors)
    return output


@cache
def backend_class() -> type:
    """The class of the backend, over vLLM's own.

    Raises
    ------
    ImportError
        Without vLLM.
    """
    from vllm.v1.attention import backend as v1

    implementation, builder = _implementation(v1), _builder(v1)

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
        def get_supported_kernel_block_sizes() -> list[Any]:
            return [v1.MultipleOf(16)]

        @classmethod
        def get_supported_head_sizes(cls) -> list[int]:
            return list(range(8, BACKENDS["triton"].head_dims[1] + 1, 8))

        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
        ) -> tuple[int, ...]:
            return (2, num_blocks, block_size, num_kv_heads, head_size)

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
