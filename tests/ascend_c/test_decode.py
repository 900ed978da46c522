"""The kernels of decoding on the CPU twin against FP64, the rules of a row's error, and an emulation of its arithmetic.

Bounds. A score is an FP32 sum of D products, so it errs by (D + 1) 2^-24 sum |q||k| scale; a weight is rounded to FP16.
The emulation differs from the kernel for Atlas A2 by the order of FP32 sums alone, and by parts merged in FP32. That
may turn the rounding of a weight, 2^-11 of it, and then that of the output: an FP16 ulp at the row's scale.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from pasa import golden_attention
from pasa.eval.random_calls import inputs
from pasa.eval.random_calls.judge import Arithmetic, judge
from pasa.eval.random_calls.truth import find_truth
from tests.adversaries import specks, spikes, stalled, sunken
from tests.ascend_c.decode_runs import emulate, launch_decode, make_call, put_into_pages
from tests.ascend_c.kernel_runs import BLOCK, LAUNCHES, Call, Run, put_nan_behind_lengths, ulp
from tests.ascend_c.twin_build import TWIN, Program
from tests.inputs import pairwise
from tests.unlike_keys import CASES, allowed
from tests.unlike_keys import found as truth_of

# batch, heads, KV heads, queries, keys, head dim
SHAPES = [
    (1, 1, 1, 1, 128, 64),
    (1, 7, 1, 1, 300, 128),
    (2, 4, 2, 1, 1000, 64),
    (1, 4, 2, 3, 515, 80),
    (1, 8, 1, 8, 257, 256),  # a whole tile of 64 rows, and two parts of the head dimension
    (1, 1, 1, 1, 1, 64),
    (1, 2, 2, 5, 3, 16),  # the first queries see nothing if causal; one vector core has no columns
    (3, 2, 1, 9, 140, 32),
    (1, 64, 1, 1, 200, 96),
    (1, 3, 1, 50, 129, 48),  # tiles of 21 tokens
    (5, 1, 1, 1, 129, 144),  # one row a tile: the other vector core has none
]


@dataclass(frozen=True)
class Decoder:
    """Hold the kernel of a chip and an overflow mode. On a 310P a launch may not saturate any number."""

    program: Program
    overflow: str
    core: str
    cores: int

    def __call__(self, x: Call, pages=None, **options) -> Run:
        result = launch_decode(self.program, replace(x, overflow=self.overflow), pages, **options)
        assert result.report["ok"], result.report["fault"]
        assert sum(result.report["undefined"].values()) == 0
        assert self.core == "aiv" or result.report[self.core]["overflows"] == {}
        return result


KINDS = {"A2, inf": ("kernels", "inf", "aiv", 20), "A2, saturate": ("kernels", "saturate", "aiv", 20),
         "310P": ("kernels_310p", "saturate", "ai", 8)}  # fmt: skip


@pytest.fixture(params=KINDS)
def decode(request):
    program, *rest = KINDS[request.param]
    return Decoder(request.getfixturevalue(program), *rest)


def check(x: Call, result) -> None:
    """Check a result against FP64 by the bounds of random calls."""
    true = find_truth(inputs.Call(x.q, x.k, x.v, None, x.causal, x.softmax_scale), fp16_scores=False, chunks=5)
    ratios = judge(true, result["out"], result["lse"], Arithmetic(x.q.dtype))
    assert not [name for name, value in ratios.items() if not value <= 1], ratios


@pytest.mark.parametrize(
    ("shape", "decode", "causal"), pairwise(SHAPES, tuple(KINDS), (False, True)), indirect=["decode"], ids=str
)
def test_agrees_with_the_emulation_and_with_fp64(decode, shape, causal):
    """Outputs are within one ulp of the emulation, or two on a 310P, whose weights have another reference."""
    x = make_call(*shape, causal=causal)
    out, lse = emulate(x)
    spacing = (1 if decode.core == "aiv" else 2) * ulp(out.abs().amax(-1, keepdim=True))
    first = {}
    for mode, seed in LAUNCHES:
        groups = (1, 2, 5)[seed % 3]
        result = decode(x, mode=mode, seed=seed, groups=groups)
        check(x, result)
        assert ((result["out"].double() - out.double()).abs() <= spacing).all()
        assert torch.equal(lse.isinf(), result["lse"].isinf())
        assert ((result["lse"] - lse).abs().nan_to_num() <= 2e-4).all()
        same = first.setdefault(groups, result)
        assert all(torch.equal(result[name], same[name]) for name in ("out", "lse")), "an interleaving changed a number"


def test_emulated_rounding_of_weights_is_what_the_kernel_rounds(kernels):
    """Most outputs have the bits of the emulation: a weight of another lift, or one that is not rounded, has not."""
    x = make_call(1, 7, 1, 1, 900, 128)
    result = launch_decode(kernels, x)
    assert (result["out"] == emulate(x)[0]).double().mean() >= 0.95


@pytest.mark.parametrize("groups", [1, 2, 3, 8, 20])
def test_parts_of_the_keys_are_merged(decode, groups):
    """Parts of no, one or several blocks, with maxima that differ by 400 nats; some cores have no part."""
    x = make_call(1, 4, 2, 2, 1200, 64, causal=True)
    x.k.mul_(torch.linspace(1, 40, 1200).view(1, 1, -1, 1))
    check(x, decode(x, groups=min(groups, decode.cores)))


@pytest.mark.parametrize("bias", [8.0, 60.0, 1000.0])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_bias_of_all_keys_costs_no_accuracy(decode, bias, groups):
    """Keys lose a frame without rounding: scores are as accurate as those of keys without the bias.

    FP32 scores of the keys as they are would err by 2^-24 of q.k, up to 0.1 nats here.
    """
    x = make_call(1, 4, 1, 3, 700, 64, causal=True)
    x = replace(x, k=(x.k.float() + bias).half())
    plain = replace(x, k=(x.k.float() - bias).half())
    assert torch.equal((plain.k.float() + bias).half(), x.k)
    x.q.add_(bias / 8)
    plain.q.copy_(x.q)
    found, expected = (decode(each, groups=groups) for each in (x, plain))
    spacing = ulp(expected["out"].abs().amax(-1, keepdim=True))
    assert ((found["out"].double() - expected["out"].double()).abs() <= (4 if bias > 8 else 8) * spacing).all()
    golden, golden_lse = golden_attention(x.q, x.k, x.v, is_causal=True)
    assert ((found["out"].double() - golden).abs() <= 8 * spacing).all()
    assert ((found["lse"] - golden_lse).abs() <= 1e-3 + 2.0**-20 * golden_lse.abs()).all()


@pytest.mark.parametrize("bias", [100.0, 4096.0, 30000.0])
@pytest.mark.parametrize("name", CASES)
def test_error_of_a_row_is_bounded_by_keys_that_it_sees(decode, name, bias):
    """Story: a frame of keys without weight enters sums of rows whose own scores are small. Parts merge in a frame that
    all of them have, so no part pays for the keys of another."""
    case = CASES[name](bias)
    x = Call(*case[:3], causal=case.how.get("is_causal", False))
    true, _ = truth_of(case)
    bound, lse_bound = allowed(case)
    for groups in (1, 3):
        run = decode(x, groups=groups)
        assert ((run["out"].double() - true.out).abs() <= bound).all()
        assert ((run["lse"].double() - true.lse).abs() <= lse_bound).all()


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(decode, causal, groups):
    """Keys beyond a length do not exist: NaN in them and in their values changes nothing."""
    x = make_call(4, 2, 1, 30, 300, 64, causal=causal, lengths=torch.tensor([300, 129, 0, -5]))
    put_nan_behind_lengths(x)
    result = decode(x, groups=groups)
    assert (result["out"][2:] == 0).all()
    assert (result["lse"][2:] == -torch.inf).all()
    for b, length in enumerate((300, 129)):
        mask = torch.ones(30, length, dtype=torch.bool)
        if causal:  # aligned to the last key that there is room for
            mask = torch.arange(length) <= torch.arange(30).unsqueeze(1) + 270
        golden, golden_lse = golden_attention(x.q[b : b + 1], x.k[b : b + 1, :, :length], x.v[b : b + 1, :, :length],
                                              attn_mask=mask)  # fmt: skip
        assert ((result["out"][b].double() - golden[0]).abs() <= 8 * ulp(golden[0].abs().amax(-1, keepdim=True))).all()
        assert ((result["lse"][b] - golden_lse[0]).abs() <= 1e-3).all()


@pytest.mark.parametrize("groups", [1, 3])
def test_sinks(decode, groups):
    """A sink below, near and above a row's scores, far above them, and none. The first tokens see no key."""
    sinks = torch.tensor([-5.0, 3.0, 20.0, 5000.0, -torch.inf, 1.0])
    x = make_call(2, 6, 2, 21, 20, 64, causal=True, sinks=sinks)
    result = decode(x, groups=groups)
    golden, golden_lse = golden_attention(x.q, x.k, x.v, is_causal=True, sinks=sinks)
    assert ((result["out"].double() - golden).abs() <= 4 * ulp(golden.abs().amax(-1, keepdim=True)) + 2.0**-24).all()
    assert (result["out"][:, :, 0] == 0).all()
    assert torch.equal(result["lse"][:, :, 0], sinks.expand(2, 6))
    assert ((result["lse"] - golden_lse)[:, :, 1:].abs() <= 1e-3).all()


