"""shift_keys on the CPU twin against the Python reference of the same arithmetic."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from tests.ascend_c.kernel_runs import BLOCK, LAUNCHES, Call, launch_shift, shifted_by_reference, ulp

# batch, KV heads, keys, head dim, bias of the keys
SHAPES = [
    (1, 1, 128, 64, 0.0),
    (1, 2, 300, 80, 20.0),
    (2, 1, 129, 128, 300.0),
    (1, 1, 127, 256, 10000.0),
    (1, 1, 1, 64, 3.0),
    (1, 3, 63, 96, 0.0),
    (1, 1, 650, 160, 1.0),
]


def keys_call(batch, heads, keys, dim, bias, **how):
    g = torch.Generator().manual_seed(keys + dim)
    k = (torch.randn(batch, heads, keys, dim, generator=g) + bias).half()
    return Call(k, k, k, **how)


@pytest.mark.parametrize("overflow", ["inf", "saturate"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "paper"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_reference(kernels, shape, exact, overflow):
    """Only the order of a sum is free: a mean that lies between two numbers of the grid may move an anchor."""
    x = keys_call(*shape, exact=exact, overflow=overflow)
    expected = shifted_by_reference(x)
    for mode, seed in LAUNCHES:
        result = launch_shift(kernels, x, cores=3, mode=mode, seed=seed)
        assert result.report["ok"], result.report["fault"]
        assert sum(result.report["undefined"].values()) == 0
        for name, array in expected.items():
            assert (result[name] == array).double().mean() >= 0.995, name
        assert ((result["keys"].double() - expected["keys"].double()).abs() <= ulp(expected["keys"])).all()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # a folder
@hypothesis_given(st.data())
def test_no_key_is_rounded(kernels, data):
    """K' / u + a is K, bit for bit, whatever finite FP16 numbers K holds."""
    count = data.draw(st.sampled_from([1, 2, 37, 128, 140]))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    low, high = sorted(data.draw(st.tuples(st.integers(0, 0x7BFF), st.integers(0, 0x7BFF))))
    bits = torch.randint(low, high + 1, (1, 1, count, 16), generator=g).short()
    sign = torch.randint(0, data.draw(st.integers(1, 2)), bits.shape, generator=g).short() * -0x8000
    k = (bits | sign.short()).view(torch.float16)
    x = Call(k, k, k, scale=data.draw(st.sampled_from([0.25, 0.0884, 1e-3])))
    result = launch_shift(kernels, x)
    assert result.report["ok"], result.report["fault"]
    unit = result["units"][..., :1].repeat_interleave(BLOCK, 2)[:, :, :count]
    rows = result["anchors"].double()
    anchors = torch.cat([rows[:, :, :1], rows[:, :, 2::2] + rows[:, :, 3::2]], 2)
    anchors = anchors.repeat_interleave(BLOCK, 2)[:, :, :count]
    assert torch.equal(result["keys"].double() / unit + anchors, k.double())


def test_keys_beyond_a_length_enter_no_mean(kernels):
    """They may be anything: here NaN."""
    x = keys_call(2, 2, 300, 64, 5.0, lengths=torch.tensor([140, 0]))
    x.k[0, :, 140:] = torch.nan
    x.k[1] = torch.nan
    result = launch_shift(kernels, x)
    assert result.report["ok"], result.report["fault"]
    short = keys_call(1, 2, 140, 64, 0.0)
    short.k.copy_(x.k[:1, :, :140])
    expected = shifted_by_reference(short)
    assert torch.equal(result["keys"][:1, :, :140], expected["keys"])
    assert torch.equal(result["anchors"][:1, :, :4], expected["anchors"])
