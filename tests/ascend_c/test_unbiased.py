"""Unbiased rounding on the CPU twin: the same bits as `ops/numerics/dither.py` makes of the same FP32 outputs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pasa.ops.numerics.dither import COLUMNS, flag_limit, is_structured, round_unbiased
from pasa.ops.numerics.formats import round_to
from tests.ascend_c.kernel_runs import (
    LAUNCHES,
    OVERFLOW,
    Call,
    launch_attention,
    means,
    means_with_biased_bits,
    shifted_by_reference,
)

LIFTED = np.exp(np.float64(np.float32(10.39720771))).astype(np.float32)  # kLiftNats: a weight before FP16 rounds it


def mixed_rows(rows, dim, dtype, seed):
    """Return FP32 rows of every kind that the rule distinguishes, among random ones."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=g)
    v = (1 + torch.rand(2, dim, generator=g)).to(dtype).float() * torch.randn(dim, generator=g).sign()
    x[1::5] = v.mean(0) + 1e-6 * x[1::5]  # two equal maxima
    x[2::5] = v[0] + 1e-6 * x[2::5]  # one key has all the weight
    x[3::5] = v.sum(0) / 4 * (1 + 1e-7 * x[3::5])
    return x


def odd_values(rows, dim, dtype, seed):
    """Return rows of ties with numbers subnormal in FP16, next to overflow, zeros of both signs, inf and NaN.

    65519.9 and 3.395e38 are above the largest numbers of FP16 and BF16, and nearer to them than to the next power of 2.
    """
    x = mixed_rows(rows, dim, dtype, seed)
    odd = torch.tensor([65519.9, 3.395e38, 65503.0, 2.0**-15 * 1.5001, 2.0**-25 * 1.1, -0.0, 0.0, torch.inf, -torch.inf,
                        torch.nan, 3.3895314e38, 2.0**-14, -(2.0**-14) * 0.9999, 1e-40])  # fmt: skip
    kept = min(len(odd), dim // 4)
    x[1::5, dim - kept :] = odd[:kept]
    return x


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize("dim", [1, 33, 64, 80, 139, 256])
@pytest.mark.parametrize("rows", [1, 2, 37, 64])
def test_rows_are_rounded_as_by_the_reference(kernels, rows, dim, fmt):
    """Rows have the bits of the reference; the kernel gets them padded with zeros, the reference without."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[fmt]
    for seed, make in enumerate((mixed_rows, odd_values)):
        x = make(rows, dim, dtype, seed)
        padded = torch.nn.functional.pad(x, (0, -dim % 16))
        settings = {"dim": padded.shape[1], "unbiased_columns": min(COLUMNS, dim), "to_bf16": int(fmt == "bf16")}
        for mode in ("eager", "deferred"):
            report = kernels.run("unbiased", {"x": padded.numpy()}, mode=mode, **settings)
            assert report["ok"], report["fault"]
            result = torch.from_numpy(kernels.load("z", np.float32).reshape(padded.shape).copy())[:, :dim]
            for overflow in OVERFLOW:
                rounded, expected = round_to(result, fmt, overflow=overflow), round_unbiased(x, fmt, overflow)
                assert torch.equal(bits(rounded), bits(expected)), (mode, overflow)
        assert is_structured(x, fmt).any() or rows < 37 or dim == 1, "some rows must be flagged"


def bits(x):
    return x.nan_to_num(nan=12345.0, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)


@pytest.mark.parametrize("overflow", OVERFLOW)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (129, 64), (200, 80), (70, 128), (40, 144)])
def test_outputs_of_the_exact_recovery(kernels, rows, dim, dtype, overflow):
    """Row r is the mean of its r + 1 values; means of two, of four and so on are flagged."""
    x = means(2, rows, rows, dim, causal=True, unbiased=dtype, overflow=overflow)
    outputs = x.v.float().cumsum(2) / torch.arange(1.0, rows + 1).unsqueeze(-1)
    expected = round_unbiased(outputs, dtype, overflow)
    assert rows == 1 or is_structured(outputs, dtype).any(), "some rows must be flagged"
    shifted = shifted_by_reference(x)
    for mode, seed in LAUNCHES[::4]:
        result = launch_attention(kernels, x, shifted, mode=mode, seed=seed, groups=1 + seed % 2)
        assert result.report["ok"], result.report["fault"]
        assert torch.equal(result["out"].float(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "keys", "dim"), [(9, 2, 64), (3, 4, 80), (65, 2, 128), (5, 128, 80), (2, 256, 144)])
def test_outputs_of_the_published_recovery(kernels, rows, keys, dim, dtype):
    """Outputs of the published recovery are rounded without bias.

    Its row sums are of weights that are not rounded; FP32 holds those of a power of two of keys.
    """
    x = means(4, rows, keys, dim, exact=False, unbiased=dtype)
    outputs = (x.v.float().sum(2, keepdim=True) * 2**15 / (keys * torch.tensor(LIFTED))).expand(x.q.shape)
    result = launch_attention(kernels, x, shifted_by_reference(x), groups=2)
    assert result.report["ok"], result.report["fault"]
    assert torch.equal(result["out"].float(), round_unbiased(outputs, dtype))


def test_each_wave_alone_flags_rows(kernels):
    x = means_with_biased_bits()
    outputs = x.v.float().mean(2, keepdim=True).expand(x.q.shape)
    flagged = is_structured(outputs, "fp16")[0, :, 0, 0]
    assert flagged.tolist() == [True] * 4 + [False] * 4
    result = launch_attention(kernels, x, shifted_by_reference(x))
    assert result.report["ok"], result.report["fault"]
    assert torch.equal(result["out"].float(), round_unbiased(outputs, "fp16"))


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "paper"])
def test_rows_that_are_not_flagged_are_rounded_to_nearest(kernels, exact):
    """Random rows, of which every other one is decided by a key that is there twice."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, s, 80, generator=g) for n, s in ((2, 150), (1, 300), (1, 300)))
    k[:, :, 41] = k[:, :, 40] = 4.0  # of one block: the published recovery keeps no tie between blocks
    q[:, :, ::2] = 2.0
    x = Call(q.half(), k.half(), v.half(), exact=exact)
    shifted = shifted_by_reference(x)
    nearest = launch_attention(kernels, x, shifted)["out"].double()
    result = launch_attention(kernels, replace(x, unbiased=torch.float16), shifted)
    assert result.report["ok"], result.report["fault"]
    off = (result["out"].double() - nearest).abs()
    assert (off <= 2.0**-10 * nearest.abs().clamp(min=2.0**-14)).all()
    changed = (off > 0).any(-1)
    assert changed[:, :, ::2].all()
    assert changed[:, :, 1::2].double().mean() < 0.05


@pytest.mark.parametrize("columns", range(COLUMNS + 1))
def test_the_limit_that_flags_a_row_is_the_reference_s(kernels, columns):
    settings = {"batch": 1, "heads": 1, "kv_heads": 1, "rows": 2, "keys": 2, "dim": 64, "scale": 1.0}
    report = kernels.run("plan", unbiased_columns=columns, **settings)
    assert report["ok"]
    assert kernels.load("leaning", np.uint32)[0] == flag_limit(columns)
