"""Tests of the vllm-ascend adapter against vllm-ascend's own platform, backend, builder and layers.

scripts/test_vllm_ascend.sh runs this file by its name, on the CPU, with the Python files of vllm-ascend and vLLM from
the registry. torch_npu is replaced (vllm_ascend_on_cpu.py), and pasa's kernels run on the CPU twin. No engine runs.
"""

import copy
import functools
import os
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.ascend_c.conftest import ready
from tests.ascend_c.twin_build import build_library
from tests.inputs import reference_serves
from tests.pages import worst
from tests.pasa.patching import vllm_ascend_interfaces, vllm_ascend_on_cpu, vllm_interfaces
from tests.pasa.patching.tiny_models import build_model, prompts_of
from tests.pasa.patching.vllm_ascend_model import Server, generate
from tests.pasa.patching.vllm_step import Step

vllm_ascend_on_cpu.prepare()

from vllm.config import CUDAGraphMode, set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig, _cached_get_attn_backend, get_attn_backend  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402
from vllm_ascend.attention import attention_v1, utils  # noqa: E402
from vllm_ascend.quantization.methods import kv_c8  # noqa: E402

import pasa  # noqa: E402
from pasa.ops.attention.ascend import decode as npu_decode  # noqa: E402
from pasa.patching import vllm as vllm_adapter  # noqa: E402
from pasa.patching import vllm_ascend as adapter  # noqa: E402

CUSTOM = AttentionBackendEnum.CUSTOM
PLATFORM = type(current_platform)
THEIR_CHECK, THEIR_CHOICE = PLATFORM.check_and_update_config, PLATFORM.get_attn_backend_cls  # before pasa's plugin
SELECTOR = AttentionSelectorConfig(64, torch.float16, "auto", 128)
STATES = attention_v1.AscendAttentionState
INTERFACE = vllm_ascend_interfaces.describe(
    attention_v1,
    utils.AscendCommonAttentionMetadata,
    sys.modules[PLATFORM.__module__],
    CUSTOM.get_path(),
    THEIR_CHOICE(CUSTOM, SELECTOR),
)
# Half a unit in the last place of an output near 4 (2^-10) for its rounding to FP16, and as much for FP16 weights. The
# largest error seen is 1.1e-3, a little more than half of this.
BOUND = 2.0**-9


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernels on the CPU twin; TWIN_FOLDER names a folder that keeps them for the next version."""
    return build_library(Path(os.environ.get("TWIN_FOLDER") or tmp_path_factory.mktemp("twin")))


@pytest.fixture
def launches(library, monkeypatch):
    """The calls of the kernel that reads pages; with it, pasa's backend `npu` serves tensors of the CPU."""
    made, launch = [], npu_decode._launch

    def counted(*arguments):
        made.append(arguments[-1].table is not None)
        return launch(*arguments)

    monkeypatch.setattr(npu_decode, "_launch", counted)
    for _ in ready(library, monkeypatch):
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model on disk."""
    path = tmp_path_factory.mktemp("model")
    build_model("plain").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine_config(folder):
    """Return a function that makes vLLM's configuration of a server, by all of vllm-ascend's checks."""

    def make(**arguments):
        defaults = {"dtype": "float16", "max_model_len": 256, "attention_backend": "CUSTOM"}
        how = {"model": str(folder), "skip_tokenizer_init": True} | defaults | arguments
        return EngineArgs(**how).create_engine_config()

    return make


@pytest.fixture(scope="module")
def config(engine_config):
    return engine_config()


@pytest.fixture
def current(config):
    """The configuration as the current one, by which vllm-ascend's layers are made; the backend is made anew."""
    for each in (adapter.backend_class, _cached_get_attn_backend):
        each.cache_clear()
    with set_current_vllm_config(config):
        yield config
    for each in (adapter.backend_class, _cached_get_attn_backend):
        each.cache_clear()


def spec_of(**changed):
    how = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float16}
    return FullAttentionSpec(**how | changed)


