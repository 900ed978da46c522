"""Rows that repeat their maximum: the published rule as printed and where it fails, and pasa's bounded rule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

import pasa
from pasa import PasaConfig
from pasa.ops.attention.options import AttentionOptions
from pasa.ops.attention.spec import attention as reference
from pasa.ops.attention.spec.attention import OnlineSoftmax
from pasa.ops.attention.spec.repeated_maxima import EPSILON, SMALLEST, SPREAD, bounded_shift, published_shift, repeats
from pasa.ops.attention.spec.scores import Block, ScoreTile
from pasa.ops.numerics.dither import round_unbiased
from pasa.ops.numerics.formats import FORMATS
from tests.inputs import fp16_naive_error, max_error, normal_qkv, rmse

DIM = 64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_blocks(count: int = 1000, keys: int = 32) -> Tensor:
    """Return FP64 scores with maxima positive, negative or 0, single, tied, close (in epsilon or not), or masked."""
    g = generator(7)
    scores = 4 * torch.randn(count, keys, generator=g, dtype=torch.float64)
    top = scores.amax(-1, keepdim=True)
    scores[::5] -= top[::5]  # the maximum becomes 0
    # The maximum falls below 0.
    scores[1::5] -= top[1::5] + 3 * torch.rand(len(top[1::5]), 1, generator=g, dtype=torch.float64)
    top = scores.amax(-1, keepdim=True)
    below = torch.tensor([0.0, 0.5, 0.999, 1.001, 2.0], dtype=torch.float64) * EPSILON
    for row in range(0, count, 2):
        where = torch.randperm(keys, generator=g)[:2]
        scores[row, where[0]] = top[row, 0]
        scores[row, where[1]] = top[row, 0] - below[row // 2 % len(below)]
    scores[3::7, ::3] = -torch.inf
    scores[6::97] = -torch.inf  # fully masked
    return scores


def printed_rule(row: list[float], beta: float, epsilon: float) -> float:
    """Apply lines 7 to 9 of Algorithm 3 (arXiv:2510.04212v2) to the maximum, number by number."""
    r_m = max(row)
    r_s = sum(1 for s in row if r_m - s <= epsilon)
    m1 = beta * r_m if r_m > 0 and r_s > 1 else r_m
    return 0.0 if r_m < 0 and r_s > 1 else m1


@pytest.mark.parametrize("beta", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("frame", [0.0, 5.0])
def test_published_rule_is_its_definition(beta, frame):
    """The published rule agrees with its definition on 1,000 random blocks.

    `frame` was subtracted from the true scores, and the rule must add it back.
    """
    true = random_blocks()
    top = true.amax(-1, keepdim=True)
    seen = top.squeeze(-1) > -torch.inf
    scores = true - frame
    got = (top + published_shift(scores, top - frame, frame, beta=beta)).squeeze(-1)[seen]
    expected = torch.tensor([printed_rule(row, beta, EPSILON) for row in true[seen].tolist()], dtype=torch.float64)
    if frame == 0:
        changed = expected != top.squeeze(-1)[seen]
        assert 300 < changed.sum() < 600
        assert (expected[changed] > 0).any()
        assert (expected[changed] == 0).any()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)  # (beta - 1) r + r is beta r up to FP64


def printed_algorithm(blocks: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Run lines 7 to 13 of Algorithm 3 in FP64, with the m'' of line 9 in line 10, where v2 prints m'."""
    m = torch.full((len(blocks[0]), 1), -torch.inf, dtype=torch.float64)
    total, out = torch.zeros_like(m), torch.zeros(len(m), values[0].shape[-1], dtype=torch.float64)
    for scores, v in zip(blocks, values, strict=True):
        rule = torch.tensor([[printed_rule(row, 2.0, EPSILON)] for row in scores.tolist()], dtype=torch.float64)
        m_new = torch.maximum(m, rule)
        p = torch.exp(scores - m_new)
        keep = torch.exp(m - m_new)
        m, total, out = m_new, keep * total + p.sum(-1, keepdim=True), keep * out + p @ v
    return m, total, out / total


