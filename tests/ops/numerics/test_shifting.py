"""Shifting matrices obey Theorem 2.1, the optimal beta reproduces table 3, and both hold for the rounded matrix."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from pasa.ops.numerics import shifting
from pasa.ops.numerics.formats import round_to
from pasa.ops.numerics.shifting import (
    TABLE_3_STARTS,
    NoOptimalBetaError,
    OptimalBeta,
    beta_table,
    invariance,
    inverse_shifting_matrix,
    optimal_beta,
    practical_invariance,
    shifting_matrix,
)

ODD_SIZES = (1, 2, 3, 63, 64, 80, 127, 128, 129, 256, 512)
HEAD_DIMENSIONS = (64, 80, 96, 128, 160, 256)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def f_of_the_paper(beta: float, n: int, scale: float, fl: type[np.floating]) -> float:
    """Return f by equations 20 and 21 as printed, with entries normalised by the scale folded into them."""
    b = float(fl(scale * (beta / n))) / scale
    a = float(fl(scale * (1 - beta / n))) / scale + b
    return b * n / (a * (a - b * n)) + (1 - a) / a


def scores(n: int, rows: int = 63) -> Tensor:
    """Return rows of scores with a common offset, in FP64."""
    generator = torch.Generator().manual_seed(n)
    return 20 + torch.randn(rows, n, generator=generator, dtype=torch.float64)


TABLE_3 = [
    # initial beta, Inva, Inva_1, Rel.Err in percent, optimised beta, Inva = Inva_1 after
    (0.9, "9.000", "8.971", "0.32", "0.899708", "8.971"),
    (1 - 2**-4, "15.00", "15.00", "0.00", "0.937500", "15.00"),
    (1 - 2**-5, "31.00", "31.25", "0.81", "0.968994", "31.25"),
    (1 - 2**-6, "63.00", "63.50", "0.79", "0.984497", "63.50"),
    (0.99, "99.00", "102.2", "3.23", "0.990311", "102.2"),
    (0.999, "999.0", "1031.", "3.20", "0.999031", "1031."),
]


@pytest.mark.parametrize(("row", "printed"), list(zip(beta_table(), TABLE_3, strict=True)), ids=str)
def test_table_3_to_all_printed_digits(row: shifting.BetaRow, printed: tuple[float, str, str, str, str, str]) -> None:
    start, ideal, practical, error, optimised, after = printed
    assert row.start == start
    assert f"{row.invariance:#.4g}" == ideal
    assert f"{row.practical_invariance:#.4g}" == practical
    assert f"{row.optimised:.6f}" == optimised
    assert f"{row.optimised_invariance:#.4g}" == f"{row.optimised_practical_invariance:#.4g}" == after
    # The percentages were computed from the invariances as printed; the row holds them unrounded.
    assert f"{100 * abs(row.invariance - float(practical)) / row.invariance:.2f}" == error
    assert 100 * row.relative_error == pytest.approx(float(error), abs=0.0101)


@pytest.mark.parametrize("scale", [1.0, 1 / 8, 80**-0.5])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.984497, 0.999])
@pytest.mark.parametrize("n", ODD_SIZES)
def test_theorem_2_1(n: int, beta: float, scale: float) -> None:
    """The inverse of Theorem 2.1 times M gives I, with M from Eq. 10.

    The entries of a row of M^-1 sum to 1 / (1 - beta) and those of M are below 1, so n roundings of
    the sum and 4 of the entries are at most (n + 4) eps / (1 - beta).
    """
    eye, ones = torch.eye(n, dtype=torch.float64), torch.ones(n, n, dtype=torch.float64)
    matrix = scale * (eye - beta / n * ones)
    inverse = inverse_shifting_matrix(n, beta, scale=scale)
    assert inverse.dtype is torch.float64
    bound = (n + 4) * torch.finfo(torch.float64).eps / (1 - beta)
    assert float((inverse @ matrix - eye).abs().max()) <= bound
    assert float((matrix @ inverse - eye).abs().max()) <= bound


def test_a_singular_matrix_has_no_inverse() -> None:
    assert torch.equal(shifting_matrix(4, 1.0, dtype=torch.float32).sum(0), torch.zeros(4))
    with pytest.raises(ValueError, match=r"beta=1\.0 makes the shifting matrix singular"):
        inverse_shifting_matrix(4, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, *FP8])
@pytest.mark.parametrize("scale", [1.0, 128**-0.5])
@pytest.mark.parametrize("n", [1, 3, 127, 128])
def test_entries_of_the_shifting_matrix(n: int, scale: float, dtype: torch.dtype) -> None:
    beta = 0.984497
    matrix = shifting_matrix(n, beta, scale=scale, dtype=dtype)
    assert (matrix.shape, matrix.dtype) == ((n, n), dtype)
    eye = torch.eye(n, dtype=torch.float64)
    exact = scale * (1 - beta / n) * eye - scale * (beta / n) * (1 - eye)
    assert torch.equal(matrix.double(), round_to(exact, dtype))


SCALES = [1.0, *(d**-0.5 for d in HEAD_DIMENSIONS), 1e-3, 30.0, 2.0**-30]
FORMATS = {torch.float16: (10, -14), torch.bfloat16: (7, -126), torch.float32: (23, -126)}  # bits, smallest exponent


def half_spacing(exact: float, dtype: torch.dtype) -> float:
    """Return half the distance of two numbers of a format near `exact`, and what FP64 may round it by."""
    bits, least = FORMATS[dtype]
    exponent = max(math.frexp(exact)[1] - 1 if exact else least, least)
    return 2.0 ** (exponent - bits - 1) * (1 + 2.0**-40)


@given(
    n=st.integers(1, 200),
    beta=st.floats(0, 1),
    scale=st.sampled_from(SCALES),
    dtype=st.sampled_from(list(FORMATS)),
)
def test_entries_are_the_nearest_numbers(n: int, beta: float, scale: float, dtype: torch.dtype) -> None:
    matrix, diagonal = shifting_matrix(n, beta, scale=scale, dtype=dtype).double(), torch.eye(n, dtype=torch.bool)
    for entries, exact in ((matrix[diagonal], scale * (1 - beta / n)), (matrix[~diagonal], -scale * beta / n)):
        assert ((entries - exact).abs() <= half_spacing(exact, dtype)).all()


@given(
    n=st.integers(1, 200),
    start=st.floats(0.001, 0.9375),
    scale=st.sampled_from(SCALES),
    dtype=st.sampled_from(list(FORMATS)),
)
@example(n=162, start=0.34183872615756195, scale=0.001, dtype=torch.float32)
def test_the_rounded_matrix_has_its_optimal_beta(n: int, start: float, scale: float, dtype: torch.dtype) -> None:
    """The row sum of the matrix that is rounded at the optimal beta gives that beta, and its invariance.

    Story: in the example a rounding boundary lies between the last two betas, and the later one was returned.
    """
    try:
        optimum = optimal_beta(start, n, scale=scale, dtype=dtype)
    except NoOptimalBetaError:  # the format is too coarse
        reject()
    beta = 1 - float(shifting_matrix(n, optimum.beta, scale=scale, dtype=dtype).double()[0].sum()) / scale
    assert beta == pytest.approx(optimum.beta, rel=10 * shifting.TOLERANCE)
    assert optimum.invariance == pytest.approx(beta / (1 - beta), abs=10 * shifting.TOLERANCE / (1 - beta) ** 2)


def test_fp16_entries_agree_with_numpy() -> None:
    matrix = shifting_matrix(128, 0.9, scale=128**-0.5).numpy()
    assert matrix[5, 5] == np.float16((1 - 0.9 / 128) * 128**-0.5)
    assert matrix[5, 6] == np.float16(-0.9 / 128 * 128**-0.5)


def test_without_shift_the_matrix_only_scales() -> None:
    assert torch.equal(shifting_matrix(63, 0.0, scale=0.125), 0.125 * torch.eye(63, dtype=torch.float16))
    assert optimal_beta(0.0, 63, scale=128**-0.5) == OptimalBeta(beta=0.0, invariance=0.0, iterations=0)


@pytest.mark.parametrize("fl", [(torch.float16, np.float16), (torch.float32, np.float32)], ids=["fp16", "fp32"])
@pytest.mark.parametrize("scale", [1.0, *(d**-0.5 for d in HEAD_DIMENSIONS)])
@pytest.mark.parametrize("n", ODD_SIZES)
def test_f_is_that_of_the_paper(n: int, scale: float, fl: tuple[torch.dtype, type[np.floating]]) -> None:
    """f equals the paper's printed form to 1e-9, which covers FP64's roundings.

    pasa divides once by the row sum; in real arithmetic both forms are equal.
    """
    dtype, numpy_type = fl
    for beta in (0.5, *TABLE_3_STARTS):
        expected = f_of_the_paper(beta, n, scale, numpy_type)
        assert practical_invariance(beta, n, scale=scale, dtype=dtype) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 80**-0.5, 128**-0.5])
@pytest.mark.parametrize("n", [1, 63, 128, 129])
def test_f_recovers_the_scores_best(n: int, scale: float, dtype: torch.dtype) -> None:
    """S' + f mean(S') has the exact row mean, and no other factor comes closer to scale * S in least squares."""
    beta = 0.9375
    f = practical_invariance(beta, n, scale=scale, dtype=dtype)
    true = scores(n)
    shifted = true @ shifting_matrix(n, beta, scale=scale, dtype=dtype).double()
    mean = shifted.mean(1, keepdim=True)
    torch.testing.assert_close((1 + f) * mean, scale * true.mean(1, keepdim=True), rtol=1e-12, atol=0)

    def error(factor: float) -> float:
        return float((shifted + factor * mean - scale * true).norm())

    assert error(f) < min(error(f * 1.0001), error(f * 0.9999))
    # What is left is the zero-mean part times (1 - a)/a: the rounding of the diagonal.
    residual = torch.finfo(dtype).eps * float((scale * (true - true.mean(1, keepdim=True))).norm())
    assert error(f) <= residual + 1e-12 * scale * float(true.norm())


@pytest.mark.parametrize("scale", [1.0, *(d**-0.5 for d in HEAD_DIMENSIONS)])
def test_fixed_points_reproduce_themselves(scale: float) -> None:
    for n in range(1, 513, 3):
        # Nearer to 1, some sizes have none: see test_some_ragged_blocks_have_no_fixed_point.
        for start in (0.9, 1 - 2**-4):
            beta, factor, iterations = optimal_beta(start, n, scale=scale)
            assert 0 < beta < 1
            assert iterations >= 1
            assert factor == practical_invariance(beta, n, scale=scale)
            assert invariance(beta) == pytest.approx(factor, rel=1e-6)
            again = optimal_beta(beta, n, scale=scale)
            assert again.iterations == 1
            assert again.beta == pytest.approx(beta, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, *FP8])
def test_every_format_has_fixed_points_or_says_why_not(dtype: torch.dtype) -> None:
    solved = 0
    for n in (4, 8, 32, 80, 128):
        for start in TABLE_3_STARTS:
            try:
                beta, factor, _ = optimal_beta(start, n, dtype=dtype)
            except NoOptimalBetaError as error:
                assert f"beta0={start!r} with n={n}" in str(error)  # noqa: PT017 - either outcome is right
            else:
                solved += 1
                # The stopping rule bounds the change of beta; the invariance amplifies it by 1 / (1 - beta).
                assert invariance(beta) == pytest.approx(factor, rel=shifting.TOLERANCE / (1 - beta))
    assert solved >= 10


def test_a_power_of_two_scale_changes_nothing() -> None:
    """A scale that is a power of two (d = 64) changes only the exponents of the entries, so beta stays the same."""
    for start in TABLE_3_STARTS:
        assert optimal_beta(start, 128, scale=1 / 8) == optimal_beta(start, 128)


@pytest.mark.parametrize(
    ("d", "expected"), [(80, "0.984122"), (128, "0.984711")], ids=["stable-video-diffusion", "qwen2"]
)
def test_another_scale_has_its_own_beta(d: int, expected: str) -> None:
    """Every scale has its own optimal beta.

    Table 3 leaves 1/sqrt(d) out, but the matrix in the algorithm includes it. With the table's
    beta, that matrix misses over one percent of the invariance.
    """
    scale = d**-0.5
    table, folded = optimal_beta(1 - 2**-6, 128), optimal_beta(1 - 2**-6, 128, scale=scale)
    assert f"{folded.beta:.6f}" == expected
    real = practical_invariance(table.beta, 128, scale=scale)
    assert abs(real - table.invariance) > 0.01 * table.invariance


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 600),
    betas=st.tuples(st.floats(0.001, 0.999), st.floats(0.001, 0.999)),
    scale=st.sampled_from([1.0, *(d**-0.5 for d in HEAD_DIMENSIONS)]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, *FP8]),
)
def test_the_iteration_is_monotone(n: int, betas: tuple[float, float], scale: float, dtype: torch.dtype) -> None:
    """A larger beta never has a smaller effective beta, which is why the fixed-point iteration cannot cycle."""
    effective = []
    for beta in sorted(betas):
        try:
            effective.append(1 - 1 / (1 + practical_invariance(beta, n, scale=scale, dtype=dtype)))
        except NoOptimalBetaError:
            effective.append(1.0)
    assert effective[0] <= effective[1] + 1e-12


def test_a_block_of_one_key_is_its_own_mean() -> None:
    beta, factor, _ = optimal_beta(0.984497, 1, scale=128**-0.5)
    key = torch.tensor([[30.0]], dtype=torch.float64)
    shifted = key @ shifting_matrix(1, beta, scale=128**-0.5).double()
    assert float(shifted + factor * shifted) == pytest.approx(30.0 * 128**-0.5, rel=1e-12)


def test_leaving_the_interval_is_an_error() -> None:
    """An iteration that leaves (0, 1) is an error: BF16 rounds the matrix of 0.999 to one that removes the whole mean.

    Nothing can recover a mean that was removed entirely.
    """
    with pytest.raises(
        NoOptimalBetaError, match=r"beta0=0\.999 with n=128, scale=1\.0, torch\.bfloat16 .*left \(0, 1\)"
    ):
        optimal_beta(0.999, 128, dtype=torch.bfloat16)
    with pytest.raises(NoOptimalBetaError, match="is singular"):
        practical_invariance(0.999, 128, dtype=torch.bfloat16)
    *_, last = beta_table(dtype=torch.bfloat16)
    assert last.invariance == pytest.approx(999)
    assert math.isnan(last.practical_invariance)
    assert math.isnan(last.optimised)


def test_some_ragged_blocks_have_no_fixed_point() -> None:
    """Some ragged blocks have no fixed point, but their mean can still be recovered.

    Story: with 1/sqrt(128) folded in, FP16 rounds the diagonal of every M near beta = 1 so low at n
    = 186 that the iteration from the paper's 0.984375 leaves (0, 1). A ragged last block may well
    have 186 keys. Its matrix still has an inverse, and f of the start value recovers the mean
    behind it.
    """
    scale, start, n = 128**-0.5, 1 - 2**-6, 186
    with pytest.raises(NoOptimalBetaError, match="start lower"):
        optimal_beta(start, n, scale=scale)
    assert 0 < optimal_beta(1 - 2**-4, n, scale=scale).beta < 1
    true = scores(n)
    mean = (true @ shifting_matrix(n, start, scale=scale).double()).mean(1)
    factor = practical_invariance(start, n, scale=scale)
    torch.testing.assert_close((1 + factor) * mean, scale * true.mean(1), rtol=1e-12, atol=0)


def test_a_lost_shift_is_an_error() -> None:
    """A matrix that no longer shifts is an error: under a scale of 1/16, E4M3 rounds the off-diagonal entry to 0."""
    with pytest.raises(NoOptimalBetaError, match=r"left \(0, 1\)"):
        optimal_beta(0.9, 128, scale=1 / 16, dtype=torch.float8_e4m3fn)


def test_the_iteration_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifting, "ITERATIONS_PER_KEY", 0)
    with pytest.raises(NoOptimalBetaError, match="did not converge in 0 steps"):
        optimal_beta(0.987654321, 77)


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "8"])
def test_bad_sizes_are_refused(n: Any) -> None:
    for call in (shifting_matrix, inverse_shifting_matrix):
        with pytest.raises(ValueError, match=f"n must be an integer >= 1, got {n!r}"):
            call(n, 0.5)
    with pytest.raises(ValueError, match=f"got {n!r}"):
        optimal_beta(0.5, n)
    with pytest.raises(ValueError, match=f"got {n!r}"):
        beta_table(n)


@pytest.mark.parametrize("beta", [-0.1, 1.5, math.nan, math.inf])
def test_bad_betas_are_refused(beta: float) -> None:
    for call in (
        lambda: shifting_matrix(8, beta),
        lambda: inverse_shifting_matrix(8, beta),
        lambda: invariance(beta),
        lambda: practical_invariance(beta, 8),
        lambda: optimal_beta(beta, 8),
    ):
        with pytest.raises(ValueError, match=rf"beta must lie in \[0, 1\), got {beta!r}"):
            call()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_bad_scales_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=f"scale must be positive and finite, got {scale!r}"):
        shifting_matrix(8, 0.5, scale=scale)


def test_other_bad_arguments_are_refused() -> None:
    for call in (lambda: invariance(1.0), lambda: optimal_beta(1.0, 8), lambda: practical_invariance(1.0, 8)):
        with pytest.raises(ValueError, match="singular"):
            call()
    with pytest.raises(ValueError, match=r"unknown number format torch\.float64"):
        shifting_matrix(8, 0.5, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"scale=100000\.0 carries the shifting matrix beyond the range of torch\.float16"
    ):
        optimal_beta(0.5, 8, scale=1e5)