def common_of(state):
    """Return a function that makes vllm-ascend's metadata of a batch out of the fields that vLLM's has."""

    def make(**fields):
        n = fields["num_actual_tokens"]
        return utils.AscendCommonAttentionMetadata(
            **fields, seq_lens_cpu=fields["seq_lens"], attn_state=state, num_input_tokens=n
        )

    return make


def test_the_interface_is_the_recorded_one():
    """The ordinary tests know vllm-ascend by this record; PASA_RECORD=1 makes it anew."""
    vllm_interfaces.check(version("vllm-ascend"), INTERFACE, vllm_ascend_interfaces.FILE)
    assert version("vllm-ascend") in adapter.TESTED


def test_without_pasa_the_setting_is_ignored(config):
    """Both methods of the platform ignore the setting, so pasa has to replace both."""
    assert INTERFACE["chosen"] == THEIR_CHOICE(None, SELECTOR) == adapter.BACKEND
    with pytest.raises((ImportError, ValueError)):
        CUSTOM.get_class()  # "ASCEND" is no class
    config.attention_config.backend = CUSTOM
    THEIR_CHECK(config)
    assert config.attention_config.backend is None
    config.attention_config.backend = CUSTOM


def test_vllm_loads_the_plugin_and_keeps_the_setting(config):
    """The configuration was made by EngineArgs, which loads plugins and runs all of vllm-ascend's checks."""
    assert config.attention_config.backend is CUSTOM
    assert config.cache_config.block_size == 128
    vllm_adapter.plugin()  # a second call, as in another module of vLLM
    assert PLATFORM.get_attn_backend_cls(CUSTOM, SELECTOR) == f"{adapter.__name__}.{adapter.NAME}"


def test_other_settings_are_left_to_vllm_ascend(engine_config):
    for backend in (None, "TRITON_ATTN"):
        assert engine_config(attention_backend=backend).attention_config.backend is None
    assert PLATFORM.get_attn_backend_cls(None, SELECTOR) == adapter.BACKEND
    engine_config(attention_backend=None, dtype="bfloat16", block_size=64)  # not pasa's business


def test_vllm_selects_the_class(current):
    backend = get_attn_backend(64, torch.float16, "auto")
    assert issubclass(backend, attention_v1.AscendAttentionBackend)
    assert issubclass(backend.get_impl_cls(), attention_v1.AscendAttentionBackendImpl)
    assert issubclass(backend.get_builder_cls(), attention_v1.AscendAttentionMetadataBuilder)
    assert backend.get_name() == "CUSTOM"
    assert backend.get_supported_kernel_block_sizes() == [128]
    assert backend.get_kv_cache_shape(5, 128, 2, 64) == (2, 5, 128, 2, 64)


