"""One layer of a step of vLLM's engine: the batch's metadata, the layer's options, and the call of both functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pasa.config import PasaConfig
from pasa.paged import attention_paged, write_pages
from pasa.patching.vllm_interface import INSTEAD, TESTED, installed, refuse


@dataclass
class PasaMetadata:
    """The metadata of a batch, shared by all layers; `decodes` sequences of one query come first, then the others.

    Where all sequences are decodes, or none is, the tensors are those that vLLM keeps from step to step and changes in
    place. So a CUDA graph that was captured with this metadata reads the lengths of later steps.

    Attributes
    ----------
    tokens, decodes, max_query_len, max_seq_len : int
    block_table, seq_lens : Tensor
        Rows of all sequences, decodes first.
    slot_mapping : Tensor (tokens,)
    cu_seqlens_q : Tensor, optional
        Cumulative query lengths of the sequences after the decodes, from 0; None if all sequences are decodes.
    """

    tokens: int
    decodes: int
    max_query_len: int
    max_seq_len: int
    block_table: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor | None

    @classmethod
    def of(cls, common: Any, advice: str = INSTEAD) -> PasaMetadata:
        """Convert vLLM's CommonAttentionMetadata; only lengths that are on the host are read, so nothing waits."""
        if common.causal is not True:
            raise NotImplementedError(
                f"pasa's attention backend is for causal attention, and vLLM asks for causal={common.causal}: {advice}"
            )
        decodes = common.num_reqs
        if common.max_query_len > 1:
            longer = common.query_start_loc_cpu.diff() != 1
            decodes = int(longer.int().argmax()) if bool(longer.any()) else decodes
        rest = common.query_start_loc
        if decodes:
            rest = None if decodes == common.num_reqs else rest[decodes:] - decodes
        sizes = (common.num_actual_tokens, decodes, common.max_query_len, common.max_seq_len)
        return cls(*sizes, common.block_table_tensor, common.seq_lens, common.slot_mapping, rest)

    def attend(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        options: LayerOptions,
        out: Tensor,
        key_anchors: Tensor | None = None,
    ) -> None:
        """Attend with queries (tokens, Hq, D), and write the result into `out` of the same shape."""
        d, longest = self.decodes, self.max_seq_len
        if d:
            out[:d] = attention_paged(
                q[:d], *caches, self.block_table[:d], self.seq_lens[:d], max_seqlen_k=longest,
                key_anchors=key_anchors, **vars(options),
            )  # fmt: skip
        if self.cu_seqlens_q is not None:
            out[d:] = attention_paged(
                q[d:], *caches, self.block_table[d:], self.seq_lens[d:], cu_seqlens_q=self.cu_seqlens_q,
                max_seqlen_q=self.max_query_len, max_seqlen_k=longest, is_causal=True, **vars(options),
            )  # fmt: skip


@dataclass
class LayerOptions:
    """The arguments of `attention_paged` that belong to a layer.

    Attributes
    ----------
    scale : float
    window : (int, int), optional
        Numbers of keys before and after a query's own that the query may see.
    softcap : float, optional
    sinks : Tensor (Hq,), optional
    config : PasaConfig, optional
    """

    scale: float
    window: tuple[int, int] | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    config: PasaConfig | None = None

    @classmethod
    def of(
        cls,
        scale: float,
        sliding_window: int | None,
        logits_soft_cap: float | None,
        sinks: Tensor | None,
        *,
        alibi_slopes: list[float] | None,
        kv_cache_dtype: str,
        attn_type: str,
        others: dict[str, Any],
        advice: str = INSTEAD,
    ) -> LayerOptions:
        """Convert the arguments of vLLM's AttentionImpl; raise NotImplementedError that names unsupported ones.

        vLLM counts a query's own key to its window, and passes 0 for no soft cap. `others` are arguments that only some
        models have, and `advice` is what to do instead.
        """
        refuse(
            {
                "alibi_slopes": alibi_slopes is not None,
                f"kv_cache_dtype={kv_cache_dtype!r}": kv_cache_dtype not in ("auto", "float16"),
                f"attn_type={attn_type!r}": attn_type != "decoder",
                **{f"{name}={value!r}": True for name, value in others.items()},
            },
            advice,
        )
        window = None if sliding_window is None else (sliding_window - 1, 0)
        return cls(float(scale), window, logits_soft_cap or None, sinks)


def attend_layer(
    metadata: PasaMetadata | None,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    kv_cache: Tensor,
    output: Tensor,
    options: LayerOptions,
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
    options : LayerOptions
    key_anchors : Tensor (pages, Hkv, D), optional
        Anchors of kv_cache's pages. Pass them only if every write to the pages goes through this function, because
        the guarantee against overflow then depends on them; see `write_pages`. vLLM reuses the pages that a sliding
        window has left, so a layer with a window takes no anchors.

    Raises
    ------
    NotImplementedError
        The cache has another shape, or anchors are passed to a layer with a window.
    """
    if metadata is None:
        return output.fill_(0)
    if key_anchors is not None and options.window is not None:
        raise NotImplementedError(
            f"key_anchors are passed to a layer with window={options.window}: pass None for layers with a window"
        )
    n = metadata.tokens
    caches = split_cache(kv_cache, query.shape[-1])
    if key is not None and value is not None:
        write_pages(key[:n], value[:n], *caches, metadata.slot_mapping[:n], key_anchors)
    metadata.attend(query[:n], caches, options, output.view(query.shape)[:n], key_anchors)
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
        f"{2 * head_dim}), the caches of {TESTED}; {installed()} is installed"
    )
