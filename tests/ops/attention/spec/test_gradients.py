"""Gradients of attention: of the FP32 formula, of the operators, and of the Triton kernels.

The formula is compared with torch's autograd of the definition in FP64, and with a plain backward pass of the same
precision. The Triton kernels run on a GPU where there is one, and in the interpreter elsewhere.
Bound: `error <= 2 x error of the same-precision naive`, the autograd of softmax(scale q k^T) v in FP32, gradients
rounded to FP16, plus half an ulp of what is rounded last.
"""

import pytest
import torch
import triton
import triton.language as tl

import pasa
from pasa.ops.attention.call import Call
from pasa.ops.attention.spec.exact_fp64 import golden_attention
from pasa.ops.attention.spec.gradients import gradients, packed_gradients
from pasa.ops.attention.triton import backend as triton_backend
from pasa.ops.attention.triton.backward.tile_math import lifted_weights
from tests.inputs import DEVICE, biased_qkv, normal_qkv, pairwise, rmse

HALF_ULP = 2.0**-11


def by_kernels(grad_out, grad_lse, q, k, v, attn_mask, is_causal, scale):
    """Return the gradients of the Triton backend, on the CPU."""
    moved = [x if x is None else x.to(DEVICE) for x in (grad_out, grad_lse, q, k, v, attn_mask)]
    call = Call(*moved[2:5], scale, is_causal=is_causal, mask=moved[5])
    return [x.cpu() for x in triton_backend.gradients(call, *moved[:2])]


def by_formula(grad_out, grad_lse, q, k, v, attn_mask, is_causal, scale):
    """Return the gradients of the reference."""
    return gradients(Call(q, k, v, scale, is_causal=is_causal, mask=attn_mask), grad_out, grad_lse)


FORMULAS = {"reference": by_formula, "triton": by_kernels}
both = pytest.mark.parametrize("backend", FORMULAS)


def definition(q, k, v, kind, grad, mask=None, is_causal=False):
    """Return gradients by torch's autograd through softmax(scale q k^T + mask) v."""
    q, k, v = (x.detach().to(kind).requires_grad_() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * q.shape[-1] ** -0.5
    keep = torch.ones(scores.shape[-2:]).bool()
    keep = keep.tril(k.shape[2] - q.shape[2]) if is_causal else keep
    if mask is not None:
        keep = keep & (mask if mask.dtype == torch.bool else mask > -torch.inf)
        scores = scores if mask.dtype == torch.bool else scores + mask.where(mask > -torch.inf, 0.0)
    scores = scores.masked_fill(~keep, -torch.inf).masked_fill(~keep.any(-1, keepdim=True), 0.0)
    weights = torch.softmax(scores, -1) * keep
    (weights @ v.repeat_interleave(groups, 1)).backward(grad.to(kind))
    return q.grad, k.grad, v.grad


def check(q, k, v, backend, mask=None, is_causal=False):
    """Check that errors of the operator's gradients are at most twice those of the naive ones in the same precision."""
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    golden = definition(q, k, v, torch.float64, grad, mask, is_causal)
    naive = definition(q, k, v, torch.float32, grad, mask, is_causal)
    device = "cpu" if backend == "reference" else DEVICE
    inputs = [x.to(device).requires_grad_() for x in (q, k, v)]
    mask = None if mask is None else mask.to(device)
    pasa.attention(*inputs, attn_mask=mask, is_causal=is_causal, backend=backend).backward(grad.to(device))
    for x, plain, true in zip(inputs, naive, golden, strict=True):
        ours = x.grad.cpu()
        assert ours.dtype == torch.float16
        limit = 2 * (plain.half().double() - true).abs().max() + HALF_ULP * true.abs().max()
        assert (ours.double() - true).abs().max() <= limit
        if true.norm() > 0:
            assert rmse(ours, true) <= 2 * rmse(plain.half(), true) + 2.0**-13


@both
@pytest.mark.parametrize(
    ("dim", "causal", "lengths"),
    pairwise([64, 80, 128], (False, True), [(1, 1), (1, 63), (63, 129), (129, 63), (129, 300)]),
    ids=str,
)
def test_odd_lengths_with_grouped_heads(backend, dim, causal, lengths):
    """Odd lengths and grouped heads have correct gradients; with Sq > Skv the first causal rows see nothing."""
    check(*normal_qkv((4, 2), lengths, dim), backend, is_causal=causal)


@pytest.mark.parametrize("dim", [16, 72, 256])
def test_head_dims_of_the_kernels(dim):
    check(*normal_qkv((2, 1), (65, 140), dim), "triton")


@both
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(2, 4, 40, 150), (2, 1, 1, 150), (40, 1), (150,)], ids=str)
def test_masks(backend, kind, shape):
    q, k, v = normal_qkv((4, 2), (40, 150), 32, batch=2)
    g = torch.Generator().manual_seed(3)
    keep = torch.rand(shape, generator=g) < 0.6
    mask = keep if kind == "bool" else torch.where(keep, torch.randn(shape, generator=g), -torch.inf)
    check(q, k, v, backend, mask, is_causal=True)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_have_the_type_of_the_inputs(backend, dtype):
    """Gradients have the dtype of the inputs, and are those at the FP16 numbers that the inputs become.

    BF16 rounds them more coarsely.
    """
    inputs = [x.to(dtype) for x in normal_qkv((4, 2), (40, 70), 64)]
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    result = FORMULAS[backend](grad, None, *inputs, None, False, 0.125)
    rounding = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-20
    if backend == "triton" and DEVICE == "cpu":
        rounding *= 2  # the interpreter truncates to BF16 where a GPU rounds
    for x, expected in zip(result, definition(*(x.half() for x in inputs), torch.float64, grad), strict=True):
        assert x.dtype == dtype
        assert rmse(x, expected) <= rounding + (2.0**-11 if backend == "triton" else 0.0)


