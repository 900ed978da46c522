"""pasa_attention on the CPU twin against the Python reference of the same arithmetic.

Bounds. A stored score may differ where an FP32 sum in another order falls on the other side of a rounding: by an ulp,
or, of a score next to its reference, by what such sums may differ: 2 (D + 2) 2^-24 (|q| |k'| + |rho|). So may the
log-sum-exp, by (D + 2) 2^-24 |q| |a_1| scale, where the frame q.a_1 is large.
"""

import pytest
import torch

from pasa import golden_attention
from pasa.eval.accuracy.rmse.cases import PAPER_CASES, RandomCase
from pasa.eval.random_calls import inputs
from pasa.eval.random_calls.judge import Arithmetic, judge
from pasa.eval.random_calls.truth import find_truth
from pasa.ops.attention.spec.shift_keys import shift_exact
from tests.adversaries import specks, spikes, stalled, sunken
from tests.ascend_c.kernel_runs import (
    BLOCK,
    LAUNCHES,
    Call,
    attend_by_reference,
    launch_attention,
    launch_shift,
    put_nan_behind_lengths,
    seen,
    shifted_by_reference,
    ulp,
)
from tests.inputs import pairwise
from tests.unlike_keys import CASES, allowed
from tests.unlike_keys import found as truth_of

# batch, heads, KV heads, queries, keys, head dim, causal
SHAPES = [
    (1, 1, 1, 128, 128, 64, False),
    (2, 2, 2, 64, 256, 128, False),
    (1, 4, 1, 63, 127, 128, True),
    (1, 7, 1, 1, 129, 80, False),
    (1, 7, 1, 129, 300, 64, True),
    (1, 4, 2, 300, 300, 80, True),
    (1, 2, 1, 129, 63, 128, True),  # the first rows see nothing
    (1, 1, 1, 2, 1, 64, False),
    (1, 1, 1, 200, 130, 256, True),
    (1, 1, 1, 257, 513, 96, True),
    (1, 2, 1, 63, 63, 64, True),  # nine fractals of scores: the largest product that a barrier must order
    (1, 1, 1, 50, 183, 144, False),  # the same behind a whole block, over two parts of the head dimension
    (1, 2, 1, 193, 100, 64, False),  # a vector core with one row: once without a barrier it needs
]


def make_call(batch, heads, kv_heads, rows, keys, dim, causal, bias=0.0, **how):
    g = torch.Generator().manual_seed(rows * 1000 + keys)
    q, k, v = (
        torch.randn(batch, n, s, dim, generator=g) for n, s in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    )
    return Call((q + bias).half(), (k + bias).half(), v.half(), causal=causal, **how)


def check_output(x, result, expected, lse_error=1e-3):
    """Check the output within 4 FP16 ulp at the row's scale, and the log-sum-exp.

    Its bound is `lse_error`, plus the error that its frame adds, plus 4 FP32 ulp.
    """
    scale = ulp(expected["out"].abs().amax(-1, keepdim=True))
    assert ((result["out"].double() - expected["out"].double()).abs() <= 4 * scale).all()
    empty = torch.isinf(expected["lse"])
    assert torch.equal(torch.isinf(result["lse"]), empty)
    anchor = shift_exact(x.k[:, :, :128].float().nan_to_num(), 1.0).anchor
    frame = x.q.norm(dim=-1).max() * anchor.norm(dim=-1).max() * x.softmax_scale
    slack = lse_error + (x.q.shape[-1] + 2) * 2.0**-24 * float(frame) * x.exact
    difference = (result["lse"] - expected["lse"]).abs() - 2.0**-21 * expected["lse"].abs()
    assert (difference[~empty] <= slack).all()
    assert torch.isfinite(result["out"]).all()


