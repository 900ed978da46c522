"""Backend `sdpa`: the fused attention of a device, guarded.

Devices of which nothing is known get FP32, which is tested on the device that is here.
"""

import itertools

import pytest
import torch
from torch.library import opcheck

import pasa
from pasa.ops import plans
from pasa.ops.attention.sdpa import backend, fused
from pasa.ops.attention.triton.guard.launch import attend_guarded
from tests.inputs import DEVICE, max_error, normal_qkv

HALF_ULP = 2.0**-11
SHAPES = [
    ((2, 2), (130, 130), 64, 1),
    ((4, 2), (50, 300), 32, 2),
    ((2, 1), (300, 70), 16, 1),
    ((4, 4), (1, 500), 64, 1),
    ((2, 2), (257, 259), 40, 2),
    ((6, 2), (3, 1), 8, 1),
]
WINDOWS = [None, (0, 0), (17, 0), (100, -1), (-1, 40), (30, 5), (1000, 1000)]


@pytest.fixture(params=["device", "fp32", "other guard"])
def kind(request, monkeypatch):
    """Run on the device as it is listed, as a device of which nothing is known, and with the guards of another device.

    The others are Triton kernels on a CPU, and torch operators on a GPU.
    """
    plans._plans.clear()  # calls on another kind of device must not be repeated here
    if request.param == "fp32":
        monkeypatch.setattr(fused, "FORMATS", {})
    if request.param == "other guard":
        guard = attend_guarded if DEVICE == "cpu" else None
        monkeypatch.setattr(backend, "_triton_guard", lambda device: guard)
    yield request.param
    plans._plans.clear()


def on_device(*tensors):
    return [None if x is None else x.to(DEVICE) for x in tensors]


def attend(q, k, v, *, attn_mask=None, sinks=None, **how):
    """Return output and log-sum-exp of the backend, on the CPU."""
    q, k, v, attn_mask, sinks = on_device(q, k, v, attn_mask, sinks)
    how = {"backend": "sdpa", "return_lse": True} | how
    return [x.cpu() for x in pasa.attention(q, k, v, attn_mask=attn_mask, sinks=sinks, **how)]


