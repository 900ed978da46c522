"""Plans: a call on tensors of a known geometry repeats launches, and gives the same bits."""

import dataclasses
import threading
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pasa
from pasa.ops import devices, operators, plans, recording, registry
from pasa.ops.attention.sdpa import fused
from pasa.ops.attention.spec import pages
from pasa.ops.attention.triton import backend as triton_backend
from tests.inputs import DEVICE, normal_qkv
from tests.ops.planned_calls import CASES, attend, kept
from tests.pages import make_pages


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.setattr(plans, "_plans", {})


portable = pytest.mark.skipif(DEVICE == "cuda", reason="counts the launches of kernels that the interpreter runs")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bias", [0, 300])
def test_a_repeated_call_has_the_bits_of_a_first_one(name, bias):
    """The second call of a geometry launches what the first did, on its own tensors; the first one's are not read."""
    call, heads, lengths, dim, how = CASES[name]
    for seed in range(2):
        q, k, v = normal_qkv(heads, lengths, dim, seed=seed)
        q[..., :8] += bias * seed  # the first call of a geometry needs no exact pass, and the second may
        k[..., :8] += bias * seed
        repeated = call(q, k, v, **how)
        assert all(kept())
    plans._plans.clear()
    first = call(q, k, v, **how)
    assert all(torch.equal(a, b) for a, b in zip(repeated, first, strict=True))


@pytest.mark.parametrize("grad", ["no_grad", "inference_mode"])
def test_a_copy_is_not_taken_for_a_view(grad):
    """A call that copies keys because their last stride is not 1 is not repeated.

    Story: in inference mode, a torch mode sees `contiguous` itself, whose schema promises a view. A plan took the copy
    for a part of the keys and, when repeated, read memory at that distance from other keys.
    """
    q, k, v = normal_qkv((2, 1), (70, 150), 80)
    with getattr(torch, grad)():
        turned = k.mT.contiguous().mT
        results = [attend(q, turned, v) for _ in range(2)]
        assert kept() == [None]
        expected = attend(q, k, v)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("anchors", [False, True])
def test_pages_are_repeated(monkeypatch, anchors):
    """A call over pages has a plan on a GPU, where tables are not read; lengths may change beside the same tensors."""
    monkeypatch.setattr(pages, "check_pages", lambda _: None)
    for seed, bias in ((0, 0.0), (1, 300.0)):
        cache = make_pages([70, 300], bias=bias, seed=seed)
        out, lse = (cache.anchored() if anchors else cache).attend(DEVICE, backend="triton", max_seqlen_k=512)
    assert kept()[0] is not None
    plans._plans.clear()
    first, first_lse = (cache.anchored() if anchors else cache).attend(DEVICE, backend="triton", max_seqlen_k=512)
    assert torch.equal(out, first)
    assert torch.equal(lse, first_lse)


