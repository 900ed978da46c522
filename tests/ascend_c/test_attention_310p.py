"""Attention on the core of an Ascend 310P, on the CPU twin, against FP64 and the reference.

Bound of an output against FP64. A score errs by eps = 4 (D + 8) 2^-24 p: FP32 sums of q.k', q.f and q.(a - f), each of
at most p = scale sum |q||k| (of the key, its anchor or its frame, which are at most three times the key), and the few
roundings that join them. A weight errs by eps and by half an ulp of FP16, so a mean of values moves by at most
(2 eps + 2^-10) times their range. Its own rounding adds half an ulp, and n weights that vanish n 2^-36 of the range.
"""

import pytest
import torch

from pasa import golden_attention
from pasa.eval.accuracy.rmse.cases import PAPER_CASES, RandomCase
from pasa.eval.random_calls import inputs
from pasa.eval.random_calls.judge import Arithmetic, judge
from pasa.eval.random_calls.truth import find_truth
from tests.adversaries import specks, spikes, stalled, sunken
from tests.ascend_c.kernel_runs import (
    BLOCK,
    LAUNCHES,
    Call,
    attend_by_reference,
    put_nan_behind_lengths,
    shifted_by_reference,
    ulp,
)
from tests.ascend_c.runs_310p import attend, fractals, launch_attention, launch_shift, rows_of
from tests.ascend_c.test_attention import SHAPES, check_output, make_call
from tests.ascend_c.twin_build import TWIN
from tests.unlike_keys import CASES, allowed
from tests.unlike_keys import found as truth_of

UNIT = 2.0**-24


@pytest.fixture
def kernels(kernels_310p):
    """The 310P's kernels, and a launch of each."""
    return kernels_310p


def run(kernels, x, **options):
    """Return the result of a call that must end without a fault, an undefined byte or a saturated number."""
    result = attend(kernels, x, **options)
    assert result.report["ok"], result.report["fault"]
    assert sum(result.report["undefined"].values()) == 0
    assert result.report["ai"]["overflows"] == {}
    return result


def check_against_reference(x, result):
    """Check against the reference, which stores a score in FP16, off by up to 2^-8 nats."""
    check_output(x, result, attend_by_reference(x), 2.0**-8)


def check_against_fp64(x, result):
    """Check an output against the bound above; no key may be masked out but by causality."""
    golden, lse = golden_attention(x.q, x.k, x.v, is_causal=x.causal, scale=x.softmax_scale)
    heads = x.q.shape[1] // x.k.shape[1]
    k, v = (each.double().repeat_interleave(heads, 1) for each in (x.k, x.v))
    products = x.softmax_scale * (x.q.double().abs() @ k.abs().mT).amax(-1, keepdim=True)
    eps = 4 * (x.q.shape[-1] + 8) * UNIT * products
    spread = v.amax(-2, keepdim=True) - v.amin(-2, keepdim=True)
    bound = (2 * eps + 2.0**-10 + x.k.shape[2] * 2.0**-36) * spread + 2.0**-11 * golden.abs() + UNIT
    assert ((result["out"].double() - golden).abs() <= bound).all()
    sees = torch.isfinite(lse)
    assert torch.equal(sees, torch.isfinite(result["lse"]))
    slack = eps.squeeze(-1) + 2.0**-10 + 4 * UNIT * lse.abs()
    assert ((result["lse"].double() - lse).abs() <= slack)[sees].all()
    assert (result["out"][~sees] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_fp64_and_the_reference_in_every_interleaving(kernels, shape):
    x = make_call(*shape, overflow="saturate")
    first = None
    for mode, seed in LAUNCHES:
        result = run(kernels, x, mode=mode, seed=seed, cores=1 + seed % 3)
        if first is None:
            first = result
            check_against_fp64(x, result)
            check_against_reference(x, result)
        for name in ("out", "lse"):
            assert torch.equal(result[name], first[name]), (mode, seed, "the interleaving changed a number")


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 47, 63, 64, 65, 127, 130])
def test_any_number_of_rows(kernels, rows):
    x = make_call(1, 2, 1, rows, 150, 64, rows % 2 == 0)
    check_against_fp64(x, run(kernels, x))