def masks(rows, keys, heads):
    g = torch.Generator().manual_seed(rows)
    keep = torch.rand(1, 1, rows, keys, generator=g) > 0.3
    keep[:, :, rows // 2] = False  # a row without keys
    return {
        "none": None,
        "bool": keep,
        "fp16": torch.randn(1, heads, rows, keys, generator=g).half(),
        "fp32": 1000 * torch.randn(keys, generator=g),
        "bf16": torch.randn(1, 1, rows, 1, generator=g).bfloat16().expand(1, 1, rows, keys),
        "keys": keep[:, :, :1].expand(1, 1, 1, keys).clone().fill_(True),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_results_are_those_of_the_definition(kind, shape, is_causal):
    """Outputs, log-sum-exps and largest scores for every mask, window and sink."""
    (heads, kv_heads), (rows, keys), dim, batch = shape
    q, k, v = normal_qkv((heads, kv_heads), (rows, keys), dim, batch=batch)
    sinks = torch.linspace(-3, 3, heads)
    every = list(enumerate(itertools.product(WINDOWS, masks(rows, keys, heads).items())))
    # Triton's interpreter takes 20 ms for a call, so it gets every fifth, others for each shape.
    few = kind == "other guard" and DEVICE == "cpu"
    for index, (window, (name, mask)) in every[SHAPES.index(shape) % 5 :: 5] if few else every:
        sink = sinks if index % 2 else None
        limits = {"attn_mask": mask, "is_causal": is_causal, "window": window, "sinks": sink}
        out, lse, top = attend(q, k, v, **limits, return_max_logits=True)
        golden, golden_lse = pasa.golden_attention(q, k, v, **limits | {"window": window or (-1, -1)})
        size = 1.0 if name != "fp32" else 2.0**-11 * 4000  # FP32 holds a score of 4000 with 2^-12
        assert max_error(out, golden) <= 4 * HALF_ULP * max(1.0, size), (window, name)
        assert torch.equal(lse == -torch.inf, golden_lse == -torch.inf)
        some = golden_lse > -torch.inf
        torch.testing.assert_close(lse[some], golden_lse[some].float(), atol=1e-4, rtol=1e-6)
        torch.testing.assert_close(top, largest(q, k, mask, is_causal, window), atol=1e-3, rtol=1e-6)


def largest(q, k, mask, is_causal, window):
    """Return the largest visible score of each head, in FP64."""
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    rows, keys = scores.shape[-2:]
    ahead = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    left, right = window or (-1, -1)
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    hidden |= (ahead > 0) & is_causal
    hidden |= (ahead < -left) & (left >= 0)
    hidden |= (ahead > right) & (right >= 0)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.masked_fill(hidden, -torch.inf).amax((-1, -2)).float()


@pytest.mark.parametrize("offset", [1000.0, 4096.0])
def test_keys_that_a_row_does_not_see_do_not_change_it(kind, offset):
    """The first half of a column is 0 and the second half is large: rows of the first half err as plain attention does.

    A mean over all keys would put them half the offset away from 0, where FP32 sums lose 12 bits.
    """
    q, k, v = normal_qkv((2, 2), (512, 512), 64)
    k[..., :256, 0], k[..., 256:, 0] = 0.0, offset
    q[..., 0] = 8.0
    out, _ = attend(q, k, v, is_causal=True)
    golden, _ = pasa.golden_attention(q, k, v, is_causal=True)
    plain = torch.nn.functional.scaled_dot_product_attention(*on_device(q, k, v), is_causal=True).cpu()
    early = slice(0, 256)
    assert max_error(out[:, :, early], golden[:, :, early]) <= 1.1 * max_error(plain[:, :, early], golden[:, :, early])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("limits", [{"is_causal": True}, {"window": (10, 3)}, {"mask": "bool"}, {"mask": "fp16"}, {}])
def test_nan_and_infinity_reach_the_rows_that_see_them(kind, bad, limits):
    """A NaN or infinity makes the rows that see it NaN, and no other. A kernel alone may give a finite output.

    Triton guards attend again from rows that a kernel turned to NaN, in FP32, so these rows may round otherwise. They
    look for no infinite key, which has the weight 0 where its score is -inf.
    """
    guarded = backend._triton_guard(torch.device(DEVICE)) is not None
    slack = 2 * HALF_ULP if guarded else 0.0
    q, k, v = normal_qkv((4, 2), (70, 90), 32)
    mask = masks(70, 90, 4)[limits.get("mask", "none")]
    limits = {name: x for name, x in limits.items() if name != "mask"} | {"attn_mask": mask}
    for tensor, at in ((0, (0, 1, 40)), (1, (0, 1, 60)), (2, (0, 0, 60))):
        inputs = [q.clone(), k.clone(), v.clone()]
        inputs[tensor][at][5] = bad
        out, lse = attend(*inputs, **limits)
        expected, expected_lse = pasa.attention(*inputs, **limits, return_lse=True, backend="reference")
        clean, _ = attend(q, k, v, **limits)
        untouched = ~expected.isnan()
        assert max_error(out[untouched], clean[untouched].double()) <= slack
        if guarded and tensor == 1 and abs(bad) == torch.inf:
            weightless = expected.isnan() & ~out.isnan()
            others = torch.ones(1, 4, 70, 90, dtype=torch.bool)
            others[:, 2:, :, 60] = False
            if mask is not None:
                shown = mask.expand(1, 4, -1, -1)
                others = shown & others if mask.dtype == torch.bool else shown.where(others, -torch.inf)
            golden, _ = pasa.golden_attention(q, k, v, **(limits | {"attn_mask": others}))
            assert max_error(out[weightless], golden[weightless]) <= 4 * HALF_ULP
            out[weightless] = torch.nan
            lse[weightless.all(-1)] = torch.nan
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(lse.isnan(), expected_lse.isnan())


def test_a_row_without_keys_whose_sink_is_minus_infinity_is_0(kind):
    """Story: a sink of -inf is no sink. The share of the keys in such a row was exp(-inf + inf), so the row was NaN."""
    q, k, v = normal_qkv((2, 2), (6, 9), 16)
    keep = torch.ones(6, 9, dtype=torch.bool)
    keep[1] = False
    limits = {"attn_mask": keep, "sinks": torch.tensor([-torch.inf, 0.0])}
    out, lse = attend(q, k, v, **limits)
    golden, golden_lse = pasa.golden_attention(q, k, v, **limits)
    assert max_error(out, golden) <= 4 * HALF_ULP
    torch.testing.assert_close(lse, golden_lse.float(), atol=1e-4, rtol=1e-6)


def test_weights_below_fp16_make_the_output_smaller_within_the_bound(kind):
    """65,535 keys are 17.5 nats below the first. FP16 has no such weights, but the sum that divides counts them.

    Values are 1, so every output should be 1. It may be smaller by 2^-11 + keys 2^-25, and in FP32 by nothing.
    """
    keys = 2**16
    q, k = torch.zeros(1, 1, 20, 16).half(), torch.zeros(1, 1, keys, 16).half()
    q[..., 0], k[:, :, 0, 0] = 1.0, 17.5
    out, _ = attend(q, k, torch.ones_like(k), scale=1.0)
    leak = (1 - out.double()).max()
    assert leak <= (2.0**-11 + keys * 2.0**-25 if kind != "fp32" else 0.0)
    assert (out <= 1).all()


def test_values_at_the_end_of_fp16_stay_finite(kind):
    """A kernel divides a sum over rounded weights by one over unrounded ones, which can pass 65504 by 2^-11."""
    q, k, v = normal_qkv((2, 2), (100, 1000), 64)
    for value in (65504.0, -65504.0):
        out, _ = attend(q, k, torch.full_like(v, value))
        assert (out == value).all()


def test_a_kernel_that_rounds_up_to_infinity_gets_halved_values(monkeypatch):
    """It is emulated here: outputs beyond 2^15 become infinite. Clamping alone would turn 65000 into 65504."""

    def rounds_up(q, k, v, *how):
        out, lse = fused.fused_attention(q, k, v, *how)
        return torch.where(out.abs() > 2.0**15, torch.inf * out, out), lse

    monkeypatch.setattr(backend, "fused_attention", rounds_up)
    q, k, v = normal_qkv((2, 2), (10, 20), 16)
    v[..., 0], v[..., 1] = 65000.0, -65000.0
    out, _ = attend(q, k, v)
    assert max_error(out, pasa.golden_attention(q, k, v)[0]) <= 65000 * 2.0**-10


def test_a_hidden_key_that_its_anchor_carries_beyond_fp16():
    """Keys of 60000 leave an anchor; a hidden key of -65504 less the anchor is beyond FP16, and reaches no row."""
    q, k, v = normal_qkv((1, 1), (32, 600), 16)
    k[..., 0] = 60000.0
    k[:, :, -1, 0] = -65504.0
    q[..., 0] = -0.01  # times -inf, and a mask of -inf added, would be NaN
    keep = torch.ones(1, 1, 1, 600, dtype=torch.bool)
    keep[..., -1] = False
    out, _ = attend(q, k, v, attn_mask=keep)
    assert max_error(out, pasa.golden_attention(q, k, v, attn_mask=keep)[0]) <= 8 * HALF_ULP


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_and_paged_calls_are_those_of_each_sequence(is_causal):
    q, k, v = (x[0].transpose(0, 1) for x in normal_qkv((4, 2), (60, 90), 32))
    edges_q, edges_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 10, 10, 60], [0, 40, 50, 90]))
    sinks = torch.tensor([0.0, 1.0, -2.0, 3.0])
    how = {"is_causal": is_causal, "window": (20, 4), "sinks": sinks, "return_lse": True, "return_max_logits": True}
    out, lse, top = pasa.attention_varlen(q, k, v, edges_q, edges_k, 50, 40, **how, backend="sdpa")
    expected = pasa.attention_varlen(q, k, v, edges_q, edges_k, 50, 40, **how, backend="reference")
    for a, b in zip((out, lse, top), expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-3, rtol=0)
    caches = torch.randn(2, 8, 16, 2, 32).half()
    table, lengths = torch.tensor([[3, 7, 1], [5, 0, 2], [4, 0, 0]]), torch.tensor([41, 20, 0])
    paged = [
        pasa.attention_paged(q[:3], *caches, table, lengths, window=(7, 0), return_lse=True, backend=name)
        for name in ("sdpa", "reference")
    ]
    for a, b in zip(*paged, strict=True):
        torch.testing.assert_close(a, b, atol=5e-3, rtol=0)