@pytest.mark.parametrize("first", ["one tensor", "one storage", "apart"])
@pytest.mark.parametrize("second", ["one tensor", "one storage", "apart"])
def test_memory_that_inputs_share_is_no_part_of_a_plan(first, second):
    """A plan knows inputs by their place among the arguments, not by their addresses.

    If one tensor is passed as k and v, or k and v lie in one storage, another call may pass two.
    """

    def inputs(kind):
        q, k, v = (x.to(DEVICE) for x in normal_qkv((4, 2), (1, 300), 64))
        both = torch.stack([k, v], 2)  # (B, H, 2, S, D): k and v with the same strides as below
        k, v = both[:, :, 0], both[:, :, 1]
        if kind == "one tensor":
            v = k
        if kind == "apart":
            v = both.clone()[:, :, 1]
        return q, k, v

    attend(*inputs(first))
    out, lse = attend(*(tensors := inputs(second)))
    assert len(kept()) == 1
    plans._plans.clear()
    assert torch.equal(out, attend(*tensors)[0])
    assert torch.equal(lse, attend(*tensors)[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_are_checked_in_every_call(dtype):
    """BF16 and FP32 inputs are checked for values beyond FP16, which reads data, so such calls have no plan."""
    q, k, v = (x.to(dtype) for x in normal_qkv((4, 2), (1, 300), 64))
    attend(q, k, v)
    assert kept() == [None]
    k[0, 0, 5, 5] = 1e5
    with pytest.raises(ValueError, match="k has 1 values beyond the FP16 range"):
        attend(q, k, v)


def test_bad_calls_are_refused_after_good_ones():
    q, k, v = normal_qkv((4, 2), (1, 300), 64)
    attend(q, k, v)
    with pytest.raises(ValueError, match="head dim of q is 64 but that of k is 32"):
        attend(q, k[..., :32], v[..., :32])
    with pytest.raises(TypeError, match="is_causal=0 is a int"):
        attend(q, k, v, is_causal=0)
    with pytest.raises(ValueError, match="scale=0 is outside"):
        attend(q, k, v, scale=0)
    with pytest.raises(ValueError, match="softcap=1e-08 is outside"):
        attend(q, k, v, softcap=1e-8)


def test_nan_reaches_what_it_reaches_in_a_first_call():
    q, k, v = normal_qkv((4, 2), (1, 300), 64)
    attend(q, k, v)
    k[0, 1, 7, 7] = torch.nan
    out, lse = attend(q, k, v)
    assert torch.equal(out.isnan().any(-1).cpu(), torch.tensor([[[False], [False], [True], [True]]]))
    assert torch.equal(lse.isnan().cpu(), torch.tensor([[[False], [False], [True], [True]]]))


def test_a_new_backend_is_considered(monkeypatch):
    """A plan belongs to the registered backends, so one that is registered later serves from then on."""
    q, k, v = normal_qkv((4, 2), (1, 300), 64)
    attend(q, k, v)
    absent = dataclasses.replace(registry.BACKENDS["triton"], missing=lambda: "it was taken away")
    monkeypatch.setitem(registry.BACKENDS, "triton", absent)
    with pytest.raises(NotImplementedError, match="it was taken away"):
        attend(q, k, v)


@pytest.mark.skipif(DEVICE == "cuda", reason="replaces the cuDNN that serves calls on a GPU")
def test_a_choice_by_shape_is_part_of_a_plan(monkeypatch):
    """Each shape stays with its backend if two serve by shape, and only a backend that can be repeated has plans.

    Warming up the backend that serves calls in a graph is not recorded; a call with it could not be repeated.
    """
    inputs = {keys: [normal_qkv((4, 2), (1, keys), 64, seed=seed) for seed in range(2)] for keys in (300, 500)}
    served_by = {300: "triton", 500: "sdpa"}
    expected = {
        keys: [pasa.attention(*(y.to(DEVICE) for y in x), backend=served_by[keys]) for x in inputs[keys]]
        for keys in inputs
    }
    plans._plans.clear()
    by_shape = registry.ByShape(registry.BACKENDS["triton"], [registry.BACKENDS["sdpa"]])
    choose = registry.choose
    monkeypatch.setattr(registry, "choose", lambda *how: (by_shape, *choose(*how)[1:]))
    monkeypatch.setattr(registry, "_capability", lambda _: "9.0")
    monkeypatch.setattr(
        registry.measured, "chosen", lambda _, shape, captured: "sdpa" if captured else served_by[shape.keys]
    )
    monkeypatch.setattr(devices.warm, "devices", frozenset())
    warmed = []
    monkeypatch.setattr(fused, "cudnn_serves", lambda q, *others: q.shape[2] == fused.ALIGNED)  # while warming up
    monkeypatch.setattr(fused, "call_cudnn", lambda *call: warmed.append(threading.get_ident()))
    for seed in range(2):
        for keys in inputs:
            out, _ = attend(*inputs[keys][seed])
            assert torch.equal(out, expected[keys][seed])
    assert warmed == [threading.get_ident()]
    assert [plan is None for plan in kept()] == [False, True]
    other = threading.Thread(target=lambda: attend(*inputs[300][0]))
    other.start()
    other.join()
    assert len(set(warmed)) == 2  # the other thread was not served by a plan of this one


def test_autograd_and_modes_see_calls_that_have_plans():
    q, k, v = normal_qkv((4, 2), (1, 300), 64)
    expected, _ = attend(q, k, v)
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watching():
        out, _ = attend(q, k, v)
    assert "pasa.attention.default" in seen
    assert torch.equal(out, expected)
    q.requires_grad_()
    out, _ = attend(q, k, v)
    assert out.requires_grad
    with torch.inference_mode():
        assert attend(q, k, v)[0].is_inference()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(attend(q, k, v)[0], expected)
    if DEVICE == "cpu":
        mapped = torch.func.vmap(lambda x: pasa.attention(x, k, v, backend="triton"))(q.detach()[None])
        assert torch.equal(mapped[0], expected)


def moved(x):
    """Return the same numbers 2 bytes behind an address that is a multiple of 16."""
    room = x.new_empty(x.numel() + 1)
    return room[1:].view(x.shape).copy_(x)


def rows_apart(x):
    """Return the same numbers with rows that lie further apart."""
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


CHANGES = {
    "shape": lambda q, k, v, how: (q, k[:, :, :-1].contiguous(), v[:, :, :-1].contiguous(), how),
    "strides": lambda q, k, v, how: (q, rows_apart(k), v, how),
    "alignment": lambda q, k, v, how: (q, k, moved(v), how),
    "dtype": lambda q, k, v, how: (q.float(), k.float(), v.float(), how),
    "scale": lambda q, k, v, how: (q, k, v, how | {"scale": 0.5}),
    "causal": lambda q, k, v, how: (q, k, v, how | {"is_causal": True}),
    "mask": lambda q, k, v, how: (q, k, v, how | {"attn_mask": torch.arange(k.shape[2], device=k.device) > 40}),
    "options": lambda q, k, v, how: (q, k, v, how | {"config": pasa.PasaConfig(softmax="unbiased")}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_has_a_plan_of_its_own(change):
    """Kernels are compiled for these: an aligned address is read 16 bytes at a time, for example."""
    given = [x.half().to(DEVICE) for x in normal_qkv((4, 2), (2, 300), 64)]
    how = {"backend": "triton", "return_lse": True}
    other = CHANGES[change](*given, how)
    expected = pasa.attention(*other[:3], **other[3])
    plans._plans.clear()
    pasa.attention(*given, **how)
    assert len(kept()) == 1
    for _ in range(2):
        results = pasa.attention(*other[:3], **other[3])
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert len(kept()) == 2


def test_a_captured_call_has_a_plan_of_its_own(monkeypatch):
    """Another backend may serve a call while a graph is captured."""
    q, k, v = (x.half().to(DEVICE) for x in normal_qkv((4, 2), (1, 300), 64))
    key = partial(plans._key, operators._op, ("a scale",))
    before = key((q, k, v))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert key((q, k, v)) != before
    assert key((None, None, q)) != key((None, None, k))  # gradients may be missing


def test_the_number_of_plans_is_limited(monkeypatch):
    monkeypatch.setattr(plans, "PLANS", 3)
    for keys in range(300, 306):
        attend(*normal_qkv((4, 2), (1, keys), 64))
        assert len(kept()) <= 3


def test_what_cannot_be_repeated_is_noticed():
    """An operation on data, memory of others, and a result that is no allocation each rule a plan out."""
    x, other = torch.ones(3), torch.ones(3)

    def record(call):
        recorder = recording.Recorder([x])
        with recorder:
            result = call(recorder)
        return plans.Plan(recorder, [result])

    def step(recorder, *tensors):
        recorder.steps.append(recording.Step(tuple(recorder.operand(each) for each in tensors), lambda _: None))

    def good(recorder):
        out = torch.empty(3)
        step(recorder, x.view(3)[1:], out)
        return out

    def converts(recorder):
        out = good(recorder)
        x.add(1)
        return out

    def changes(recorder):
        out = good(recorder)
        out.zero_()
        return out

    def borrows(recorder):
        out = good(recorder)
        step(recorder, other)
        return out

    def returns_a_part(recorder):
        good(recorder)
        return torch.empty(6)[:3]

    def returns_an_input(recorder):
        good(recorder)
        return x.view(3)

    def launches_nothing(_):
        return torch.empty(3)

    assert record(good).steps
    refused = {
        converts: "aten.add", changes: "aten.zero_", borrows: "neither an input", returns_a_part: "of its own",
        returns_an_input: "of its own", launches_nothing: "without a launch",
    }  # fmt: skip
    for call, why in refused.items():
        with pytest.raises(LookupError, match=why):
            record(call)


def test_a_launcher_with_plans_of_its_own_is_called_as_a_whole(monkeypatch):
    """The Hopper kernel keeps plans with tensor maps; a plan calls its launcher, and skips what comes before it."""
    made = []

    def fake(call):
        made.append((call.scale, call.is_causal, call.dropped))
        return lambda q, k, v, alone=False: (q * 2, q[..., 0].float() + v[0, 0, 0, 0])

    monkeypatch.setattr(triton_backend, "hopper_serves", lambda _: True)
    monkeypatch.setattr(triton_backend, "_hopper", lambda: triton_backend.with_own_plans(fake))
    for seed in range(2):
        q, k, v = normal_qkv((2, 2), (70, 300), 64, seed=seed)
        out, lse = attend(q, k, v, is_causal=True, scale=0.25)
        assert torch.equal(out.cpu(), q * 2)
        assert torch.equal(lse.cpu(), q[..., 0].float() + v[0, 0, 0, 0])
        assert kept()[0].whole
    assert made == [(0.25, True, 0)]
    attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
    attend(q, k, v, window=(200, 69))  # which cuts off keys
    assert kept()[1:] == [None, None]