def check_scores(x, result, expected, shifted):
    """Check that 99.5 % of the visible scores have equal bits, and all keep the bound above."""
    visible = seen(x).expand_as(expected["scores"])
    keys = (
        shifted["keys"][:, :, : x.k.shape[2], : x.q.shape[-1]]
        .double()
        .repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    )
    sums = x.q.double().abs() @ keys.abs().mT
    rho = sums.amax(-1, keepdim=True)  # no larger than the largest score of a row
    slack = 2 * (x.q.shape[-1] + 2) * 2.0**-24 * (sums + rho)
    difference = (result["scores"].double() - expected["scores"].double()).abs()
    assert (result["scores"] == expected["scores"])[visible].double().mean() >= 0.995
    assert (difference <= torch.maximum(ulp(expected["scores"]), slack))[visible].all()


@pytest.mark.parametrize(("shape", "overflow", "exact"), pairwise(SHAPES, ("inf", "saturate"), (True, False)), ids=str)
def test_agrees_with_the_reference(kernels, shape, exact, overflow):
    x = make_call(*shape, exact=exact, overflow=overflow)
    shifted = shifted_by_reference(x)
    expected = attend_by_reference(x)
    first = None
    for mode, seed in LAUNCHES:
        result = launch_attention(kernels, x, shifted, mode=mode, seed=seed, groups=1 + seed % 3)
        assert result.report["ok"], result.report["fault"]
        assert sum(result.report["undefined"].values()) == 0
        if first is None:
            first = result
            check_output(x, result, expected)
            check_scores(x, result, expected, shifted)
        for name in ("out", "lse"):
            assert torch.equal(result[name], first[name]), (mode, seed, "the interleaving changed a number")
        visible = seen(x).expand_as(first["scores"])
        assert torch.equal(result["scores"][visible], first["scores"][visible])


@pytest.mark.parametrize("rows", [48, 49, 55, 56, 57, 62, 64 + 48, 64 + 51, 64 + 63])
def test_vector_cores_with_48_to_63_rows(kernels, rows):
    """Calls that take eight or sixteen rows at a time end within the last block of a vector core's 64 rows."""
    x = make_call(1, 1, 1, rows, 150, 64, rows % 2 == 0)
    shifted = shifted_by_reference(x)
    result, expected = launch_attention(kernels, x, shifted), attend_by_reference(x)
    assert result.report["ok"], result.report["fault"]
    check_output(x, result, expected)
    check_scores(x, result, expected, shifted)


@pytest.mark.parametrize("biases", [(300.0, 12.0), (12.0, 300.0), (300.0, 250.0)], ids=str)
def test_blocks_of_different_biases(kernels, biases):
    """Anchors that differ: the second block leaves the frame of the first, and in the last case it stays in it."""
    x = make_call(1, 2, 1, 70, 256, 64, False)
    for block, bias in zip(x.k.split(BLOCK, 2), biases, strict=True):
        block.add_(bias)
    shifted = launch_shift(kernels, x)
    assert shifted.report["ok"], shifted.report["fault"]
    expected = shifted_by_reference(x)
    assert (expected["anchors"][:, :, 3].abs() >= 1).all(), "the distance of the second anchor must not be 0"
    assert all(torch.equal(shifted[name], values) for name, values in expected.items())
    result, expected = launch_attention(kernels, x, shifted.arrays), attend_by_reference(x)
    assert result.report["ok"], result.report["fault"]
    check_output(x, result, expected)
    check_scores(x, result, expected, shifted)


