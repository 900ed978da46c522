"""Tests of the vLLM adapter against a description of vLLM's V1 interfaces, so that vLLM need not be installed.

The description covers vllm/v1/attention/backend.py and backends/registry.py of vLLM 0.14, 0.28 to 0.31 and 0.33:
abstract methods, the arguments that vLLM passes to them, and the fields of CommonAttentionMetadata that a builder
reads. vllm_itself.py tests against vLLM's own classes.
"""

import abc
import enum
import importlib
import inspect
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from pasa.patching import vllm as adapter
from tests.pages import worst
from tests.pasa.patching.vllm_step import Step

ROOT = Path(__file__).parents[3]
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
    """Return a class with abstract methods of these names."""
    methods = {name: abc.abstractmethod(lambda *a, **k: None) for name in names}
    return abc.ABCMeta("Abstract", (), methods | attributes)


class BuilderBase(abc.ABC):
    reorder_batch_threshold = None

    @abc.abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.layer_names, self.device = layer_names, device

    @abc.abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


INTERFACES = {
    # version: the abstract methods of a backend other than those for its name and classes, and the rest
    "until 0.28": (("get_kv_cache_shape",), ("get_supported_kernel_block_sizes",)),
    "from 0.29 on": ((), ("get_supported_kernel_block_sizes", "supported_kv_cache_layouts")),
}


@pytest.fixture(params=INTERFACES)
def vllm(request, monkeypatch):
    """A fake package `vllm` made from the description; the fixture returns what was registered."""
    v1 = types.ModuleType("vllm.v1.attention.backend")
    needed, others = INTERFACES[request.param]
    names = ("get_name", "get_impl_cls", "get_builder_cls", *needed)
    v1.AttentionBackend = abstract(*names, **dict.fromkeys(others, staticmethod(lambda *a: None)))
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
    registered["packed"] = not needed
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
    assert backend.get_name() == "CUSTOM"
    if vllm["packed"]:
        assert not hasattr(backend, "get_kv_cache_shape"), "vLLM would believe it"
    else:
        assert parameters(backend.get_kv_cache_shape) == CACHE
        assert backend.get_kv_cache_shape(9, 16, 4, 128) == (2, 9, 16, 4, 128)
    assert {64, 80, 96, 128, 256} < set(backend.get_supported_head_sizes())
    assert not backend.supports_device_cpu_query_lens_mismatch()
    for spec in ((), (None,), (types.SimpleNamespace(block_size=32),)):  # vLLM 0.31 and newer pass a spec
        assert [size.base for size in backend.get_supported_kernel_block_sizes(*spec)] == [16]
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


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 1, 20], [1, 9, 20], [5, 3, 33]], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_decodes_and_prompts_in_one_step(vllm, by_reference, queries, flat):
    """Queries attend to keys that the same call writes, and a second chunk also to the keys of the first.

    The biased scores are eleven times FP16's largest number.
    """
    step = Step([40, 17, 33], queries, padding=3, packed=vllm["packed"])
    output = torch.full((len(step.q), 4 * 64) if flat else step.q.shape, 5.0).half()
    assert step.run(output) is output
    n = sum(queries)
    out = output.view(-1, 4, 64)
    assert (out[n:] == 5.0).all()
    golden, lse = step.pages.golden(is_causal=True)
    assert worst((out[:n], lse), (golden, lse))[0] <= HALF_ULP


def test_anchors_are_kept_for_who_gives_them(vllm, by_reference):
    step = Step([40, 17, 33], [1, 1, 20], packed=vllm["packed"])
    anchors, output = torch.zeros(step.k_cache.shape[0], 2, 64).half(), torch.empty_like(step.q)
    metadata = adapter.PasaMetadata.of(step.common)
    adapter.attend_layer(metadata, step.q, step.k, step.v, step.cache, output, 64**-0.5, anchors)
    golden, lse = step.pages.golden(is_causal=True)
    assert worst((output, lse), (golden, lse))[0] <= HALF_ULP
    assert (anchors[step.pages.table[0, 2], :, :8] > 250).all()  # the page of the first written token


def test_a_padded_batch_of_decodes(vllm):
    """A batch padded for a CUDA graph is right: padding sequences have length 0, and a token each without a slot."""
    step = Step([40, 17], [1, 1], padding=2, packed=vllm["packed"])
    common = step.common
    common.seq_lens = torch.cat([common.seq_lens, torch.zeros(2).int()])
    common.block_table_tensor = torch.cat([common.block_table_tensor, torch.full((2, 4), -1).int()])
    common.num_reqs = common.num_actual_tokens = 4
    out = step.run(torch.empty_like(step.q))
    golden, lse = step.pages.golden()
    assert worst((out[:2], lse), (golden, lse))[0] <= HALF_ULP
    assert (out[2:] == 0).all()


def test_a_layer_that_shares_a_cache_writes_nothing(vllm):
    step = Step([40, 17], [1, 4], packed=vllm["packed"])
    step.run(torch.empty_like(step.q), kv_sharing_target_layer_name="other")
    assert step.cache.isnan().sum() == 2 * 5 * 2 * 64


@pytest.mark.parametrize(
    "shape", [(5, 2, 16, 2, 64), (2, 5, 16, 2, 65), (5, 2, 16, 64), (5, 16, 2, 128, 1), (0,)], ids=str
)
def test_a_cache_of_another_shape_is_refused(vllm, shape):
    """A cache of an unknown shape is refused.

    vLLM 0.29 changed the shape, and a 5-dimensional view of the new cache would have read values as keys.
    """
    step = Step([40], [1])
    step.cache = torch.zeros(shape).half()
    with pytest.raises(NotImplementedError, match=rf"kv_cache \(.*\) is neither .* the caches of {adapter.TESTED}; "):
        step.run(torch.empty_like(step.q))


@pytest.mark.parametrize("name", ["AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder"])
def test_an_interface_that_asks_for_more_is_refused(vllm, name):
    v1 = sys.modules["vllm.v1.attention.backend"]
    more = abc.ABCMeta(name, (getattr(v1, name),), {"new_duty": abc.abstractmethod(lambda self: None)})
    setattr(v1, name, more)
    with pytest.raises(NotImplementedError, match=rf"tested with {adapter.TESTED}; .* also asks for {name}.new_duty"):
        adapter.backend_class()


def test_an_interface_without_either_cache_is_refused(vllm):
    sys.modules["vllm.v1.attention.backend"].AttentionBackend = abstract("get_name")
    with pytest.raises(NotImplementedError, match="has caches of another kind"):
        adapter.backend_class()


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


def test_the_versions_that_are_told_are_those_that_are_run():
    """README, changelog, errors and the test script name the same versions of vLLM.

    Story: the README named the tested versions, the errors a range of versions, and the changelog another range.
    """
    (listed,) = re.findall(r"\|\| versions=\((.*)\)", (ROOT / "scripts" / "test_vllm.sh").read_text("utf-8"))
    runs = [int(version.split(".")[1]) for version in listed.split()]
    spans = re.findall(r"0\.(\d+)(?: to 0\.(\d+))?", adapter.TESTED)
    assert [minor for low, high in spans for minor in range(int(low), int(high or low) + 1)] == runs
    for file in ("README.md", "CHANGELOG.md", "pasa/patching/vllm.py"):
        assert f"the classes and cache views of {adapter.TESTED}" in " ".join((ROOT / file).read_text("utf-8").split())