@pytest.mark.parametrize("dim", range(16, 257, 16))
def test_every_head_dim_fits_and_runs(kernels, dim):
    """The twin knows how large the memories are."""
    x = make_call(1, 1, 1, 70, 130, dim, False)
    check_against_fp64(x, run(kernels, x))


def test_no_score_leaves_the_core(kernels):
    """Bytes that leave UB are weights on their way to L1, outputs and log-sum-exps, and nothing else."""
    x = make_call(1, 1, 1, 128, 512, 128, False)
    report = run(kernels, x).report["ai"]
    rows, keys, dim = 128, 512, 128
    assert report["bytes"]["MTE3"] == rows * keys * 2 + rows * dim * 2 + rows * 4
    assert report["bytes"]["FIX"] == 0


@pytest.mark.parametrize("shape", [(2, 2, 300, 64), (1, 1, 128, 256), (1, 2, 129, 16)], ids=str)
def test_keys_and_values_are_laid_out_as_fractals(kernels, shape):
    """K' and anchors are those of the reference, V is unchanged, and both end with zeros up to 16 rows."""
    g = torch.Generator().manual_seed(3)
    k, v = (torch.randn(*shape, generator=g).half() for _ in "kv")
    x = Call(k, k, v)
    result, expected = launch_shift(kernels, x), shifted_by_reference(x)
    assert result.report["ok"], result.report["fault"]
    keys, rows = shape[2], -(-shape[2] // 16) * 16
    for name in ("keys", "anchors", "units"):
        actual = rows_of(result[name], keys) if name == "keys" else result[name]
        assert (actual == expected[name]).double().mean() >= 0.995, name
    assert torch.equal(rows_of(result["values"], keys), v)
    for name in ("keys", "values"):
        assert (rows_of(result[name], rows)[:, :, keys:] == 0).all()
    assert torch.equal(rows_of(fractals(v), keys), v)


# ---- overflow


@pytest.mark.parametrize("case", PAPER_CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("saturate_float", [0, 1])
def test_the_papers_cases(kernels, case, saturate_float):
    """Table 4, at a reduced length: the chip saturates, and no number does, whether FP32 saturates there or not."""
    reduced = RandomCase(case.distribution, case.mean, case.amplitude, shape=(1, 2, 256, 128))
    x = Call(*reduced.tensors(0), overflow="saturate")
    result = run(kernels, x, cores=2, saturate_float=saturate_float)
    check_against_fp64(x, result)
    check_against_reference(x, result)


def test_scores_that_fp16_cannot_hold(kernels):
    """Products of 10^7, which FP16 would cut off at 65504: not one number saturates on their way to the output."""
    x = make_call(1, 2, 1, 130, 300, 64, True, overflow="saturate")
    x.q.mul_(300)
    x.k[:, :, ::7] *= 3000
    assert (x.q.double() @ x.k.double().mT).abs().max() > 100 * 65504
    result = run(kernels, x)
    true = find_truth(inputs.Call(x.q, x.k, x.v, None, True, x.softmax_scale))
    ratios = judge(true, result["out"], result["lse"], Arithmetic(x.q.dtype))
    assert not [name for name, value in ratios.items() if not value <= 1], ratios


def test_the_twin_counts_what_saturates(kernels):
    """A sum of values beyond FP32: the count that the other tests want to be empty is not always empty."""
    x = make_call(1, 1, 1, 16, 16, 16, False)
    x.q.fill_(60000.0)
    x.k.fill_(60000.0)
    shifted = shifted_by_reference(x) | {"values": fractals(x.v)}
    shifted["keys"] = fractals(torch.full_like(x.k, 60000.0))
    shifted["units"] = torch.full_like(shifted["units"], 1e-35)
    result = launch_attention(kernels, x, shifted)
    assert result.report["ok"], result.report["fault"]
    assert result.report["ai"]["overflows"]


@pytest.mark.parametrize(
    ("make", "scale"), [(spikes, 5e-5), (spikes, 1e-4), (specks, 2.0**30), (specks, 2.0**80), (spikes, 2.0**80)]
)
def test_scales_at_which_fp16_holds_no_score(kernels, make, scale):
    x = Call(*make(100), scale=scale)
    result = run(kernels, x)
    true = find_truth(inputs.Call(x.q, x.k, x.v, None, False, scale))
    ratios = judge(true, result["out"], result["lse"], Arithmetic(x.q.dtype))
    assert not [name for name, value in ratios.items() if not value <= 1], ratios


def test_thousands_of_roundings_do_not_carry_a_mean_past_the_largest_number(kernels):
    q, k, v = stalled(4200, BLOCK, dim=16)
    result = run(kernels, Call(q, k, v, scale=1.0))
    assert (result["out"] == 65504).all()


# ---- accuracy


@pytest.mark.parametrize("bias", [0.0, 8.0, 60.0, 1000.0])
def test_a_shared_bias_costs_no_digits(kernels, bias):
    """The RMS error is at most 1.25 times that of FP32 scores whose keys have no bias, with weights rounded to FP16."""
    x = make_call(1, 2, 1, 128, 384, 64, False)
    q = x.q.clone()
    q[..., 0] = bias  # a bias of the first column's products, the same for all keys of a row
    x.k[..., 0] = 0.0
    shifted = Call(q, x.k.clone(), x.v)
    shifted.k[..., 0] = bias
    golden, _ = golden_attention(shifted.q, shifted.k, shifted.v)
    q[..., 0] = 0.0
    weights = torch.softmax(q.float() @ x.k.float().mT * x.softmax_scale, -1)
    weights = (weights / weights.amax(-1, keepdim=True) * 1024).half().float()
    naive = ((weights @ x.v.float()) / weights.sum(-1, keepdim=True)).half()
    ours = run(kernels, shifted)["out"]
    errors = [float((out.double() - golden).square().mean().sqrt()) for out in (ours, naive)]
    assert errors[0] <= 1.25 * errors[1], errors


@pytest.mark.parametrize("bias", [100.0, 4096.0, 30000.0])
@pytest.mark.parametrize("name", CASES)
def test_error_of_a_row_is_bounded_by_keys_that_it_sees(kernels, name, bias):
    case = CASES[name](bias)
    result = run(kernels, Call(*case[:3], causal=case.how.get("is_causal", False)))
    true, _ = truth_of(case)
    bound, lse_bound = allowed(case)
    assert ((result["out"].double() - true.out).abs() <= bound).all()
    assert ((result["lse"].double() - true.lse).abs() <= lse_bound).all()


@pytest.mark.parametrize("apart", [4000.0, 10000.0, 30000.0])
def test_anchors_far_apart(kernels, apart):
    """Scores of 2^28 nats, in two blocks: FP32 rounds sums of them by more than a weight."""
    x = make_call(1, 1, 1, 70, 256, 128, False, overflow="saturate")
    x.q.add_(apart * (1 + 0.01 * torch.arange(70.0).view(1, 1, 70, 1)).half())
    x.k.mul_(50)
    x.k[:, :, :128] -= apart
    x.k[:, :, 128:] += apart
    check_against_reference(x, run(kernels, x))


@pytest.mark.parametrize("scale", [1e-4, 0.03, 1.0, 30.0, 100.0, 1000.0, 1e6])
def test_any_scale(kernels, scale):
    """Scores up to 10^7 nats: FP32 rounds no reference so far below a score that a weight saturates."""
    x = make_call(1, 2, 1, 70, 200, 64, True, scale=scale)
    check_against_reference(x, run(kernels, x))


@pytest.mark.parametrize("exponent", range(14, 41))
def test_weights_stay_finite_on_every_grid_of_fp32(kernels, exponent):
    """Equal scores of 2^exponent nats and a little: an output is the mean of its values, and no weight saturates."""
    g = torch.Generator().manual_seed(exponent)
    q, k = (torch.ones(1, 1, n, 16).half() for n in (16, 40))
    v = torch.randn(1, 1, 40, 16, generator=g).half()
    q.mul_(1 + torch.arange(16.0).view(1, 1, 16, 1) / 64)
    k[:, :, 1::2] = -1
    result = run(kernels, Call(q, k, v, scale=2.0 ** (exponent - 4)))
    mean = v[:, :, ::2].double().mean(2, keepdim=True)
    assert ((result["out"].double() - mean).abs() <= 2.0**-11 * mean.abs() + 2.0**-18).all()


@pytest.mark.parametrize("gap", [14.0, 17.5, 24.0])
def test_keys_behind_a_sink(kernels, gap):
    """2,047 keys `gap` nats below the first one, which alone has a value of 0. exp(-17.5) is zero in FP16."""
    x = make_call(1, 1, 1, 64, 2048, 64, False)
    x.q.zero_()
    x.q[..., 0] = 8.0
    x.k.mul_(0.01)
    x.k[..., 0] = 0.0
    x.k[:, :, 0, 0] = gap
    x.v.fill_(1.0)
    x.v[:, :, 0] = 0.0
    golden, _ = golden_attention(x.q, x.k, x.v)
    assert ((run(kernels, x)["out"].double() - golden).abs() <= 4 * ulp(golden)).all()


def test_values_of_one_give_one(kernels):
    """The row sum is that of the weights as they multiply the values, rounded to FP16."""
    x = make_call(1, 2, 1, 100, 300, 64, True)
    x.v.fill_(1.0)
    assert (run(kernels, x)["out"] == 1).all()


def test_more_blocks_than_offsets_fit(kernels):
    """Products of anchors are made for 32 blocks at a time."""
    x = make_call(1, 1, 1, 20, 66 * BLOCK, 16, True)
    x.k.add_(torch.randint(-20, 20, (66,)).half().repeat_interleave(BLOCK).view(1, 1, -1, 1))
    check_against_fp64(x, run(kernels, x))


# ---- which keys a row sees


@pytest.mark.parametrize("causal", [False, True])
def test_lengths(kernels, causal):
    """Keys beyond a length do not exist: NaN in them and in their values changes nothing."""
    x = make_call(4, 2, 1, 140, 300, 64, causal, lengths=torch.tensor([300, 129, 0, -5]))
    put_nan_behind_lengths(x)
    result = run(kernels, x)
    check_against_reference(x, result)
    assert (result["out"][2] == 0).all()
    assert (result["lse"][2] == -torch.inf).all()


def test_rows_that_see_nothing_at_a_tiny_scale(kernels):
    x = make_call(1, 1, 1, 40, 30, 64, True, bias=3.0, scale=1e-5)
    result = run(kernels, x)
    check_against_reference(x, result)
    assert (result["out"][:, :, :10] == 0).all()


def test_scores_far_below_those_of_their_anchors(kernels):
    q, k, v = sunken(BLOCK, rows=2 * BLOCK + 3)
    x = Call(q, k, v, causal=True, scale=0.125, overflow="saturate")
    check_against_reference(x, run(kernels, x))


# ---- what the device may do otherwise


def test_clean_under_sanitizers(twin_program):
    kernels = twin_program("kernels_310p", include=[TWIN.parent], define=["PASA_CPU_TWIN"])
    run(kernels, make_call(1, 2, 1, 70, 140, 64, True))


def test_function_errors_of_an_ulp_do_no_harm(kernels):
    x = make_call(1, 2, 1, 100, 300, 64, True)
    check_against_fp64(x, run(kernels, x, jitter=1))


@pytest.mark.parametrize("spread", [1.0, 20.0])
def test_subnormal_results_of_exp_do_not_matter(kernels, spread):
    x = make_call(1, 2, 1, 100, 300, 64, True)
    x.q.mul_(spread)
    kept, flushed = (run(kernels, x, flush=flush) for flush in (0, 1))
    assert all(torch.equal(kept[name], flushed[name]) for name in ("out", "lse"))


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rows": 0}, "rows=0 must be above 0"),
        ({"dim": 72}, "dim=72 must be a multiple of 16, from 16 to 256"),
        ({"scale": "inf"}, "scale must be positive and finite"),
        ({"exact": 0}, "an Ascend 310P has no kernel of the published recovery"),
        ({"to_bf16": 1}, "an Ascend 310P has no BF16"),
        ({"unbiased_columns": 64}, "an Ascend 310P has no unbiased rounding: its vector unit does not shift"),
        (
            {"mask": 1, "causal": 1},
            "a mask comes alone: it has to hide what a causal mask, a window or lengths hide",
        ),
        ({"token_rows": 3}, "rows=100 are no multiple of token_rows=3"),
    ],
)
def test_what_the_chip_or_its_kernel_lacks_is_refused(kernels, changes, sentence):
    good = {"batch": 1, "heads": 8, "kv_heads": 2, "rows": 100, "keys": 100, "dim": 128, "scale": 0.0884}
    assert kernels.run("plan", **good)["ok"]
    assert kernels.run("plan", **(good | changes))["fault"]["sentence"] == sentence