@pytest.mark.parametrize("bias", [0.5, 8.0, 60.0])
def test_biased(kernels, bias):
    """The larger the sums beside the scores, the more of them fall on another side of a rounding."""
    x = make_call(1, 4, 2, 200, 300, 128, True, bias)
    shifted = shifted_by_reference(x)
    result, expected = launch_attention(kernels, x, shifted), attend_by_reference(x)
    assert result.report["ok"], result.report["fault"]
    check_output(x, result, expected)
    check_scores(x, result, expected, shifted)


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "paper"])
@pytest.mark.parametrize("case", [c for c in PAPER_CASES if c.paper_nan_share], ids=lambda c: c.name)
def test_cases_that_overflow_in_the_paper(kernels, case, exact, overflow):
    """Table 4, at a reduced length: no stored score is infinite, NaN or at the end of FP16's range."""
    reduced = RandomCase(case.distribution, case.mean, case.amplitude, shape=(1, 2, 256, 128))
    x = Call(*reduced.tensors(0), exact=exact, overflow=overflow)
    plain = x.q.float() @ x.k.float().mT
    shifted = launch_shift(kernels, x)
    assert shifted.report["ok"], shifted.report["fault"]
    result = launch_attention(kernels, x, shifted.arrays, groups=2)
    assert result.report["ok"], result.report["fault"]
    assert result["scores"].isfinite().all()
    assert (result["scores"].abs() < 65504).all()
    assert result.report["aic"]["overflows"] == {}, f"Q K^T alone reaches {plain.abs().max():.0f}"
    check_output(x, result, attend_by_reference(x))


@pytest.mark.parametrize(("exact", "overflow"), [(True, "inf"), (True, "saturate"), (False, "saturate")])
def test_scores_that_overflow(kernels, exact, overflow):
    """Each mode gives what its reference gives, where FP16 cannot hold the scores: their tiles are kept in FP32, or in
    the published recovery they saturate."""
    x = make_call(1, 2, 1, 130, 300, 64, True, exact=exact, overflow=overflow)
    x.q.mul_(300)
    x.k[:, :, ::7] *= 3000
    result, expected = launch_attention(kernels, x, shifted_by_reference(x)), attend_by_reference(x)
    assert result.report["ok"], result.report["fault"]
    visible = seen(x).expand_as(result["scores"])
    assert not (result["scores"].abs() < 65504)[visible].all(), "this data must overflow"
    check_output(x, result, expected)


def test_values_of_one_give_one(kernels):
    """The row sum is that of the weights as they multiply the values, rounded to FP16."""
    x = make_call(1, 2, 1, 100, 300, 64, True)
    x.v.fill_(1.0)
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    assert (result["out"] == 1).all()


@pytest.mark.parametrize("causal", [False, True])
def test_lengths(kernels, causal):
    """Keys beyond a length do not exist: NaN in them and in their values changes nothing."""
    x = make_call(4, 2, 1, 140, 300, 64, causal, lengths=torch.tensor([300, 129, 0, -5]))
    put_nan_behind_lengths(x)
    shifted = launch_shift(kernels, x)
    result = launch_attention(kernels, x, shifted.arrays)
    assert result.report["ok"], result.report["fault"]
    check_output(x, result, attend_by_reference(x))
    assert (result["out"][2] == 0).all()
    assert (result["lse"][2] == -torch.inf).all()


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("lengths", [None, torch.tensor([200, 129, 0])], ids=["whole", "lengths"])
def test_sinks(kernels, lengths, overflow):
    """A sink below, near and above a row's scores, far above them, and none. The first rows see no key."""
    sinks = torch.tensor([-5.0, 3.0, 20.0, 5000.0, -torch.inf])
    x = make_call(3, 5, 1, 230, 200, 64, True, lengths=lengths, sinks=sinks, overflow=overflow)
    shifted = launch_shift(kernels, x)
    result = launch_attention(kernels, x, shifted.arrays, groups=2)
    assert result.report["ok"], result.report["fault"]
    assert sum(result.report["undefined"].values()) == 0
    check_output(x, result, attend_by_reference(x))
    assert (result["out"][:, :, :30] == 0).all()
    assert torch.equal(result["lse"][:, :, :30], sinks[:, None].expand(3, 5, 30))


