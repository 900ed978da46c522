"""Repeated calls of backend `sdpa`: a plan keeps what the first call of a geometry has prepared."""

import pytest
import torch

import pasa
from pasa.ops import plans
from pasa.ops.attention.sdpa import anchors, backend, fused
from pasa.ops.attention.triton.guard import launch as guard
from pasa.ops.attention.triton.guard.launch import attend_guarded
from tests.inputs import DEVICE, max_error, normal_qkv

HALF_ULP = 2.0**-11


@pytest.fixture(autouse=True)
def no_plans():
    """Let each test make its plans, and leave none of them."""
    plans._plans.clear()
    yield
    plans._plans.clear()


def on_device(*tensors):
    return [None if x is None else x.to(DEVICE) for x in tensors]


def attend(q, k, v, *, attn_mask=None):
    """Return output and log-sum-exp of the backend, on the CPU."""
    q, k, v, attn_mask = on_device(q, k, v, attn_mask)
    return [x.cpu() for x in pasa.attention(q, k, v, attn_mask=attn_mask, backend="sdpa", return_lse=True)]


def test_a_repeated_call_leaves_autocast_off(monkeypatch):
    """Story: a plan called the backend without turning autocast off, so the second call multiplied in BF16."""
    monkeypatch.setattr(fused, "FORMATS", {})
    monkeypatch.setattr(backend, "_triton_guard", lambda device: attend_guarded)
    q, k, v = normal_qkv((2, 2), (70, 90), 32)
    mask = torch.randn(70, 90)
    with torch.autocast(DEVICE, torch.bfloat16):
        first, again, third = (attend(q, k, v, attn_mask=mask)[0] for _ in range(3))
    assert torch.equal(first, again)
    assert torch.equal(first, third)
    assert max_error(again, pasa.golden_attention(q, k, v, attn_mask=mask)[0]) <= 4 * HALF_ULP


def serve_by_stand_in(monkeypatch):
    """Let torch's kernel for CPUs stand in for cuDNN; return the keys that it is called with."""
    called = []

    def cudnn(q, k, v, bias, causal, scale):
        called.append(k)
        out, lse = fused._cpu(q.cpu(), k.cpu(), v.cpu(), None if bias is None else bias.cpu(), causal, scale)
        return torch.empty_like(q).copy_(out), lse.to(q.device)

    monkeypatch.setattr(backend, "_triton_guard", lambda device: attend_guarded)
    monkeypatch.setattr(backend, "cudnn_serves", lambda *tensors: True)
    monkeypatch.setattr(backend, "cudnn_allowed", lambda: True)
    monkeypatch.setattr(backend, "call_cudnn", cudnn)
    return called


@pytest.mark.parametrize("order", ["HND", "NHD", "SBHD"])
def test_a_repeated_call_lays_its_output_out_as_the_first_one(order, monkeypatch):
    """Story: cuDNN gives the output the strides of any q, and repeated calls returned it as it was."""
    serve_by_stand_in(monkeypatch)
    q, k, v = on_device(*normal_qkv((2, 2), (6, 9), 16, batch=3))
    if order != "HND":
        dims = (0, 2, 1, 3) if order == "NHD" else (2, 0, 1, 3)
        q = q.permute(dims).contiguous().permute(sorted(range(4), key=dims.__getitem__))
    outs = [pasa.attention(q, k, v, backend="sdpa") for _ in range(3)]
    assert outs[0].stride() == outs[1].stride() == outs[2].stride()
    assert max_error(outs[2].cpu(), pasa.golden_attention(q.cpu(), k.cpu(), v.cpu())[0]) <= 4 * HALF_ULP


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [512, 3000])
def test_a_repeated_call_has_anchors_of_its_own(keys, masked, monkeypatch):
    """A plan keeps the launches before cuDNN, and each call forms its anchors and finds its NaN, seen or not."""
    called = serve_by_stand_in(monkeypatch)
    monkeypatch.setattr(anchors, "LEAST_ROWS_ON_GPU", anchors.LEAST_ROWS)  # so few rows have anchors there, too
    q, k, v = on_device(*normal_qkv((2, 1), (20, keys), 16, batch=2))
    keep = None
    if masked:
        keep = torch.ones(2, 1, 1, keys, dtype=torch.bool, device=DEVICE)
        keep[0, ..., 7:9], keep[1, ..., 9] = False, False
    hidden, seen = k.clone(), k.clone()
    hidden[0, 0, 8, 3], seen[1, 0, 11, 3] = torch.nan, torch.nan
    attend(q, k, v, attn_mask=keep)  # makes the plan
    del called[:]
    for bias, each in ((0, k), (20, k), (-40, hidden), (20, seen)):
        again = attend(q, each + bias, v, attn_mask=keep)
        (shifted,) = called  # by the plan alone: a first call calls fused.py
        assert shifted.abs().median() < 2
        plans._plans.clear()
        first = attend(q, each + bias, v, attn_mask=keep)
        del called[:]
        for a, b in zip(again, first, strict=True):
            torch.testing.assert_close(a, b, atol=4 * HALF_ULP, rtol=4 * HALF_ULP, equal_nan=True)
        wrong = first[0].isnan().any(-1).any(-1).any(-1).tolist()
        assert wrong == [each is hidden and not masked, each is seen]


@pytest.mark.parametrize("tensor", ["k", "v"])
def test_anchors_of_rows_that_are_not_contiguous(tensor, monkeypatch):
    """Story: the kernels before cuDNN read neighbours of such elements. Outputs erred by 0.4, or a NaN was missed."""
    found = []
    run = guard.Shift.run
    monkeypatch.setattr(guard.Shift, "run", lambda *given: found.append(run(*given)) or found[-1])
    monkeypatch.setattr(backend, "_triton_guard", lambda device: guard.attend_guarded)
    monkeypatch.setattr(anchors, "LEAST_ROWS_ON_GPU", anchors.LEAST_ROWS)  # so few rows have anchors there, too
    q, k, v = normal_qkv((2, 2), (20, 600), 16)
    k += 8
    v[0, 0, 5, 3] = 60000.0
    expected, _ = pasa.golden_attention(q, k, v)
    given = {"k": k, "v": v}
    given[tensor] = given[tensor].mT.contiguous().mT
    for _ in range(2):
        out, _ = attend(q, given["k"], given["v"])
        torch.testing.assert_close(out.double(), expected, atol=4 * HALF_ULP, rtol=4 * HALF_ULP)
        assert torch.equal(found.pop()[1][:, :, 1].cpu(), v.abs().amax(2))
