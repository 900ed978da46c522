"""Tests of the vLLM adapter against the recorded interfaces of vLLM, so that vLLM need not be installed.

`vllm_interfaces` says what is recorded: abstract methods, arguments, the fields of CommonAttentionMetadata, and the
shape of a cache. vllm_itself.py and vllm_engine.py test against vLLM itself.
"""

import abc
import copy
import functools
import importlib.metadata
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from pasa import PasaConfig
from pasa.patching import vllm as adapter
from tests.pages import worst
from tests.pasa.patching import vllm_interfaces
from tests.pasa.patching.vllm_interfaces import PATHS
from tests.pasa.patching.vllm_step import SPEC, Step

ROOT = Path(__file__).parents[3]
HALF_ULP = 2.0**-11 * 4


@pytest.fixture(params=vllm_interfaces.recorded(), ids=lambda entry: entry["versions"][0])
def vllm(request, monkeypatch):
    """A fake package `vllm` with a recorded interface, which the fixture returns."""
    interface = copy.deepcopy(request.param["interface"])  # tests change it
    made = vllm_interfaces.modules(interface)
    made |= vllm_interfaces.registry_modules(platform=object())
    attention = types.ModuleType("vllm.v1.attention")
    attention.backend = made["vllm.v1.attention.backend"]
    made[attention.__name__] = attention
    for name in ("vllm", "vllm.v1"):
        made[name] = types.ModuleType(name)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    adapter.backend_class.cache_clear()
    yield interface
    adapter.backend_class.cache_clear()
    PATHS.clear()


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_is_found_by_the_name_that_it_registers(vllm):
    adapter.register()
    module, _, name = PATHS["CUSTOM"].rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert (found.__module__, found.__qualname__) == (module, name)


def test_the_plugin_registers_once_and_leaves_others_alone(vllm):
    """vLLM calls the plugin in each process. A backend that someone chose before keeps the name."""
    adapter.plugin()
    adapter.plugin()
    assert PATHS == {"CUSTOM": "pasa.patching.vllm.PasaAttentionBackend"}
    PATHS["CUSTOM"] = "other.Backend"
    with pytest.warns(UserWarning, match=r"other\.Backend has taken vLLM's name CUSTOM: set .* VLLM_PLUGINS=pasa"):
        adapter.plugin()
    assert PATHS == {"CUSTOM": "other.Backend"}


def test_the_plugin_does_not_stop_a_vllm_without_a_registry():
    with pytest.warns(UserWarning, match="pasa's attention backend was not registered: .*No module named 'vllm'"):
        adapter.plugin()


