"""Whole language models in FP16: measurements, checks, and a model that overflows by itself."""

from __future__ import annotations

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from pasa.eval.kit import output
from pasa.eval.models.whole_model import arms, measuring, run
from pasa.eval.models.whole_model.report import table, verdict
from tests.pasa.fp16 import checkpoints

VOCABULARY = 128


def tokenizer(begin):
    """Return a tokenizer of numbers between blanks that begins a text with the ids `begin`."""

    def encode(text, add_special_tokens=True):
        return SimpleNamespace(input_ids=begin * add_special_tokens + [int(word) for word in text.split()])

    encode.eos_token_id, encode.decode = None, lambda ids: " ".join(map(str, ids))
    return encode


@pytest.fixture(scope="module")
def gemma():
    """A tiny Gemma 3 whose residual stream passes 65504 in its second layer, by the weight of a norm."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 16}
    sizes |= {"query_pre_attn_scalar": 32, "initializer_range": 0.2, "eos_token_id": None}
    model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes)).eval()
    model.model.layers[1].post_feedforward_layernorm.weight.data.fill_(39999.0)
    return model


@pytest.mark.parametrize(("begin", "tokens", "chunk"), [([2], 100, 30), ([], 100, 30), ([2], 20, 20), ([], 7, 1)])
def test_every_token_is_predicted_once(begin, tokens, chunk):
    chunks = run.split(tokenizer(begin), " ".join(map(str, range(1000, 1200))), tokens, chunk)
    first = 1000 if begin else 1001
    assert [int(token) for ids in chunks for token in ids[1:]] == list(range(first, first + tokens))
    assert {int(ids[0]) for ids in chunks} <= ({2} if begin else set(range(1000, 1200)))
    assert max(map(len, chunks)) == chunk + 1


def test_measures_are_their_definitions(gemma):
    ids = [torch.randint(VOCABULARY, (12,)), torch.randint(VOCABULARY, (7,))]
    base, reference = measuring.measure(gemma, ids, [])
    moved = [logits + torch.randn_like(logits) for logits in reference]
    comparison = measuring.Comparison()
    losses, divergences, gaps = [], [], []
    for index, each in enumerate(ids):
        comparison.add(moved[index], each, reference[index])
        for row in range(len(each) - 1):
            p, q = (x[row].double().softmax(-1) for x in (reference[index], moved[index]))
            losses.append(-math.log(q[each[row + 1]]))
            divergences.append(float((p * (p / q).log()).sum()))
            best = p.log().sort(descending=True).values
            gaps += [float(best[0] - best[1])] * bool(p.argmax() != q.argmax())
    summary = comparison.summary(compared=True)
    assert summary["tokens"] == 17
    assert summary["perplexity"] == pytest.approx(math.exp(sum(losses) / 17))
    assert summary["kl"] == pytest.approx(sum(divergences) / 17)
    assert summary["kl_max"] == pytest.approx(max(divergences))
    assert summary["top1_agreement"] == pytest.approx(1 - len(gaps) / 17)
    assert summary["top1_gaps"] == pytest.approx(sorted(gaps))
    assert 0 < base["rounded_logits"]["kl"] < 1e-3
    assert base["kl"] is None
    assert base["residual_peak"] == max(base["layer_peaks"]) > measuring.FP16_MAX
    assert base["layers_beyond_fp16"] == 2


def test_products_round_as_torch_does_in_fp16():
    """One rounding of FP32 sums: beside torch's own FP16 product at most one bit differs, and both overflow alike."""
    x, weight, bias = torch.randn(40, 300).half(), torch.randn(50, 300).half(), torch.randn(50).half()
    x[3] = 3e4
    native = torch.nn.functional.linear(x, weight, bias)
    with measuring.TensorCoreProducts():
        ours = torch.nn.functional.linear(x, weight, bias)
        few = torch.nn.functional.linear(x[:2], weight)
        wide = torch.nn.functional.linear(x.float(), weight.float())
    assert ours.dtype == few.dtype == torch.float16
    assert wide.dtype == torch.float32
    assert torch.equal(ours.isinf(), native.isinf())
    assert ours.isinf().any()
    finite = ours.isfinite()
    assert torch.allclose(ours[finite].float(), native[finite].float(), rtol=2**-10, atol=2e-3)


def test_a_greedy_text_is_compared_with_fp32():
    gaps = [0.5, 0.25, 0.125]
    assert measuring.compare_texts([1, 2, 3], [1, 2, 3], gaps) == {"greedy_equal": 3, "greedy_gap": None}
    assert measuring.compare_texts([1, 9, 3], [1, 2, 3], gaps) == {"greedy_equal": 1, "greedy_gap": 0.25}
    assert measuring.compare_texts([1, 2], [1, 2, 3], gaps) == {"greedy_equal": 2, "greedy_gap": 0.125}


def test_gaps_are_those_of_the_two_best_tokens(gemma):
    ids = torch.randint(VOCABULARY, (9,))
    tokens = []
    for _ in range(3):
        whole = torch.cat([ids, torch.tensor(tokens, dtype=torch.long)])
        rows = gemma(input_ids=whole[None]).logits[0, -1].log_softmax(-1).sort(descending=True)
        gap = measuring.best_gaps(gemma, ids, [*tokens, int(rows.indices[0])])[-1]
        assert gap == pytest.approx(float((rows.values[0] - rows.values[1]).detach()), abs=1e-4)
        tokens.append(int(rows.indices[0]))