def test_running_maximum_sum_and_output_are_those_of_the_printed_algorithm():
    """Running maximum, sum and output are those of the printed algorithm, over four blocks in FP32.

    The maximum and l agree to a few ulps, O to the rounding of P to FP16. A weight loses 2^-11 of itself, or
    2^-25 if it is subnormal. All 128 weights together then lose at most 128 * 2^-25, relative to l.
    """
    scores = random_blocks()
    scores = scores[(scores > -torch.inf).any(-1)]
    scores = scores[: len(scores) // 4 * 4].view(4, -1, scores.shape[-1]).float().double()
    values = [torch.randn(scores.shape[-1], 8, generator=generator(i), dtype=torch.float64) for i in range(4)]
    rows = scores.shape[1]
    softmax = OnlineSoftmax(torch.zeros(1, 1, 1, rows, 8), published_options(), FORMATS["fp32"])
    for index, (block, v) in enumerate(zip(scores, values, strict=True)):
        tile = ScoreTile(block, block.float().view(1, 1, 1, rows, -1))
        where = Block(index, torch.zeros(0), torch.zeros(0), None, None, softmax.maximum, 0)
        softmax.add(tile, where, v.float().view(1, 1, -1, 8))
    m, total, golden = printed_algorithm(list(scores), values)
    torch.testing.assert_close(softmax.maximum.view(-1, 1).double(), m, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(softmax.sum.view(-1, 1).double(), total, rtol=1e-5, atol=0)
    with pytest.warns(UserWarning, match="rows underflow"):  # blocks after one whose maximum was doubled
        out = softmax.finish(0.0)[0].view(rows, 8)
    bound = (2**-10 + 128 * 2**-25 / total) * max(v.abs().max() for v in values)
    assert ((out - golden).abs() <= bound).all()


def published_options() -> AttentionOptions:
    """Return options with FP32 scores and row sums, so that only the rule is compared."""
    return AttentionOptions(precision="fp32", softmax="unbiased_paper")


def tied_inputs(r_m: float, at: Iterable[int] = (3, 77), heads: int = 48, rows: int = 1, keys: int = 160):
    """Return q, k, v (1, heads, n, DIM) in FP16: scores of exactly r_m at the keys `at`, all others 13 to 16 below.

    Values are positive, of one binade, and independent from head to head. The other keys weigh 1e-4 together.
    """
    g = generator()
    q = torch.ones(1, heads, rows, DIM)
    scores = r_m - 13 - 3 * torch.rand(1, heads, keys, 1, generator=g)
    scores[:, :, list(at)] = r_m
    k = (scores / 8).expand(-1, -1, -1, DIM)  # 64 equal products over sqrt(64)
    v = 1 + torch.rand(1, heads, keys, DIM, generator=g)
    return q.half(), k.half(), v.half()


def attend(inputs, **config):
    how = {key: config.pop(key) for key in ("is_causal", "attn_mask", "return_lse") if key in config}
    return pasa.attention(*inputs, config=PasaConfig(**config), backend="reference", **how)


ARITHMETICS = {
    "exact": {},
    "exact, accumulate fp16": {"accumulate": "fp16"},
    "paper": {"recovery": "paper"},
    "paper, accumulate fp16": {"recovery": "paper", "accumulate": "fp16"},
    "fp16": {"precision": "fp16"},
    "fp32": {"precision": "fp32"},
    "partial": {"precision": "partial"},
}


@pytest.mark.parametrize("r_m", [20.0, 100.0, -20.0, -100.0])
def test_where_the_published_rule_underflows(r_m):
    """Pasa's rule stays finite and as accurate as FP32 where the published rule underflows.

    The published rule's largest weight is exp(-|r_m|), 0 in FP16, so every row is lost, and counted in a warning.
    The factor 1.5: stochastic rounding grows the error of the output by sqrt(2) at most where the dropped
    fractions are uniform, and P is rounded as in "fp32".
    """
    inputs = tied_inputs(r_m)
    golden, golden_lse = pasa.golden_attention(*inputs)
    assert (golden_lse - r_m - math.log(2)).abs().max() < 0.1
    with pytest.warns(UserWarning, match="weights of 48 rows underflow") as said:
        published = attend(inputs, softmax="unbiased_paper")
    assert [each.filename for each in said] == [__file__]  # the caller's file, not one of the package
    assert published.isnan().all()
    ours = attend(inputs, softmax="unbiased")
    assert ours.isfinite().all()
    assert rmse(ours, golden) <= 1.5 * rmse(attend(inputs, precision="fp32"), golden)


def test_the_warning_says_how_to_silence_it():
    inputs = tied_inputs(20.0)
    with pytest.warns(UserWarning, match="to silence: ") as said:
        attend(inputs, softmax="unbiased_paper")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(str(said[0].message).partition("to silence: ")[2].removesuffix(")"), {"warnings": warnings})
        attend(inputs, softmax="unbiased_paper")


@pytest.mark.parametrize("name", ARITHMETICS)
@pytest.mark.parametrize("r_m", [0.0, 20.0, 100.0])
def test_ours_composes_and_stays_as_near_as_without(name, r_m):
    """pasa's rule composes with every arithmetic and stays as accurate as without it.

    1.5 is explained above. 2^-11 of the values, one rounding of the output, is allowed where there is no error
    without it.
    """
    inputs = tied_inputs(r_m)
    golden, golden_lse = pasa.golden_attention(*inputs)
    out, lse = attend(inputs, softmax="unbiased", return_lse=True, **ARITHMETICS[name])
    plain, plain_lse = attend(inputs, return_lse=True, **ARITHMETICS[name])
    assert out.isfinite().all()
    assert rmse(out, golden) <= 1.5 * rmse(plain, golden) + 2**-11
    lse_error = (plain_lse - golden_lse).abs().max() + 2**-10 * max(1, abs(r_m))
    assert (lse - golden_lse).abs().max() <= 1.5 * lse_error


@pytest.mark.parametrize("name", ["exact", "paper", "fp32"])
@pytest.mark.parametrize("r_m", [4.0, -4.0])
def test_published_rule_is_attention_where_it_does_not_underflow(name, r_m):
    """The published rule is attention where it does not underflow.

    A weight of e^-4 keeps 11 bits in FP16. Weights 6 to 12 nats below it keep fewer: 2^-25 of e^-4, hence 2^-18
    of l.
    """
    inputs = tied_inputs(r_m)
    golden, golden_lse = pasa.golden_attention(*inputs)
    out, lse = attend(inputs, softmax="unbiased_paper", return_lse=True, **ARITHMETICS[name])
    assert max_error(out, golden) <= 2 * max_error(attend(inputs, **ARITHMETICS[name]), golden) + 2**-10
    assert (lse - golden_lse).abs().max() <= (2**-10 if name != "paper" else 2**-4)


@pytest.mark.parametrize("softmax", ["unbiased", "unbiased_paper"])
@pytest.mark.parametrize("name", ARITHMETICS)
def test_ties_in_different_blocks(softmax, name):
    """Ties in different blocks are harmless: the published rule looks only inside a block, so it changes nothing."""
    inputs = tied_inputs(20.0, at=(3, 150))
    golden, _ = pasa.golden_attention(*inputs)
    out, plain = attend(inputs, softmax=softmax, **ARITHMETICS[name]), attend(inputs, **ARITHMETICS[name])
    assert rmse(out, golden) <= 1.5 * rmse(plain, golden) + 2**-11


def test_the_bounded_shift_sees_ties_in_different_blocks():
    """The bounded shift detects ties in different blocks if products are rounded before they are divided.

    The later block's row is shifted, though its maximum is single.
    """
    inputs = tied_inputs(5.0, at=(3, 150))
    single = tied_inputs(5.0, at=(3,))
    for case, changes in ((inputs, True), (single, False)):
        out, plain = (attend(case, precision="fp16", softmax=softmax) for softmax in ("unbiased", "safe"))
        structured = torch.equal(out, plain)
        assert structured != changes


@pytest.mark.parametrize("softmax", ["unbiased", "unbiased_paper"])
@pytest.mark.parametrize("name", ARITHMETICS)
def test_causal_and_fully_masked_rows(softmax, name):
    """Rows of one key are not repeated maxima, rows without keys give 0 and -inf, and rows of equal scores means."""
    q, k, v = tied_inputs(0.0, at=range(12), heads=2, rows=20, keys=12)
    golden, golden_lse = pasa.golden_attention(q, k, v, is_causal=True)
    out, lse = attend((q, k, v), softmax=softmax, is_causal=True, return_lse=True, **ARITHMETICS[name])
    assert torch.equal(out[:, :, :8], torch.zeros_like(out[:, :, :8]))
    assert (lse[:, :, :8] == -torch.inf).all()
    assert torch.equal(out[:, :, 8], v[:, :, 0])
    naive = fp16_naive_error(q, k, v, golden, is_causal=True)
    assert max_error(out, golden) <= 8 * naive + 2**-9
    assert (lse - golden_lse)[:, :, 8:].abs().max() <= 2**-9
    mask = torch.ones(20, 12, dtype=torch.bool)
    mask[5] = False
    out, lse = attend((q, k, v), softmax=softmax, attn_mask=mask, return_lse=True, **ARITHMETICS[name])
    assert torch.equal(out[:, :, 5], torch.zeros_like(out[:, :, 5]))
    assert (lse[:, :, 5] == -torch.inf).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ["exact", "fp16"])
def test_a_maximum_of_zero_repeats_too(name):
    """A maximum of 0 counts as repeated. The published rule leaves r_m = 0 alone, so all its errors stay.

    Its small weights are rounded to multiples of 2^-24, those of the exact recovery to multiples of 2^-34. 98 of them
    differ by 98 * 2^-25 together, which moves an output in [1, 2) by at most one spacing, and few of them.
    """
    inputs = tied_inputs(0.0, keys=100)
    plain = attend(inputs, **ARITHMETICS[name])
    moved = (attend(inputs, softmax="unbiased_paper", **ARITHMETICS[name]) - plain).abs()
    assert moved.max() <= (2**-10 if name == "exact" else 0)
    assert (moved > 0).double().mean() <= 0.02
    assert not torch.equal(attend(inputs, softmax="unbiased", **ARITHMETICS[name]), plain)


@pytest.mark.parametrize("name", ARITHMETICS)
def test_ours_changes_few_random_rows(name):
    """pasa's rule changes at most 1 % of random rows; FP16 scores repeat by chance, and those rows are shifted."""
    inputs = normal_qkv((2, 2), (300, 160), DIM)
    golden, _ = pasa.golden_attention(*inputs)
    out, plain = attend(inputs, softmax="unbiased", **ARITHMETICS[name]), attend(inputs, **ARITHMETICS[name])
    changed = (out != plain).any(-1).double().mean()
    assert changed <= (0.01 if not rounds_products(name) else 0.2)
    assert rmse(out, golden) <= 1.02 * rmse(plain, golden)


def rounds_products(name: str) -> bool:
    """Return whether P V is rounded before it is divided by l, or O between blocks."""
    return "fp16" in name


@pytest.mark.parametrize(("dtype", "fmt"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp16")])
def test_outputs_are_rounded_once(monkeypatch, dtype, fmt):
    """Outputs are rounded once: BF16 directly from FP32.

    FP16 in between would remove the remainder that separates a tie from its neighbours.
    """
    seen = []

    def record(x, target, overflow):
        seen.append((target.name, rounded := round_unbiased(x, target, overflow)))
        return rounded

    monkeypatch.setattr(reference, "round_unbiased", record)
    inputs = [x.to(dtype) for x in tied_inputs(20.0)]
    out = attend(inputs, softmax="unbiased")
    assert out.dtype is dtype
    ((name, rounded),) = seen
    assert name == fmt
    assert torch.equal(out.float(), rounded.flatten(1, 2))


def test_the_published_rule_can_lose_a_block_and_go_on():
    """The published rule can lose a block without NaN; a warning reports it.

    A block of 19.9 is kept and one of two 20 underflows, so the output is that of the keys with less weight. A
    tie that weighs nothing in its row causes no warning.
    """
    q, k, v = tied_inputs(20.0, at=(130, 150))
    k[:, :, 3] = 19.875 / 8
    golden, _ = pasa.golden_attention(q, k, v)
    with pytest.warns(UserWarning, match="weights of 48 rows underflow"):
        out = attend((q, k, v), softmax="unbiased_paper")
    assert out.isfinite().all()
    assert max_error(out, golden) > 0.1
    k[:, :, 3] = 60 / 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = attend((q, k, v), softmax="unbiased_paper")
    assert max_error(out, pasa.golden_attention(q, k, v)[0]) < 2**-9


@pytest.mark.parametrize("name", ["exact", "exact, accumulate fp16"])
@pytest.mark.parametrize("overflow", ["inf", "saturate"])
def test_stochastically_rounded_outputs_stay_means_of_values(name, overflow):
    """Stochastically rounded outputs stay within the values, up to one FP16 number, and never exceed 65504.

    FP32's O / l may exceed the largest value by a rounding error.
    """
    q, k, v = tied_inputs(20.0, heads=256)
    v[..., ::4] = 65504
    v[..., 1::4] = -65504
    v[..., 2::4] *= 30000
    out = attend((q, k, v), softmax="unbiased", overflow=overflow, **ARITHMETICS[name])
    assert out.isfinite().all()
    step = torch.exp2(torch.frexp(out.double()).exponent.double() - 11)
    assert (out.double() <= v.amax(-2, keepdim=True).double() + step).all()
    assert (out.double() >= v.amin(-2, keepdim=True).double() - step).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounded_shift_is_bounded(dtype):
    """The bounded shift is 0.2 to 0.6 nats whatever the maximum, varies with the data, and is 0 for single maxima.

    So no weight underflows.
    """
    top = torch.cat([100 * torch.randn(4000, generator=generator(1)), torch.tensor([0.0, -0.0, 1e30, -1e30])])
    top = top.to(dtype).unsqueeze(-1)
    tied = torch.arange(len(top)).unsqueeze(-1) % 2 == 0
    shift = bounded_shift(tied, top)
    assert (shift[~tied] == 0).all()
    assert shift[tied].min() >= SMALLEST
    assert shift[tied].max() < SMALLEST + SPREAD + 1e-6
    # uniform: mean and spread within 5 sigma of 2,000 draws
    assert abs(shift[tied].mean() - SMALLEST - SPREAD / 2) < 5 * SPREAD / math.sqrt(12 * 2000)
    weights = torch.exp(-shift[tied])
    assert weights.max() < 0.82
    assert weights.min() > 0.5


def test_repeats_counts_within_epsilon():
    scores = torch.tensor(
        [[1.0, 1.0, 0.0], [1.0, 1 - 0.9e-3, 0.0], [1.0, 1 - 1.1e-3, 0.0], [2.0, -math.inf, -math.inf]]
    )
    assert repeats(scores, scores.amax(-1, keepdim=True)).squeeze(-1).tolist() == [True, True, False, False]


def test_no_warning_without_lost_rows():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(normal_qkv((1, 1), (20, 40), DIM), softmax="unbiased_paper")
        attend(tied_inputs(100.0), softmax="unbiased")
