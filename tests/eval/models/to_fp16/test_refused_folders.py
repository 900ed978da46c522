"""Folders that `pasa to-fp16` refuses, each in one line, and without a trace on the disk."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.pasa.fp16.checkpoints import contents, save


def change_config(folder, **entries):
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps(config))


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def adapter(folder):
    (folder / "adapter_config.json").write_text("{}")


def gguf(folder):
    (folder / "config.json").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


def pipeline(folder):
    (folder / "model_index.json").write_text("{}")


def awq(folder):
    change_config(folder, quantization_config={"quant_method": "awq"})


def old_gptq(folder):
    (folder / "quantize_config.json").write_text("{}")


def edit_weights(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def packed(folder):
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.qweight": torch.zeros(2, 2)}))


def infinite(folder):
    edit_weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("inf")))


def strange(folder):
    edit_weights(folder, lambda tensors: tensors.update({"mtp.0.weight": torch.zeros(2, 2)}))


def missing(folder):
    edit_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))


def unknown(folder):
    change_config(folder, architectures=["WonderForCausalLM"], model_type="wonder")


def other_width(folder):
    """Story: weights on disk were not compared with config.json, so a folder that no one can load was written."""
    change_config(folder, intermediate_size=66)


def encoder(folder):
    change_config(folder, architectures=["BertModel"], model_type="bert")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_tokenizer, "has no tokenizer"),
        (adapter, "LoRA"),
        (gguf, "GGUF"),
        (pipeline, "pipeline"),
        (awq, "AWQ"),
        (old_gptq, "GPTQ"),
        (packed, "qweight"),
        (infinite, "model.norm.weight"),
        (strange, "mtp.0.weight"),
        (missing, "model.norm.weight"),
        (unknown, "WonderForCausalLM"),
        (other_width, "has the shape (64, 32), and the model's configuration says (66, 32)"),
        (encoder, "BertModel"),
    ],
)
def test_folders_that_cannot_be_converted_are_refused_in_one_line(damage, message, tmp_path, refused):
    folder = tmp_path / "model"
    save("qwen2", folder)
    damage(folder)
    before = contents(folder)
    assert message in refused("to-fp16", str(folder), str(tmp_path / "out"))
    assert contents(folder) == before
    assert not (tmp_path / "out").exists()


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, refused):
    """Story: transformers loads whole files, so the written checkpoint lacked a tensor that the original had."""
    folder = tmp_path / "model"
    save("qwen2", folder, max_shard_size="20KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.layers.0.mlp.down_proj.weight"
    file = index["weight_map"].pop(name)
    path.write_text(json.dumps(index))
    assert f"{file!r} holds {name}, which is nowhere by the index" in refused(
        "to-fp16", str(folder), str(tmp_path / "out")
    )
    other = next(each for each in index["weight_map"].values() if each != file)
    tensors = {**load_file(folder / other), name: torch.zeros(2, 2)}
    save_file(tensors, folder / other, {"format": "pt"})
    path.write_text(json.dumps(index | {"weight_map": {**index["weight_map"], name: file}}))
    message = f"{other!r} holds {name}, which is in {file!r} by the index"
    assert message in refused("to-fp16", str(folder), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