def plain_flash_backward(q, k, v, grad, dtype):
    """Return gradients as flash attention computes them: P from the saved log-sum-exp, delta from the saved output."""
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    out, lse = golden_attention(q, k, v)
    scale = q.shape[-1] ** -0.5
    weights = torch.exp(q @ k.mT * scale - lse.to(dtype).unsqueeze(-1))
    scores = weights * (grad @ v.mT - (grad * out.half().to(dtype)).sum(-1, keepdim=True))
    return scores @ k * scale, scores.mT @ q * scale, weights.mT @ grad


@both
def test_scores_of_131072(backend):
    """Scores of 131,072 nats leave the gradients exact.

    Story: keys that share an offset gave scores of 131,072 nats. FP32 stores such a score in steps of 2^-6, so
    weights exp(S - lse) of the backward pass were off by percents, although the forward pass was exact. dQ, in
    which the shared offset cancels, had no correct digit.
    """
    q, k, v = normal_qkv((2, 2), (100, 200), 64)
    q[..., 0] = k[..., 0] = 1024
    assert 131060 < (q.float() @ k.float().mT / 8).max() < 131090
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    golden = definition(q, k, v, torch.float64, grad)
    ours = FORMULAS[backend](grad, None, q, k, v, None, False, 0.125)
    plain = plain_flash_backward(q, k, v, grad, torch.float32)
    for mine, other, true in zip(ours, plain, golden, strict=True):
        assert rmse(other, true) > 0.01
        assert rmse(mine, true) < 2.0**-11


@both
@pytest.mark.parametrize("bias", [1000, 4096])
def test_rows_that_see_no_biased_key(backend, bias):
    """Rows that see no biased key have gradients as good as those of a plain backward pass.

    Story: the mean key that was subtracted, three quarters of the bias of later keys, entered the scores of rows
    that see earlier keys alone. Their gradients were off by percents.
    """
    q, k, v = normal_qkv((1, 1), (128, 128), 64)
    q[..., 0], k[..., 0] = bias, 0
    k[:, :, 32:, 0] = bias
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    grad[:, :, 32:] = 0
    ours = FORMULAS[backend](grad, None, q, k, v, None, True, 0.125)
    early, first_keys, less, some = (x[:, :, :32].double() for x in (grad, q, k, v))
    golden = FORMULAS["reference"](early, None, first_keys, less, some, None, True, 0.125)  # FP64
    for mine, true in zip(ours, golden, strict=True):
        assert rmse(mine[:, :, :32, 1:], true[..., 1:]) < 2.0**-10