BAD = [
    ({"dtype": "bfloat16"}, r"dtype=torch\.bfloat16 \(serve with --dtype float16\)"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
    ({"additional_config": {"xlite_graph_config": {"enabled": True}}}, "additional_config xlite_graph_config="),
    ({"additional_config": {"enable_hamming_sparse": True}}, "additional_config enable_hamming_sparse=True"),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "speculative decoding",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda x: str(x)[:40])
def test_what_it_cannot_serve_stops_the_start(engine_config, arguments, message):
    with pytest.raises(NotImplementedError, match=f"does not support {message}.*: serve without --attention-backend"):
        engine_config(**arguments)


def test_options_that_are_off_stop_nothing(engine_config):
    off = {"xlite_graph_config": {"enabled": False}, "enable_hamming_sparse": False}
    assert engine_config(additional_config=off).attention_config.backend is CUSTOM


def test_latent_attention_is_refused():
    with pytest.raises(NotImplementedError, match=r"vllm-ascend serves by vllm_ascend\.attention\.mla_v1\.AscendMLA"):
        PLATFORM.get_attn_backend_cls(CUSTOM, SELECTOR._replace(use_mla=True))


def test_the_310p_is_refused(monkeypatch):
    """Its cache has another layout, (2, pages, Hkv D / 16, slots, 16)."""
    monkeypatch.setattr(sys.modules[PLATFORM.__module__], "is_310p", lambda: True)
    with pytest.raises(NotImplementedError, match=r"vllm-ascend serves by vllm_ascend\._310p\.attention"):
        PLATFORM.get_attn_backend_cls(CUSTOM, SELECTOR)


def test_another_version_is_refused(engine_config, monkeypatch):
    monkeypatch.setattr(adapter, "TESTED", ("0.1.0",))
    with pytest.raises(NotImplementedError, match=f"vllm-ascend {version('vllm-ascend')} is installed: install one of"):
        engine_config()


def test_another_layout_of_the_cache_stops_the_start(current, monkeypatch):
    """Planted: a vllm-ascend that puts heads before slots."""
    planted = staticmethod(lambda pages, slots, heads, dim, *others: (2, pages, heads, slots, dim))
    monkeypatch.setattr(attention_v1.AscendAttentionBackend, "get_kv_cache_shape", planted)
    message = (
        r"a cache of \(2, 5, 3, 128, 64\) numbers where \(2, 5, 128, 3, 64\) was expected\. Install one of the tested"
    )
    with pytest.raises(NotImplementedError, match=message):
        get_attn_backend(64, torch.float16, "auto")


def test_a_cache_of_another_dtype_is_refused(current):
    builder = get_attn_backend(64, torch.float16, "auto").get_builder_cls()
    with pytest.raises(NotImplementedError, match=rf"a cache with dtype=torch\.bfloat16.*{adapter.INSTEAD}$"):
        builder(spec_of(dtype=torch.bfloat16), ["layer"], current, torch.device("cpu"))


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL"])
def test_no_graph_of_a_whole_step_is_captured(current, mode):
    """vLLM's own rule, applied to pasa's builder, leaves graphs in pieces, or none, or raises an error."""
    backend = get_attn_backend(64, torch.float16, "auto")
    graphs = copy.deepcopy(current.compilation_config)
    runner = MagicMock(vllm_config=current, compilation_config=graphs, speculative_config=None)
    runner.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    resolve = functools.partial(GPUModelRunner._check_and_update_cudagraph_mode, runner)
    group = SimpleNamespace(kv_cache_spec=spec_of())
    if mode == "FULL":
        with pytest.raises(ValueError, match="FULL is not supported with PasaAscendBackend backend"):
            resolve([{backend}], [group])
        return
    resolve([{backend}], [group])
    (call,) = runner.cudagraph_dispatcher.initialize_cudagraph_keys.call_args_list
    assert not call.args[0].has_full_cudagraphs()
    theirs = attention_v1.AscendAttentionMetadataBuilder.get_cudagraph_support(current, spec_of())
    assert theirs.name == "ALWAYS"  # so the rule decides by pasa's builder


def layer_of(config, step, **how):
    """Return a function that runs one layer of a step, by vllm-ascend's `forward`."""
    backend = get_attn_backend(64, torch.float16, "auto")
    builder = backend.get_builder_cls()(spec_of(), ["layer"], config, torch.device("cpu"))
    arguments = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None}
    arguments |= {"attn_type": "decoder", "kv_sharing_target_layer_name": None}
    layer = backend.get_impl_cls()(4, 64, 64**-0.5, 2, **arguments | how)
    metadata = None if step.common is None else builder.build(0, step.common)
    module = SimpleNamespace(layer_name="model.layers.0.attn", _k_scale_float=1.0, _v_scale_float=1.0)
    return lambda output: layer.forward(module, step.q, step.k, step.v, tuple(step.cache), metadata, output)


QUERIES = [([1, 1, 1], STATES.DecodeOnly), ([1, 1, 20], STATES.ChunkedPrefill), ([5, 3, 33], STATES.ChunkedPrefill)]
PADDED = [*QUERIES, ([300, 17, 133], STATES.PrefillNoCache)]


@pytest.mark.parametrize(("queries", "state"), PADDED, ids=str)
def test_a_step_on_the_twin(launches, current, queries, state):
    """vllm-ascend writes the new keys, and pasa attends to its pages. Biased scores are eleven times FP16's largest."""
    step = Step([300, 17, 133], queries, 3, common=common_of(state), slots=128)
    output = torch.full_like(step.q, 5.0)
    assert layer_of(current, step)(output) is output
    n = sum(queries)
    golden, lse = step.pages.golden(is_causal=True)
    assert worst((output[:n], lse), (golden, lse))[0] <= BOUND
    assert (output[n:] == 5.0).all()
    if state is not STATES.PrefillNoCache:
        assert launches
    assert all(launches)  # every launch read pages


