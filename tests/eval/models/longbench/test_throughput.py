"""Time and memory of a model by its attention, on a tiny configuration."""

import json

import pytest
import torch

from pasa.eval.kit import random_model
from pasa.eval.models.longbench import throughput


@pytest.fixture(scope="module")
def result():
    return throughput.run_throughput("tiny", tokens=[48, 64], new_tokens=2, rounds=1)


def test_every_attention_is_timed(result):
    json.dumps(result, allow_nan=False)
    assert [(each["bias"], each["tokens"], each["attention"]) for each in result["records"]] == [
        (bias, tokens, name) for bias in (0, 362) for tokens in (48, 64) for name in throughput.ATTENTIONS
    ]
    for each in result["records"]:
        assert each["prefill_tokens_per_s"] == pytest.approx(each["tokens"] / each["prefill_s"])
        assert each["decode_tokens_per_s"] > 0
        assert each["peak_bytes"] > 0


def test_the_bias_breaks_eager_attention_alone(result):
    broken = {(each["attention"], each["bias"]): each["nonfinite_logits"] for each in result["records"]}
    assert broken == {(name, bias): float((name, bias) == ("eager", 362)) for name, bias in broken}
    table = throughput.table(result)
    assert [row[0] for row in table.rows if row[-1] == "100 %"] == [
        "eager, 48 tokens, bias 362",
        "eager, 64 tokens, bias 362",
    ]
    assert table.note.startswith("FP16, batch 1, one round, decoding")


def test_the_bias_is_one_constant_in_every_score():
    model = random_model.build(random_model.CONFIGS["tiny"], torch.device("cpu")).float()
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, output: seen.append(output))
    ids = torch.arange(20)[None]
    for bias in (0, 5):
        throughput.set_bias(model, bias)
        with torch.no_grad():
            model(ids)
    heads = seen[1].view(20, 4, 64) - seen[0].view(20, 4, 64)
    expected = torch.zeros(64)
    expected[31] = 5
    assert (heads - expected).abs().max() < 1e-4, "the dimension that turns most slowly, of the first layer's input"


def test_the_configuration_is_qwen2_7b():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**random_model.CONFIGS["qwen2-7b"]))
    assert sum(p.numel() for p in model.parameters()) == 7_615_616_512
    assert model.model.layers[0].self_attn.head_dim == 128


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config": "gpt"}, "config='gpt'"),
        ({"attention": ["flash"]}, "'flash' is not one of"),
        ({"tokens": [0]}, "tokens=0"),
        ({"tokens": []}, "tokens=0"),
        ({"rounds": 0}, "rounds=0"),
        ({"new_tokens": 0}, "new_tokens=0"),
    ],
)
def test_bad_settings_are_named(change, reason):
    with pytest.raises(ValueError, match=reason):
        throughput.run_throughput(**{"config": "tiny", **change})
