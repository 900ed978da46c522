"""Whole engines of vLLM on a CPU: scheduler, block tables, model runner and layers are vLLM's own.

scripts/test_vllm.sh runs this file by its name, with the Python files of several versions of vLLM. `vllm_on_cpu` says
what is replaced. The tokens must be those of transformers with pasa, from the same weights in FP16.
"""

import importlib.util
import inspect

import pytest
import torch

from tests.pasa.patching import vllm_on_cpu
from tests.pasa.patching.tiny_models import MARGIN, TOKENS, build_model, continued, prompts_of

vllm_on_cpu.prepare()

import vllm  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.v1.attention import backend as v1  # noqa: E402
from vllm.v1.attention.selector import _cached_get_attn_backend  # noqa: E402
from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: E402

import pasa  # noqa: E402
from pasa.patching import vllm as adapter  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _plugin(tmp_path_factory):
    """vLLM finds pasa by its entry point; no test registers the backend."""
    vllm_on_cpu.install_plugin(tmp_path_factory.mktemp("installed"))


def runners():
    """Return the values of VLLM_USE_V2_MODEL_RUNNER for the runners that the installed vLLM has for CPUs."""
    return ["0", "1"] if importlib.util.find_spec("vllm.v1.worker.cpu") else ["0"]


@pytest.fixture(params=runners(), ids=lambda value: f"runner {int(value) + 1}")
def runner(request, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)
    return request.param


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that saves a tiny model and returns its folder and the model with pasa's attention."""
    pasa.register("transformers")

    def build(name):
        model = build_model(name)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        model.set_attn_implementation("pasa")
        return folder, model

    built = {}

    def once(name):
        if name not in built:
            built[name] = build(name)
        return built[name]

    return once


class Engine:
    """An engine with pasa's backend; leave it to free what vLLM keeps for a whole process."""

    def __init__(self, folder, **arguments):
        defaults = {
            "dtype": "float16", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256,
            "block_size": 16, "attention_backend": "CUSTOM", "compilation_config": {"custom_ops": ["none"]},
            "disable_log_stats": False,
        }  # fmt: skip
        self.llm = vllm.LLM(str(folder), **defaults | arguments)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        del self.llm
        cleanup_dist_env_and_memory()

    def generate(self, prompts):
        how = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False)
        return self.llm.generate([{"prompt_token_ids": list(each)} for each in prompts], how, use_tqdm=False)

    def tokens(self, prompts):
        return [list(each.outputs[0].token_ids) for each in self.generate(prompts)]

    def count(self, name):
        return sum(each.value for each in self.llm.get_metrics() if each.name == name)


@pytest.mark.parametrize("name", ["plain", "range", "window"])
def test_tokens_are_those_of_transformers(models, runner, name):
    """Prompts of several chunks share steps with decodes, and a second call finds pages of the first in the cache."""
    folder, model = models(name)
    prompts, expected = prompts_of(model, [3, 40, 100])
    with Engine(folder, max_num_batched_tokens=48, max_num_seqs=4) as engine:
        assert engine.tokens(prompts) == [*expected]
        (again,) = engine.generate(prompts[2:])
    assert [*again.outputs[0].token_ids] == expected[2]
    assert again.num_cached_tokens >= 16


@torch.no_grad()
def test_the_range_overflows_without_pasa(models):
    _, model = models("range")
    model.set_attn_implementation("eager")
    logits = model(torch.tensor([[5, 7, 9]]), use_cache=False).logits
    model.set_attn_implementation("pasa")
    assert logits.isnan().all()


def test_drafts_are_verified_with_several_queries_a_sequence(models, runner):
    """The model counts upwards, most of the time. So drafts that are taken from the prompt are mostly right."""
    if "spec decode is not supported" in inspect.getsource(CPUModelRunner):
        pytest.skip("this vLLM has no speculative decoding on a CPU")
    folder, model = models("counting")
    prompts = [[*range(20, 60), 7, *range(20, 30)], [*range(100, 120), 3, 100, 101]]
    expected = [continued(model, prompt) for prompt in prompts]
    assert min(lead for _, lead in expected) >= MARGIN
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    try:
        engine = Engine(folder, speculative_config=drafts)
    except ValueError as error:
        if "V2 does not yet support" not in str(error):
            raise
        pytest.skip("this vLLM's second runner takes no drafts from a prompt")
    with engine:
        assert engine.tokens(prompts) == [tokens for tokens, _ in expected]
        assert engine.count("vllm:spec_decode_num_accepted_tokens") > 0


# vLLM 0.18 itself refuses FP8 on a CPU, and 0.33 itself refuses BF16 beside FP16.
CACHE = "bfloat16" if vllm.__version__.startswith("0.18.") else "fp8"
BAD = [
    ({"kv_cache_dtype": CACHE}, "kv_cache_dtype not supported"),
    ({"block_size": 24}, "block_size not supported"),
    ({"dtype": "bfloat16"}, "dtype not supported"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda x: str(x))
def test_what_it_cannot_serve_stops_the_start(models, arguments, message):
    with pytest.raises(ValueError, match=message):
        Engine(models("plain")[0], **arguments)
    cleanup_dist_env_and_memory()


@pytest.fixture
def fresh():
    """Let the backend class be made and chosen anew, now and after the test."""
    for each in (adapter.backend_class, _cached_get_attn_backend):
        each.cache_clear()
    yield
    for each in (adapter.backend_class, _cached_get_attn_backend):
        each.cache_clear()


def test_an_argument_that_vllm_adds_stops_the_start(models, monkeypatch, fresh):
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, new, output_scale=None): ...

    monkeypatch.setattr(v1.AttentionImpl, "forward", forward)
    with pytest.raises(NotImplementedError, match=r"AttentionImpl\.forward takes \(.*output, new, output_scale\)"):
        Engine(models("plain")[0])
    cleanup_dist_env_and_memory()


def test_another_layout_of_the_cache_stops_the_start(models, monkeypatch, fresh):
    """Planted: a vLLM that puts slots before heads."""
    if hasattr(v1.AttentionBackend, "get_kv_cache_shape"):
        return  # the backend chooses the shape
    from vllm.v1 import kv_cache_interface as interface

    theirs = interface.compute_layer_kv_cache_shape_bytes

    def planted(*arguments):
        pages, heads, slots, content = theirs(*arguments)
        return pages, slots, heads, content

    monkeypatch.setattr(interface, "compute_layer_kv_cache_shape_bytes", planted)
    with pytest.raises(NotImplementedError, match=r"a cache of \(5, 48, 3, 256\) bytes where \(5, 3, 48, 256\)"):
        Engine(models("plain")[0])
    cleanup_dist_env_and_memory()