def test_sinks_that_are_not_finite(kernels):
    """Infinity takes all weight; NaN reaches all rows of its head, and no others."""
    x = make_call(1, 3, 1, 70, 150, 64, False, sinks=torch.tensor([torch.inf, 0.0, torch.nan]))
    result, expected = launch_attention(kernels, x, shifted_by_reference(x)), attend_by_reference(x)
    assert result.report["ok"], result.report["fault"]
    assert (result["out"][:, 0] == 0).all()
    assert result["lse"][:, 0].isposinf().all()
    for name in ("out", "lse"):
        assert result[name][:, 2].isnan().all()
        assert expected[name][:, 2].isnan().all()
        assert result[name][:, 1].isfinite().all()


@pytest.mark.parametrize("scale", [1e-4, 0.03, 1.0, 30.0, 100.0, 1000.0])
def test_any_scale(kernels, scale):
    x = make_call(1, 2, 1, 70, 200, 64, True, scale=scale)
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    check_output(x, result, attend_by_reference(x))


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("apart", [4000.0, 10000.0, 30000.0])
def test_anchors_far_apart(kernels, apart, overflow):
    """Once the weights of a tile were taken relative to a maximum that came through the frame of the first anchor and
    back: 2^28 nats on, FP32 rounds that by more than a weight, and the output was NaN or, saturating, wrong."""
    x = make_call(1, 1, 1, 70, 256, 128, False, overflow=overflow)
    x.q.add_(apart * (1 + 0.01 * torch.arange(70.0).view(1, 1, 70, 1)).half())
    x.k.mul_(50)
    x.k[:, :, :128] -= apart
    x.k[:, :, 128:] += apart
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    check_output(x, result, attend_by_reference(x))


@pytest.mark.parametrize("bias", [100.0, 4096.0, 30000.0])
@pytest.mark.parametrize("name", CASES)
def test_error_of_a_row_is_bounded_by_keys_that_it_sees(kernels, name, bias):
    """Story: an anchor of later keys, or a frame of keys without weight, entered FP32 sums of rows whose own scores
    were small: at a bias of 4096 outputs were wrong by 0.03 to 0.9, where FP32 SDPA errs by 0.001."""
    case = CASES[name](bias)
    x = Call(*case[:3], causal=case.how.get("is_causal", False))
    shifted = launch_shift(kernels, x)
    assert shifted.report["ok"], shifted.report["fault"]
    run = launch_attention(kernels, x, shifted.arrays)
    assert run.report["ok"], run.report["fault"]
    true, _ = truth_of(case)
    bound, lse_bound = allowed(case)
    assert ((run["out"].double() - true.out).abs() <= bound).all()
    assert ((run["lse"].double() - true.lse).abs() <= lse_bound).all()


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "paper"])
def test_rows_that_see_nothing_at_a_tiny_scale(kernels, exact):
    """Once such a row was a sum of values: a hidden score times the scale was not below every maximum."""
    x = make_call(1, 1, 1, 40, 30, 64, True, bias=3.0, scale=1e-5, exact=exact)
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    check_output(x, result, attend_by_reference(x))
    assert (result["out"][:, :, :10] == 0).all()


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "paper"])
@pytest.mark.parametrize("gap", [14.0, 17.5, 24.0])
def test_keys_behind_a_sink(kernels, gap, exact):
    """2,047 keys `gap` nats below the first one, which alone has a value of 0. exp(-17.5) is zero in FP16."""
    x = make_call(1, 1, 1, 64, 2048, 64, False, exact=exact)
    x.q.zero_()
    x.q[..., 0] = 8.0
    x.k.mul_(0.01)
    x.k[..., 0] = 0.0
    x.k[:, :, 0, 0] = gap
    x.v.fill_(1.0)
    x.v[:, :, 0] = 0.0
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    golden, _ = golden_attention(x.q, x.k, x.v)
    assert ((result["out"].double() - golden).abs() <= 4 * ulp(golden)).all()


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "paper"])
def test_clean_under_sanitizers(sanitized_kernels, exact):
    x = make_call(1, 2, 1, 70, 140, 64, True, exact=exact)
    for launch in (launch_shift, lambda *a: launch_attention(*a, shifted_by_reference(x))):
        result = launch(sanitized_kernels, x)
        assert result.report["ok"], result.report["fault"]


