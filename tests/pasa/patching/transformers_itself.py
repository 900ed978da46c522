"""The common model tests of transformers, for six architectures, with PASA in the place of SDPA.

scripts/test_transformers_suite.sh downloads the source distribution of the installed transformers and runs this file.
That distribution ships tests/test_modeling_common.py, but neither the tests of single models nor those of generation:
the small models are described here, and test_transformers_generation.py has the cases of generation.

The text of the tests asks for "pasa" where it asked for "sdpa", and a model that asks for no attention gets "pasa" too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import unittest
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as hf

import pasa
from tests.versions import INSTALLED

FOLDER = "TRANSFORMERS_TESTS"
"""The environment variable with the folder of transformers' tests."""

SERVED = "calls of pasa"
BATCH, TOKENS, VOCABULARY = 13, 7, 99
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2}
ARCHITECTURES: dict[str, tuple[type[hf.PreTrainedConfig], dict[str, Any]]] = {
    "Qwen2": (hf.Qwen2Config, {}),
    "Llama": (hf.LlamaConfig, {}),
    "Gemma2": (hf.Gemma2Config, MIXED),
    "Gemma3": (hf.Gemma3TextConfig, MIXED),
    "Qwen3Moe": (hf.Qwen3MoeConfig, EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16}),
    "GptOss": (hf.GptOssConfig, EXPERTS | MIXED | {"num_local_experts": 4}),
}
HEADS = (
    *("Model", "TextModel", "ForCausalLM", "ForSequenceClassification", "TextForSequenceClassification"),
    *("ForTokenClassification", "ForQuestionAnswering"),
)
LEFT_OUT = {
    "test_bc_torch_dtype": "runs no attention, and takes a quarter of the time",
    "test_generation_tester_mixin_inheritance": "asks for the tests of generation, which are not distributed",
    "test_can_load_ignoring_mismatched_shapes": "reads a log line, and fails with SDPA too",
    "test_load_with_mismatched_shapes": "reads a log line, and fails with SDPA too",
}
"""Tests that are not run, each with the reason."""


def load_tests() -> ModuleType:
    """Return transformers' module of common tests, with empty classes for the two that are not distributed."""
    package = "transformers_tests"
    file = Path(os.environ[FOLDER]) / "test_modeling_common.py"
    for name, mixin in (
        ("", ""),
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        path = package
        for part in ["", *name.split(".")]:
            path += f".{part}" * bool(part)
            sys.modules.setdefault(path, ModuleType(path)).__path__ = []
        setattr(sys.modules[path], mixin, type(mixin, (), {}))
    spec = importlib.util.spec_from_file_location(f"{package}.{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    text = file.read_text("utf-8")
    assert text.count('"sdpa"') > 10
    exec(compile(text.replace('"sdpa"', '"pasa"'), file, "exec"), vars(module))
    return module


class SmallModels:
    """The properties of an architecture that the common tests read, and its configuration and inputs."""

    batch_size, seq_length, vocab_size, is_training = BATCH, TOKENS, VOCABULARY, True
    num_hidden_layers, num_attention_heads, hidden_size = (
        SIZES[name] for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )

    def __init__(self, config: type[hf.PreTrainedConfig], sizes: dict[str, Any]) -> None:
        self.config, self.sizes = config, sizes

    def get_config(self) -> hf.PreTrainedConfig:
        return self.config(**SIZES | self.sizes)

    def prepare_config_and_inputs_for_common(self) -> tuple[hf.PreTrainedConfig, dict[str, torch.Tensor]]:
        """Return a configuration and inputs; the mask leaves row i of the batch its first i + 1 tokens."""
        ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


def make_tests(common: ModuleType, name: str) -> type[unittest.TestCase]:
    """Return the class of tests of an architecture."""
    config, sizes = ARCHITECTURES[name]
    known = [kind for head in HEADS if (kind := getattr(hf, name + head, None)) and kind.config_class is config]

    def setUp(self: Any) -> None:
        self.model_tester = SmallModels(config, sizes)

    # The tests skip architectures without SDPA (Gemma 2, gpt-oss) by this attribute of the first class.
    known[0]._supports_sdpa = True
    members = {"all_model_classes": tuple(known), "setUp": setUp, "__module__": __name__}
    members |= {test: unittest.skip(why)(lambda self: None) for test, why in LEFT_OUT.items()}
    return type(f"Test{name}", (common.ModelTesterMixin, unittest.TestCase), members)


if FOLDER in os.environ:
    pasa.register("transformers")
    globals().update({f"Test{name}": make_tests(COMMON, name) for COMMON in [load_tests()] for name in ARCHITECTURES})


@pytest.fixture(autouse=True)
def served(monkeypatch, record_property):
    """Select PASA where a model asks for no attention, and record how many calls it served."""
    calls = Counter()
    attention, choose = pasa.attention, hf.PreTrainedModel.get_correct_attn_implementation

    def count(*args, **kwargs):
        calls[SERVED] += 1
        return attention(*args, **kwargs)

    def choose_pasa(self, requested_attention, is_init_check=False):
        return choose(self, requested_attention or "pasa", is_init_check)

    monkeypatch.setattr(pasa, "attention", count)
    monkeypatch.setattr(hf.PreTrainedModel, "get_correct_attn_implementation", choose_pasa)
    yield
    record_property(SERVED, calls[SERVED])


class Outcomes:
    """A plugin of pytest that counts the outcomes, and the tests in which PASA attended, of each architecture."""

    def __init__(self) -> None:
        self.counts = {name: Counter() for name in ARCHITECTURES}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        counts = self.counts[report.nodeid.split("::Test")[1].split("::")[0]]
        if report.when == "call" or report.outcome == "skipped":
            counts[report.outcome] += type(report) is pytest.TestReport  # not of a part of a test
        if report.when == "teardown" and dict(report.user_properties)[SERVED]:
            counts["served"] += 1
            counts[SERVED] += dict(report.user_properties)[SERVED]


def main() -> int:
    """Run the tests and print the counts; return 1 if one fails, or if PASA never attended in an architecture."""
    os.environ[FOLDER], *options = sys.argv[1:]
    outcomes = Outcomes()
    settings = ["-o", "addopts=--import-mode=importlib", "-W", "ignore::pytest.PytestUnknownMarkWarning", "-q"]
    code = pytest.main([__file__, "-p", "no:cacheprovider", *settings, *options], plugins=[outcomes])
    print(f"transformers {'.'.join(map(str, INSTALLED))}".ljust(20), "passed  failed  skipped  served by PASA (calls)")
    counted = {name: counts for name, counts in outcomes.counts.items() if counts}
    for name, counts in counted.items():
        served = f"{counts['served']} ({counts[SERVED]})"
        print(name.ljust(20), *(f"{counts[each]:6}" for each in ("passed", "failed", "skipped")), f"  {served}")
    idle = [name for name, counts in counted.items() if not counts["served"]]
    if idle:
        print(f"PASA never attended: {', '.join(idle)}")
    return int(bool(code or idle))


if __name__ == "__main__":
    sys.exit(main())
