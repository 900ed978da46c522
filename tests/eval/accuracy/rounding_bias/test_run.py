"""The inputs have what their names say, the arms are the operator's, the judge judges, and the command delivers."""

from __future__ import annotations

import io
import math

import pytest
import torch
from rich.console import Console

import pasa
from pasa.eval.accuracy.rounding_bias import arithmetic, cases, run
from pasa.eval.accuracy.rounding_bias.arithmetic import Z_95, measure, spacing
from pasa.eval.kit import output
from pasa.ops.attention.spec.repeated_maxima import EPSILON, repeats
from pasa.ops.numerics.formats import FORMATS, round_to


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_rows_are_what_their_case_says(case, fmt):
    rows = cases.make_rows(case, fmt, 64, 16, generator())
    assert torch.equal(round_to(rows.values, fmt), rows.values)
    tied = repeats(rows.scores, rows.scores.amax(-1, keepdim=True))
    if case.maxima in cases.CONTROLS:
        assert not tied.any()
        return
    assert tied.all()
    at = list(cases.AT[case.maxima])
    largest = rows.scores.topk(len(at)).indices.sort().values
    assert torch.equal(largest, torch.tensor(at).expand(64, -1))
    below = rows.scores[:, at[:1]] - rows.scores[:, at]
    assert (below <= EPSILON).all()
    assert (below[:, 1:] > 0).any() == (case.maxima == "near")
    assert {key // cases.BLOCK_K for key in at} == ({0, 1} if case.maxima == "blocks" else {0})
    main = rows.values[:, at]
    one_signed = (main.sign() == main[:, :1].sign()).all()
    assert one_signed == case.one_signed
    if case.one_signed:
        assert torch.equal(rows.grad.sign(), main[:, 0].double().sign())


def test_remainders_are_trifles():
    """They move no output by more than half a spacing: a tie is decided by them and not hidden."""
    for fmt in ("bf16", "fp16"):
        rows = cases.make_rows(cases.CASES[0], fmt, 256, 64, generator())
        moved = (rows.exact() - rows.values[:, list(cases.AT["two"])].double().mean(1)) / spacing(rows.exact(), fmt)
        assert 0.02 < moved.abs().mean() < 0.1
        assert moved.abs().quantile(0.99) < 0.5  # beside 0 a spacing vanishes


@pytest.mark.parametrize(("arm", "rule"), [pair for pair in arithmetic.RULES.items() if pair[0] != "stochastic"])
def test_the_quotient_is_the_operators(arm, rule):
    """Bit for bit on FP16: keys that pick scores of FP16 out of the query, and `pasa.attention`."""
    rows = cases.make_rows(cases.CASES[0], "fp16", 48, 64, generator())
    rows = cases.Rows(rows.scores.half().float(), rows.values, rows.grad)
    eye = torch.eye(cases.KEYS).half().expand(1, 48, -1, -1)
    config = pasa.PasaConfig(precision="fp32", softmax=rule, block_k=cases.BLOCK_K)
    query, values = rows.scores.half().view(1, 48, 1, -1), rows.values.half().unsqueeze(0)
    expected = pasa.attention(query, eye, values, scale=1.0, config=config, backend="reference")
    assert torch.equal(arithmetic.output(rows, "fp16", "quotient", arm, generator()), expected[0, :, 0].float())


@pytest.mark.parametrize("arm", arithmetic.ARMS)
@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_the_product_is_rounded_once(arm, fmt):
    """Times l it is a value of the format; without ties ours is nearest."""
    rows = cases.make_rows(cases.CASES[2], fmt, 32, 16, generator())
    out = arithmetic.output(rows, fmt, "product", arm, generator())
    assert ((out.double() - rows.exact()).abs() <= 2 * spacing(rows.exact(), fmt)).all()
    single = cases.make_rows(cases.Case("random", "same"), fmt, 32, 16, generator())
    if arm == "ours":
        plain = arithmetic.output(single, fmt, "product", "nearest", generator())
        assert torch.equal(arithmetic.output(single, fmt, "product", arm, generator()), plain)


def test_spacing_is_the_distance_of_neighbours():
    for fmt in ("bf16", "fp16"):
        dtype = FORMATS[fmt].dtype
        x = torch.tensor([1.0, 1.5, 3.0, 0.1, 2.0**-14]).to(dtype)
        up = (x.view(torch.int16) + 1).view(dtype)
        assert torch.equal(spacing(x.double(), fmt), up.double() - x.double())


def test_errors_are_signed_and_clustered_by_row():
    """Away from zero is positive whatever the sign; all columns of a row are one observation."""
    exact = torch.tensor([[1.25, -1.25], [1.25, -1.25]], dtype=torch.float64)
    out = (exact + exact.sign() * 2.0**-7 * torch.tensor([[0.5], [0.1]])).float()
    grad = torch.tensor([[1.0, -3.0], [1.0, 3.0]], dtype=torch.float64)
    errors = measure(out, exact, grad, "bf16")
    assert errors["bias"] == pytest.approx(0.3, abs=1e-5)
    assert errors["interval"] == pytest.approx(Z_95 * 0.2, abs=1e-5)  # of two rows: (0.5 - 0.1) / 2
    assert errors["rms"] == pytest.approx(math.sqrt((0.25 + 0.01) / 2), abs=1e-5)
    assert errors["delta_bias"] == pytest.approx((0.5 + 0.1 * (1 - 3) / 4) / 2, abs=1e-5)
    assert arithmetic.mean_of(torch.arange(5.0))[1] == pytest.approx(Z_95 * math.sqrt(2.5 / 5))


def arm(bias, rms=0.3):
    return {"bias": bias, "interval": Z_95 * 0.001, "rms": rms}


@pytest.mark.parametrize(
    ("ours", "all_flagged", "passed"),
    [(0.001, True, True), (0.03, True, False), (0.019, True, False), (0.019, False, True), (0.009, True, True)],
)
def test_the_judge_of_repeated_maxima(ours, all_flagged, passed):
    """Nearest 0.1, stochastic 0.005: below 0.02, and beside zero or below 0.01; all rows flagged or not."""
    arms = {"nearest": arm(-0.1), "stochastic": arm(0.005), "ours": arm(ours)}
    assert run.judge_repeated(arms, 2.0, all_flagged)["passed"] == passed


def test_the_judge_of_controls():
    """Nearest has a bias of 0.1 and an error of 0.3, which may grow by 5 %."""
    ours = [(0.0, 0.3), (0.1, 0.3), (0.05, 0.3), (0.0, 0.314), (0.0, 0.316)]
    passed = [run.judge_control({"nearest": arm(0.1), "ours": arm(*each)}, 2.0)["passed"] for each in ours]
    assert passed == [True, True, False, True, False]


@pytest.fixture(scope="module")
def result():
    return run.run_bias(rows=run.LEAST_ROWS, seed=3)


def test_a_small_run_passes_and_is_shown(result):
    """1024 rows show a bias of a fifth of nearest's: 0.4 / sqrt(64 x 1024) is 0.002, so noise fails no check.

    The same rows again give the same records. Worked examples fit 80 columns.
    """
    assert result["gate"]["passed"], result["gate"]["failures"]
    assert result["examples"]["exact"]
    assert len(result["records"]) == 2 * len(cases.CASES) * len(arithmetic.PLACES) * len(arithmetic.ARMS)
    again = run.measure_case("bf16", cases.CASES[0], run.LEAST_ROWS, generator(3))
    assert again == result["records"][: len(again)]
    screen = io.StringIO()
    run.example_table(result).show(Console(file=screen, width=80))
    assert "-0.014759540557861328" in screen.getvalue()
    page = run.EXPERIMENT.markdown({**result, "environment": output.environment()})
    for part in ("Bias of O, BF16, quotient", "Bias of delta, FP16, product", "| two, smaller tail |", " checks pass."):
        assert part in page


def test_a_failed_check_is_named_with_its_numbers(monkeypatch):
    """A rule that does nothing fails where maxima repeat, and nowhere else."""
    monkeypatch.setitem(arithmetic.RULES, "ours", "safe")
    few = [case for case in cases.CASES if case.name in ("two, smaller tail", "one, smaller tail")]
    records = [each for fmt in run.FORMATS_16 for case in few for each in run.measure_case(fmt, case, 256, generator())]
    gate = run.judge(records, run.worked_examples(), few)
    assert not gate["passed"]
    (failure,) = gate["failures"]
    assert failure.startswith("bf16, quotient, two, smaller tail: not fewer and not unbiased; nearest -0.0")
    ours = next(each for each in records if (each["case"], each["arm"]) == ("two, smaller tail", "ours"))
    assert f"ours {run.signed(ours)}" in failure
