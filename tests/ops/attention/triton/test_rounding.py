"""Unbiased rounding in the Triton kernels equals numerics/dither.py bit for bit, given equal FP32 outputs.

Queries of 0 give all keys the same weight. Means of 2^n values of few bits are exact in FP32, in any order of
summation, so the output of every kernel is known to the last bit. Runs on a GPU where there is one, in Triton's
interpreter elsewhere.
"""

import pytest
import torch
import triton
import triton.language as tl

import pasa
from pasa import PasaConfig
from pasa.ops.attention.triton.backend import portable_attention, rounded_after
from pasa.ops.attention.triton.decode.launch import MERGE_ROW, blocks_of_a_split
from pasa.ops.attention.triton.kernel_call import KernelCall, dropped_bits, output_dtype
from pasa.ops.attention.triton.rounding_kernel import round_rows
from pasa.ops.numerics.dither import is_structured, round_unbiased
from tests.inputs import DEVICE, HOPPER, normal_qkv, portable_kernel, short_prompts

DTYPES = (torch.float16, torch.bfloat16)
UNBIASED = PasaConfig(softmax="unbiased")
ROWS = 32  # rows of a tile
SMALL_BIAS = 2.0**-8  # in spacings: the error of FP32 rounding, and of a weight of 1e-4 in FP16
SPACING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # of numbers from 1 to 2


@pytest.fixture(autouse=True, params=["portable", "hopper"] if HOPPER else ["portable"])
def kernel(request):
    """Select the kernel of prompts: on Hopper its own and the portable one in turn, elsewhere the portable one."""
    with portable_kernel() if request.param == "portable" else short_prompts(False):
        yield


@triton.jit
def rows_kernel(p_x, p_y, D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr, DROPPED: tl.constexpr,
                LAZY: tl.constexpr):  # fmt: skip
    o_row = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    o_d = tl.arange(0, D_PAD)
    b_x = tl.load(p_x + o_row * D + o_d[None, :], mask=(o_d < D)[None, :], other=1.7)
    b_y = round_rows(b_x, o_d, D, DROPPED, LAZY)
    tl.store(p_y + o_row * D + o_d[None, :], b_y.to(p_y.dtype.element_ty), mask=(o_d < D)[None, :])


