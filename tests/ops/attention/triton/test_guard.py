"""The Triton kernels around a device's fused attention, against the torch operators that specify them."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import pasa
from pasa.ops.attention.call import Call
from pasa.ops.attention.sdpa import backend, fused
from pasa.ops.attention.sdpa.anchors import LEAST_KEYS, LEAST_ROWS, LEAST_ROWS_ON_GPU, head_anchors
from pasa.ops.attention.triton.guard import launch as guard
from pasa.ops.attention.triton.kernel_call import KernelCall, visible_keys
from tests.inputs import DEVICE, max_error, normal_qkv, pairwise

HALF_ULP = 2.0**-11
ROWS = LEAST_ROWS // 2 if DEVICE == "cpu" else LEAST_ROWS_ON_GPU // 2  # of each of two heads: enough for anchors


def biased_call(keys, dim, *, masked=False, strided=False):
    """Return a call whose keys share a bias in half of their columns, with keys that are not finite."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (ROWS, keys), dim, seed=keys, batch=2))
    k[..., 8::2] = 3.0 + k[..., 8::2] / 4
    k[:, 0, :, 4:8] = torch.tensor([-60000.0, 0.0, 2.0**-24, -0.0])
    k[:, 1, ::2, 6:8], k[:, 1, 1::2, 6:8] = 2.0, torch.tensor([6.0, 7.0])  # anchors end where keys differ by 3 times
    k[0, 1, keys // 2, 2], k[1, 0, keys - 1, 4] = torch.nan, torch.inf
    v[0, 0, keys // 2, 3], v[1, 1, 0, 2] = torch.nan, -60000.0
    if strided:  # tokens before heads, at an address that is no multiple of 16 bytes
        k = torch.cat([k.new_zeros(1), k.transpose(1, 2).flatten()])[1:].view(2, keys, 2, dim).transpose(1, 2)
    mask = None
    if masked:
        mask = torch.ones(2, 1, 1, keys, dtype=torch.bool, device=DEVICE)
        mask[0, ..., : keys // 3], mask[1, ..., keys - 1] = False, False
        k[0, :, 5, :3] = torch.tensor([torch.nan, 65504.0, -torch.inf])
        k[1, :, -1, 4] = 65504.0  # less an anchor of -60000, beyond FP16
    return Call(q, k, v, dim**-0.5, mask=mask)


@pytest.mark.parametrize("keys", [512, 1025, 2048, 2049])
@pytest.mark.parametrize("dim", [40, 64, 127, 256])
@pytest.mark.parametrize("masked", [False, True])
def test_anchors_and_keys_less_them_have_the_bits_of_the_specification(keys, dim, masked):
    call = biased_call(keys, dim, masked=masked, strided=keys % 2 == 1)
    expected = head_anchors(call)
    seen = visible_keys(KernelCall.of(call))
    shifted, columns = guard.Shift.of(call.k, call.v, seen).run(call.k, call.v, seen)
    anchors, values = columns.unbind(2)
    assert expected.any(-1).all()
    assert torch.equal(anchors.nan_to_num()[:, :, None], expected)
    clean = call.k.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) - expected
    assert torch.equal(shifted, clean.clamp(-65504, 65504).half())
    seen = torch.ones_like(call.k, dtype=torch.bool) if call.mask is None else call.mask.mT.expand_as(call.k)
    assert torch.equal(anchors.isnan(), (seen & ~call.k.isfinite()).any(2))
    torch.testing.assert_close(values, call.v.abs().amax(2), atol=0, rtol=0, equal_nan=True)


def masks(rows, keys):
    g = torch.Generator().manual_seed(rows)
    keep = torch.rand(1, 2, rows, keys, generator=g) > 0.3
    keep[:, :, rows // 2] = False
    bias = 5 * torch.randn(2, 1, rows, keys, generator=g)
    return {"none": None, "bool": keep, "fp16": bias.half(), "fp32": bias.masked_fill(bias < 0, -torch.inf)}


LIMITS = [{}, {"is_causal": True}, {"window": (5, 9)}, {"mask": "bool"}, {"mask": "fp16"}, {"mask": "fp32"}]


@pytest.mark.parametrize(
    ("lengths", "dim", "limits"),
    [*pairwise([(1, 1), (1, 300), (33, 50), (50, 33)], (8, 40), LIMITS), ((3, 9), 256, {})],
)
def test_rows_that_a_kernel_got_wrong_are_computed_again(lengths, dim, limits):
    """Every row is wrong here: NaN or infinite. Rows without keys give 0 and -inf."""
    q, k, v = normal_qkv((2, 1), lengths, dim, batch=2)
    mask = masks(*lengths)[limits.get("mask", "none")]
    limits = {name: x for name, x in limits.items() if name != "mask"}
    golden, golden_lse = pasa.golden_attention(q, k, v, attn_mask=mask, **limits)
    call = Call(*(x.to(DEVICE) for x in (q, k, v)), dim**-0.5, mask=None if mask is None else mask.to(DEVICE), **limits)
    wrong = torch.full_like(call.q, torch.nan), torch.zeros(call.q.shape[:3], device=DEVICE)
    wrong[0][:, ::2] = 1.0
    wrong[0][:, ::2, :, -1] = torch.inf
    out, lse = (x.cpu() for x in guard.finish(KernelCall.of(call), None, *wrong))
    assert max_error(out, golden) <= 4 * HALF_ULP
    assert torch.equal(lse == -torch.inf, golden_lse == -torch.inf)
    some = golden_lse > -torch.inf
    torch.testing.assert_close(lse[some], golden_lse[some].float(), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("large", [40000.0, torch.nan, -torch.inf])
def test_over_few_keys_values_tell_whether_outputs_can_be_wrong(large):
    """Outputs are read where a value of their head is large or not finite, or a log-sum-exp is not finite.

    Elsewhere they are convex combinations of small values. Here a NaN among them shows that they are not read.
    """
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (200, 9), 32))
    v[0, 1, 8, 3] = large
    call = KernelCall.of(Call(q, k, v, 0.2))
    golden, golden_lse = (x.to(DEVICE) for x in pasa.golden_attention(*(x.cpu() for x in (q, k, v)), scale=0.2))
    out, lse = golden.half(), golden_lse.float()
    wrong, wrong_lse = out.clone(), lse.clone()
    wrong[0, :, 7] = wrong[0, :, 150] = torch.nan
    wrong_lse[0, 1, 190] = torch.inf
    new, new_lse = guard.finish(call, None, wrong, wrong_lse, queries=False)
    assert new[0, 0, [7, 150]].isnan().all()
    left = [7] if new[0, 1, 7].isnan().all() else []  # in another program than the infinite log-sum-exp
    rows = torch.tensor([row for row in range(200) if row not in left], device=DEVICE)
    assert max_error(new[0, 1, rows], golden[0, 1, rows]) <= 4 * HALF_ULP
    assert max_error(new[0, 2:, :, :3], golden[0, 2:, :, :3]) <= 4 * HALF_ULP
    assert torch.equal(new[0, 2:, :, 3].isfinite(), golden[0, 2:, :, 3].isfinite())
    torch.testing.assert_close(new_lse, lse, atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("bad", [0.0, 65504.0, torch.nan, torch.inf])
@pytest.mark.parametrize(("keys", "dim"), [(16, 40), (77, 64), (77, 160)])
def test_images_that_attend_to_a_text(keys, dim, bad):
    """Many rows over few keys: a whole call is as exact as elsewhere, and NaN where its values are not finite."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 4), (1024, keys), dim, batch=2))
    v[0, 1, keys - 1] = bad
    if bad == 65504.0:
        v[0, 2] = bad  # sums of weights above 1 would round to infinity
    k[1, 3] += 100
    out, lse = pasa.attention(q, k, v, backend="sdpa", return_lse=True)
    golden, golden_lse = pasa.golden_attention(*(x.cpu() for x in (q, k, v)))
    assert torch.equal(out.cpu().isnan(), ~golden.isfinite())
    largest = v.cpu().double().nan_to_num(0.0, 0.0, 0.0).abs().amax((2, 3), keepdim=True)
    error = (out.cpu().double() - golden).abs().nan_to_num(0.0)
    assert bool((error <= 4 * HALF_ULP * largest).all())
    torch.testing.assert_close(lse.cpu(), golden_lse.float(), atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_mask_that_is_not_finite_makes_the_rows_that_see_it_nan(bad):
    """A query that is not finite makes its row NaN, too, unless the row sees no key."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((2, 1), (6, 9), 16))
    q[0, :, 2:4, 5] = bad
    mask = torch.zeros(6, 9, device=DEVICE)
    mask[1, 4], mask[3], mask[4, 5:] = bad, -torch.inf, -torch.inf
    call = KernelCall.of(Call(q, k, v, 0.25, mask=mask))
    out, lse = guard.finish(call, None, torch.full_like(q, torch.nan), torch.zeros(q.shape[:3], device=DEVICE))
    rows = [False, True, True, False, False, False]
    assert out.isnan().all(-1)[0].tolist() == [rows, rows] == out.isnan().any(-1)[0].tolist()
    assert lse.isnan()[0].tolist() == [rows, rows]
    assert not out[:, :, 3].any()
    assert (lse[:, :, 3] == -torch.inf).all()


def test_rows_that_a_kernel_got_right_keep_their_bits():
    """Only wrong rows change, the row of a NaN query, and those that see a NaN key; the kernel hid both."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (50, 70), 32, batch=2))
    k[1, 1, 60, 3] = q[1, 0, 20, 8] = torch.nan
    v[0, 0, 69, 0] = 40000.0
    call = KernelCall.of(Call(q, k, v, 0.2, is_causal=True))
    out, lse = torch.randn_like(q), torch.randn(q.shape[:3], device=DEVICE)
    out[0, 0, 7] = -torch.inf
    lse[0, 1, 9], lse[1, 0, 20] = torch.nan, -torch.inf
    _, anchors = guard.Shift.of(k, v, None).run(k, v, None)
    new, new_lse = guard.finish(call, anchors, out.clone(), lse.clone())
    changed = torch.zeros_like(lse, dtype=torch.bool)
    changed[0, 0, 7] = changed[0, 1, 9] = True
    changed[1, 2:, 40:] = changed[1, 0, 20] = True
    assert torch.equal((new != out).all(-1), changed)
    assert torch.equal(new_lse != lse, changed)
    assert torch.equal(new.isnan().all(-1), changed & (torch.arange(2, device=DEVICE)[:, None, None] == 1))
    assert torch.equal(new_lse.isnan(), new.isnan().all(-1))


@pytest.mark.parametrize("row", [0, 31, 32, 77, 149])
@pytest.mark.parametrize("what", ["output", "log-sum-exp", "query", "without keys"])
def test_one_wrong_row_of_many_is_found(what, row, monkeypatch):
    """A program looks at many rows, some at a time, and then repairs fewer at a time; all others keep their bits."""
    monkeypatch.setattr(guard, "PROGRAMS", (1, 1))
    monkeypatch.setattr(guard, "LOOK", 2048)
    monkeypatch.setattr(guard, "REPAIR", 512)
    q, k, v = (x.to(DEVICE) for x in normal_qkv((2, 1), (150, 9), 32))
    out, lse = torch.randn_like(q), torch.randn(q.shape[:3], device=DEVICE)
    mask = torch.zeros(1, 1, 150, 9, dtype=torch.float16, device=DEVICE) if what == "without keys" else None
    place = 0, 1, row
    if what == "output":
        out[place][31] = torch.inf
    elif what == "log-sum-exp":
        lse[place] = torch.nan
    elif what == "query":
        q[place][3] = torch.nan
    else:
        mask[0, 0, row] = -torch.inf
        place = 0, slice(None), row
    call = Call(q, k, v, 0.2, mask=mask)

    def attend(*_):
        return out.clone(), lse.clone()

    new, new_lse = guard.attend_guarded(call, attend, attend, anchored=False)
    changed = torch.zeros_like(lse, dtype=torch.bool)
    changed[place] = True
    assert torch.equal((new != out).any(-1), changed)
    assert torch.equal(new_lse != lse, changed)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_below_a_mask_a_query_that_the_kernel_hid_makes_its_row_nan(bad):
    """A kernel may give it what it gives a row without keys, of which masks make many: 0 and -inf."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((2, 1), (40, 50), 16))
    q[0, 1, 7, 3] = bad
    mask = torch.ones(40, 50, dtype=torch.bool, device=DEVICE)
    mask[:9, 20:] = False
    mask[20] = False
    out, lse = torch.randn_like(q), torch.randn(q.shape[:3], device=DEVICE)
    out[0, 1, 7], lse[0, 1, 7] = 0.0, -torch.inf
    out[:, :, 20], lse[:, :, 20] = 0.0, -torch.inf
    new, new_lse = guard.finish(KernelCall.of(Call(q, k, v, 0.25, mask=mask)), None, out.clone(), lse.clone())
    assert new.isnan().all(-1).nonzero().tolist() == [[0, 1, 7]] == new_lse.isnan().nonzero().tolist()
    others = ~new_lse.isnan()
    assert torch.equal(new[others], out[others])
    assert torch.equal(new_lse[others], lse[others])


def test_without_a_mask_only_rows_before_the_first_key_have_none():
    """A kernel may take a row whose keys are all NaN for one without keys, and give it 0 and -inf."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((2, 1), (40, 30), 16))
    k[:] = torch.nan
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, device=DEVICE)
    new, new_lse = guard.finish(KernelCall.of(Call(q, k, v, 0.25, is_causal=True)), None, out, lse)
    assert new[:, :, 10:].isnan().all()
    assert new_lse[:, :, 10:].isnan().all()
    assert not new[:, :, :10].any()
    assert (new_lse[:, :, :10] == -torch.inf).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_value_that_no_row_sees_leaves_no_row_nan(bad, anchored, dtype):
    """CUDA's kernels multiply it by the weight 0, which is NaN, below a finite log-sum-exp."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (33, 600), 16, batch=2))
    keep = torch.ones(2, 1, 1, 600, dtype=torch.bool, device=DEVICE)
    keep[1, ..., 595:] = False
    mask = keep if dtype == torch.bool else torch.zeros(keep.shape, device=DEVICE).masked_fill(~keep, -torch.inf)
    expected, expected_lse = backend.attend_visible(Call(q, k, v.clone(), 0.25, mask=mask))
    v[1, 1, 597, 3] = bad

    def multiply_by_0(*arguments):
        out = expected.clone()
        out[1, 2:, :, 3] = torch.nan
        return out, expected_lse.clone()

    call = Call(q, k, v, 0.25, mask=mask)
    out, _ = guard.attend_guarded(call, backend.attend_visible, fused.fused_attention, anchored=anchored)
    assert max_error(out, expected.double()) <= 4 * HALF_ULP
    out, lse = guard.attend_guarded(call, multiply_by_0, multiply_by_0, anchored=anchored)
    assert max_error(out, expected.double()) <= 4 * HALF_ULP
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 50), (2, 1, 40, 50), (1, 4, 1, 50), (2, 4, 40, 50), (40, 50), (50,), (2, 1, 40, 1)]
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
@pytest.mark.parametrize("anchored", [False, True])
def test_whatever_a_kernel_makes_of_rows_without_keys_they_get_0(shape, dtype, anchored):
    """The mask becomes numbers to add with aligned rows, and the rows that see no key are not left to the kernel."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (40, 50), 16, batch=2))
    g = torch.Generator().manual_seed(len(shape))
    keep = torch.rand(shape, generator=g) > 0.4
    keep[..., 0] = True
    if len(shape) > 1 and shape[-2] > 1:
        keep[..., 7, :] = False
    elif len(shape) > 1:
        keep[-1, -1] = False
    mask = keep if dtype == torch.bool else torch.randn(shape, generator=g).half().masked_fill(~keep, -torch.inf)
    call = Call(q, k, v, 0.25, mask=mask.to(DEVICE))
    golden, golden_lse = pasa.golden_attention(q, k, v, attn_mask=call.mask, scale=0.25)
    seen = []

    def attend(q, k, v, bias, is_causal, scale):
        assert bias.dtype == torch.float16
        assert not any(stride % 8 for stride in bias.stride()[:-1])
        seen.append(bias)
        out, lse = fused.fused_attention(q, k, v, bias, is_causal, scale)
        empty = (bias == -torch.inf).all(-1)
        return out.masked_fill(empty.unsqueeze(-1), 3.0), lse.masked_fill(empty, 5.0)

    out, lse = guard.attend_guarded(call, backend.attend_visible, attend, anchored=anchored)
    assert len(seen) == 1
    assert max_error(out, golden) <= 4 * HALF_ULP
    empty = golden_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not out[empty].any()
    torch.testing.assert_close(lse[~empty], golden_lse[~empty].float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "heads", "rows"), [(1, 2**16 - 1, 1), (1, 2**16, 1), (1, 2**16, 9), (2**16, 1, 1), (2**16, 1, 9)]
)
def test_more_heads_than_a_grid_has_place_for(batch, heads, rows):
    """Torch operators guard a call of more than 65,535 heads. Nor can torch's kernels be launched for some of these.

    On an H100, cuDNN fails for single rows of more entries or heads, and memory-efficient attention for more heads.
    """
    q, k, v = (x.to(DEVICE) for x in normal_qkv((heads, heads), (rows, 2), 8, batch=batch))
    v[-1, -1, 0] = torch.nan
    out = pasa.attention(q, k, v, backend="sdpa").flatten(0, 1)
    golden = pasa.golden_attention(*(x.cpu() for x in (q, k, v)))[0].flatten(0, 1)
    assert out[-1].isnan().all()
    assert max_error(out[:-1].cpu(), golden[:-1]) <= 16 * HALF_ULP  # values of up to 5.5, and two roundings
    assert (backend._guard_of(Call(q, k, v, 1.0)) is None) == (DEVICE == "cpu" or heads == 2**16)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_below_a_mask_a_row_with_keys_is_not_taken_for_one_without(dtype):
    """Story: a kernel that hides an infinite query by a log-sum-exp of -inf was believed; no query is read here."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((2, 1), (9, 30), 16))
    q[0, 1, 7, 3], k[..., 3] = torch.inf, -1.0
    keep = torch.rand(9, 30, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.5
    keep[7, 3] = True
    mask = keep if dtype == torch.bool else q.new_zeros(keep.shape).masked_fill(~keep, -torch.inf)

    def attend(q, k, v, bias, is_causal, scale):
        out, lse = fused.fused_attention(q, k, v, bias, is_causal, scale)
        out[0, 1, 7], lse[0, 1, 7] = 0.0, -torch.inf
        return out, lse

    call = Call(q, k, v, 0.25, mask=mask)
    out, lse = guard.attend_guarded(call, backend.attend_visible, attend, anchored=False, queries=False)
    assert out.isnan().all(-1).nonzero().tolist() == [[0, 1, 7]] == lse.isnan().nonzero().tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_the_query_of_a_row_without_keys_may_be_anything(bad, dtype):
    """Story: what anchors took from the scores was added to the log-sum-exp of -inf, which a NaN made NaN."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((2, 1), (40, 600), 16))
    k += 20
    q[0, 1, 7, 3] = bad
    keep = torch.ones(40, 600, dtype=torch.bool, device=DEVICE)
    keep[7] = False
    mask = keep if dtype == torch.bool else q.new_zeros(keep.shape).masked_fill(~keep, -torch.inf)
    out, lse = guard.attend_guarded(
        Call(q, k, v, 0.25, mask=mask), backend.attend_visible, fused.fused_attention, anchored=True
    )
    assert not out[:, :, 7].any()
    assert (lse[:, :, 7] == -torch.inf).all()
    assert (lse > -torch.inf).sum() == 2 * 39


def test_without_anchors_an_infinite_key_has_the_weight_0_or_makes_the_row_nan():
    """Nothing looks for such keys then. The first query's score is -inf and the second one's inf."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((2, 1), (1, 600), 16))
    q[0, :, 0, 3] = torch.tensor([-1.0, 1.0])
    k[0, 0, 17, 3] = torch.inf
    out, lse = guard.attend_guarded(Call(q, k, v, 0.25), backend.attend_visible, fused.fused_attention, anchored=False)
    golden, golden_lse = pasa.golden_attention(q, *(x[:, :, torch.arange(600) != 17] for x in (k, v)), scale=0.25)
    assert max_error(out[:, 0], golden[:, 0]) <= 4 * HALF_ULP
    torch.testing.assert_close(lse[:, 0], golden_lse[:, 0].float(), atol=1e-4, rtol=1e-6)
    assert out[:, 1].isnan().all()
    assert lse[:, 1].isnan().all()


KERNELS = ["default", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "MATH"][
    : 1 if DEVICE == "cpu" else 5
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("limits", [{}, {"is_causal": True}, {"mask": "bool"}, {"mask": "fp32"}])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_no_kernel_hides_a_query_in_the_log_sum_exp(kernel, bad, limits, dim):
    """The guard reads queries and outputs only where the log-sum-exp is not finite."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (77, 77), dim))
    q[0, 1, 40, 3], q[0, 3, 76] = bad, bad
    mask = masks(77, 77)[limits.get("mask", "none")]
    call = Call(q, k, v, 0.2, is_causal="is_causal" in limits, mask=None if mask is None else mask[:1, :1].to(DEVICE))
    with nullcontext() if kernel == "default" else sdpa_kernel(getattr(SDPBackend, kernel)):
        _, lse = backend.attend_visible(call)
    rows = lse.isfinite().logical_not().nonzero().tolist()
    assert [0, 1, 40] in rows
    assert [0, 3, 76] in rows


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU: torch's kernel for CPUs hides such a key")
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "FLASH_ATTENTION"])  # is never called
@pytest.mark.parametrize("keys", [1, 2, 3, 16, 40, 64, 129, 300, 4096, 32768])
@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_kernel_hides_a_key(kernel, keys, dim, is_causal):
    """Without anchors nothing looks for a NaN key, because it shows in the output or the log-sum-exp of each row."""
    for rows, nan in itertools.product((1, min(33, keys)), (slice(None), slice(keys // 2, keys // 2 + 1))):
        q, k, v = (x.cuda() for x in normal_qkv((4, 2), (rows, keys), dim))
        k[:, :, nan, 3] = torch.nan
        with nullcontext() if kernel == "default" else sdpa_kernel(getattr(SDPBackend, kernel)):
            out, lse = backend.attend_visible(Call(q, k, v, 0.2, is_causal=is_causal))
        first = 0 if not is_causal or nan == slice(None) else max(0, keys // 2 - (keys - rows))
        shown = ~out.isfinite().all(-1) | ~(lse < torch.inf)
        assert shown[:, :, first:].all()


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU: says what cuDNN does")
@pytest.mark.parametrize("keys", [1, 2, 3, 16, 40, 64, 129, 300, 4096, 32768])
@pytest.mark.parametrize("dim", [32, 64, 72, 128, 256])
@pytest.mark.parametrize("limits", [{}, {"is_causal": True}, {"mask": "bool"}])
def test_cudnn_hides_no_query(keys, dim, limits):
    """cuDNN shows every NaN or infinite query in the output or the log-sum-exp, so its guard need not read queries."""
    for rows, group, bad in itertools.product((1, 2, 33, 200), (1, 4), ("nan", "inf", "one column", "all columns")):
        rows = min(rows, keys) if "is_causal" in limits else rows
        q, k, v = (x.cuda() for x in normal_qkv((4, 4 // group), (rows, keys), dim))
        if bad == "one column":
            q[:, :, rows // 2, 3], k[..., 3] = torch.inf, -1.0
        elif bad == "all columns":
            q[:, :, rows // 2], k = -torch.inf, k.abs() + 0.1
        else:
            q[:, :, rows // 2, 3] = float(bad)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            if "mask" in limits:
                mask = torch.rand(rows, keys, device="cuda") < 0.5
                mask[:, keys // 2] = True
                out, lse = fused.fused_attention(q, k, v, mask.expand(1, 4, rows, keys), False, 0.2)
            else:
                out, lse = backend.attend_visible(Call(q, k, v, 0.2, **limits))
        row = rows // 2
        assert (~out[:, :, row].isfinite().all(-1) | ~lse[:, :, row].isfinite()).all(), (rows, group, bad)


@pytest.mark.parametrize("keys", [1, 3, 64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_an_infinite_query_whose_scores_are_all_infinite_makes_its_row_nan(keys, is_causal):
    """Memory-efficient attention hides it on a GPU: it gives such a row 0 and a log-sum-exp of 0."""
    q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (keys, keys), 64))
    q[:, :, keys // 2, 3], k[..., 3] = torch.inf, -1.0
    out, lse = guard.attend_guarded(
        Call(q, k, v, 0.2, is_causal=is_causal), backend.attend_visible, fused.fused_attention, anchored=False
    )
    assert out.isnan().all(-1).nonzero()[:, 2].tolist() == [keys // 2] * 4 == lse.isnan().nonzero()[:, 2].tolist()


@pytest.mark.parametrize("limits", [{}, {"is_causal": True}, {"mask": "padding"}])
def test_a_whole_call_gives_what_torch_operators_give(limits):
    """The call has anchors, and NaN and infinite keys, of which a mask hides some."""
    call = biased_call(2100, 40, masked="mask" in limits)
    call.is_causal = limits.get("is_causal", False)
    call.k[..., 0] = 0.0  # so that heads of the second batch entry keep finite scores
    expected, expected_lse = backend._attend_checked(call)
    out, lse = guard.attend_guarded(call, backend.attend_visible, fused.fused_attention, anchored=True)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(lse.isnan(), expected_lse.isnan())
    assert not expected.isnan().all()
    assert max_error(out.nan_to_num(), expected.nan_to_num().double()) <= 4 * HALF_ULP
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-5, equal_nan=True)


class NoReads(TorchDispatchMode):
    """Refuse operators that wait for the device, to read a number or a shape back."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keys", [300, LEAST_KEYS])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("limits", [{}, {"is_causal": True}, {"window": (9, 3)}, {"mask": "bool"}, {"mask": "fp32"}])
def test_nothing_is_read_back(keys, rows, limits, monkeypatch):
    """Every value stays on the device. So calls do not wait, and can be captured in a graph."""
    monkeypatch.setattr(backend, "_triton_guard", lambda device: guard.attend_guarded)
    q, k, v = (x.to(DEVICE) for x in normal_qkv((2, 1), (rows, keys), 16, batch=2))
    k[0, 0, 0, 0] = v[1, 0, 3, 3] = torch.nan
    mask = masks(rows, keys)[limits.get("mask", "none")]
    limits = {name: x for name, x in limits.items() if name != "mask"}
    call = Call(
        q, k, v, 0.25, mask=None if mask is None else mask.to(DEVICE), sinks=torch.zeros(2).to(DEVICE), **limits
    )
    with NoReads():
        backend.attend(call)
    assert fused.score_format(DEVICE).kind == "a"


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("mask", [False, True])
def test_a_captured_graph_gives_what_direct_calls_give(rows, mask):
    """Replayed on clean keys, on biased ones, and on NaN, in the same tensors."""
    q, k, v = (x.cuda() for x in normal_qkv((4, 2), (rows, 700), 64))
    keep = torch.ones(rows, 700, dtype=torch.bool, device="cuda").tril(700 - rows) if mask else None
    how = {"attn_mask": keep, "is_causal": not mask, "return_lse": True, "backend": "sdpa"}
    pasa.attention(q, k, v, **how)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        captured = pasa.attention(q, k, v, **how)
    for change in (lambda: None, lambda: k.add_(80.0), lambda: v[0, 0, 650].fill_(torch.nan)):
        change()
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        direct = pasa.attention(q, k, v, **how)
        torch.cuda.set_sync_debug_mode("default")
        # cuDNN sums the parts of a decoding row in no fixed order.
        within = {"atol": 1e-6, "rtol": 2 * HALF_ULP} if rows == 1 else {"atol": 0, "rtol": 0}
        for a, b in zip(captured, direct, strict=True):
            torch.testing.assert_close(a, b, **within, equal_nan=True)
