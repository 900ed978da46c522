"""Whole engines of vLLM on a CPU: scheduler, block tables, model runner and layers are vLLM's own.

scripts/test_vllm.sh runs this file by its name, with the Python files of several versions of vLLM. `vllm_on_cpu` says
what is replaced. The tokens must be those of transformers with pasa, from the same weights in FP16.
"""

import pytest
import torch

from tests.pasa.patching import vllm_on_cpu

vllm_on_cpu.prepare()

import transformers as hf  # noqa: E402
import vllm  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

import pasa  # noqa: E402

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 64, "bos_token_id": 0, "eos_token_id": 511,
}  # fmt: skip
TOKENS = 12
MARGIN = 0.1
"""The least lead of the best token, in logits.

vLLM and transformers round differently in FP16. The largest difference of two logits that was seen is 0.02."""


@pytest.fixture(scope="module", autouse=True)
def _plugin(tmp_path_factory):
    """vLLM finds pasa by its entry point; no test registers the backend."""
    vllm_on_cpu.install_plugin(tmp_path_factory.mktemp("installed"))


@pytest.fixture(params=["0", "1"], ids=["runner 1", "runner 2"])
def runner(request, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)
    return request.param


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that saves a tiny model and returns its folder and the model with pasa's attention."""
    pasa.register("transformers")

    def build(name):
        torch.manual_seed(1)
        config = hf.MistralConfig(**SIZES, sliding_window=24) if name == "window" else hf.Qwen2Config(**SIZES)
        config.initializer_range = 0.15
        model = hf.AutoModelForCausalLM.from_config(config).half().eval()
        if name == "range":
            for layer in model.model.layers:
                layer.self_attn.q_proj.bias.data.fill_(60.0)
                layer.self_attn.k_proj.bias.data.fill_(60.0)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        model.set_attn_implementation("pasa")
        return folder, model

    built = {}
    return lambda name: built.setdefault(name, None) or built.update({name: build(name)}) or built[name]


@torch.no_grad()
def continued(model, prompt, tokens=TOKENS):
    """Return the best tokens, one after another, and their least lead over the second."""
    ids, lead = list(prompt), float("inf")
    for _ in range(tokens):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        assert logits.isfinite().all()
        best = logits.topk(2)
        ids.append(int(best.indices[0]))
        lead = min(lead, float(best.values[0] - best.values[1]))
    return ids[len(prompt) :], lead


def prompts_of(model, lengths):
    """Return random prompts whose continuations have no near ties, and the continuations."""
    g = torch.Generator().manual_seed(3)
    chosen = []
    for n in lengths:
        for _ in range(40):
            prompt = torch.randint(1, 511, (n,), generator=g).tolist()
            tokens, lead = continued(model, prompt)
            if lead >= MARGIN and 511 not in tokens:
                break
        else:
            raise AssertionError("no prompt without near ties")
        chosen.append((prompt, tokens))
    return zip(*chosen, strict=True)


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
    """Prompts of several chunks share steps with decodes."""
    folder, model = models(name)
    prompts, expected = prompts_of(model, [3, 40, 100])
    with Engine(folder, max_num_batched_tokens=48, max_num_seqs=4) as engine:
        assert engine.tokens(prompts) == [*expected]
