"""The cost of watching, on tiny sizes: the gate and what is stored; the definition by hand."""

import json

import pytest
import torch

from pasa.eval.kit.random_model import CONFIGS
from pasa.eval.speed.cases import SpeedCase
from pasa.eval.speed.watching import run
from pasa.ops import operators
from pasa.ops.attention.spec import watch
from tests.eval.speed.fakes import FakeClock


@pytest.fixture(scope="module", autouse=True)
def small():
    """Sizes for a CPU, and a clock that needs no device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "CudaClock", FakeClock)
        patch.setattr(run, "MODEL", CONFIGS["tiny"])
        patch.setattr(run, "ATTENTION", (SpeedCase("tiny", 1, 4, 2, 300, 300, 64, causal=True),))
        patch.setattr(run, "PROMPTS", ((2, 150),))
        patch.setattr(run, "DECODED", 20)
        patch.setattr(run, "SHAPES", run.SHAPES[:2])
        patch.setattr(run, "MOST_PERCENT", 1e9)  # so small a model pays more
        yield patch


def test_a_run_checks_first_and_times_every_case():
    result = run.run_watch(turns=2)
    json.dumps(result, allow_nan=False)
    same = ("unchanged, prompt, 2 x 150", "unchanged, 73 steps of decoding at 20")
    assert result["gate"] == {"passed": True, "checks": dict.fromkeys(("counts_exact", *same, "model_cost"), True)}
    kinds = ["attention, eager", "attention, CUDA graph", "model", "model"]
    assert [each["kind"] for each in result["records"]] == kinds
    for each in result["records"]:
        assert min(each["plain_ms"], each["watched_ms"]) > 0
        assert each["p20_percent"] <= each["cost_percent"] <= each["p80_percent"]
    for field in watch.FIELDS:
        assert any(each[field] > 0 for each in result["checks"]), field
    assert {each["step"] for each in result["checks"]} == {127, watch.STRIDE}
    assert "Counts equal to FP64's in 6 of 6 calls. All checks hold." in run.EXPERIMENT.markdown(result)


def test_a_model_that_pays_too_much_fails(monkeypatch):
    monkeypatch.setattr(run, "MOST_PERCENT", -100.0)
    assert "FAILED: model_cost." in run.verdict(run.run_watch(turns=1))


def test_nothing_is_timed_where_a_count_is_wrong(monkeypatch):
    def one_too_many(q, k, mask, totals, causal, scale, taken):
        watch.count_scores(q, k, mask, totals, causal, scale, taken)
        totals[1] += 1

    monkeypatch.setattr(operators, "score_counter", lambda device, head_dim: one_too_many)
    result = run.run_watch()
    assert not result["gate"]["passed"]
    assert result["records"] == []
    assert "equal to FP64's in 0 of 6 calls. FAILED: counts_exact" in run.verdict(result)


def test_decoding_of_a_turn_is_sampled_as_in_the_long_run():
    heads = CONFIGS["qwen2-7b"]["num_attention_heads"]
    walks = [watch.sample(step * heads, heads) for step in range(run.STEPS)]
    assert sum(map(len, walks)) == pytest.approx(run.STEPS * heads / watch.STRIDE, rel=0.01)


@pytest.mark.parametrize("causal", [False, True])
def test_the_definition_by_hand(causal):
    """q.k of 2 rows and 3 keys: 0 0 9, 70000 0 0; the second row of two alone sees all keys where causal."""
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()[None, None]
    k = torch.tensor([[0.0, 70000.0], [0.0, 0.0], [9.0, 0.0]]).double()[None, None]
    counts = run.define(q, k, None, causal, 1.0, range(0, 2, 1))
    assert counts == ([2, 1, 0, 5, 1] if causal else [2, 0, 0, 6, 1])