@both
def test_one_key_without_the_bias(backend):
    """A first key without the bias of all others, as an attention sink, costs no accuracy.

    K - c is not exact then, so kernels are held to the bound of a plain backward pass.
    """
    q, k, v = normal_qkv((2, 2), (100, 200), 64)
    q[..., 0] = k[..., 0] = 1024
    k[..., 0, 0] = 3.14159
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    golden = definition(q, k, v, torch.float64, grad)
    ours = FORMULAS[backend](grad, None, q, k, v, None, False, 0.125)
    plain = plain_flash_backward(q, k, v, grad, torch.float32)
    for mine, other, true in zip(ours, plain, golden, strict=True):
        assert rmse(mine, true) < (2.0**-11 if backend == "reference" else 2 * rmse(other, true))


def exact_scores(sizes, dim, seed):
    """Return q, k of small integers times powers of two, whose scores FP32 sums exactly; some keys are equal."""
    g = torch.Generator().manual_seed(seed)
    q, k = (s * torch.randint(-3, 4, (1, 2, n, dim), generator=g) for s, n in zip(sizes, (70, 100), strict=True))
    k[:, :, 50:] = k[:, :, torch.randint(50, (50,), generator=g)]
    v, grad = (torch.randn(1, 2, n, dim, generator=g).half() for n in (100, 70))
    return q.half(), k.half(), v, grad


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("sizes", "dim"), [((32, 512), 16), ((1024, 2048), 64), ((16384, 16384), 80)], ids=str)
def test_largest_scores_leave_the_weights_their_sum(sizes, dim, causal, masked):
    """The weights of the largest scores sum to 1 in the backward kernels too.

    Story: weights were exp2(score - (maximum + log2(sum) - 15)). Beside a maximum of 1e7 bits the logarithm and
    the 15 bits of FP16's range were rounded by several bits. 2^15 P was infinite, and so was dV of finite inputs,
    or both were 0. Here scores are 1e5 to 1e10 nats and exact in FP32, so nothing excuses an error. A softmax of
    equal keys has weights of one half, which meet in dQ and dK. (The reference is left out, because it subtracts
    a mean that rounds keys.)
    """
    q, k, v, grad = exact_scores(sizes, dim, seed=dim)
    assert 1e5 < (q.double() @ k.double().mT * dim**-0.5).max() < 2e10
    keep = torch.rand(70, 100, generator=torch.Generator().manual_seed(3)) < 0.8 if masked else None
    result = by_kernels(grad.float(), None, q.float(), k.float(), v.float(), keep, causal, dim**-0.5)
    for x, true in zip(result, definition(q, k, v, torch.float64, grad, keep, causal), strict=True):
        # P and dS are rounded to FP16; terms of equal keys may cancel, so they are up to twice the largest result
        assert (x.double() - true).abs().max() <= 2 * HALF_ULP * true.abs().max()


@both
@pytest.mark.parametrize(("size", "bias"), [(6e4, 300.0), (2400.0, 1330.0), (6e4, 6e4)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_largest_random_scores_have_finite_gradients(backend, size, bias, seed):
    """The largest random scores have finite gradients, although FP32 rounds such scores by nats.

    A row's key of weight 1 stands further above the others than that. So dV is right, and dQ and dK are 0.
    """
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 2, n, 16, generator=g) for n in (60, 100))
    q, k = ((q + bias).clamp(max=65504).half(), (size * k).clamp(-65504, 65504).half())
    v, grad = (torch.randn(1, 2, n, 16, generator=g).half() for n in (100, 60))
    result = FORMULAS[backend](grad, None, q, k, v, None, False, 0.25)
    golden, naive = (definition(q, k, v, kind, grad) for kind in (torch.float64, torch.float32))
    for x, true, plain in zip(result, golden, naive, strict=True):
        limit = 2 * (plain.half().double() - true).abs().max() + HALF_ULP * true.abs().max()
        assert (x.double() - true).abs().max() <= limit


