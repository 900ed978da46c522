"""The Hopper kernels compute attention, mark what they must and finish what they marked, interpreted on a CPU.

gluon_interpreter.py says what that shows and what it does not. The launches are those of hopper/launch.py.
"""

import pytest
import torch
import triton.language as tl

import pasa
from pasa.ops.attention.triton.hopper import launch
from tests.inputs import DEVICE
from tests.ops.attention.triton.gluon_interpreter import Kernels

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="interprets kernels, which a GPU compiles: test_on_gpu.py")
PROCESSORS = 2  # so few that a program of the exact pass has several tiles
HALF_ULP = 2.0**-11


@pytest.fixture(autouse=True)
def small_device(monkeypatch):
    monkeypatch.setattr(launch, "processors", lambda device: PROCESSORS)
    for name in ("gdc_launch_dependents", "gdc_wait"):
        monkeypatch.setattr(tl.extra.cuda, name, lambda: None)


def tensors(heads, kv_heads, rows, keys, dim, batch=1, seed=0):
    source = torch.Generator().manual_seed(seed)
    sizes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    return [torch.randn(batch, *each, dim, generator=source) for each in sizes]


def attend(q, k, v, causal=False, scale=None, seed=0, consumers=None, monkeypatch=None):
    """Return output, log-sum-exp, and the log-sum-exp that the plain kernel left: infinite in marked tiles."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    strides = [list(x.stride()) for x in (q, k, v)]
    plan = launch.Plan(q.shape, k.shape, strides, causal, 0, torch.device("cpu"))
    out, lse = torch.empty_strided(q.shape, plan.strides["o"]).half(), torch.full(plan.lse_shape, torch.nan)
    assert out.stride() == tuple(plan.strides["o"])
    out.fill_(torch.nan)
    buffer = torch.full((plan.bytes // 2,), torch.nan).half()
    parts = plan._views(buffer)
    calls = plan._calls(k, v, lse, parts, plan._descriptors(q, k, parts[-1], v, out), scale)
    kernels, left = Kernels(seed), None
    for (kernel, _), (programs, arguments) in zip(plan.kernels, calls, strict=True):
        if kernel in (launch.centre_kernel, launch.anchor_kernel):
            kernel[(programs, 1, 1)](*arguments)
        else:
            kernels.run(getattr(kernels, kernel.__name__), programs, arguments)
        left = lse.clone() if kernel is launch.plain_kernel else left
    return out, lse, left


def check(q, k, v, causal=False, marked=(), limit=4 * HALF_ULP, **how):
    """Compare with FP64; `marked` are the (batch, head) that the plain kernel may leave to the exact one."""
    q, k, v = (x.half() for x in (q, k, v))
    out, lse, left = attend(q, k, v, causal, **how)
    golden, golden_lse = pasa.golden_attention(q, k, v, is_causal=causal, scale=how.get("scale"))
    largest = v.double().abs().amax()
    assert (out.double() - golden).abs().max() <= limit * largest
    assert torch.equal(lse.isneginf(), golden_lse.isneginf())
    seen = ~golden_lse.isneginf()
    assert (lse.double() - golden_lse)[seen].abs().max() <= 1e-6 * (1 + golden_lse[seen].abs().max())
    assert left.isposinf().any(-1).nonzero().tolist() == [list(each) for each in marked]
    return out, lse, left


SHAPES = [
    # heads, key heads, rows, keys, causal
    (2, 1, 200, 300, False),
    (2, 1, 300, 300, True),
    (1, 1, 64, 128, False),
    (1, 1, 192, 256, True),
    (1, 1, 1, 130, True),
    (1, 1, 193, 1, False),
    (1, 1, 70, 700, True),
    (1, 1, 400, 130, True),  # rows without keys
    (3, 3, 65, 129, True),
]


@pytest.mark.parametrize("dim", [32, 64, 80, 128, 160, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "rows", "keys", "causal"), SHAPES)
def test_plain_data(heads, kv_heads, rows, keys, causal, dim):
    check(*tensors(heads, kv_heads, rows, keys, dim), causal)


@pytest.mark.parametrize(("dim", "causal"), [(80, True), (128, False)])
def test_an_output_lies_in_memory_as_its_queries_do(dim, causal):
    """Models hold (B, S, H, D) and transpose the output back, which then copies nothing."""
    q, k, v = tensors(3, 1, 200, 300, dim, batch=2)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse, _ = check(q, k, v, causal)
    assert out.transpose(1, 2).is_contiguous()
    dense, dense_lse, _ = check(q.contiguous(), k, v, causal)
    assert dense.is_contiguous()
    assert torch.equal(out, dense)
    assert torch.equal(lse, dense_lse)


@pytest.mark.parametrize(
    ("dim", "causal"), [(32, True), (64, False), (72, True), (128, False), (128, True), (192, False), (256, True)]
)
@pytest.mark.parametrize("bias", [(20, 0), (0, 20), (20, 20)], ids=["q", "k", "both"])
def test_a_bias_takes_no_second_pass(dim, causal, bias):
    """A constant on Q spreads the scores, one on K is subtracted before; both leave nothing to the exact kernel.

    An output errs by the rounding of FP16 weights, and by that of FP32 sums of |q| |k|, which K' makes small again.
    """
    q, k, v = tensors(2, 1, 260, 400, dim)
    q, k = q + bias[0], k + bias[1]
    check(q, k, v, causal, limit=4 * HALF_ULP)


def test_each_head_has_its_own_keys():
    """K' counts for the heads whose keys share a bias, and for no other head of the call."""
    q, k, v = tensors(4, 2, 200, 300, 64, batch=2)
    k[0, 1] += 20
    k[1, 0, :, :8] -= 60
    check(q, k, v, True)
    check(q, k, v, False)


