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
another head dimension than keys. From 0.28 on, vLLM itself refuses adaptive verification, context parallelism and batch
invariance, because this backend does not declare them as supported. CUDA graphs of a whole step are for batches in
which all sequences have equally many queries, which includes speculative decoding. vLLM captures other batches in
pieces. Page anchors are not used, because vLLM plans no memory for them and pages that a KV connector fills would lack
them. A backend that owns both memory and connector can pass anchors to `attend_layer`.

vLLM's platform for CPUs and vllm-ascend ignore `--attention-backend CUSTOM`. They choose among their own backends, so a
model served there does not run PASA. An Ascend backend gets the same arguments under other names. In
`npu_fused_infer_attention_score` with layout "TND", `query` is q; `key` and `value`, viewed as (pages, block_size, Hkv,
D), are the caches; `block_table` has the same name; `actual_seq_lengths` is cu_seqlens_q without its leading 0;
`actual_seq_lengths_kv` is seq_lens; sparse_mode 3 is is_causal. On an NPU, pages are first gathered and lengths read
back to the host, because no Ascend C kernel of this project reads pages.
"""

from __future__ import annotations

import abc
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from pasa.ops.registry import BACKENDS
from pasa.paged import attention_paged, write_pages

NAME = "PasaAttentionBackend"

TESTED = "vLLM 0.18 to 0.33"
"""The versions whose interfaces scripts/test_vllm.sh has recorded; README.md and CHANGELOG.md name the same."""


def plugin() -> None:
    """Register the backend when vLLM loads its plugins, unless another package has taken the name CUSTOM.

    vLLM calls this in every process, whatever backend is selected. So nothing here stops a vLLM that pasa cannot serve.
    """
    try:
        slot = _registry().AttentionBackendEnum.CUSTOM
    except ImportError as error:
        warnings.warn(f"pasa's attention backend was not registered: {error}", stacklevel=2)
        return
    if slot.is_overridden() and slot.get_path() != _path():
        warnings.warn(
            f"pasa's attention backend was not registered, because {slot.get_path()} has taken vLLM's name CUSTOM: "
            "set the environment variable VLLM_PLUGINS=pasa to load no other plugin",
            stacklevel=2,
        )
        return
    register()


def register() -> None:
    """Register the backend with vLLM under the name CUSTOM, also if another backend had that name.

    Raises
    ------
    ImportError
        vLLM is not installed, or its V1 engine has no registry of backends.
    """
    registry = _registry()
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, _path())


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
    def of(cls, common: Any) -> PasaMetadata:
        """Convert vLLM's CommonAttentionMetadata; only lengths that are on the host are read, so nothing waits."""
        if common.causal is not True:
            raise NotImplementedError(
                f"pasa's attention backend is for causal attention, and vLLM asks for causal={common.causal}: use "
                "another --attention-backend"
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
    """

    scale: float
    window: tuple[int, int] | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


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


def installed() -> str:
    """Return the name and version of the installed vLLM."""
    try:
        return f"vLLM {version('vllm')}"
    except PackageNotFoundError:  # imported from a folder, for example
        return "an unknown version of vLLM"


READ = (
    "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len",
    "max_seq_len", "block_table_tensor", "slot_mapping", "causal",
)  # fmt: skip
"""The fields of vLLM's CommonAttentionMetadata that `PasaMetadata.of` reads."""


def _refuse_unknown(v1: Any, parts: dict[str, type]) -> None:
    """Raise NotImplementedError if the installed vLLM differs from the interface that these classes were written for.

    Parameters
    ----------
    v1 : module
        vllm.v1.attention.backend
    parts : dict
        vLLM's name of each base class, and the class derived from it.
    """
    differences = [each for name, part in parts.items() for each in _differences(name, getattr(v1, name), part)]
    fields = v1.CommonAttentionMetadata.__dataclass_fields__
    differences += [f"CommonAttentionMetadata lacks {name}" for name in READ if name not in fields]
    differences += _cache_differences(v1)
    if differences:
        raise NotImplementedError(
            f"pasa's attention backend was tested with {TESTED}. {installed()} has another interface: "
            f"{'; '.join(differences)}. Install one of the tested versions, or use another --attention-backend"
        )


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


def _check_spec(spec: Any) -> None:
    """Raise NotImplementedError if a layer's cache cannot be read; `spec` is vLLM's AttentionSpec."""
    keys, values = spec.head_size, getattr(spec, "head_size_v", spec.head_size)
    unsupported = {
        f"dtype={spec.dtype}": spec.dtype != torch.float16,
        f"head_size={keys} and head_size_v={values}": keys != values,
    }
    if refused := [name for name, is_set in unsupported.items() if is_set]:
        raise NotImplementedError(
            f"pasa's attention backend does not support a cache with {', '.join(refused)}: serve with --dtype float16, "
            "or use another --attention-backend"
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
        def supports_device_cpu_query_lens_mismatch(cls) -> bool:
            return False  # PasaMetadata counts decodes by the lengths on the host

    if hasattr(v1.AttentionBackend, "get_kv_cache_shape"):
        Backend.get_kv_cache_shape = staticmethod(_kv_cache_shape)
        abc.update_abstractmethods(Backend)
    parts = {"AttentionBackend": Backend, "AttentionImpl": implementation, "AttentionMetadataBuilder": builder}
    _refuse_unknown(v1, parts)
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
            unsupported = {
                "alibi_slopes": alibi_slopes is not None,
                f"kv_cache_dtype={kv_cache_dtype!r}": kv_cache_dtype not in ("auto", "float16"),
                f"attn_type={attn_type!r}": attn_type != "decoder",
                **{f"{name}={value!r}": True for name, value in others.items()},
            }
            if refused := [name for name, is_set in unsupported.items() if is_set]:
                raise NotImplementedError(
                    f"pasa's attention backend does not support {', '.join(refused)}: use another --attention-backend"
                )
            self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
            self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
            self.kv_cache_dtype = kv_cache_dtype
            self.writes = kv_sharing_target_layer_name is None
            window = None if sliding_window is None else (sliding_window - 1, 0)
            self.options = LayerOptions(self.scale, window, logits_soft_cap or None, sinks)

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
            _check_spec(kv_cache_spec)
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PasaMetadata:
            return PasaMetadata.of(common_attn_metadata)

    return Builder
