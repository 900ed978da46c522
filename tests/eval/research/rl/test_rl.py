"""The toy GRPO: rollout and trainer agree, steps are lost and skipped where they must be, and a run goes on."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import pasa
from pasa.eval.kit.overflow_fixture import inject_overflow
from pasa.eval.kit.random_model import CONFIGS, SMALL, build
from pasa.eval.research.rl import rollout, run, training

CPU = torch.device("cpu")
PROMPTS = torch.arange(12).view(2, 6)
NEW = 5


@pytest.fixture(scope="module")
def model():
    pasa.register()
    rollout.register_pages()
    # With the usual range of 0.02, attention hardly moves a logit of so small a model.
    return build(CONFIGS[SMALL] | {"initializer_range": 0.2}, CPU).float()


def policy_of(model, arm, rate=1e-3):
    return training.Policy(model, training.ARMS[arm], CPU, rate)


def sampled(policy, seed=0):
    return rollout.sample(policy.model, PROMPTS, NEW, policy.arm.rollout, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("injected", [False, True])
def test_rollout_and_trainer_agree(model, injected):
    """Paged decoding gives the distributions of a whole forward pass, also where scores are beyond FP16.

    A logit may differ by its rounding to FP16, and by those of what comes before it: a few units of 2^-11.
    """
    policy = policy_of(inject_overflow(model, 131072)[0] if injected else model, "fp16-pasa")
    done = sampled(policy)
    trainer = policy.log_probs(done.tokens, PROMPTS.shape[1]).detach()
    assert done.tokens.shape == (2, 6 + NEW)
    assert torch.equal(done.tokens[:, :6], PROMPTS)
    mine = torch.log_softmax(done.logits, -1)
    bound = 8 * 2.0**-11 * float(done.logits.abs().max())
    assert (mine - trainer).abs().max() <= bound
    assert training.divergence(mine, trainer) <= bound**2


def test_a_wrong_page_is_noticed(model, monkeypatch):
    """The agreement above tests the cache: a position that is off by one in the pages changes distributions."""
    policy = policy_of(model, "fp16-pasa")
    write = pasa.write_pages
    monkeypatch.setattr(pasa, "write_pages", lambda k, v, *rest: write(k.roll(1, 0), v.roll(1, 0), *rest))
    done = sampled(policy)
    trainer = policy.log_probs(done.tokens, PROMPTS.shape[1]).detach()
    bound = 8 * 2.0**-11 * float(done.logits.abs().max())
    assert training.divergence(torch.log_softmax(done.logits, -1), trainer) > bound**2


def test_a_seed_draws_the_same_tokens(model):
    policy = policy_of(model, "bf16-sdpa")
    assert torch.equal(sampled(policy, 3).tokens, sampled(policy, 3).tokens)
    assert not torch.equal(sampled(policy, 3).tokens, sampled(policy, 4).tokens)


def test_the_objective_prefers_what_was_rewarded():
    old = torch.zeros(4, 3)
    new = old.clone().requires_grad_()
    training.objective(new, old, torch.tensor([1.0, 0.0, 5.0, 5.0]), 2).backward()
    assert (new.grad[0] < 0).all()  # a higher probability lowers the loss
    assert (new.grad[1] > 0).all()
    assert (new.grad[2:] == 0).all()  # a group without differences teaches nothing


def test_the_objective_is_clipped():
    old = torch.zeros(2, 1)
    new = torch.tensor([[0.5], [0.0]]).requires_grad_()  # the first ratio is 1.65
    training.objective(new, old, torch.tensor([1.0, 0.0]), 2).backward()
    assert new.grad[0] == 0
    assert new.grad[1] != 0


def test_divergence_is_that_of_the_definition():
    p, q = torch.tensor([[[0.5, 0.25, 0.25]]]), torch.tensor([[[0.25, 0.25, 0.5]]])
    assert training.divergence(p.log(), q.log()) == pytest.approx(0.5 * 0.693147 - 0.25 * 0.693147, rel=1e-5)


def test_rewards_are_shares_of_good_tokens():
    good = torch.tensor([False, True, True])
    assert training.rewards(torch.tensor([[0, 1, 2, 0], [0, 0, 0, 0]]), good).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("arm", training.ARMS)
def test_steps_change_the_model_toward_the_reward(model, arm):
    policy = policy_of(model, arm, rate=3e-3)
    good = torch.arange(97) % 2 == 0
    records = training.train(policy, [PROMPTS], good, 15, 8, NEW, 0)
    assert not any(each["lost"] or each["skipped"] for each in records)
    first, last = (sum(each["reward"] for each in part) / 3 for part in (records[:3], records[-3:]))
    assert last > first + 0.1


def test_a_step_without_finite_gradients_is_skipped(model):
    policy = policy_of(model, "fp16-pasa")
    before = [x.clone() for x in policy.masters]
    scale = policy.scaler.get_scale()
    logits = policy.log_probs(torch.cat([PROMPTS, PROMPTS], 1), 6)
    assert policy.update((logits * 1e30).sum()) is False
    assert all(torch.equal(x, y) for x, y in zip(before, policy.masters, strict=True))
    assert policy.scaler.get_scale() < scale


def test_eager_fp16_loses_steps_that_pasa_does_not(model):
    wide, _ = inject_overflow(model, 131072)
    good = torch.arange(97) % 2 == 0
    lost = {
        arm: [each["lost"] for each in training.train(policy_of(wide, arm), [PROMPTS], good, 2, 4, NEW, 0)]
        for arm in (run.PASA, run.EAGER)
    }
    assert lost == {run.PASA: [False, False], run.EAGER: [True, True]}


class Tokenizer:
    """Tokens are words; every second one has the letter of the reward."""

    def __call__(self, text, return_tensors):
        assert return_tensors == "pt"
        return SimpleNamespace(input_ids=torch.tensor([[len(word) for word in text.split()]]))

    def decode(self, tokens):
        return "xe"[tokens[0] % 2]


def test_a_run_goes_on_and_is_judged(model, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "require_built_in", lambda **_: None)
    monkeypatch.setattr(run, "load_model", lambda: (model, Tokenizer()))
    monkeypatch.setattr(run, "pick_device", lambda: CPU)
    how = {"steps": 2, "group": 4, "new_tokens": 3, "folder": tmp_path}
    begun = run.run_rl(minutes=0, **how)
    assert begun["records"] == []
    assert not begun["gate"]["passed"]
    result = run.run_rl(**how)
    assert [(each["model"], each["arm"]) for each in result["records"]] == [
        (m, a) for m in run.MODELS for a in run.ARMS
    ]
    assert all(result["gate"]["checks"].values())
    monkeypatch.setattr(run, "train", None)  # nothing is trained again
    again = run.run_rl(**how)
    assert again["records"] == json.loads(json.dumps(result["records"]))
    with pytest.raises(ValueError, match="steps was 2 and is 3"):
        run.run_rl(**how | {"steps": 3})
    written = run.EXPERIMENT.save({"experiment": "rl", **again}, tmp_path)
    assert {path.name for path in written} == {"rl.json", "rl.md", "rl.png"}
    text = (tmp_path / "rl.md").read_text()
    assert "All checks hold." in text
    assert "FP16, PASA: paged rollout" in text


def record(model, arm, **fields):
    return {"model": model, "arm": arm, "kl": 1e-4, "lost": 0, "skipped": 0} | fields


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({("plain", run.BF16): {"kl": 9e-4}}, "mismatch"),
        ({("injected", run.PASA): {"lost": 1}}, "injected: fp16-pasa loses"),
        ({("plain", run.PASA): {"skipped": 1}}, "plain: fp16-pasa loses"),
        ({("injected", run.EAGER): {"lost": 0}}, "so the test means something"),
    ],
)
def test_each_check_can_fail(change, failed):
    good = {("plain", run.BF16): {"kl": 2e-3}, ("injected", run.EAGER): {"lost": 2, "kl": None}}
    cases = [(model, arm) for model in run.MODELS for arm in run.ARMS]
    assert run.judge([record(*case, **good.get(case, {})) for case in cases])["passed"]
    checks = run.judge([record(*case, **(good | change).get(case, {})) for case in cases])["checks"]
    assert [name for name, holds in checks.items() if not holds and failed in name]
