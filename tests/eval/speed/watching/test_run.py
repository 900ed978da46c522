"""The cost of watching, on tiny sizes: the gate and what is stored; the definition by hand."""

import json

import pytest
import torch

from pasa.eval.speed.watching import run
from pasa.ops import operators
from pasa.ops.attention.spec import watch


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return run.run_watch(small=True, turns=2)


def test_a_run_checks_first_and_times_every_case(result):
    json.dumps(result, allow_nan=False)
    assert result["gate"] == {
        "passed": True,
        "checks": {
            "counts_exact": True,
            "unchanged, prompt, 2 x 150": True,
            "unchanged, 73 steps of decoding at 20": True,
        },
    }
    assert [each["kind"] for each in result["records"]] == ["attention, eager", "model", "model"]
    for each in result["records"]:
        assert min(each["plain_ms"], each["watched_ms"]) > 0
        assert each["p20_percent"] <= each["cost_percent"] <= each["p80_percent"]
    for field in watch.FIELDS:
        assert any(each[field] > 0 for each in result["checks"]), field
    assert {each["step"] for each in result["checks"]} == {127, watch.STRIDE}
    assert "Counts equal to FP64's in 6 of 6 calls. All checks hold." in run.EXPERIMENT.markdown(result)


def test_nothing_is_timed_where_a_count_is_wrong(monkeypatch):
    def one_too_many(q, k, mask, totals, causal, scale, taken):
        watch.count_scores(q, k, mask, totals, causal, scale, taken)
        totals[1] += 1

    monkeypatch.setattr(operators, "score_counter", lambda device, head_dim: one_too_many)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run.run_watch(small=True)
    assert not result["gate"]["passed"]
    assert result["records"] == []
    assert "equal to FP64's in 0 of 6 calls. FAILED: counts_exact" in run.verdict(result)


def test_decoding_of_a_turn_is_sampled_as_in_the_long_run():
    heads = run.MODEL["num_attention_heads"]
    walks = [watch.sample(step * heads, heads) for step in range(run.STEPS)]
    assert sum(map(len, walks)) == pytest.approx(run.STEPS * heads / watch.STRIDE, rel=0.01)


@pytest.mark.parametrize("causal", [False, True])
def test_the_definition_by_hand(causal):
    """q.k of 2 rows and 3 keys: 0 0 9, 70000 0 0; the second row of two alone sees all keys where causal."""
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()[None, None]
    k = torch.tensor([[0.0, 70000.0], [0.0, 0.0], [9.0, 0.0]]).double()[None, None]
    counts = run.define(q, k, None, causal, 1.0, range(0, 2, 1))
    assert counts == ([2, 1, 0, 5, 1] if causal else [2, 0, 0, 6, 1])