def test_gradients_are_those_of_exact_attention():
    leaves = [x.float().requires_grad_() for x in normal_qkv((4, 2), (40, 60), 16)] + [torch.zeros(4).requires_grad_()]
    out, lse = pasa.attention(
        *leaves[:3], sinks=leaves[3], is_causal=True, window=(20, 0), return_lse=True, backend="sdpa"
    )
    found = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out, lse = pasa.golden_attention(*wide[:3], sinks=wide[3], is_causal=True, window=(20, 0))
    for a, b in zip(found, torch.autograd.grad(out.square().sum() + lse.sum(), wide), strict=True):
        assert (a - b).abs().max() <= 2e-3 * b.abs().max()


def test_it_is_one_node_of_a_compiled_program():
    q, k, v = normal_qkv((4, 2), (40, 60), 16)
    opcheck(torch.ops.pasa.attention.default, (q, k, v), {"window_left": 9, "backend": "sdpa"})
    compiled = torch.compile(lambda *x: pasa.attention(*x, is_causal=True, backend="sdpa"), fullgraph=True)
    assert torch.equal(compiled(q, k, v), pasa.attention(q, k, v, is_causal=True, backend="sdpa"))


def test_a_replaced_function_of_torch_is_never_called(monkeypatch, kind):
    """After `F.scaled_dot_product_attention = ...`, the backend's own call would come back to it."""

    def refuse(*_, **__):
        raise AssertionError("the backend called what the program had put in the place of torch's function")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    q, k, v = normal_qkv((2, 2), (30, 30), 16)
    attend(q, k, v, is_causal=True)


