"""Tests of the vllm-ascend adapter against the recorded interfaces of vllm-ascend, so that it need not be installed.

`vllm_ascend_interfaces` says what is recorded. vllm_ascend_itself.py tests against vllm-ascend itself.
"""

import copy
import dataclasses
import functools
import importlib.metadata
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pasa.ops import registry
from pasa.patching import vllm as vllm_adapter
from pasa.patching import vllm_ascend as adapter
from tests.pages import worst
from tests.pasa.patching import vllm_ascend_interfaces, vllm_interfaces
from tests.pasa.patching.test_vllm import HALF_ULP
from tests.pasa.patching.vllm_interfaces import PATHS, Slot
from tests.pasa.patching.vllm_step import SPEC, Common, Step

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=vllm_ascend_interfaces.recorded(), ids=lambda entry: entry["versions"][0])
def ascend(request, monkeypatch):
    """The modules of a fake `vllm_ascend` with a recorded interface, by name; vLLM's current platform is its own."""
    interface = copy.deepcopy(request.param["interface"])
    made = vllm_ascend_interfaces.modules(interface)
    made |= vllm_interfaces.registry_modules(platform=made["vllm_ascend.platform"].NPUPlatform())
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    metadata = importlib.metadata.version
    version = request.param["versions"][0]
    monkeypatch.setattr(adapter, "version", lambda name: version if name == "vllm-ascend" else metadata(name))
    PATHS["CUSTOM"] = interface["registered"]
    for each in (adapter.backend_class, adapter.install):
        each.cache_clear()
    yield made
    for each in (adapter.backend_class, adapter.install):
        each.cache_clear()
    PATHS.clear()


@pytest.fixture
def theirs(ascend):
    return ascend["vllm_ascend.attention.attention_v1"]


@pytest.fixture
def platform(ascend):
    """vllm-ascend's platform class, after vLLM has loaded pasa's plugin twice."""
    vllm_adapter.plugin()
    vllm_adapter.plugin()
    return ascend["vllm_ascend.platform"].NPUPlatform


def config_of(backend=Slot.CUSTOM, **changed):
    """Return the fields of vLLM's VllmConfig that are read, in order but for what is changed."""
    fields = {
        "dtype": torch.float16, "cache_dtype": "auto", "block_size": 128, "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1, "speculative_config": None, "quant_config": None, "additional_config": None,
    }  # fmt: skip
    part = SimpleNamespace(**fields | changed)
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend), model_config=part, cache_config=part, parallel_config=part,
        speculative_config=part.speculative_config, quant_config=part.quant_config,
        additional_config=part.additional_config,
    )  # fmt: skip


def test_the_record_says_that_the_setting_is_ignored(ascend):
    """`install` replaces methods because of this; a version that names another backend for CUSTOM may not need it."""
    for entry in vllm_ascend_interfaces.recorded():
        assert entry["interface"]["chosen"] == adapter.BACKEND
        assert entry["interface"]["registered"] == "ASCEND"
        assert entry["interface"]["block_sizes"] == [128]


def test_the_setting_reaches_the_class(platform):
    config = config_of()
    platform.check_and_update_config(config)
    assert config.checked
    assert config.attention_config.backend is Slot.CUSTOM
    path = platform.get_attn_backend_cls(Slot.CUSTOM, None, num_heads=4)
    module, _, name = path.rpartition(".")
    assert getattr(sys.modules[module], name) is adapter.backend_class()
    assert PATHS == {"CUSTOM": "ASCEND"}, "vLLM's registry has no part in it"


@pytest.mark.parametrize("backend", [None, SimpleNamespace(name="FLASH_ATTN")], ids=str)
def test_other_settings_are_left_alone(platform, monkeypatch, backend):
    monkeypatch.setattr(adapter, "TESTED", ())
    config = config_of(backend, dtype=torch.bfloat16)
    platform.check_and_update_config(config)
    assert config.checked
    assert config.attention_config.backend is None
    assert platform.get_attn_backend_cls(backend, None) == adapter.BACKEND
    assert platform.get_attn_backend_cls(backend, "theirs.MLA", num_heads=4) == "theirs.MLA"


def test_another_platform_is_left_alone(ascend, monkeypatch):
    monkeypatch.setattr(sys.modules["vllm.platforms"], "current_platform", object())
    PATHS.clear()
    vllm_adapter.plugin()
    assert PATHS == {"CUSTOM": "pasa.patching.vllm.PasaAttentionBackend"}
    assert not adapter.install.cache_info().currsize


