"""The table of cases is the paper's, and data depend on seed and case alone."""

import math

import pytest
import torch

from pasa.eval.accuracy.rmse.cases import PAPER_CASES, BiasCase, RandomCase
from pasa.eval.accuracy.rmse.report import FIGURES, panels
from pasa.eval.kit.error_metrics import generator

SMALL = (1, 2, 640, 128)


def test_fifteen_cases_of_figures_9_and_10() -> None:
    expected = {("uniform", x0, 0.5) for x0 in (0, 10, 20, 30)} | {("uniform", 20, am) for am in (0.5, 5, 10, 15, 20)}
    expected |= {("hybrid", x0, 10) for x0 in (0, 10, 20, 30)} | {("hybrid", 20, am) for am in (10, 20, 50, 100)}
    assert {(case.distribution, case.mean, case.amplitude) for case in PAPER_CASES} == expected
    assert len(PAPER_CASES) == 15
    assert all(case.shape == (1, 16, 1280, 128) for case in PAPER_CASES)


def test_panels_show_every_case() -> None:
    shown = {name for distribution in FIGURES for panel in panels(distribution).values() for name in panel}
    assert shown == {case.name for case in PAPER_CASES}
    assert [len(panel) for panel in panels("uniform").values()] == [4, 5]


@pytest.mark.parametrize("case", [RandomCase("uniform", 20, 5, SMALL), RandomCase("hybrid", 20, 50, SMALL)], ids=str)
def test_data_depend_on_seed_and_tensor_alone(case: RandomCase) -> None:
    first, again = case.tensors(0), case.tensors(0)
    assert all(torch.equal(a, b) and a.dtype == torch.float16 for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], case.tensors(1)[0])


def test_generator_is_the_same_on_every_machine() -> None:
    """Built-in hash() differs from process to process: seeds must not come from it."""
    assert generator(0, "uniform(20,5)", "q").initial_seed() == 0x7D47E788F309CEB5


def test_uniform_fills_its_interval() -> None:
    """163,840 samples: a gap of 1e-3 of the range at an end has probability (1 - 1e-3)^163840 < 1e-71."""
    q, _, _ = RandomCase("uniform", 20, 5, SMALL).tensors(0)
    assert 15 <= q.min() < 15.01 + 2**-7
    assert 25 >= q.max() > 24.99 - 2**-6


def test_hybrid_moments() -> None:
    """Mean x0 and variance 1 + p Am^2, within 6 standard errors."""
    q, _, _ = RandomCase("hybrid", 10, 100, SMALL).tensors(0)
    x, n = q.double().flatten() - 10, q.numel()
    variance = 1 + 0.001 * 100**2
    fourth = 3 + 6 * 0.001 * 100**2 + 0.001 * 3 * 100**4  # E x^4 of N(0,1) + b N(0, Am^2)
    assert abs(float(x.mean())) < 6 * math.sqrt(variance / n)
    assert abs(float(x.square().mean()) - variance) < 6 * math.sqrt((fourth - variance**2) / n)


def test_bias_sits_on_sixteen_channels_of_q_and_k() -> None:
    q, k, v = (x.float() for x in BiasCase(200, (1, 1, 256, 128)).tensors(0))
    for x in (q, k):
        assert abs(float(x[..., :16].mean()) - 200) < 1
        assert abs(float(x[..., 16:].mean())) < 0.1
    assert abs(float(v.mean())) < 0.1