@pytest.mark.parametrize(("queries", "state"), QUERIES, ids=str)
@pytest.mark.parametrize("bias", [0.0, 300.0])
@pytest.mark.parametrize("windowed", [False, True])
def test_sinks_and_windows_on_the_twin(launches, current, queries, state, bias, windowed):
    """A window is served by gathering pages, with the same guarantee."""
    sinks = torch.tensor([3.0, 0.0, -2.0, 50.0]).half()  # beside biased scores they have no weight
    step = Step([300, 17, 133], queries, common=common_of(state), slots=128, bias=bias)
    output = torch.empty_like(step.q)
    layer_of(current, step, sinks=sinks, sliding_window=90 if windowed else None)(output)
    golden, lse = step.pages.golden(is_causal=True, sinks=sinks, window=(89, 0) if windowed else None)
    assert worst((output, lse), (golden, lse))[0] <= BOUND


def test_memory_is_measured_without_metadata(current):
    step = Step([40], [1], common=common_of(STATES.DecodeOnly), slots=128)
    step.common = None
    assert not layer_of(current, step)(torch.ones_like(step.q)).any()


REFUSED = [
    ({"alibi_slopes": [1.0]}, "alibi_slopes"),
    ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8'"),
    ({"attn_type": "encoder_only"}, "attn_type='encoder_only'"),
]


@pytest.mark.parametrize(("how", "message"), REFUSED, ids=lambda x: str(x)[:30])
def test_layers_that_it_cannot_serve_stop_the_start(current, how, message):
    step = Step([40], [1], common=common_of(STATES.DecodeOnly), slots=128)
    with pytest.raises(NotImplementedError, match=f"does not support {message}"):
        layer_of(current, step, **how)


def test_a_quantised_cache_is_refused_when_weights_are_made(current):
    """Version 0.18 announces its C8 caches nowhere. Its method replaces the class of a layer."""
    layer = get_attn_backend(64, torch.float16, "auto").get_impl_cls()(
        4, 64, 0.125, 2, None, None, "auto", None, "decoder", None
    )
    method = kv_c8.AscendC8KVCacheAttentionMethod({}, "model.layers.0")
    with pytest.raises(NotImplementedError, match=r"a layer that is turned into .*AscendC8AttentionBackendImpl"):
        method.create_weights(SimpleNamespace(impl=layer))


def test_attention_that_is_not_causal_is_refused(current):
    step = Step([40], [4], common=common_of(STATES.PrefillNoCache), slots=128)
    step.common.causal = False
    with pytest.raises(NotImplementedError, match=f"causal=False: {adapter.INSTEAD}$"):
        layer_of(current, step)


@pytest.fixture(scope="module", params=["plain", "range", "window"])
def served(request):
    """Return the name of a tiny model, the model, prompts, and the tokens of transformers with pasa's reference."""
    pasa.register("transformers")
    model = build_model(request.param)
    model.set_attn_implementation("pasa")
    with reference_serves():
        return request.param, model, *prompts_of(model, [3, 40, 150])


@pytest.mark.parametrize("padding", [0, 5])
def test_tokens_are_those_of_transformers(served, launches, current, padding):
    """Prompts of several chunks share steps with decodes; scores of "range" overflow FP16.

    With padding, vllm-ascend gives the tokens behind the last sequence one of their own, which has no pages.
    """
    name, model, prompts, expected = served
    backend = get_attn_backend(64, torch.float16, "auto")
    server = Server(model, backend, common_of(STATES.ChunkedPrefill), spec_of(), current, padding=padding)
    assert generate(server, prompts, len(expected[0]), chunk=48) == [*expected]
    if name != "window":  # whose pages are gathered
        assert len(launches) > 2 * len(expected[0])