@pytest.mark.parametrize("scale", [2.0**-80, 1e-4, 0.03, 1.0, 100.0, 2.0**40, 2.0**80])
def test_any_scale(decode, scale):
    x = make_call(1, 4, 1, 3, 200, 64, causal=True, scale=scale)
    check(x, decode(x, groups=2))


@pytest.mark.parametrize(("make", "scale"), [(spikes, 1e-4), (specks, 2.0**30), (specks, 2.0**80), (spikes, 2.0**80)])
def test_scores_that_fp16_does_not_hold(decode, make, scale):
    x = Call(*make(100), scale=scale)
    check(x, decode(x))


@pytest.mark.parametrize("groups", [1, 2])
def test_scores_far_below_those_of_other_blocks(decode, groups):
    q, k, v = sunken(BLOCK, rows=2 * BLOCK + 3)
    x = Call(q, k, v, causal=True, scale=1.0)
    check(x, decode(x, groups=groups))


def test_thousands_of_roundings_do_not_carry_a_mean_past_the_largest_number(decode):
    q, k, v = stalled(4200, BLOCK, dim=16)
    x = Call(q[:, :, :2], k, v, scale=1.0)
    result = decode(x)
    assert (result["out"] == 65504).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_makes_its_column_nan(kernels, bad):
    x = make_call(1, 4, 2, 1, 300, 64)
    x.v[0, 1, 200, 5] = bad
    result = launch_decode(kernels, x, groups=3)
    assert result.report["ok"], result.report["fault"]
    assert torch.isnan(result["out"][0, 2:, 0, 5]).all()
    assert torch.isfinite(result["out"][0, :2]).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_key_that_is_not_finite_reaches_the_matrix_unit_as_nan(kernels, bad):
    """A score of -inf would be a key without weight; the twin reports NaN, which the device should not be fed."""
    x = make_call(1, 4, 2, 1, 300, 64)
    x.k[0, 1, 200, 5] = bad
    fault = launch_decode(kernels, x, groups=3).report["fault"]
    assert (fault["kind"], fault["call"]) == ("nan", "Mmad")


