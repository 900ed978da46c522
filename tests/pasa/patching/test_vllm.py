"""The vLLM adapter against a description of vLLM's V1 interface, written here; vLLM itself is not run.

Described: vllm/v1/attention/backend.py and backends/registry.py of vLLM (2026): abstract methods, the arguments that
vLLM gives them, and the fields of CommonAttentionMetadata that a builder reads.
"""

import abc
import enum
import importlib
import inspect
import sys
import types
from dataclasses import dataclass

import pytest
import torch

from pasa.patching import vllm as adapter
from tests.pages import make_pages, worst

FORWARD = [
    "layer",
    "query",
    "key",
    "value",
    "kv_cache",
    "attn_metadata",
    "output",
    "output_scale",
    "output_block_scale",
]
IMPL = ["num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"]
IMPL += ["logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"]
BUILDER = ["kv_cache_spec", "layer_names", "vllm_config", "device"]
BUILD = ["common_prefix_len", "common_attn_metadata", "fast_build"]
CACHE = ["num_blocks", "block_size", "num_kv_heads", "head_size", "cache_dtype_str"]
HALF_ULP = 2.0**-11 * 4


def abstract(*names, **attributes):
    """A class whose methods of these names are abstract."""
    methods = {name: abc.abstractmethod(lambda *a, **k: None) for name in names}
    return abc.ABCMeta("Abstract", (), methods | attributes)


class BuilderBase(abc.ABC):
    reorder_batch_threshold = None

    @abc.abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.layer_names, self.device = layer_names, device

    @abc.abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