def test_an_installation_brings_the_plugin(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    (installed,) = importlib.metadata.distributions(name="pasa", path=[str(tmp_path)])
    (entry,) = installed.entry_points.select(group="vllm.general_plugins")
    assert entry.load() is adapter.plugin


def test_without_vllm_it_says_so():
    with pytest.raises(ImportError, match=r"register needs a vLLM with vllm\.v1.*No module named 'vllm'"):
        adapter.register()
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        adapter.Other  # noqa: B018


def test_methods_take_what_vllm_gives(vllm):
    backend = adapter.PasaAttentionBackend
    implementation, builder = backend.get_impl_cls(), backend.get_builder_cls()
    owners = {"AttentionBackend": backend, "AttentionImpl": implementation, "AttentionMetadataBuilder": builder}
    for owner in owners.values():
        assert not owner.__abstractmethods__
    for full, expected in vllm["methods"].items():
        owner, method = full.split(".")
        taken = [*inspect.signature(getattr(owners[owner], method)).parameters]
        assert taken[: len(expected)] == expected, full
    assert {*adapter.READ} <= {*vllm["metadata"]}
    assert backend.get_name() == "CUSTOM"
    if vllm["cache"]:
        assert not hasattr(backend, "get_kv_cache_shape"), "vLLM would believe it"
    else:
        assert backend.get_kv_cache_shape(9, 16, 4, 128) == (2, 9, 16, 4, 128)
    assert {64, 80, 96, 128, 256} < set(backend.get_supported_head_sizes())
    assert backend.supports_sink()
    assert backend.supports_sliding_window()
    assert not backend.supports_device_cpu_query_lens_mismatch()
    for spec in ((), (None,), (types.SimpleNamespace(block_size=32),)):  # vLLM 0.31 and newer pass a spec
        assert [size.base for size in backend.get_supported_kernel_block_sizes(*spec)] == [16]
    assert builder._cudagraph_support.name == "UNIFORM_BATCH"
    assert builder.reorder_batch_threshold == 1


REFUSED = [
    ({"alibi_slopes": [1.0]}, "alibi_slopes"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
    ({"attn_type": "encoder"}, "attn_type='encoder'"),
    ({"chunk_lookback": 2}, "chunk_lookback=2"),
]


@pytest.mark.parametrize(("how", "message"), REFUSED, ids=lambda x: str(x)[:30])
def test_what_it_cannot_do_is_refused_by_name(vllm, how, message):
    with pytest.raises(NotImplementedError, match=f"does not support {message}: use another --attention-backend"):
        adapter.PasaAttentionBackend.get_impl_cls()(4, 64, 0.125, 2, **how)


BAD_SPECS = [
    ({"dtype": torch.bfloat16}, "dtype=torch.bfloat16: serve with --dtype float16"),
    ({"head_size_v": 32}, "head_size=64 and head_size_v=32"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_SPECS, ids=lambda x: str(x)[:30])
def test_a_cache_that_cannot_be_read_is_refused_before_any_request(vllm, fields, message):
    spec = types.SimpleNamespace(**vars(SPEC) | fields)
    with pytest.raises(NotImplementedError, match=f"does not support a cache with {message}"):
        adapter.PasaAttentionBackend.get_builder_cls()(spec, ["layer"], None, torch.device("cpu"))


@pytest.mark.parametrize(("value", "invariant"), [("1", True), ("0", False), ("", False)])
def test_layers_follow_vllms_switch_for_batch_invariance(vllm, monkeypatch, value, invariant):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    options = adapter.PasaAttentionBackend.get_impl_cls()(4, 64, 0.125, 2).options
    assert options.config == (PasaConfig(batch_invariant=True) if invariant else None)


@pytest.mark.parametrize(
    ("chunked", "cached", "flags"),
    [
        (True, False, "chunked prefill would cut .* serve with --no-enable-chunked-prefill$"),
        (True, True, "chunked prefill and prefix caching .* --no-enable-chunked-prefill --no-enable-prefix-caching$"),
        (False, False, None),
    ],
)
def test_batch_invariance_needs_prompts_in_one_step(vllm, monkeypatch, chunked, cached, flags):
    config = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(enable_chunked_prefill=chunked),
        cache_config=types.SimpleNamespace(enable_prefix_caching=cached),
    )
    make = functools.partial(
        adapter.PasaAttentionBackend.get_builder_cls(), SPEC, ["layer"], config, torch.device("cpu")
    )
    make()  # without the switch, prompts may be cut
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    if flags is None:
        make()
        return
    with pytest.raises(NotImplementedError, match=flags):
        make()


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 1, 20], [5, 3, 33]], ids=str)
def test_a_batch_invariant_step(vllm, by_reference, monkeypatch, queries):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    step = Step([40, 17, 33], queries, packed=bool(vllm["cache"]))
    config = types.SimpleNamespace(enable_chunked_prefill=False, enable_prefix_caching=False)
    vllm_config = types.SimpleNamespace(scheduler_config=config, cache_config=config)
    out = step.run(torch.empty_like(step.q), vllm_config=vllm_config)
    golden, lse = step.pages.golden(is_causal=True)
    assert worst((out, lse), (golden, lse))[0] <= HALF_ULP


SINKS = torch.tensor([3.0, 0.0, -2.0, 50.0])
LAYERS = [
    ({"sliding_window": 9}, {"window": (8, 0)}),
    ({"logits_soft_cap": 30.0}, {"softcap": 30.0}),
    ({"sinks": SINKS}, {"sinks": SINKS}),
    ({"sliding_window": 1, "sinks": SINKS.half()}, {"window": (0, 0), "sinks": SINKS}),
]


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 9, 20], [4, 4, 4]], ids=str)
@pytest.mark.parametrize(("how", "golden_how"), LAYERS, ids=lambda x: "-".join(x))
def test_windows_caps_and_sinks(vllm, by_reference, queries, how, golden_how):
    """vLLM counts a query's own key to its window."""
    step = Step([40, 17, 33], queries, packed=bool(vllm["cache"]), bias=0.0 if "sinks" in how else 300.0)
    out = step.run(torch.empty_like(step.q), **how)
    golden, lse = step.pages.golden(is_causal=True, **golden_how)
    assert worst((out, lse), (golden, lse))[0] <= HALF_ULP


