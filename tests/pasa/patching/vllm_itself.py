"""Tests of the vLLM adapter against vLLM's own classes, metadata and cache views; vllm_engine.py runs whole engines.

scripts/test_vllm.sh runs this file by its name, on the CPU, with the Python files of several versions of vLLM. They
are too large for every test run (300 MB each, with CUDA libraries), so pytest does not collect this file by itself.
"""

import importlib.util
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from pasa.patching import vllm as adapter
from tests.pages import worst
from tests.pasa.patching import vllm_interfaces, vllm_on_cpu
from tests.pasa.patching.test_vllm import HALF_ULP
from tests.pasa.patching.vllm_step import Step

LAYERS, LAYER = 3, 1  # layers that share the cache, and the index of the tested one


@pytest.fixture(scope="module")
def v1():
    from vllm.v1.attention import backend

    return backend


@pytest.fixture(scope="module")
def pasa_backend(v1):
    """The backend class, looked up as vLLM does."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    adapter.register()
    return AttentionBackendEnum.CUSTOM.get_class()


def layouts():
    """Return the cache layouts of the installed vLLM; [None] if a backend chooses the shape."""
    if importlib.util.find_spec("vllm.v1.kv_cache_layout") is None:
        return [None]
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return list(KVCacheLayout)


def test_the_interface_is_the_recorded_one(v1):
    """The ordinary tests know vLLM by this record; PASA_RECORD=1 makes it anew."""
    vllm_interfaces.check(version("vllm"), vllm_interfaces.describe(v1))


def test_only_newer_versions_let_a_backend_ask_for_bytes_beyond_keys_and_values(v1):
    """The page on vLLM says so, as one of the reasons why page anchors are not used."""
    number = tuple(map(int, version("vllm").split(".")[:2]))
    has_hook = hasattr(v1.AttentionBackend, "customize_spec")
    assert has_hook if number >= (0, 28) else number > (0, 18) or not has_hook


def test_no_method_is_missing(v1, pasa_backend):
    assert issubclass(pasa_backend, v1.AttentionBackend)
    assert issubclass(pasa_backend.get_impl_cls(), v1.AttentionImpl)
    assert issubclass(pasa_backend.get_builder_cls(), v1.AttentionMetadataBuilder)
    for part in (pasa_backend, pasa_backend.get_impl_cls(), pasa_backend.get_builder_cls()):
        assert not part.__abstractmethods__


def test_vllm_finds_the_plugin(tmp_path, monkeypatch):
    from vllm import plugins

    monkeypatch.syspath_prepend(str(tmp_path))
    vllm_on_cpu.install_plugin(tmp_path)
    found = plugins.load_plugins_by_group("vllm.general_plugins")
    assert found["pasa"] is adapter.plugin


def test_what_vllm_asks_before_it_chooses(v1, pasa_backend):
    assert pasa_backend.get_name() == "CUSTOM"
    assert pasa_backend.supports_dtype(torch.float16)
    assert not pasa_backend.supports_dtype(torch.bfloat16)
    assert pasa_backend.supports_kv_cache_dtype("auto")
    assert not pasa_backend.supports_kv_cache_dtype("fp8")
    assert pasa_backend.supports_head_size(128)
    assert not pasa_backend.supports_head_size(36)
    assert pasa_backend.supports_block_size(16)
    assert not pasa_backend.supports_block_size(24)
    assert pasa_backend.supports_attn_type("decoder")
    assert not pasa_backend.supports_attn_type("encoder")
    assert pasa_backend.supports_sink()
    assert pasa_backend.supports_sliding_window()
    assert pasa_backend.supports_batch_invariance()
    names = ["is_mla", "is_sparse", "supports_mm_prefix", "supports_pcp", "supports_dcp", "supports_non_causal"]
    names += ["supports_device_cpu_query_lens_mismatch", "supports_rswa"]
    for name in names:
        assert not getattr(pasa_backend, name, lambda: False)(), name


def spec_of(per_page):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=per_page, num_kv_heads=2, head_size=64, dtype=torch.float16)


def cache_of(pasa_backend, layout):
    """Make the cache of one layer as vLLM does: in the backend's shape, or as a view of a cache of all layers."""

    def make(pages, per_page):
        if layout is None:
            return torch.empty(pasa_backend.get_kv_cache_shape(pages, per_page, 2, 64)).half()
        from vllm.v1 import kv_cache_interface as interface

        spec = spec_of(per_page)
        strides = interface.compute_layout_strides(spec, pages, LAYERS, layout)
        raw = torch.zeros(LAYERS * pages * spec.page_size_bytes, dtype=torch.int8)
        held = SimpleNamespace(layers=["layer"] * LAYERS, layer_stride=strides[0], block_stride=strides[1], offset=0)
        return interface.create_kv_cache_views(raw, spec, pages, layout, held)[LAYER]

    return make


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 1, 20], [5, 3, 33]], ids=str)
@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_decodes_and_prompts_in_one_step(by_reference, v1, pasa_backend, layout, queries):
    """New keys are written to the pages of one layer in any memory layout, and are attended to.

    The biased scores are eleven times FP16's largest number.
    """
    cache = cache_of(pasa_backend, layout)
    step = Step([40, 17, 33], queries, 3, layout is not None, v1.CommonAttentionMetadata, cache)
    output = torch.full_like(step.q, 5.0)
    step.run(output, spec=spec_of(16))
    n = sum(queries)
    golden, lse = step.pages.golden(is_causal=True)
    assert worst((output[:n], lse), (golden, lse))[0] <= HALF_ULP
    assert (output[n:] == 5.0).all()


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_sinks_and_windows(by_reference, v1, pasa_backend, layout):
    sinks = torch.tensor([3.0, 0.0, -2.0, 50.0]).half()
    cache = cache_of(pasa_backend, layout)
    step = Step([40, 17, 33], [1, 4, 20], 3, layout is not None, v1.CommonAttentionMetadata, cache, bias=0.0)
    output = torch.empty_like(step.q)
    step.run(output, spec=spec_of(16), sinks=sinks, sliding_window=9)
    golden, lse = step.pages.golden(is_causal=True, sinks=sinks, window=(8, 0))
    assert worst((output[:25], lse), (golden, lse))[0] <= HALF_ULP


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_a_step_leaves_the_other_layers_alone(v1, pasa_backend, layout):
    if layout is None:
        return
    step = Step([40, 17], [1, 4], 0, True, v1.CommonAttentionMetadata, cache_of(pasa_backend, layout))
    step.run(torch.empty_like(step.q), spec=spec_of(16))
    shared = torch.empty(0, dtype=torch.float16).set_(step.cache.untyped_storage())
    step.cache.zero_()
    assert not shared.any()