@pytest.mark.parametrize("dim", [18, 22, 33, 64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lazy", [False, True])
def test_rows_are_rounded_as_in_the_reference(dim, dtype, lazy):
    """Rows are rounded as in the reference, whatever they contain.

    They are random; with two equal weights; one weight; weights of a quarter and three; tiny, huge, zero; with
    equal columns; with NaN and infinity.
    """
    g = torch.Generator().manual_seed(dim)
    a, b = torch.randn(2, 128, dim, generator=g).to(dtype).float()
    noise = 1 + 1e-6 * torch.rand(128, 1, generator=g)
    parts = [torch.randn(128, dim, generator=g), (a + b) / 2 * noise, a * noise, (a + 3 * b) / 4, a * 1e-7, a * 4e4]
    x = torch.cat([*parts, torch.zeros(32, dim), torch.full((32, dim), 1 + 2.0**-12)])
    x[3, 1], x[200, 2], x[201, 3] = torch.nan, torch.inf, -torch.inf
    x = x[torch.randperm(len(x), generator=g)]  # tiles with and without flagged rows
    flagged = is_structured(x, dtype).float().mean()
    assert 0.1 < flagged < 0.9 if dim > 18 else flagged == 0  # 4.25 sigma of 18 signs are more than 18
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    pad = 1 << (dim - 1).bit_length()
    rows_kernel[(len(x) // ROWS,)](x.to(DEVICE), out, dim, pad, ROWS, dropped_bits("unbiased", dtype), lazy)
    assert torch.equal(torch.nan_to_num(out.cpu(), 7.0), torch.nan_to_num(round_unbiased(x, dtype).to(dtype), 7.0))


def means(dtype, heads, keys, dim):
    """Return values (1, heads, keys, D), and the FP32 mean of all keys (1, heads, 1, D).

    Every other head has only two values that are not 0, whose halved sums are ties.
    """
    g = torch.Generator().manual_seed(keys + dim)
    top = 2048 if dtype == torch.float16 else 256
    v = torch.randint(top // 2, top, (1, heads, keys, dim), generator=g) * 2.0 / top
    pair = v[:, ::2, :2] * keys / 2
    v[:, ::2] = 0
    v[:, ::2, 1], v[:, ::2, keys // 2] = pair.unbind(2)
    assert torch.equal(v.to(dtype).float(), v)
    return v.to(dtype), v.double().mean(2, keepdim=True).float()


KERNELS = {  # rows, keys, config
    "prefill": (40, 128, UNBIASED),
    "several blocks": (70, 256, UNBIASED),
    "decode": (3, 256, UNBIASED),
    "short": (20, 16, UNBIASED),
    "paper": (40, 256, PasaConfig(softmax="unbiased", recovery="paper")),
    "fp32": (40, 128, PasaConfig(softmax="unbiased", precision="fp32")),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("dim", "mask"), [(32, "none"), (64, "float"), (80, "bool"), (128, "none")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_rounds_exact_means_to_the_same_bits(name, dim, mask, dtype):
    rows, keys, config = KERNELS[name]
    v, mean = means(dtype, 2, keys, dim)
    assert bool(is_structured(mean, dtype)[:, ::2].all()) or dim < 64
    expected = round_unbiased(mean, dtype).to(dtype).expand(-1, -1, rows, -1)
    q, k = torch.zeros(1, 2, rows, dim, dtype=dtype), torch.zeros(1, 2, keys, dim, dtype=dtype)
    seen = None
    if mask != "none":
        seen = torch.arange(keys + 13, device=DEVICE) < keys
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 13), value=1.0) for x in (k, v))
    if mask == "float":
        seen = torch.zeros(keys + 13, device=DEVICE).masked_fill(~seen, -torch.inf)
    out = pasa.attention(*(x.to(DEVICE) for x in (q, k, v)), attn_mask=seen, config=config, backend="triton")
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences(dtype):
    v, mean = means(dtype, 4, 128, 64)
    q, k = torch.zeros(40, 4, 64, dtype=dtype), torch.zeros(128, 4, 64, dtype=dtype)
    cu_q, cu_k = torch.tensor([0, 40]), torch.tensor([0, 128])
    packed = (x.to(DEVICE) for x in (q, k, v[0].transpose(0, 1).contiguous(), cu_q, cu_k))
    out = pasa.attention_varlen(*packed, 40, 128, config=UNBIASED, backend="triton").cpu()
    assert torch.equal(out, round_unbiased(mean, dtype).to(dtype)[0, :, 0].expand(40, -1, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 80])
def test_a_separate_launch_rounds_to_the_same_bits(dtype, dim):
    """A separate rounding launch, as on an NPU, gives the same bits."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (33, 200), dim))
    dropped = dropped_bits("unbiased", dtype)
    how = {"is_causal": True, "dropped": dropped, "out_dtype": output_dtype(dropped)}
    call = KernelCall(q, k, v, 0.1, UNBIASED, **how)
    both = portable_attention(call)[:2], rounded_after(call)[:2]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    assert both[0][0].dtype == dtype


def two_tied_keys(rows, keys, dim, dtype):
    """Return q, k, v with two keys of equal score, one some 9 nats below with a larger value, and others far below.

    Every output is slightly above the mean of two values, so rounding to nearest decides all ties upwards.
    """
    g = torch.Generator().manual_seed(rows)
    q, k, v = torch.zeros(1, 4, rows, dim), torch.zeros(1, 4, keys, dim), torch.full((1, 4, keys, dim), 2.5)
    q[..., 0], q[..., 1] = 9.5, torch.rand(1, 4, rows, generator=g) / 2
    k[..., 0] = -8 * dim**0.5
    k[:, :, [1, keys // 2], 0] = dim**0.5
    k[:, :, 2, :2] = torch.tensor([0, dim**0.5])
    v[:, :, [1, keys // 2]] = 1 + torch.rand(1, 4, 2, dim, generator=g)
    return tuple(x.to(dtype).to(DEVICE) for x in (q, k, v))


@pytest.mark.parametrize(("rows", "keys"), [(60, 150), (16, 300), (60, 30)], ids=["prefill", "decode", "short"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_ties_have_no_one_sided_error(rows, keys, dtype, dim):
    """Ties have no one-sided error: no output is off by more than a spacing, and the mean error is within four sigma.

    A random rounding has a variance of at most 1/4. Equal outputs are rounded together.
    """
    q, k, v = two_tied_keys(rows, keys, dim, dtype)
    golden = pasa.golden_attention(q, k, v)[0].double().cpu()
    safe, out = (
        pasa.attention(q, k, v, config=config, backend="triton").double().cpu() for config in (PasaConfig(), UNBIASED)
    )
    error = (out - golden) / SPACING[dtype]
    assert float(error.abs().max()) <= 1.0 + 2.0**-4
    if dtype == torch.float16:  # FP16 halves BF16 values exactly, and its rounding then hides the remainder
        assert float((safe - golden).mean() / SPACING[dtype]) > 0.15
    together = golden.float().unique(return_counts=True)[1].double()
    assert abs(float(error.mean())) <= 4 * 0.5 * float(together.norm()) / error.numel() + SMALL_BIAS


@pytest.mark.parametrize(("rows", "keys"), [(200, 150), (16, 300), (64, 30)], ids=["prefill", "decode", "short"])
def test_rows_without_ties_are_rounded_to_nearest(rows, keys):
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 4), (rows, keys), 64))
    safe, out = (pasa.attention(q, k, v, config=c, backend="triton") for c in (PasaConfig(), UNBIASED))
    assert float((safe == out).all(-1).float().mean()) >= 0.99


def test_what_repeats_its_maximum_in_fp16_sums_is_left_to_the_reference():
    q, k, v = (x.to(DEVICE) for x in normal_qkv((1, 1), (4, 8), 64))
    config = PasaConfig(softmax="unbiased", recovery="paper", accumulate="fp16")
    with pytest.raises(NotImplementedError, match="softmax unbiased with recovery paper with accumulate fp16 is not"):
        pasa.attention(q, k, v, config=config, backend="triton")


def test_splits_are_no_more_than_a_merge_of_whole_rows_holds():
    assert all(-(-9000 // blocks_of_a_split(132, 9000, 1, limit)) <= limit for limit in (1, 7, 128, 256))
    assert blocks_of_a_split(132, 9000, 1, MERGE_ROW) == -(-9000 // 132)


def test_outputs_are_written_in_the_format_that_they_are_rounded_to():
    assert [output_dtype(dropped_bits(s, d)) for s in ("safe", "unbiased") for d in (*DTYPES, torch.float32)] == [
        *(torch.float16,) * 4, torch.bfloat16, torch.float16
    ]  # fmt: skip