@pytest.mark.parametrize("stale", [torch.nan, torch.inf, 65504.0])
def test_pages_that_a_window_has_left_may_hold_anything(vllm, by_reference, stale):
    """vLLM gives such pages to other sequences, and names the page 0 in their place."""
    step = Step([70, 40], [1, 5], packed=bool(vllm["cache"]))
    step.common.block_table_tensor = table = step.common.block_table_tensor.clone()
    left = {int(page) for page in (*table[0, :3], *table[1, :1])}
    for cache in (step.k_cache, step.v_cache):
        cache[sorted(left)] = stale
    table[0, :3] = table[1, :1] = min(left)
    out = step.run(torch.empty_like(step.q), sliding_window=12)
    golden, lse = step.pages.golden(is_causal=True, window=(11, 0))
    assert worst((out, lse), (golden, lse))[0] <= HALF_ULP


@pytest.mark.parametrize("queries", [[1, 1, 1], [4, 4, 4]], ids=str)
def test_a_captured_step_reads_the_lengths_of_a_later_one(vllm, by_reference, queries):
    """A CUDA graph keeps the metadata of its capture: a longest sequence, and tensors that vLLM changes in place.

    Played without a graph: the metadata is made of one step, then the tensors get the values of another, whose last
    sequence is padding.
    """
    captured, later = Step([70, 70, 70], queries), Step([40, 17], queries[:2], padding=queries[0])
    common, now = captured.common, later.common
    common.max_seq_len = 512
    common.block_table_tensor = torch.zeros(3, 32).int()
    builder = adapter.PasaAttentionBackend.get_builder_cls()(SPEC, ["layer"], None, torch.device("cpu"))
    metadata = builder.build(0, common)
    n = 2 * queries[0]
    common.query_start_loc.copy_(torch.tensor([0, queries[0], n, n + (queries[0] == 1)]))
    common.seq_lens.copy_(torch.tensor([40, 17, 0]))
    common.block_table_tensor[:2, : now.block_table_tensor.shape[1]] = now.block_table_tensor
    common.slot_mapping.copy_(now.slot_mapping)
    out = torch.empty_like(later.q)
    adapter.attend_layer(metadata, later.q, later.k, later.v, later.cache, out, adapter.LayerOptions(64**-0.5))
    golden, lse = later.pages.golden(is_causal=True)
    assert worst((out[:n], lse), (golden, lse))[0] <= HALF_ULP
    assert (out[n:] == 0).all()


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 1, 20], [1, 9, 20], [5, 3, 33]], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_decodes_and_prompts_in_one_step(vllm, by_reference, queries, flat):
    """Queries attend to keys that the same call writes, and a second chunk also to the keys of the first.

    The biased scores are eleven times FP16's largest number.
    """
    step = Step([40, 17, 33], queries, padding=3, packed=bool(vllm["cache"]))
    output = torch.full((len(step.q), 4 * 64) if flat else step.q.shape, 5.0).half()
    assert step.run(output) is output
    n = sum(queries)
    out = output.view(-1, 4, 64)
    assert (out[n:] == 5.0).all()
    golden, lse = step.pages.golden(is_causal=True)
    assert worst((out[:n], lse), (golden, lse))[0] <= HALF_ULP


def test_anchors_are_kept_for_who_gives_them(vllm, by_reference):
    step = Step([40, 17, 33], [1, 1, 20], packed=bool(vllm["cache"]))
    anchors, output = torch.zeros(step.k_cache.shape[0], 2, 64).half(), torch.empty_like(step.q)
    metadata = adapter.PasaMetadata.of(step.common)
    adapter.attend_layer(metadata, step.q, step.k, step.v, step.cache, output, adapter.LayerOptions(64**-0.5), anchors)
    golden, lse = step.pages.golden(is_causal=True)
    assert worst((output, lse), (golden, lse))[0] <= HALF_ULP
    assert (anchors[step.pages.table[0, 2], :, :8] > 250).all()  # the page of the first written token


def test_a_padded_batch_of_decodes(vllm):
    """A batch padded for a CUDA graph is right: padding sequences have length 0, and a token each without a slot."""
    step = Step([40, 17], [1, 1], padding=2, packed=bool(vllm["cache"]))
    common = step.common
    common.seq_lens = torch.cat([common.seq_lens, torch.zeros(2).int()])
    common.block_table_tensor = torch.cat([common.block_table_tensor, torch.full((2, 4), -1).int()])
    common.num_reqs = common.num_actual_tokens = 4
    out = step.run(torch.empty_like(step.q))
    golden, lse = step.pages.golden()
    assert worst((out[:2], lse), (golden, lse))[0] <= HALF_ULP
    assert (out[2:] == 0).all()


def test_a_layer_that_shares_a_cache_writes_nothing(vllm):
    step = Step([40, 17], [1, 4], packed=bool(vllm["cache"]))
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


def v1():
    return sys.modules["vllm.v1.attention.backend"]