def test_unknown_devices_get_fp32(monkeypatch):
    """Apple, Intel and AMD devices keep scores in formats that nobody here has checked. ROCm's are called cuda."""
    assert [fused.score_format(device).kind for device in ("cpu", "cuda", "npu", "mps", "xpu")] == list("aabcc")
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert fused.score_format("cuda").kind == "c"


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "MATH"])
def test_cuda_backends_that_a_program_selects(name):
    """The setting is kept where the kernel keeps scores in FP32; FP32 matrix products serve otherwise."""
    q, k, v = normal_qkv((4, 2), (200, 300), 64)
    q, k = 100 * q, 100 * k
    golden, _ = pasa.golden_attention(q, k, v, is_causal=True)
    with torch.nn.attention.sdpa_kernel([getattr(torch.nn.attention.SDPBackend, name)]):
        assert max_error(attend(q, k, v, is_causal=True)[0], golden) <= 0.02


@pytest.mark.parametrize("offset", [1, 3, 7])
def test_tensors_that_start_at_any_address(offset):
    """Story: cuDNN gave wrong numbers for a view that starts one element behind an aligned address."""
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2 * 4 * 80 * 64 + offset, generator=g).half().to(DEVICE)[offset:] for _ in range(3)]
    q, k, v = (x.view(2, 4, 80, 64) for x in tensors)
    assert q.data_ptr() % 16
    for limits in ({}, {"is_causal": True}, {"attn_mask": torch.ones(80, 80, dtype=torch.bool, device=DEVICE).tril(9)}):
        out = pasa.attention(q, k, v, **limits, backend="sdpa")
        assert max_error(out, pasa.golden_attention(q, k, v, **limits)[0]) <= 4 * HALF_ULP


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_a_mask_of_the_lowest_number_leaves_the_mean(kind, dtype):
    """Models mask keys out by finfo.min. A row where it stands for all keys sees all alike.

    Story: CUDA's kernels multiply a mask by log2(e), which made finfo.min of FP32 -inf, and the row NaN.
    """
    q, k, v = normal_qkv((2, 2), (20, 40), 64)
    mask = torch.zeros(20, 40, dtype=dtype)
    mask[5], mask[7, 3:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    out, lse = attend(q, k, v, attn_mask=mask)
    golden, golden_lse = pasa.golden_attention(q, k, v, attn_mask=mask)
    assert max_error(out, golden) <= 4 * HALF_ULP + 2e-3 * (dtype == torch.float16)
    torch.testing.assert_close(lse, golden_lse.float(), atol=1e-2, rtol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_largest_score_of_a_head_that_sees_a_nan_or_infinity_is_nan(kind, bad):
    q, k, v = normal_qkv((2, 2), (5, 9), 16)
    k[0, 1, 3] = bad
    *_, top = attend(q, k, v, return_max_logits=True)
    assert top.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("keys", [1, 2])
def test_a_single_nan_key_is_not_lost(kind, keys):
    """Story: torch's kernel for CPUs gave a finite output for a row whose only key was NaN."""
    if kind == "other guard" and DEVICE == "cpu":
        pytest.skip("Triton's guards rely on CUDA's kernels: see test_no_kernel_hides_a_key in test_guard.py")
    q, k, v = normal_qkv((1, 1), (1, keys), 16)
    k[..., 0] = torch.nan
    out, lse = attend(q, k, v)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_a_last_stride_that_is_not_1(kind):
    """Story: torch's kernel for CPUs read such tensors as if rows were contiguous."""
    q, k, v = (x.mT.contiguous().mT for x in normal_qkv((2, 2), (20, 30), 16))
    out, _ = attend(q, k, v)
    assert max_error(out, pasa.golden_attention(q, k, v)[0]) <= 4 * HALF_ULP


@pytest.mark.parametrize("limits", [{}, {"is_causal": True}, {"window": (2, 0)}, {"attn_mask": True}], ids=str)
def test_a_batch_invariant_call_is_not_left_to_cudnn(limits, monkeypatch):
    """Story: cuDNN gave a single query row over 343 keys other bits when the same call was repeated (H100)."""
    asked = []

    def note(q, k, v, bias, causal, scale, *, repeatable=False):
        asked.append(repeatable)
        return fused.fused_attention(q, k, v, bias, causal, scale)

    def refuse(*tensors):
        raise AssertionError("cuDNN was called")

    q, k, v = on_device(*normal_qkv((2, 2), (6, 9), 16, batch=2))
    if "attn_mask" in limits:
        limits = {"attn_mask": torch.ones(6, 9, dtype=torch.bool, device=DEVICE).tril(3)}
    monkeypatch.setattr(backend, "fused_attention", note)
    monkeypatch.setattr(fused, "cudnn_serves", lambda *tensors: True)
    monkeypatch.setattr(fused, "call_cudnn", refuse)
    fused._cuda(q, k, v, None, False, 0.25, True)
    monkeypatch.setattr(fused, "cudnn_serves", lambda *tensors: False)
    pasa.attention(q, k, v, **limits, backend="sdpa", config=pasa.PasaConfig(batch_invariant=True))
    assert asked
    assert all(asked)


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("mask", [None, "keys", "rows", "heads", "float"])
@pytest.mark.parametrize(("rows", "is_causal"), [(1, True), (1, False), (5, False), (5, True), (65, False)])
def test_queries_of_a_group_are_rows_of_one_head_where_they_see_the_same_keys(
    rows, is_causal, mask, order, monkeypatch
):
    """Story: cuDNN took 760 us for 38 query heads of one key head, and takes 116 us for the same rows of one head.

    With one row of each head, its kernel for decoding is faster without that.
    """
    batch, heads, kv_heads, keys = 2, 6, 2, 40
    seen = []
    monkeypatch.setattr(backend, "_triton_guard", lambda device: attend_guarded)
    monkeypatch.setattr(backend, "_attend_dense", noting(backend._attend_dense, seen))
    plans._plans.clear()
    q, k, v = normal_qkv((heads, kv_heads), (rows, keys), 16, batch=batch)
    if order == "NHD":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    keep = torch.rand(batch, heads, rows, keys, generator=torch.Generator().manual_seed(rows)) > 0.3
    keep[..., 0] = True
    attn_mask = {
        None: None,
        "keys": keep[:, :1, :1],
        "rows": keep[:, :1],
        "heads": keep[:, :, :1],
        "float": torch.where(keep[:, :1, :1], 0.5, -torch.inf).half(),
    }[mask]
    expected, expected_lse = pasa.golden_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal)
    outs = [attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal) for _ in range(3)]
    assert None not in plans._plans.values()  # each is repeated by its plan
    plans._plans.clear()
    stacked = rows == 5 and not is_causal and mask in (None, "keys", "float")
    assert seen[0] == ((batch, kv_heads, 3 * rows, 16) if stacked else (batch, heads, rows, 16))
    for out, lse in outs:
        assert out.stride() == outs[0][0].stride()
        assert out.shape == q.shape
        assert max_error(out, expected) <= 4 * HALF_ULP
        assert max_error(lse, expected_lse) <= 1e-4