@pytest.mark.parametrize("dim", range(16, 257, 16))
def test_every_head_dim_fits_and_runs(decode, dim):
    """The twin knows how large the memories are."""
    x = make_call(1, 20, 1, 3, 130, dim, causal=True)
    check(x, decode(x, groups=2))


@pytest.mark.parametrize("option", ["jitter", "flush"])
def test_what_the_device_may_do_otherwise_does_no_harm(decode, option):
    """Exp and Ln that err by an ulp, or take subnormal numbers for 0."""
    x = make_call(1, 4, 2, 2, 400, 64, bias=2.0, causal=True)
    check(x, decode(x, groups=3, **{option: 1}))


@pytest.mark.parametrize("kind", ["A2, saturate", "310P"])
def test_clean_under_sanitizers(twin_program, kind):
    program, *rest = KINDS[kind]
    decode = Decoder(twin_program(program, include=[TWIN.parent], define=["PASA_CPU_TWIN"]), *rest)
    decode(make_call(2, 4, 2, 3, 140, 64, causal=True), groups=2)
    single = make_call(2, 4, 2, 1, 140, 64)
    decode(single, put_into_pages(single, 48), groups=2)


# ---- caches in pages


@pytest.mark.parametrize("slots", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("groups", [1, 3])
def test_pages_give_the_bits_of_keys_in_a_row(decode, slots, groups):
    x = make_call(3, 7, 1, 1, 700, 128, lengths=torch.tensor([700, 1, 333]))
    x.k[:, :, 350:].add_(30)  # columns leave the frame within the first sequence
    expected = decode(x, groups=groups)
    result = decode(x, put_into_pages(x, slots), groups=groups)
    assert torch.equal(result["out"], expected["out"][:, :, 0])
    assert torch.equal(result["lse"], expected["lse"][:, :, 0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slots", [16, 128])
def test_prompts_and_mixed_batches(decode, slots, causal):
    """A decoding sequence, a prompt, one without queries, one whose first tokens see nothing, and one in several tiles.

    Causal tokens are aligned to the last key of their own sequence.
    """
    starts = [0, 1, 61, 61, 71, 141]
    lengths = torch.tensor([300, 60, 50, 4, 200])
    x = make_call(5, 4, 2, 70, 300, 64, causal=causal, lengths=lengths)
    result = None
    for mode, seed in LAUNCHES[::3]:
        run = decode(x, put_into_pages(x, slots, starts), groups=3, mode=mode, seed=seed)
        result = result or run
        assert all(torch.equal(run[name], result[name]) for name in ("out", "lse"))
    for b, length in enumerate(lengths.tolist()):
        rows = slice(starts[b], starts[b + 1])
        n = rows.stop - rows.start
        if n == 0:
            continue
        one = replace(x, q=x.q[b : b + 1, :, 70 - n :], k=x.k[b : b + 1, :, :length], v=x.v[b : b + 1, :, :length],
                      lengths=None)  # fmt: skip
        golden, golden_lse = golden_attention(one.q, one.k, one.v, is_causal=causal)
        out, lse = result["out"][rows].transpose(0, 1), result["lse"][rows].T
        assert ((out.double() - golden[0]).abs() <= 8 * ulp(golden[0].abs().amax(-1, keepdim=True))).all()
        assert torch.equal(lse.isinf(), golden_lse[0].isinf())
        assert ((lse - golden_lse[0]).abs().nan_to_num() <= 1e-3).all()


def test_a_page_number_that_is_wrong_on_the_device_reads_nothing_beyond_the_cache(decode):
    """Tables on a device cannot be checked without waiting for it; the twin faults where a copy leaves its array."""
    x = make_call(1, 4, 2, 1, 300, 64)
    pages = put_into_pages(x, 64)
    pages.table[0, 1], pages.table[0, 3], pages.lengths[0] = 1000000, -1, 100000
    decode(x, replace(pages, k=pages.k.nan_to_num(), v=pages.v.nan_to_num()))