@dataclass
class Common:
    """What a builder reads of CommonAttentionMetadata."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: object = True


@pytest.fixture
def vllm(monkeypatch):
    """A stand-in for the package; returns what was registered."""
    v1 = types.ModuleType("vllm.v1.attention.backend")
    v1.AttentionBackend = abstract("get_name", "get_impl_cls", "get_builder_cls", "get_kv_cache_shape")
    v1.AttentionImpl = abstract("__init__", "forward")
    v1.AttentionMetadataBuilder = BuilderBase
    v1.AttentionCGSupport = enum.Enum("AttentionCGSupport", "NEVER UNIFORM_SINGLE_TOKEN_DECODE UNIFORM_BATCH ALWAYS")
    v1.MultipleOf = type("MultipleOf", (), {"__init__": lambda self, base: setattr(self, "base", base)})
    registry, registered = types.ModuleType("vllm.v1.attention.backends.registry"), {}
    registry.AttentionBackendEnum = enum.Enum("AttentionBackendEnum", "FLASH_ATTN CUSTOM")
    registry.register_backend = lambda slot, path: registered.update({slot.name: path})
    attention = types.ModuleType("vllm.v1.attention")
    attention.backend = v1
    for name in ("vllm", "vllm.v1", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in (attention, v1, registry):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    adapter.backend_class.cache_clear()
    yield registered
    adapter.backend_class.cache_clear()


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_is_found_by_the_name_that_it_registers(vllm):
    adapter.register()
    module, _, name = vllm["CUSTOM"].rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert (found.__module__, found.__qualname__) == (module, name)


def test_without_vllm_it_says_so():
    with pytest.raises(ImportError, match=r"register needs a vLLM with vllm\.v1.*No module named 'vllm'"):
        adapter.register()
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        adapter.Other  # noqa: B018


def test_methods_take_what_vllm_gives(vllm):
    backend = adapter.PasaAttentionBackend
    implementation, builder = backend.get_impl_cls(), backend.get_builder_cls()
    assert not backend.__abstractmethods__ | implementation.__abstractmethods__ | builder.__abstractmethods__
    assert parameters(implementation.forward) == FORWARD
    assert parameters(implementation.__init__)[: len(IMPL)] == IMPL
    assert parameters(builder.__init__) == BUILDER
    assert parameters(builder.build) == BUILD
    assert parameters(backend.get_kv_cache_shape) == CACHE
    assert backend.get_name() == "CUSTOM"
    assert backend.get_kv_cache_shape(9, 16, 4, 128) == (2, 9, 16, 4, 128)
    assert {64, 80, 96, 128, 256} < set(backend.get_supported_head_sizes())
    assert [size.base for size in backend.get_supported_kernel_block_sizes()] == [16]
    assert builder._cudagraph_support.name == "UNIFORM_SINGLE_TOKEN_DECODE"
    assert builder.reorder_batch_threshold == 1


REFUSED = [
    ({"alibi_slopes": [1.0]}, "alibi_slopes"),
    ({"sliding_window": 128}, "sliding_window=128"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
    ({"logits_soft_cap": 30.0}, "logits_soft_cap=30.0"),
    ({"attn_type": "encoder"}, "attn_type='encoder'"),
]


@pytest.mark.parametrize(("how", "message"), REFUSED, ids=lambda x: str(x)[:30])
def test_what_it_cannot_do_is_refused_by_name(vllm, how, message):
    with pytest.raises(NotImplementedError, match=message):
        adapter.PasaAttentionBackend.get_impl_cls()(4, 64, 0.125, 2, **how)


class Step:
    """A step of the engine: the newest queries of each sequence are new tokens, whose keys are not yet in the cache."""

    def __init__(self, lengths, queries, padding=0):
        self.pages = make_pages(lengths, queries=queries, bias=300.0, stale=7.0)
        pages, (starts, ends) = self.pages, self.pages.edges
        new = [range(end - n, end) for n, end in zip(queries, ends[1:], strict=True)]
        where = [(b, key - ends[b]) for b, span in enumerate(new) for key in span]
        slots = [int(pages.table[b, at // 16]) * 16 + at % 16 for b, at in where]
        self.cache = torch.stack([pages.k_cache, pages.v_cache])
        self.cache.flatten(1, 2)[:, slots] = torch.nan
        index = [key for span in new for key in span]
        rows = [torch.full((padding, *x.shape[1:]), torch.nan).half() for x in (pages.q, pages.k, pages.v)]
        self.q, self.k, self.v = (
            torch.cat(x) for x in zip((pages.q, pages.k[index], pages.v[index]), rows, strict=True)
        )
        cu, n = torch.tensor(starts).int(), len(index)
        self.common = Common(cu, cu, pages.lengths, len(lengths), n, max(queries), max(lengths), pages.table,
                             torch.tensor(slots + [-1] * padding))  # fmt: skip

    def run(self, output, key=True, **how):
        backend = adapter.PasaAttentionBackend
        builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
        implementation = backend.get_impl_cls()(4, 64, 64**-0.5, 2, **how)
        metadata = builder.build(0, self.common)
        key, value = (self.k, self.v) if key else (None, None)
        return implementation.forward(None, self.q, key, value, self.cache, metadata, output)


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 1, 20], [1, 9, 20], [5, 3, 33]], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_decodes_and_prompts_in_one_step(vllm, queries, flat):
    """Queries attend to keys that the same call writes; a prompt's second chunk to those of the first. The biased
    scores are eleven times what FP16 holds."""
    step = Step([40, 17, 33], queries, padding=3)
    output = torch.full((len(step.q), 4 * 64) if flat else step.q.shape, 5.0).half()
    assert step.run(output) is output
    n = sum(queries)
    out = output.view(-1, 4, 64)
    assert (out[n:] == 5.0).all()
    golden, lse = step.pages.golden(is_causal=True)
    assert worst((out[:n], lse), (golden, lse))[0] <= HALF_ULP


def test_anchors_are_kept_for_who_gives_them(vllm):
    step = Step([40, 17, 33], [1, 1, 20])
    anchors, output = torch.zeros(step.cache.shape[1], 2, 64).half(), torch.empty_like(step.q)
    metadata = adapter.PasaMetadata.of(step.common)
    adapter.attend_layer(metadata, step.q, step.k, step.v, step.cache, output, 64**-0.5, anchors)
    golden, lse = step.pages.golden(is_causal=True)
    assert worst((output, lse), (golden, lse))[0] <= HALF_ULP
    assert (anchors[step.pages.table[0, 2], :, :8] > 250).all()  # the page of the first token that is written


def test_a_padded_batch_of_decodes(vllm):
    """In a CUDA graph: sequences of length 0, with tokens of their own and no slot."""
    step = Step([40, 17], [1, 1], padding=2)
    common = step.common
    common.seq_lens = torch.cat([common.seq_lens, torch.zeros(2).int()])
    common.block_table_tensor = torch.cat([common.block_table_tensor, torch.full((2, 4), -1).int()])
    common.num_reqs = common.num_actual_tokens = 4
    out = step.run(torch.empty_like(step.q))
    golden, lse = step.pages.golden()
    assert worst((out[:2], lse), (golden, lse))[0] <= HALF_ULP
    assert (out[2:] == 0).all()


def test_a_layer_that_shares_a_cache_writes_nothing(vllm):
    step = Step([40, 17], [1, 4])
    step.run(torch.empty_like(step.q), kv_sharing_target_layer_name="other")
    assert step.cache.isnan().sum() == 2 * 5 * 2 * 64


def test_memory_is_measured_without_metadata(vllm):
    step = Step([40], [1])
    implementation = adapter.PasaAttentionBackend.get_impl_cls()(4, 64, 0.125, 2)
    out = implementation.forward(None, step.q, step.k, step.v, torch.empty(0), None, torch.ones_like(step.q))
    assert (out == 0).all()


def test_quantised_outputs_and_mixed_masks_are_refused(vllm):
    step = Step([40], [1])
    implementation = adapter.PasaAttentionBackend.get_impl_cls()(4, 64, 0.125, 2)
    with pytest.raises(NotImplementedError, match="does not quantise"):
        implementation.forward(None, step.q, step.k, step.v, step.cache, None, step.q, torch.ones(1))
    step.common.causal = torch.ones(1, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="causal is a Tensor"):
        step.run(step.q)
