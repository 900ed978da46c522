"""Time and memory of a model by its attention, on a tiny configuration."""

import json

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from pasa.eval.commands import app
from pasa.eval.kit import random_model
from pasa.eval.models.longbench import throughput


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What the command stores."""
    folder = tmp_path_factory.mktemp("throughput")
    options = ["--config", "tiny", "--tokens", "48,64", "--new-tokens", "2", "--output-dir", str(folder)]
    done = CliRunner().invoke(app, ["bench", "model", *options])
    assert done.exit_code == 0, done.output
    assert "random weights" in (folder / "model.md").read_text()
    return json.loads((folder / "model.json").read_text())


def test_every_attention_is_timed(result):
    assert [(each["bias"], each["tokens"], each["attention"]) for each in result["records"]] == [
        (bias, tokens, name) for bias in (0, 362) for tokens in (48, 64) for name in throughput.ATTENTIONS
    ]
    for each in result["records"]:
        assert each["prefill_tokens_per_s"] == pytest.approx(each["tokens"] / each["prefill_s"], rel=1e-3)
        assert each["decode_tokens_per_s"] > 0
        assert each["peak_bytes"] > 0


def test_the_bias_breaks_eager_attention_alone(result):
    broken = {(each["attention"], each["bias"]): each["nonfinite_logits"] for each in result["records"]}
    assert broken == {(name, bias): float((name, bias) == ("eager", 362)) for name, bias in broken}
    shown = [row[0] for row in throughput.table(result).rows if row[-1] == "100 %"]
    assert shown == ["eager, 48 tokens, bias 362", "eager, 64 tokens, bias 362"]


def test_the_bias_is_one_constant_in_every_score():
    """It is in the dimension of each head that turns most slowly."""
    model = random_model.build(random_model.CONFIGS["tiny"], torch.device("cpu"))
    for bias in (7, 5):
        throughput.set_bias(model, bias)
    attention = model.model.layers[1].self_attn
    for projection, heads in ((attention.q_proj, 4), (attention.k_proj, 2)):
        expected = torch.zeros(heads, 64, dtype=torch.float16)
        expected[:, 31] = 5
        assert torch.equal(projection.bias.view(heads, 64), expected)


def test_the_configuration_is_qwen2_7b():
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**random_model.CONFIGS["qwen2-7b"]))
    assert sum(p.numel() for p in model.parameters()) == 7_615_616_512
    assert model.model.layers[0].self_attn.head_dim == 128