@triton.jit
def weights_kernel(p_x, p_top, p_log, p_out, scale, MASK: tl.constexpr, SIZE: tl.constexpr):
    """Store `lifted_weights` in FP16."""
    o = tl.arange(0, SIZE)
    b_p = lifted_weights(tl.load(p_x + o), tl.load(p_top + o), tl.load(p_log + o), scale, MASK)
    tl.store(p_out + o, b_p.to(tl.float16))


@pytest.mark.parametrize("kind", ["none", "float"])
def test_no_order_of_sums_lifts_a_weight_out_of_range(kind):
    """No order of summation takes 2^15 P out of FP16's range, because P is limited to 1.

    The maximum of a row comes from another kernel, which may sum in another order. Here scores are up to 64 nats
    above it.
    """
    x = torch.linspace(-64, 64, 64) + 1e6
    top, log = torch.full((64,), 1e6), torch.full((64,), -15.0) + torch.arange(64) % 4
    out = torch.empty(64, dtype=torch.float16, device=DEVICE)
    weights_kernel[(1,)](*(t.to(DEVICE) for t in (x, top, log)), out, 1.0, MASK=kind, SIZE=64)
    expected = torch.exp((x.double() - 1e6).clamp(max=0)) * 2.0 ** (15 - torch.arange(64) % 4)
    assert ((out.cpu().double() - expected).abs() <= 2 * HALF_ULP * expected + 2.0**-24).all()


@both
def test_shared_bias_leaves_query_gradients_whole(backend):
    """A bias that all keys share leaves the gradients of queries exact.

    In dQ = dS K the shared part cancels, since rows of dS sum to 0. Computed from centred keys, dQ never contains
    it.
    """
    q, k, v = biased_qkv(80, seed=2, length=300)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    golden = definition(q, k, v, torch.float64, grad)
    ours = FORMULAS[backend](grad, None, q, k, v, None, False, 128**-0.5)
    for mine, true in zip(ours, golden, strict=True):
        assert rmse(mine, true) < 2.0**-11


@both
@pytest.mark.parametrize("size", [60000.0, 1e-7, 1e-30])
@pytest.mark.parametrize("values", [1.0, 1000.0])
def test_loss_scaling_keeps_range_and_digits(backend, size, values):
    """Loss scaling loses neither range nor digits: gradients may be as large as FP16 holds, or as small as FP32 does.

    Only a result beyond the range of its own dtype is infinite.
    """
    q, k, v = normal_qkv((4, 2), (40, 70), 64)
    v = v * values
    grad = size * torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).clamp(-1, 1)
    result = FORMULAS[backend](grad, None, q.float(), k.float(), v.float(), None, False, 0.125)
    for x, true in zip(result, definition(q, k, v, torch.float64, grad), strict=True):
        assert rmse(x, true) < 2.0**-11


def rowwise_fp16_backward(q, k, v, grad):
    """Return dQ from FP16 products with FP32 sums, where each row's gradient has its own unit.

    Centred keys, P and dS are rounded once.
    """
    unit = grad.abs().amax(-1, keepdim=True).double()
    q, k, v = (x.double() for x in (q, k, v))
    grad = (grad.double() / unit).half().double()
    weights = torch.softmax(
        (q @ k.mT * q.shape[-1] ** -0.5).tril() + torch.ones(q.shape[2], k.shape[2]).triu(1).mul(-1e9), -1
    )
    slopes = grad @ v.mT
    scores = weights * (slopes - (weights * slopes).sum(-1, keepdim=True))
    size = scores.abs().amax(-1, keepdim=True)
    scores = (scores / size).half().double() * size
    return scores @ (k - k.mean(2, keepdim=True)).half().double() * q.shape[-1] ** -0.5 * unit


