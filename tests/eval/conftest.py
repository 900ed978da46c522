"""The real model, read once per session from the installed weights, and a tiny one for what needs no real weights."""

from __future__ import annotations

import fcntl
import functools
from contextlib import contextmanager

import gguf
import pytest
import torch
import transformers as hf

from pasa.eval.kit import embedded_model
from pasa.eval.kit.random_model import CONFIGS

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
ONCE = {name: functools.cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
"""What transformers makes again and again of a GGUF file: all that stands in it, and names for each of 397 modules."""


@contextmanager
def reading_once():
    with pytest.MonkeyPatch.context() as patch:
        for name, cached in ONCE.items():
            patch.setattr(gguf, name, cached)
        yield


@pytest.fixture(scope="session")
def llama(shared_folder):
    """Read from its GGUF file by one test process, which takes 10 s; the others load what that leaves."""
    file = shared_folder / "llama.pt"
    with open(shared_folder / "llama.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            with reading_once():
                torch.save(embedded_model.load_llama(), file)
        return torch.load(file, weights_only=False)


@pytest.fixture(scope="session")
def converted(llama):
    return embedded_model.to_qwen2(llama)


@pytest.fixture
def base(converted):
    """SmolLM2-135M-Instruct as Qwen2, FP32, with the attention it was made with, whatever a test set before."""
    converted.set_attn_implementation("sdpa")
    return converted


@pytest.fixture(scope="session")
def tokenizer():
    path = embedded_model.find_weights()
    with reading_once():
        return hf.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="session")
def ids(tokenizer):
    """48 tokens of the essay the demonstration reads, (1, 48)."""
    text = embedded_model.find_essays()["worked"].read_text(encoding="utf-8")
    return tokenizer(text[:2000], return_tensors="pt").input_ids[:, :48]


@pytest.fixture
def tiny_llama():
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**CONFIGS["tiny"] | {"head_dim": 32})).eval()


@pytest.fixture
def tiny(tiny_llama):
    return embedded_model.to_qwen2(tiny_llama)
