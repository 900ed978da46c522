"""An attention backend for SGLang, over `attention_paged`.

Installing pasa beside SGLang is enough: SGLang calls `plugin` in each of its processes, by the entry point
`sglang.srt.plugins`. The backend then runs under the name "pasa"::

    python -m sglang.launch_server --model-path ... --attention-backend pasa --dtype float16 --disable-cuda-graph

It is tested on a CPU with the registry, layers, memory pools and batches of SGLang 0.5.20 and 0.5.23, by
scripts/test_sglang.sh. **No SGLang engine has run it**, on any device.

A pool of SGLang has tokens in rows, and the pages of a pool are consecutive rows. So a page of SGLang is a page of
`attention_paged`, of any size. SGLang writes the cache, so there are no page anchors.

The backend refuses, by name and when the server starts: other dtypes than FP16, pools of other kinds (MLA, quantised,
separate pools for windows), speculative decoding and CUDA graphs. What belongs to a layer is refused in the first call,
which is SGLang's warm-up: cross attention, encoders, scales of a cache, soft caps other than tanh.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from pasa.paged import attention_paged

NAME = "pasa"
TESTED = "SGLang 0.5.20 to 0.5.23"
BATCH = ("forward_mode", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc", "extend_seq_lens",
         "extend_seq_lens_cpu")  # fmt: skip
"""The fields of SGLang's ForwardBatch that the backend reads."""
LAYER = ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"]
"""The first parameters of `AttentionBackend.forward_extend` and `forward_decode`."""


def plugin() -> None:
    """Register the backend when SGLang loads its plugins; warn if this SGLang has no registry of backends."""
    try:
        register()
    except ImportError as error:
        warnings.warn(f"pasa's attention backend was not registered: {error}", stacklevel=2)


def register() -> None:
    """Register the backend with SGLang under the name "pasa", also as a value of `--attention-backend`.

    Raises
    ------
    ImportError
        SGLang is not installed, or has no registry of attention backends.
    """
    try:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    except ImportError as error:
        raise ImportError(f"pasa.patching.sglang.register needs {TESTED} in this environment ({error})") from error
    register_attention_backend(NAME)(lambda runner: backend_class()(runner))
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


@dataclass
class Step:
    """The sequences of a forward pass, shared by all layers.

    Attributes
    ----------
    block_table : Tensor (B, most pages of a sequence), INT32
    seq_lens : Tensor (B,), INT32
    longest_k, longest_q : int
    cu_seqlens_q : Tensor (B + 1,), INT32, optional
        None if every sequence has one query.
    """

    block_table: Tensor
    seq_lens: Tensor
    longest_k: int
    longest_q: int
    cu_seqlens_q: Tensor | None

    @classmethod
    def of(cls, batch: Any, rows_of_requests: Tensor, page: int) -> Step:
        """Convert SGLang's ForwardBatch; `rows_of_requests` holds the pool's row of every token of a request."""
        mode = batch.forward_mode
        if mode.name not in ("DECODE", "EXTEND", "MIXED", "IDLE"):
            raise NotImplementedError(f"pasa's attention backend does not support the forward mode {mode.name}")
        lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        longest = int(lengths.max()) if lengths.numel() else 0
        rows = rows_of_requests[batch.req_pool_indices, : max(longest, 1) : page]
        table = torch.div(rows, page, rounding_mode="floor").int()
        if mode.name in ("DECODE", "IDLE"):
            return cls(table, batch.seq_lens.int(), longest, 1, None)
        new = batch.extend_seq_lens
        cu = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
        host = batch.extend_seq_lens_cpu
        return cls(table, batch.seq_lens.int(), longest, int(new.max()) if host is None else max(host), cu)


def check_runner(runner: Any, pool: Any, plain: type) -> None:
    """Raise NotImplementedError if a model runner has a cache that the backend cannot read; `plain` is the right kind.

    The message names all differences, because each restart of a server takes minutes.
    """
    kind = type(pool)
    unsupported = {
        f"dtype={runner.dtype} (serve with --dtype float16)": runner.dtype != torch.float16,
        f"a memory pool of class {kind.__name__}": kind is not plain,
        f"speculative decoding by {runner.server_args.speculative_algorithm}": (
            runner.server_args.speculative_algorithm is not None
        ),
    }
    if kind is plain:
        unsupported |= {
            f"a cache of {pool.store_dtype}": pool.store_dtype != torch.float16,
            f"the cache layout {pool.kv_cache_layout!r}": pool.kv_cache_layout != "nhd",
            f"head_dim={pool.head_dim} and v_head_dim={pool.v_head_dim}": pool.head_dim != pool.v_head_dim,
        }
    if refused := [name for name, is_set in unsupported.items() if is_set]:
        raise NotImplementedError(
            f"pasa's attention backend does not support {', '.join(refused)}: use another --attention-backend"
        )


def check_layer(layer: Any, others: dict[str, Any]) -> None:
    """Raise NotImplementedError if a RadixAttention layer has an option, or passes an argument, that is unsupported."""
    unsupported = {
        "cross attention": layer.is_cross_attention,
        f"attn_type={layer.attn_type.value!r}": layer.attn_type.value != "decoder",
        "scales of the cache": layer.k_scale is not None or layer.v_scale is not None,
        f"logit_capping_method={layer.logit_capping_method!r}": (
            bool(layer.logit_cap) and layer.logit_capping_method != "tanh"
        ),
        f"xai_temperature_len={layer.xai_temperature_len}": layer.xai_temperature_len > 0,
        **{name: value is not None and value is not False for name, value in others.items()},
    }
    if refused := [name for name, is_set in unsupported.items() if is_set]:
        raise NotImplementedError(
            f"pasa's attention backend does not support {', '.join(refused)}: use another --attention-backend"
        )


def refuse_unknown(base: Any, batch: Any) -> None:
    """Raise NotImplementedError if the installed SGLang has another interface than the one that was tested."""
    differences = [f"ForwardBatch lacks {name}" for name in BATCH if name not in batch.__dataclass_fields__]
    for name in ("forward_extend", "forward_decode"):
        taken = [*inspect.signature(getattr(base, name)).parameters]
        if taken[: len(LAYER)] != LAYER:
            differences.append(f"AttentionBackend.{name} takes ({', '.join(taken)})")
    if differences:
        raise NotImplementedError(
            f"pasa's attention backend was tested with {TESTED}. {_installed()} has another interface: "
            f"{'; '.join(differences)}. Install one of the tested versions, or use another --attention-backend"
        )


def _installed() -> str:
    try:
        return f"SGLang {version('sglang')}"
    except PackageNotFoundError:  # imported from a folder, for example
        return "an unknown version of SGLang"


@cache
def backend_class() -> type:
    """Return the backend class, derived from the base class of the installed SGLang.

    Raises
    ------
    ImportError
        SGLang is not installed, or has no such classes.
    NotImplementedError
        The installed SGLang has another interface.
    """
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    refuse_unknown(AttentionBackend, ForwardBatch)

    class Backend(AttentionBackend):  # type: ignore[misc]
        """Attends to each layer of a forward pass."""

        def __init__(self, runner: Any) -> None:
            super().__init__()
            check_runner(runner, runner.token_to_kv_pool, MHATokenToKVPool)
            # SGLang reads these two names as well
            self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
            self.forward_metadata: Step | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            self.forward_metadata = Step.of(
                forward_batch, self.req_to_token_pool.req_to_token, self.token_to_kv_pool.page_size
            )

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            raise NotImplementedError("pasa's attention backend runs outside of CUDA graphs: pass --disable-cuda-graph")

        def forward_extend(
            self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any,
            save_kv_cache: bool = True, sinks: Tensor | None = None, **others: Any,
        ) -> Tensor:  # fmt: skip
            check_layer(layer, others)
            if save_kv_cache and k is not None:
                self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
            return self._attend(q, layer, sinks)

        forward_decode = forward_extend

        def _attend(self, q: Tensor, layer: Any, sinks: Tensor | None) -> Tensor:
            """Attend with queries (T, Hq * D) or (T, Hq, D), and return (T, Hq * D)."""
            step, pool = self.forward_metadata, self.token_to_kv_pool
            if step is None:
                raise RuntimeError("SGLang called pasa's attention backend without init_forward_metadata")
            buffers = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            keys, values = (x.view(-1, pool.page_size, *x.shape[1:]) for x in buffers)
            # SGLang counts the keys before a query's own
            window = (layer.sliding_window_size, 0) if layer.sliding_window_size > -1 else None
            out: Tensor = attention_paged(
                q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), keys, values, step.block_table, step.seq_lens,
                cu_seqlens_q=step.cu_seqlens_q, max_seqlen_q=None if step.cu_seqlens_q is None else step.longest_q,
                max_seqlen_k=step.longest_k, is_causal=step.cu_seqlens_q is not None, window=window,
                scale=layer.scaling, softcap=layer.logit_cap or None, sinks=sinks,
            )  # fmt: skip
            rows: Tensor = out.reshape(q.shape[0], -1)
            return rows

    Backend.__name__ = Backend.__qualname__ = "PasaAttentionBackend"
    return Backend