@pytest.mark.parametrize("name", ["AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder"])
def test_an_interface_that_asks_for_more_is_refused(vllm, name):
    more = abc.ABCMeta(name, (getattr(v1(), name),), {"new_duty": abc.abstractmethod(lambda self: None)})
    setattr(v1(), name, more)
    with pytest.raises(
        NotImplementedError, match=rf"tested with {adapter.TESTED}\. .*: {name} requires new_duty\. Install"
    ):
        adapter.backend_class()


@pytest.mark.parametrize("full", ["AttentionImpl.forward", "AttentionMetadataBuilder.build", "AttentionImpl.__init__"])
def test_an_argument_that_is_added_is_refused(vllm, full):
    owner, method = full.split(".")
    vllm = vllm | {"methods": vllm["methods"] | {full: [*vllm["methods"][full], "added"]}}
    setattr(v1(), owner, getattr(vllm_interfaces.modules(vllm)[v1().__name__], owner))
    with pytest.raises(NotImplementedError, match=rf"{owner}\.{method} takes \(self, .*, added\)"):
        adapter.backend_class()


@pytest.mark.parametrize("name", adapter.READ)
def test_a_field_that_is_gone_is_refused(vllm, name):
    del v1().CommonAttentionMetadata.__dataclass_fields__[name]
    with pytest.raises(NotImplementedError, match=f"CommonAttentionMetadata lacks {name}"):
        adapter.backend_class()


def test_another_cache_is_refused(vllm):
    """Planted: slots before heads."""
    if vllm["cache"]:
        vllm["cache"] = [5, 48, 3, 256]
        module = vllm_interfaces.modules(vllm)["vllm.v1.kv_cache_interface"]
        sys.modules[module.__name__].compute_layer_kv_cache_shape_bytes = module.compute_layer_kv_cache_shape_bytes
        with pytest.raises(NotImplementedError, match=r"a cache of \(5, 48, 3, 256\) bytes where \(5, 3, 48, 256\)"):
            adapter.backend_class()
    else:
        del v1().AttentionBackend.get_kv_cache_shape
        with pytest.raises(NotImplementedError, match=r"No module named 'vllm\.v1\.kv_cache_interface'"):
            adapter.backend_class()


def test_memory_is_measured_without_metadata(vllm):
    step = Step([40], [1])
    implementation = adapter.PasaAttentionBackend.get_impl_cls()(4, 64, 0.125, 2)
    out = implementation.forward(None, step.q, step.k, step.v, torch.empty(0), None, torch.ones_like(step.q))
    assert (out == 0).all()


def test_what_it_does_not_compute_is_refused(vllm):
    step = Step([40], [1])
    implementation = adapter.PasaAttentionBackend.get_impl_cls()(4, 64, 0.125, 2)
    with pytest.raises(NotImplementedError, match="does not quantise"):
        implementation.forward(None, step.q, step.k, step.v, step.cache, None, step.q, torch.ones(1))
    for causal in (False, torch.ones(1, dtype=torch.bool)):
        step.common.causal = causal
        with pytest.raises(NotImplementedError, match=f"causal={re.escape(str(causal))}: use another"):
            step.run(step.q)


def test_windows_take_no_anchors(vllm):
    step = Step([40], [1], packed=bool(vllm["cache"]))
    options, anchors = adapter.LayerOptions(0.125, window=(8, 0)), torch.zeros(len(step.k_cache), 2, 64).half()
    metadata = adapter.PasaMetadata.of(step.common)
    with pytest.raises(NotImplementedError, match=r"key_anchors are passed to a layer with window=\(8, 0\)"):
        adapter.attend_layer(metadata, step.q, step.k, step.v, step.cache, step.q, options, anchors)


def test_the_versions_that_are_named_are_those_that_are_run():
    """README, changelog, errors, the test script and the record name the same versions of vLLM.

    Story: the README named the tested versions, the errors a range of versions, and the changelog another range.
    """
    seen = {version for entry in vllm_interfaces.recorded() for version in entry["versions"]}
    (listed,) = re.findall(r"\|\| versions=\((.*)\)", (ROOT / "scripts" / "test_vllm.sh").read_text("utf-8"))
    assert {*listed.split()} <= seen
    oldest, newest = re.findall(r"0\.(\d+)", adapter.TESTED)
    assert {int(version.split(".")[1]) for version in seen} == {*range(int(oldest), int(newest) + 1)}
    for file in ("README.md", "CHANGELOG.md", "docs/hosts/vllm.md", "pasa/patching/vllm.py"):
        assert f"the classes and caches of {adapter.TESTED}" in " ".join((ROOT / file).read_text("utf-8").split()), file