@both
@pytest.mark.parametrize("rising", [False, True])
def test_rows_whose_gradients_span_a_million(backend, rising):
    """Rows whose gradients differ by a factor of a million all keep their digits.

    Story: the gradients of a key head shared one power of two. With values of 100, rows of 1e-4 of the head's
    largest kept a few bits of FP16, and rows of 1e-6 none. Now a row's dQ is as good as for that row alone (twice
    the error of FP16 products). In a causal call dK and dV are as good as the rows that see the key, whether the
    largest row is first or last.
    """
    q, k, v = normal_qkv((2, 1), (150, 150), 64)
    v = 100 * v.clamp(-1, 1)
    sizes = torch.logspace(-6, 0, 150) if rising else torch.logspace(0, -6, 150)
    grad = sizes[:, None] * torch.randn(q.shape, generator=torch.Generator().manual_seed(9))
    dq, dk, dv = FORMULAS[backend](grad, None, q.float(), k.float(), v.float(), None, True, 0.125)
    golden = definition(q, k, v, torch.float64, grad, None, True)
    naive = rowwise_fp16_backward(q, k, v, grad)
    # Rows of few keys are left out: the other error may be nearly 0 by chance, and dQ of a row with one key is 0.
    error, other, size = ((x.double())[:, :, 8:].norm(dim=-1) for x in (dq - golden[0], naive - golden[0], golden[0]))
    assert (error <= 2 * other + HALF_ULP * size).all()
    for x, true in ((dk, golden[1]), (dv, golden[2])):
        rows = (x.double() - true).norm(dim=-1)
        assert (rows <= 2.0**-9 * true.norm(dim=-1)).all()


@both
def test_weights_of_many_keys_keep_their_digits(backend):
    """Weights of many keys keep their digits: of 6000 keys each weighs 1.7e-4, close to where FP16 loses digits.

    dS is smaller than the weights, here by far.
    """
    q, k, v = normal_qkv((1, 1), (16, 6000), 16)
    q *= 0.01
    grad = 1e-3 * torch.randn(q.shape, generator=torch.Generator().manual_seed(9))
    result = FORMULAS[backend](grad, None, q.float(), k.float(), v.float(), None, False, 0.25)
    for x, true in zip(result, definition(q, k, v, torch.float64, grad), strict=True):
        assert rmse(x, true) < 2.0**-11


@both
@pytest.mark.parametrize("bias", [0, 3])
def test_log_sum_exp_has_gradients(backend, bias):
    """The log-sum-exp has gradients: two halves of the keys, merged as in ring attention, give those of the whole.

    If keys share a bias, both terms of dQ = dS (K - c) + G_L c matter.
    """
    q, k, v = normal_qkv((4, 2), (40, 130), 64)
    k[..., :8] += bias
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    inputs = [x.float().to("cpu" if backend == "reference" else DEVICE).requires_grad_() for x in (q, k, v)]
    how = {"return_lse": True, "backend": backend}
    parts = [pasa.attention(inputs[0], *(x[:, :, s] for x in inputs[1:]), **how) for s in (slice(60), slice(60, None))]
    share = torch.sigmoid(parts[0][1] - parts[1][1]).unsqueeze(-1)
    (share * parts[0][0] + (1 - share) * parts[1][0]).backward(grad.to(inputs[0]))
    for x, true in zip(inputs, definition(q, k, v, torch.float64, grad), strict=True):
        assert rmse(x.grad.cpu(), true) < 1e-3


