"""The training experiment: what provokes ties, that it repeats bit for bit, its gates, and the stored runs."""

import json
import math
from pathlib import Path

import pytest
import torch

from pasa.eval import cli
from pasa.eval.research.rounding_training import gpu as training_gpu
from pasa.eval.research.rounding_training import training
from pasa.eval.research.rounding_training.attention import ARMS
from pasa.eval.research.rounding_training.model import SINK, SINKS, Decoder, Shape, batch, provoke, spectral_norms
from pasa.eval.research.rounding_training.sums import interval

TINY = Shape(layers=2, width=32, heads=2, context=24)
BY_NAME = {arm.name: arm for arm in ARMS}
STORED = Path(training.__file__).parent / "results"


@pytest.fixture(scope="module")
def text():
    return training.as_bytes("".join(chr(97 + (i * i + i // 7) % 26) for i in range(4000)))


@pytest.fixture(autouse=True)
def _alone():
    with training.one_thread():
        yield


def test_five_steps_twice_are_equal_bit_for_bit(text):
    first, again, other = (training.train(BY_NAME["product-ours"], text, seed, 5, TINY) for seed in (0, 0, 1))
    marks = [training.digest(run["sums"], run["model"]) for run in (first, again, other)]
    assert marks[0] == marks[1] != marks[2]


def test_arms_start_from_the_same_weights_and_batches_and_repeat_their_maxima(text):
    runs = [
        training.train(BY_NAME[name], text, 0, 300, TINY, stop_after=1) for name in ("fp32", "product", "fp16-ours")
    ]
    losses = [run["sums"].curves["loss"][0] for run in runs]
    assert max(losses) - min(losses) <= 1e-2 * losses[0]
    assert runs[1]["sums"].curves["tied"][0] > 0.9  # all rows but the first


def test_training_learns(text):
    run = training.train(BY_NAME["product-ours"], text, 0, 30, TINY)
    losses = run["sums"].curves["loss"]
    assert run["failed_step"] is None
    assert losses[-1] < losses[0] - 1


def test_a_run_that_fails_stops_and_says_when(text, monkeypatch):
    """Scores of 40: the published rule's weights are exp(-40), 0 in FP16."""
    monkeypatch.setattr("pasa.eval.research.rounding_training.model.SINK_SCORES", (40.0,))
    run = training.train(BY_NAME["fp16-published"], text, 0, 30, TINY)
    assert run["failed_step"] is not None
    described = training.describe(run, None, None)
    assert described["lost_in_last_step"] > 0
    assert training.judge([{"arm": "fp16-published", **described}], reproduced=True)["failures_are_underflow"]
    assert training.train(BY_NAME["fp16-ours"], text, 0, 5, TINY)["failed_step"] is None


def test_provoked_scores_are_those_asked_for(text):
    """Before training; embeddings of positions turn a sink from its direction, which costs some of the score."""
    seen = {}

    def attention(layer, q, k, v):
        seen[layer] = (q @ k.mT * q.shape[-1] ** -0.5)[:, :, :, :SINKS].mean((0, 2, 3))
        return v

    generator = torch.Generator().manual_seed(0)
    model = Decoder(training.SMALL, attention, generator)
    provoke(model, generator)
    model(batch(text, 4, training.SMALL.context, generator)[0])
    assert torch.allclose(seen[0], torch.tensor([4.0, 8.0, 12.0, 16.0]), rtol=0.15)


def test_batches_begin_with_sinks_and_targets_are_the_next_bytes(text):
    tokens, targets = batch(text, 3, 24, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (3, 24)
    assert (tokens[:, :SINKS] == SINK).all()
    assert (tokens[:, SINKS:] != SINK).all()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_comparing_gradients_leaves_them_alone(text):
    attention = training.Attention(BY_NAME["product"], TINY.layers)
    model = Decoder(TINY, attention, torch.Generator().manual_seed(0))
    tokens, targets = batch(text, 2, TINY.context, torch.Generator().manual_seed(0))
    training.backward(model, tokens, targets)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    assert 1e-6 < training.gradient_error(model, attention, tokens, targets) < 0.1
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    assert attention.arm.name == "product"


def test_spectral_norms_are_the_heads_own():
    model = Decoder(TINY, lambda layer, q, k, v: v, torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.blocks[1].query.weight.zero_()
        model.blocks[1].query.weight[16:, 3] = 2.0  # the second head's 16 rows: norm 2 sqrt(16)
        assert spectral_norms(model)[1].tolist() == pytest.approx([0.0, 8.0], abs=1e-6)
        model.blocks[1].query.weight[0, 0] = torch.nan
    first, second = spectral_norms(model)[1].tolist()
    assert math.isnan(first)
    assert second == pytest.approx(8.0)


def test_accumulated_is_one_for_alternating_signs_of_chance_and_the_root_for_equal_ones():
    sums = training.Sums()
    for step in range(100):
        sums.add_delta(torch.tensor([[0.5, (-1.0) ** step]]), torch.ones(1, 2))
    assert sums.accumulated()[-1].tolist() == [pytest.approx([10.0, 0.0])]
    assert sums.curve()[99] == pytest.approx(50**0.5)


def test_learning_rate_warms_up_and_ends_where_it_says():
    rates = [training.learning_rate(step, 300) for step in range(300)]
    assert max(rates) == rates[29] == training.RATE
    assert rates[0] == pytest.approx(training.RATE / 30)
    assert rates[-1] == pytest.approx(training.LAST_RATE, rel=0.01)


def record(arm: str, **changes):
    return {"arm": arm, "tied": 0.5, "failed_step": None, "lost_in_last_step": 0.0} | changes


@pytest.mark.parametrize(
    ("broken", "gate"),
    [
        (record("product-ours", failed_step=3, lost_in_last_step=1.0), "ours_finite"),
        (record("fp16-published", failed_step=3), "failures_are_underflow"),
        (record("product", tied=0.01), "repeated_maxima"),
    ],
)
def test_gates_can_fail(broken, gate):
    good = [record("fp32", tied=0.0), record("product"), record("fp16-published", failed_step=9, lost_in_last_step=2.0)]
    assert training.judge(good, reproduced=True)["passed"]
    found = training.judge([*good, broken], reproduced=True)
    assert not found["passed"]
    assert not found[gate]
    assert not training.judge(good, reproduced=False)["passed"]


def test_bad_arguments_are_refused(capsys):
    with pytest.raises(ValueError, match="steps=4"):
        training.run_training(steps=4)
    with pytest.raises(ValueError, match="byte 0 at 3"):
        training.as_bytes("abc\0")
    with pytest.raises(SystemExit) as left:
        cli.main(["eval", "training", "--gpt2-small", "--seconds", "3"])
    assert left.value.code == 2
    assert "CUDA device" in capsys.readouterr().err


def test_stored_run_passed_and_is_whole():
    stored = json.loads((STORED / "training.json").read_text(encoding="utf-8"))
    assert stored["gate"]["passed"]
    assert stored["settings"]["steps"] == training.STEPS
    assert len(stored["records"]) == len(ARMS) * len(training.SEEDS)
    assert stored["environment"]["commit"]
    assert not stored["environment"]["commit"].endswith("-dirty")


@pytest.mark.parametrize("name", ["training", "gpt2_small"])
def test_stored_tables_are_those_of_the_stored_run(name, tmp_path):
    experiment = {"training": training.EXPERIMENT, "gpt2_small": training_gpu.EXPERIMENT}[name]
    experiment.save(json.loads((STORED / f"{name}.json").read_text(encoding="utf-8")), tmp_path)
    for suffix in ("json", "md"):
        (made,) = tmp_path.glob(f"*.{suffix}")
        assert made.read_text(encoding="utf-8") == (STORED / f"{name}.{suffix}").read_text(encoding="utf-8")


def test_gpu_part_runs_on_a_cpu_and_is_shown(text, tmp_path, monkeypatch):
    """Few steps; the reference stands in for the kernels, which need a GPU."""
    monkeypatch.setattr(training_gpu, "BATCH", 2)
    monkeypatch.setattr(training_gpu, "HELD_OUT", 4)
    result = training_gpu.run_training_gpu(
        text, 0.1, source="letters", arms=("flash", *training_gpu.TITLES), shape=TINY, device="cpu"
    )
    first, second, *ours = result["records"]
    assert first["curves"]["loss"] == second["curves"]["loss"], "the same weights and batches"
    assert second["gap"] == 0
    assert first["tied"] > 0.9
    assert 0 < first["gradient_errors"][0] < 1
    assert [each["arm"] for each in ours] == ["flash-unbiased", "safe", "unbiased"]
    assert all(each["gradient_errors"][0] < first["gradient_errors"][0] for each in ours[1:]), "delta of P and dP"
    assert first["steps"] == result["settings"]["steps"] > 0
    training_gpu.EXPERIMENT.save(result, tmp_path)
    assert result["gate"]["passed"]
    assert "torch's flash attention" in (tmp_path / "gpt2_small.md").read_text(encoding="utf-8")


def test_flash_backward_takes_our_output():
    """Against FP64 it errs no more than torch's own forward and backward pass, of which it is half."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 63, 16, generator=generator).bfloat16() for _ in range(4))

    def gradients(function, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(function(*leaves), leaves, grad.to(dtype))

    device = torch.device("cpu")
    right = gradients(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True), torch.float64)
    errors = {}
    for arm in ("flash", "flash-unbiased"):
        found = gradients(lambda *x, arm=arm: training_gpu.Probe(arm, device)(0, *x), torch.bfloat16)
        errors[arm] = [float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]
    assert all(ours <= 1.2 * theirs for ours, theirs in zip(errors["flash-unbiased"], errors["flash"], strict=True))
    assert errors["flash-unbiased"] != errors["flash"]


def test_tied_rows_are_counted_in_both_precisions():
    """Scores 1 and 1 + 2^-9: apart by more than 1e-3, and one number in BF16. The first row has one key."""
    q, k = torch.ones(1, 3, 1), torch.tensor([[[1.0], [1 + 2**-9], [0.0]]])
    near, rounded = training_gpu.tied_rows(q, k)
    assert near.flatten().tolist() == [False, False, False]
    assert rounded.flatten().tolist() == [False, True, True]


def test_interval_of_one_value_is_unbounded():
    assert interval("x", torch.tensor([3.0])) == {"x": 3.0, "x_95": math.inf}
