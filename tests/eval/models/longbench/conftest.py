"""A tiny model in a folder, with a tokenizer of bytes: random weights that answer in a moment, and always the same."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()

END = "<|end|>"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """One token per byte, so that lengths are known; a template that can be seen in the ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END, chat_template=CHAT)


@pytest.fixture(scope="session")
def steady(tokenizer, tmp_path_factory):
    """The folder of a Qwen2 of two layers whose attention weighs little.

    So roundings do not decide what a model without training answers: with the offset, FP32 rounds scores to 1/64.
    """
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("steady") / "tiny-qwen2"
    config = hf.Qwen2Config(  # heads as the built-in model's: the overflow fixture needs slow rotary pairs
        head_dim=64, vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=256, initializer_range=0.2,
    )  # fmt: skip
    model = hf.Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.001
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    """Three data sets of LongBench's form, of 3, 2 and 1 items of different lengths."""
    folder = tmp_path_factory.mktemp("questions")
    row = {"answers": ["Paris"], "length": 3, "all_classes": None}
    for name, count in (("hotpotqa", 3), ("triviaqa", 2), ("lcc", 1)):
        rows = [row | {"context": "Some text. " * (3 + index), "input": f"Question {index}"} for index in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder
