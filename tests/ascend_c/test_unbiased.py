"""Unbiased rounding on the CPU twin: the same bits as `ops/numerics/dither.py` makes of the same FP32 outputs."""

import numpy as np
import pytest
import torch

from pasa.ops.numerics.dither import COLUMNS, is_structured, round_unbiased
from pasa.ops.numerics.formats import round_to
from tests.ascend_c.kernel_runs import OVERFLOW


def mixed_rows(rows, dim, dtype, seed):
    """FP32 rows of every kind that the rule tells apart, among random ones."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=g)
    v = torch.randn(2, dim, generator=g).to(dtype).float()
    x[1::5] = v.mean(0) + 1e-6 * x[1::5]  # two equal maxima
    x[2::5] = v[0] + 1e-6 * x[2::5]  # one key has all the weight
    x[3::5] = v.sum(0) / 4 * (1 + 1e-7 * x[3::5])
    return x


def odd_values(rows, dim, dtype, seed):
    """Rows of ties whose numbers are also subnormal in FP16, next to overflow, zeros of both signs, inf and NaN."""
    x = mixed_rows(rows, dim, dtype, seed)
    odd = torch.tensor([65519.9, 65503.0, 2.0**-15 * 1.5001, 2.0**-25 * 1.1, -0.0, 0.0, torch.inf, -torch.inf, torch.nan,
                        3.3895314e38, 2.0**-14, -(2.0**-14) * 0.9999, 1e-40])  # fmt: skip
    kept = dim // 4
    x[1::5, :kept] = odd.repeat(dim)[:kept]
    return x


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize("dim", [1, 33, 64, 80, 139, 256])
@pytest.mark.parametrize("rows", [1, 2, 37, 64])
def test_rows_are_rounded_as_by_the_reference(kernels, rows, dim, fmt):
    """Head dimensions come padded with zeros, of which the reference does not know."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[fmt]
    for seed, make in enumerate((mixed_rows, odd_values)):
        x = make(rows, dim, dtype, seed)
        padded = torch.nn.functional.pad(x, (0, -dim % 16))
        settings = {"dim": padded.shape[1], "unbiased_columns": min(COLUMNS, dim), "to_bf16": int(fmt == "bf16")}
        for mode in ("eager", "deferred"):
            report = kernels.run("unbiased", {"x": padded.numpy()}, mode=mode, **settings)
            assert report["ok"], report["fault"]
            found = torch.from_numpy(kernels.load("z", np.float32).reshape(padded.shape).copy())[:, :dim]
            for overflow in OVERFLOW:
                rounded, expected = round_to(found, fmt, overflow=overflow), round_unbiased(x, fmt, overflow)
                assert torch.equal(bits(rounded), bits(expected)), (mode, overflow)
        assert is_structured(x, fmt).any() or min(rows, dim) == 1 or make is odd_values, "this data must lean"


def bits(x):
    return x.nan_to_num(nan=12345.0, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