LARGE = 40.0  # with this factor on Q and K, scores pass 2048 nats and the tile is marked


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "keys", "causal", "dim"),
    [(*shape, (32, 64, 80, 128, 256)[i % 5]) for i, shape in enumerate(SHAPES)] + [(1, 1, 200, 300, False, 128)],
)
def test_the_exact_kernel_finishes_tiles_of_large_scores(heads, kv_heads, rows, keys, causal, dim):
    """Only the head whose scores may be too large is computed again; the others keep their results.

    A head with a single key has no scores to speak of, because K' is 0.
    """
    q, k, v = tensors(heads, kv_heads, rows, keys, dim)
    q[:, :1] *= LARGE
    k[:, :1] *= LARGE
    if kv_heads < heads:  # another query head of the same keys
        q[:, 1:] /= 10 * LARGE
    # Scores are right to 2^-24 of |q| |k| in FP32, in nats times the largest difference that they make: 2 |V|.
    limit = 4 * HALF_ULP + 2.0**-22 * LARGE**2 * dim**0.5 * 8
    check(q, k, v, causal, marked=[(0, 0)] if keys > 1 else [], limit=limit)


def test_long_queries_mark_a_tile_as_well():
    """Keys of ordinary length do not decide alone: the producer's last message counts the queries, too."""
    q, k, v = tensors(1, 1, 64, 200, 64)
    check(q * LARGE**2, k, v, marked=[(0, 0)], limit=4 * HALF_ULP + 2.0**-22 * LARGE**2 * 64)


@pytest.mark.parametrize(
    ("dim", "causal"), [(32, True), (64, True), (80, False), (80, True), (128, False), (256, False), (256, True)]
)
def test_a_bias_of_part_of_the_keys_reaches_the_exact_kernel(dim, causal):
    """Blocks with a bias of their own have anchors of their own, which the exact kernel subtracts in shared memory."""
    q, k, v = tensors(1, 1, 300, 384, dim)
    q += 300
    k[:, :, :128] += 300
    k[:, :, 256:] += 200
    check(q, k, v, causal, marked=[(0, 0)])


@pytest.mark.parametrize(("dim", "bad"), [(64, torch.nan), (80, torch.inf), (128, torch.nan), (256, torch.inf)])
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_not_finite_reaches_the_rows_that_see_it(dim, bad, part, causal):
    """NaN and infinity reach the rows that the reference says, and all others are as accurate as without them."""
    clean = [x.half() for x in tensors(2, 1, 200, 260, dim)]
    q, k, v = (x.clone() for x in clean)
    {"q": q, "k": k, "v": v}[part][0, 0, 150, 3] = bad
    out, lse, _ = attend(q, k, v, causal)
    expected, expected_lse = pasa.attention(q, k, v, is_causal=causal, return_lse=True, backend="reference")
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(lse.isnan(), expected_lse.isnan())
    error = (out.double() - expected.double()).abs().nan_to_num(nan=0.0)
    assert error.max() <= 8 * HALF_ULP * clean[2].abs().max()
    assert out.isfinite().any() == (causal or part != "k")  # without a mask every row sees every key


def test_outputs_do_not_pass_the_largest_number():
    q, k, v = tensors(1, 1, 70, 300, 64)
    for sign in (1, -1):
        out, _, _ = check(q, k, torch.full_like(v, sign * 65504.0))
        assert (out == sign * 65504.0).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_copies_does_not_matter(seed):
    """Copies by TMA are late and in another order each time."""
    first = check(*tensors(2, 1, 300, 700, 64), True, seed=seed)
    again = check(*tensors(2, 1, 300, 700, 64), True, seed=100 + seed)
    assert torch.equal(first[0], again[0])