def test_packed_sequences_are_separate():
    q, k, v = normal_qkv((4, 2), (60, 90), 32)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    packed = [x[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    cu_q, cu_k = torch.tensor([0, 25, 25, 40, 60]), torch.tensor([0, 30, 50, 50, 90])
    out = pasa.attention_varlen(*packed, cu_q, cu_k, 25, 40, is_causal=True)
    out.backward(grad[0].transpose(0, 1))
    for q0, q1, k0, k1 in ((0, 25, 0, 30), (40, 60, 50, 90)):
        one = (q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1])
        expected = by_formula(grad[:, :, q0:q1], None, *one, None, True, 32**-0.5)
        for x, true, (start, stop) in zip(packed, expected, ((q0, q1), (k0, k1), (k0, k1)), strict=True):
            assert torch.equal(x.grad[start:stop], true[0].transpose(0, 1))
    assert not packed[0].grad[25:40].any()  # their sequence has no keys
    assert not packed[1].grad[30:50].any()  # their sequence has no queries
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        packed_gradients(gradients, Call(*packed, 1.0, is_causal=True, cu_q=cu_q + 1, cu_k=cu_k), out, None)


def test_kernels_serve_packed_sequences():
    """Kernels serve packed sequences, one after another."""
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (60, 90), 32))
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half()
    lengths = torch.tensor([0, 25, 25, 40, 60]), torch.tensor([0, 30, 50, 50, 90]), 25, 40
    result = []
    for backend, device in (("reference", "cpu"), ("triton", DEVICE)):
        inputs = [x.to(device, copy=True).requires_grad_() for x in (q, k, v)]
        edges = (x.to(device) if isinstance(x, torch.Tensor) else x for x in lengths)
        pasa.attention_varlen(*inputs, *edges, is_causal=True, backend=backend).backward(grad.to(device))
        result.append([x.grad.cpu() for x in inputs])
    for expected, x in zip(*result, strict=True):
        assert rmse(x, expected.double()) < 2.0**-10


@both
def test_a_key_that_nobody_sees_reaches_no_gradient(backend):
    """A key that nobody sees, such as padding, reaches no gradient, whatever it holds."""
    formula = FORMULAS[backend]
    q, k, v = normal_qkv((2, 2), (9, 20), 16)
    keep = torch.arange(20) < 15
    expected = formula(q, None, q, k, v, keep, False, 0.25)
    k[:, :, 15:], v[:, :, 15:] = torch.nan, torch.inf
    for x, clean in zip(formula(q, None, q, k, v, keep, False, 0.25), expected, strict=True):
        assert torch.equal(x, clean)


def test_kernels_take_gradients_of_any_layout():
    """Kernels accept gradients of any layout.

    The gradient of a sum is one number, expanded; that of a transposed result has another last stride.
    """
    q, k, v = normal_qkv((2, 1), (40, 70), 32)
    grad = torch.randn(1, 2, 32, 40, generator=torch.Generator().manual_seed(9)).half().mT
    for strided in (grad, torch.ones(()).half().expand(q.shape)):
        result = by_kernels(strided, None, q, k, v, None, False, 0.2)
        for x, expected in zip(result, by_kernels(strided.contiguous(), None, q, k, v, None, False, 0.2), strict=True):
            assert torch.equal(x, expected)


@both
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_gradient_of_a_fully_masked_row_s_log_sum_exp_reaches_nothing(backend, bad):
    """The gradient of a fully masked row's log-sum-exp reaches nothing, even if it is NaN.

    The log-sum-exp is -inf, and exp() of the difference of two of them is NaN. So the gradient is NaN too,
    although the loss leaves that row out by `where`. One NaN scaled the FP16 operands of all rows that share its
    keys by 2^-15.
    """
    q, k, v = normal_qkv((2, 1), (6, 9), 16)
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[2] = False
    g = torch.Generator().manual_seed(1)
    grad = torch.randn(q.shape, generator=g)
    grad_lse = torch.randn(q.shape[:3], generator=g)
    grad_lse[:, :, 2] = 0.0
    expected = FORMULAS[backend](grad, grad_lse, q, k, v, mask, False, 0.25)
    grad_lse[:, :, 2] = bad
    result = FORMULAS[backend](grad, grad_lse, q, k, v, mask, False, 0.25)
    for one, other in zip(result, expected, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)