def test_function_errors_of_an_ulp_do_no_harm(kernels):
    """The device's Exp and Ln are not known to the last bit."""
    x = make_call(1, 2, 1, 100, 300, 64, True)
    result = launch_attention(kernels, x, shifted_by_reference(x), jitter=1)
    assert result.report["ok"], result.report["fault"]
    check_output(x, result, attend_by_reference(x))


@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_subnormal_results_of_exp_do_not_matter(kernels, spread):
    """FP16 holds no weight that is subnormal in FP32, and no output keeps a factor as small as that."""
    x = make_call(1, 2, 1, 100, 300, 64, True)
    x.q.mul_(spread)
    shifted = shifted_by_reference(x)
    kept, flushed = (launch_attention(kernels, x, shifted, flush=flush) for flush in (0, 1))
    for result in (kept, flushed):
        assert result.report["ok"], result.report["fault"]
    assert all(torch.equal(kept[name], flushed[name]) for name in ("out", "lse"))


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize(
    ("make", "scale"), [(spikes, 5e-5), (spikes, 1e-4), (specks, 2.0**30), (specks, 2.0**80), (spikes, 2.0**80)]
)
def test_scales_at_which_fp16_holds_no_score(kernels, make, scale, overflow):
    """Story: a score stored as 65504 was within reach of its reference at a tiny scale, and one stored as 0 at a large
    scale was not; neither was asked for in FP32. And of scores below -2^90 nats all weights were 0: NaN."""
    x = Call(*make(100), overflow=overflow, scale=scale)
    found = launch_attention(kernels, x, shifted_by_reference(x))
    assert found.report["ok"], found.report["fault"]
    true = find_truth(inputs.Call(x.q, x.k, x.v, None, False, scale))
    ratios = judge(true, found["out"], found["lse"], Arithmetic(x.q.dtype))
    assert not [name for name, value in ratios.items() if not value <= 1], ratios


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("scale", [0.125, 1.0, 2.0**20])
def test_scores_far_below_those_of_their_anchors(kernels, scale, overflow):
    """Story: a reference that had to be raised to fit into two FP16 numbers stood above all scores of its block, whose
    keys lost their weight, or, saturated, took that of all others.
    The first three rows see no key."""
    q, k, v = sunken(BLOCK, rows=2 * BLOCK + 3)
    x = Call(q, k, v, causal=True, overflow=overflow, scale=scale)
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    seen_of_block = torch.arange(-2, 2 * BLOCK + 1).clamp(min=0, max=BLOCK)  # value 1
    seen_at_all = torch.arange(-2, 2 * BLOCK + 1).clamp(min=1)
    mean = (seen_of_block / seen_at_all).double()
    assert ((result["out"][0, 0].double().T - mean).abs() <= 2.0**-11 * mean).all()
    check_output(x, result, attend_by_reference(x))


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
def test_thousands_of_roundings_do_not_carry_a_mean_past_the_largest_number(kernels, overflow):
    """Story: over 4,096 blocks O / l grew from 65504 to 65520, where FP16 is infinite, because O and l are rounded on
    their own."""
    q, k, v = stalled(4200, BLOCK, dim=16)
    x = Call(q, k, v, overflow=overflow, scale=1.0)
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    assert (result["out"] == 65504).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_does_not_hide_behind_the_largest_number(kernels, bad):
    """Outputs are kept within FP16's range; those that an infinity reaches are NaN."""
    x = make_call(1, 1, 1, 70, 140, 64, True)
    x.v[0, 0, 137, 5] = bad
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    reached = torch.isnan(result["out"][0, 0])
    assert reached[67:, 5].all()
    assert not torch.isinf(result["out"]).any()
    assert not reached[:, :5].any()