@pytest.fixture
def subjects(gemma, monkeypatch, tmp_path):
    """Let the tiny model be the model that overflows, and a text of numbers the essay."""
    text = tmp_path / "worked.txt"
    text.write_text(" ".join(str(number % VOCABULARY) for number in range(3, 700, 5)))
    subject = arms.Subject("tiny Gemma", lambda: (gemma, tokenizer([2])), lambda: None, overflows=True)
    monkeypatch.setitem(arms.SUBJECTS, "gemma", subject)
    monkeypatch.setattr(run, "find_essays", lambda: {"worked": text})
    monkeypatch.setattr(run, "require_built_in", lambda **_: None)


def test_fp16_fails_where_the_residual_stream_overflows(subjects):
    """The claim: patched attention does not help, because no score is beyond FP16."""
    chosen = {"models": ["gemma"], "arms": ["bf16", "fp16", "fp16-patched"]}
    result = run.EXPERIMENT.measure(**chosen, tokens=60, chunk=20, new_tokens=3)
    assert result["gate"]["passed"], result["gate"]
    failing = [each for each in result["runs"] if each["arm"].startswith("fp16")]
    modules = {each["first_nonfinite"]["module"] for each in failing}
    assert modules == {"model.layers.1.post_feedforward_layernorm"}
    assert [each["perplexity"] for each in failing] == [None, None]
    stored = json.loads(output.to_json(result))
    assert "model.layers.1.post_feedforward_layernorm, with patched attention as well" in verdict(stored)
    assert "inf" in table(stored, "gemma").markdown()


def test_a_written_model_runs_without_pasa(gemma):
    """Its folder holds all that FP16 needs: no hook, no patched attention."""
    ids = torch.arange(3, 40)[None]
    expected = gemma(ids).logits.detach()
    with arms.ARMS["written"].prepare(copy.deepcopy(gemma), checkpoints.tokenizer()) as model:
        logits = model(ids).logits.detach()
    assert not copy.deepcopy(gemma).half()(ids).logits.isfinite().any()
    assert logits.dtype == torch.float16
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.allclose(logits.float(), expected, atol=5e-3 * float(expected.abs().max()))


def test_names_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match="'fp8' is not one of fp32, bf16"):
        run.run_whole_model(arms=["fp8"])
    with pytest.raises(ValueError, match="'llama' is not one of gemma, smollm2, amplified"):
        run.run_whole_model(models=["llama"])


GOOD = {
    "fp32": {"perplexity": 25.0},
    "bf16": {"perplexity": 25.1, "kl": 8e-4},
    "fp16": {"nonfinite_logits": 1.0},
    "to-fp16": {"perplexity": 25.001, "kl": 2e-5, "top1_agreement": 0.999, "greedy_gap": None},
    "written": {"perplexity": 25.009, "kl": 4e-5, "top1_agreement": 0.996, "greedy_gap": 0.5},
}


def judged(arm="fp32", **changes):
    """Return the names of the checks that fail when a field of one run of good runs is another."""
    runs = {
        name: {"model": "gemma", "arm": name, "first_nonfinite": None, "tokens": 4000, **GOOD[name]} for name in GOOD
    }
    runs[arm] |= changes
    return [name for name, passed in run.judge(list(runs.values()))["checks"].items() if not passed]


@pytest.mark.parametrize(
    ("arm", "changes", "failing"),
    [
        ("fp32", {}, []),
        ("fp16", {"nonfinite_logits": 0.99}, ["gemma_fp16_all_nan"]),
        ("to-fp16", {"top1_agreement": 0.9979}, ["gemma_top1"]),
        ("to-fp16", {"perplexity": 25.0051}, ["gemma_perplexity"]),
        ("to-fp16", {"perplexity": 25.0099, "top1_agreement": 0.9961, "tokens": 1000}, []),
        ("to-fp16", {"perplexity": 25.0101, "tokens": 1000}, ["gemma_perplexity"]),
        ("to-fp16", {"perplexity": 24.9949}, ["gemma_perplexity"]),
        ("to-fp16", {"kl": 8.1e-5}, ["gemma_kl_below_bf16"]),
        ("to-fp16", {"greedy_gap": 0.02}, ["gemma_greedy"]),
        ("to-fp16", {"greedy_gap": 0.009}, []),
        ("to-fp16", {"perplexity": None, "kl": None}, ["gemma_finite", "gemma_kl_below_bf16"]),
        ("to-fp16", {"first_nonfinite": {"module": "lm_head"}}, ["gemma_finite", "gemma_kl_below_bf16"]),
        ("written", {"top1_agreement": 0.9949}, ["gemma_written_top1"]),
        ("written", {"perplexity": 25.0126}, ["gemma_written_perplexity"]),
        ("written", {"perplexity": None, "kl": None}, ["gemma_written_finite"]),
    ],
)
def test_each_check_fails_for_its_own_reason(arm, changes, failing):
    assert judged(arm, **changes) == failing
