"""Two diagnoses that are run once: of a tiny pipeline, and of a folder with a language model."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.models.diagnose import run

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()

SMALL_VIDEO = {"height": 64, "width": 64, "frames": 2, "steps": 2}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PROMPT = "one two three four five six seven eight nine ten " * 3


def make_language_model():
    """Two layers, four heads on two of keys."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=len(ALPHABET) + 1)).eval()


@pytest.fixture
def language_model():
    return make_language_model()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Layer 1 overflows in opposition: its scores are near -131,072."""
    path = tmp_path_factory.mktemp("model") / "a model"
    inject_overflow(make_language_model(), {1: -131072}, pairs=2)[0].save_pretrained(path)
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def text_diagnosis(folder):
    """(result, maps) of the folder."""
    return run.look(str(folder), prompt=PROMPT)


@pytest.fixture(scope="session")
def video_diagnosis():
    """(result, maps) of the tiny pipeline."""
    return run.look("tiny", **SMALL_VIDEO)