BAD = [
    ({"dtype": torch.bfloat16}, r"dtype=torch\.bfloat16 \(serve with --dtype float16\)"),
    ({"cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
    ({"block_size": 24}, r"block_size=24 \(no multiple of 16\)"),
    ({"speculative_config": SimpleNamespace()}, "speculative decoding"),
    ({"prefill_context_parallel_size": 2}, "context parallelism"),
    ({"decode_context_parallel_size": 2}, "context parallelism"),
    ({"quant_config": SimpleNamespace(enable_c8_quant=True)}, "enable_c8_quant"),
    ({"quant_config": SimpleNamespace(enable_fa_quant=True)}, "enable_fa_quant"),
    ({"additional_config": {"enable_hamming_sparse": True}}, "additional_config enable_hamming_sparse=True"),
    ({"additional_config": {"xlite_graph_config": {"enabled": True}}}, "additional_config xlite_graph_config="),
    ({"dtype": torch.bfloat16, "cache_dtype": "int8"}, r"dtype=torch\.bfloat16 .*, kv_cache_dtype='int8'"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=lambda x: str(x)[:40])
def test_what_it_cannot_serve_stops_the_start(platform, changed, message):
    with pytest.raises(NotImplementedError, match=f"does not support {message}.*: serve without --attention-backend"):
        platform.check_and_update_config(config_of(**changed))


GOOD = [
    {"cache_dtype": "float16"},
    {"block_size": None},
    {"block_size": 1152},
    {"quant_config": SimpleNamespace(enable_c8_quant=False)},
    {"quant_config": SimpleNamespace()},
    {"additional_config": {"xlite_graph_config": {"enabled": False}, "enable_hamming_sparse": False, "other": True}},
]


@pytest.mark.parametrize("changed", GOOD, ids=str)
def test_what_it_can_serve_starts(platform, changed):
    config = config_of(**changed)
    platform.check_and_update_config(config)
    assert config.attention_config.backend is Slot.CUSTOM


def test_batch_invariance_is_refused(platform, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(NotImplementedError, match="does not support VLLM_BATCH_INVARIANT=1: serve without"):
        platform.check_and_update_config(config_of())


@pytest.mark.parametrize("version", ["0.22.0", "0.23.1", "0.26.0rc1", None])
def test_other_versions_are_refused_by_name(platform, monkeypatch, version):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(adapter, "version", installed)
    here = re.escape(version or "of an unknown version")
    message = rf"tested with {re.escape(adapter.TESTED_NAMES)}, and vllm-ascend {here} is installed: install one of"
    with pytest.raises(NotImplementedError, match=message):
        platform.check_and_update_config(config_of())


def test_what_vllm_ascend_serves_by_another_backend_is_refused(platform):
    with pytest.raises(NotImplementedError, match=r"that vllm-ascend serves by a\.MLA: serve without"):
        platform.get_attn_backend_cls(Slot.CUSTOM, "a.MLA")


# ---- the classes


def test_methods_take_what_vllm_ascend_gives(ascend, theirs):
    backend = adapter.PasaAscendBackend
    assert backend.__qualname__ == adapter.NAME
    parts = {
        "AscendAttentionBackend": backend,
        "AscendAttentionBackendImpl": backend.get_impl_cls(),
        "AscendAttentionMetadataBuilder": backend.get_builder_cls(),
    }
    for name, part in parts.items():
        assert issubclass(part, getattr(theirs, name))
        for method in vars(part):
            if (
                inspect.isroutine(base := getattr(getattr(theirs, name), method, None))
                and method != "__init_subclass__"
            ):
                expected = [*inspect.signature(base).parameters]
                assert [*inspect.signature(getattr(part, method)).parameters][: len(expected)] == expected, method
    assert backend.get_builder_cls().get_cudagraph_support(None, None).name == "NEVER"


def test_another_name_is_none(ascend):
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        adapter.Other  # noqa: B018


@pytest.mark.parametrize("cache", [(2, 5, 3, 128, 64), (5, 2, 128, 3, 64), (2, 5, 12, 128, 16)], ids=str)
def test_another_layout_of_the_cache_is_refused(ascend, theirs, cache):
    """Planted: heads before slots, pages before keys and values, and the layout of the 310P."""
    theirs.AscendAttentionBackend.get_kv_cache_shape = staticmethod(lambda *sizes: cache)
    with pytest.raises(NotImplementedError, match=rf"another interface: a cache of {re.escape(str(cache))} numbers"):
        adapter.backend_class()


CHANGED = ["AscendAttentionBackendImpl.forward_impl", "AscendAttentionMetadataBuilder.build"]
CHANGED += ["AscendAttentionBackendImpl.__init__", "AscendAttentionMetadataBuilder.__init__"]


@pytest.mark.parametrize("full", CHANGED)
def test_an_argument_that_is_added_is_refused(ascend, theirs, full):
    owner, method = full.split(".")
    (entry,) = (e for e in vllm_ascend_interfaces.recorded() if adapter.version("vllm-ascend") in e["versions"])
    methods = entry["interface"]["methods"]
    changed = entry["interface"] | {"methods": methods | {full: [*methods[full], "added"]}}
    setattr(theirs, owner, getattr(vllm_ascend_interfaces.modules(changed)[theirs.__name__], owner))
    with pytest.raises(NotImplementedError, match=rf"{owner}\.{method} takes \(self, .*, added\)"):
        adapter.backend_class()


@pytest.mark.parametrize("name", vllm_adapter.READ)
def test_a_field_that_is_gone_is_refused(ascend, name):
    del ascend["vllm_ascend.attention.utils"].AscendCommonAttentionMetadata.__dataclass_fields__[name]
    message = f"AscendCommonAttentionMetadata lacks {name}. Install one of the tested versions, or {adapter.INSTEAD}$"
    with pytest.raises(NotImplementedError, match=message):
        adapter.backend_class()


ARGUMENTS = {
    "num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2, "alibi_slopes": None, "sliding_window": None,
    "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder", "kv_sharing_target_layer_name": None,
}  # fmt: skip
REFUSED = [
    ({"alibi_slopes": [1.0]}, "alibi_slopes"),
    ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8'"),
    ({"attn_type": "encoder_only"}, "attn_type='encoder_only'"),
    ({"chunk_lookback": 2}, "chunk_lookback=2"),
]


@pytest.mark.parametrize(("how", "message"), REFUSED, ids=lambda x: str(x)[:30])
def test_layers_that_it_cannot_serve_are_refused(ascend, how, message):
    with pytest.raises(NotImplementedError, match=f"does not support {message}: {adapter.INSTEAD}$"):
        adapter.PasaAscendBackend.get_impl_cls()(**ARGUMENTS | how)


def test_a_cache_of_another_dtype_is_refused(ascend):
    """Story: the advice was another --attention-backend, which vllm-ascend ignores."""
    spec = SimpleNamespace(head_size=64, dtype=torch.bfloat16)
    message = rf"a cache with dtype=torch\.bfloat16: serve with --dtype float16, or {adapter.INSTEAD}$"
    with pytest.raises(NotImplementedError, match=message):
        adapter.PasaAscendBackend.get_builder_cls()(spec, ["layer"], None, torch.device("cpu"))


def test_a_layer_does_not_become_another(ascend, theirs):
    """vllm-ascend's quantisation of caches sets the class of a layer; nothing of pasa would run."""
    layer = adapter.PasaAscendBackend.get_impl_cls()(**ARGUMENTS)
    with pytest.raises(NotImplementedError, match=r"a layer that is turned into <class .*AscendAttentionBackendImpl'>"):
        layer.__class__ = theirs.AscendAttentionBackendImpl
    layer.layerIndex = 3
    assert layer.layerIndex == 3


@pytest.mark.parametrize("fields", [{"dtype": torch.bfloat16}, {"head_size_v": 32}], ids=str)
def test_a_cache_that_cannot_be_read_is_refused_before_any_request(ascend, fields):
    spec = SimpleNamespace(**vars(SPEC) | fields)
    with pytest.raises(NotImplementedError, match="does not support a cache with"):
        adapter.PasaAscendBackend.get_builder_cls()(spec, ["layer"], None, torch.device("cpu"))


def test_an_npu_without_the_kernels_is_refused(ascend, monkeypatch):
    """Another backend of pasa would serve, and take many times as long."""
    record = dataclasses.replace(registry.BACKENDS["npu"], missing=lambda: "there is no x.so: run `pasa build-ascend`")
    monkeypatch.setitem(registry.BACKENDS, "npu", record)
    make = functools.partial(adapter.PasaAscendBackend.get_builder_cls(), SPEC, ["layer"], None)
    with pytest.raises(
        NotImplementedError, match=r"needs its kernels for NPUs\. there is no x\.so: .*, or serve without"
    ):
        make(SimpleNamespace(type="npu"))
    make(torch.device("cpu"))
    monkeypatch.setitem(registry.BACKENDS, "npu", dataclasses.replace(record, missing=lambda: None))
    make(SimpleNamespace(type="npu"))


def common_of(**fields):
    """Return the metadata that vllm-ascend makes: tokens of padding have a sequence, without a length and pages."""
    common, tokens = Common(**fields), len(fields["slot_mapping"])
    if tokens > common.num_actual_tokens:
        common.query_start_loc = common.query_start_loc_cpu = torch.cat(
            [common.query_start_loc, torch.tensor([tokens])]
        )
        common.num_reqs += 1
    return common


def attend(theirs, step, caches=None, **how):
    """Return the output of a layer whose keys are written, as vllm-ascend's `forward` does before `forward_impl`."""
    build = lambda self, common_prefix_len, common_attn_metadata, fast_build=False: SimpleNamespace()  # noqa: E731
    theirs.AscendAttentionMetadataBuilder.build = build
    adapter.backend_class.cache_clear()
    backend = adapter.PasaAscendBackend
    layer = backend.get_impl_cls()(**ARGUMENTS | how)
    layer.num_kv_heads, layer.head_size = 2, 64
    layer.key_cache, layer.value_cache = caches or tuple(step.cache)
    for slot, k, v in zip(step.common.slot_mapping.tolist(), step.k, step.v, strict=True):
        if slot >= 0:
            step.k_cache.flatten(0, 1)[slot], step.v_cache.flatten(0, 1)[slot] = k, v
    metadata = backend.get_builder_cls()(SPEC, ["layer"], None, torch.device("cpu")).build(0, step.common)
    output = torch.full_like(step.q, 5.0)
    assert layer.forward_impl(step.q, step.k, step.v, None, metadata, output) is output
    return output


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 1, 20], [1, 9, 20], [5, 3, 33]], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
def test_decodes_and_prompts_in_one_step(ascend, theirs, by_reference, queries, padding):
    """The biased scores are eleven times FP16's largest number."""
    step = Step([140, 17, 133], queries, padding=padding, common=common_of, slots=128)
    assert step.common.num_reqs == 3 + bool(padding)
    out, n = attend(theirs, step), sum(queries)
    golden, lse = step.pages.golden(is_causal=True)
    assert worst((out[:n], lse), (golden, lse))[0] <= HALF_ULP
    assert (out[n:] == 5.0).all()


SINKS = torch.tensor([3.0, 0.0, -2.0, 50.0])
LAYERS = [
    ({"sliding_window": 9}, {"window": (8, 0)}),
    ({"logits_soft_cap": 30.0}, {"softcap": 30.0}),
    ({"sinks": SINKS}, {"sinks": SINKS}),
]


@pytest.mark.parametrize(("how", "golden_how"), LAYERS, ids=lambda x: "-".join(x))
def test_windows_caps_and_sinks(ascend, theirs, by_reference, how, golden_how):
    bias = 0.0 if "sinks" in how else 300.0
    step = Step([40, 17, 133], [1, 9, 20], common=common_of, slots=128, bias=bias)
    golden, lse = step.pages.golden(is_causal=True, **golden_how)
    assert worst((attend(theirs, step, **how), lse), (golden, lse))[0] <= HALF_ULP


CACHES = [
    ((7, 128, 4, 32), "float16"),
    ((7, 100, 2, 64), "float16"),
    ((7, 128, 2, 64), "int8"),
    ((7, 128, 128), "int8"),
]


@pytest.mark.parametrize(("shape", "dtype"), CACHES, ids=str)
def test_a_cache_of_another_kind_is_refused(ascend, theirs, shape, dtype):
    step = Step([40], [1], common=common_of, slots=128)
    caches = (step.cache[0], torch.zeros(shape, dtype=getattr(torch, dtype)))
    message = rf"got a cache {re.escape(str(shape))} of torch\.{dtype} where \(pages, a multiple of 16, 2, 64\) of"
    with pytest.raises(NotImplementedError, match=message):
        attend(theirs, step, caches)


def test_attention_that_is_not_causal_is_refused(ascend, theirs):
    step = Step([40], [1], common=common_of, slots=128)
    step.common.causal = False
    with pytest.raises(NotImplementedError, match=f"causal=False: {adapter.INSTEAD}$"):
        attend(theirs, step)


def test_the_versions_that_are_named_are_those_that_are_run():
    """Record, errors, pages and the test script name the same versions of vllm-ascend."""
    seen = {version for entry in vllm_ascend_interfaces.recorded() for version in entry["versions"]}
    (listed,) = re.findall(r"\|\| versions=\((.*)\)", (ROOT / "scripts" / "test_vllm_ascend.sh").read_text("utf-8"))
    assert {*listed.split()} == seen == {*adapter.TESTED}
    for file in ("CHANGELOG.md", "docs/hosts/vllm-ascend.md"):
        text = " ".join((ROOT / file).read_text("utf-8").split())
        assert adapter.TESTED_NAMES in text, file


def test_the_record_keeps_versions_with_one_interface_together():
    entries = vllm_ascend_interfaces.recorded()
    assert len({str(entry["interface"]) for entry in entries}) == len(entries)
    assert vllm_interfaces.recorded(vllm_ascend_interfaces.FILE) == entries