@pytest.mark.parametrize(
    ("dim", "kv_heads", "keys", "masked", "stacked"),
    [
        (160, 32, 520, False, True),
        (160, 31, 520, False, False),
        (128, 32, 520, False, False),
        (160, 1, 512, False, True),
        (160, 1, 128, False, True),
        (160, 32, 127, False, False),
        (160, 32, 256, True, False),
    ],
)
def test_single_rows_of_a_wide_group_are_rows_of_one_head_where_keys_are_few_or_heads_many(
    dim, kv_heads, keys, masked, stacked, monkeypatch
):
    """Story: for 16 x 32 heads of 192 over 8 x 16,384 keys, cuDNN took 646 us, and takes 529 us for rows of a head.

    Below a mask, or over 64 keys, it took longer.
    """
    seen = []
    monkeypatch.setattr(backend, "_triton_guard", lambda device: attend_guarded)
    monkeypatch.setattr(backend, "_attend_dense", noting(backend._attend_dense, seen))
    plans._plans.clear()
    q, k, v = normal_qkv((2 * kv_heads, kv_heads), (1, keys), dim, batch=2)
    mask = (torch.arange(keys) > 5)[None, None, None] if masked else None
    out, _ = attend(q, k, v, attn_mask=mask)
    plans._plans.clear()
    assert seen[0] == ((2, kv_heads, 2, dim) if stacked else (2, 2 * kv_heads, 1, dim))
    assert max_error(out, pasa.golden_attention(q, k, v, attn_mask=mask)[0]) <= 4 * HALF_ULP


def noting(function, seen):
    """Return the function, and note the shape of the queries of each call."""

    def noted(call, *arguments, **options):
        seen.append(tuple(call.q.shape))
        return function(call, *arguments, **options)

    return noted
