"""The work of the host: what a call on a GPU enters and launches, keeps and compiles, without a GPU."""

import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

import pasa
from pasa.ops import plans
from pasa.ops.attention.triton import launcher
from pasa.ops.attention.triton.backward import launch as backward_launch
from pasa.ops.attention.triton.decode import launch as decode_launch
from pasa.ops.attention.triton.decode import paged_launch
from tests.inputs import DEVICE, normal_qkv
from tests.ops.planned_calls import CASES, attend, differentiate, kept, masked

portable = pytest.mark.skipif(DEVICE == "cuda", reason="counts the launches of kernels that the interpreter runs")


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.setattr(plans, "_plans", {})


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Pretend that every kernel is compiled, and launch nothing; return the list of the launches.

    This leaves the work that Python does for a call on a GPU. Allocations are those of the CPU.
    """
    launched = []
    ready = launcher.Ready(lambda *arguments: launched.append(arguments), None, 0, None, True, ())
    monkeypatch.setattr(launcher, "_compiled", lambda *_: ready)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    for module in (decode_launch, paged_launch, backward_launch):
        monkeypatch.setattr(module, "device_architecture", lambda _: "sm_90")
    monkeypatch.setattr(decode_launch, "early", lambda _: True)
    return launched


def calls_of(function):
    """Return how many functions, in Python and C, a call enters."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


# Functions that a call may enter, and its launches. Before there were plans, these calls entered 561 (decode), 513
# (masked), 654 (prefill) and 270 (short) functions, and forward and backward together 1402. In a model, where other
# code fills the caches of the processor, each costs twice as much time as in a loop.
WORK = {
    "decode": (85, 3),
    "decode masked": (90, 3),
    "decode some rows": (85, 3),
    "prefill": (95, 4),
    "short": (70, 1),
}


@portable
@pytest.mark.parametrize("name", WORK)
def test_work_of_the_host(name, pretended_gpu):
    """A repeated call enters few functions, and launches its kernels on addresses of three allocations."""
    call, heads, lengths, dim, how = CASES[name]
    most, launches = WORK[name]
    q, k, v = normal_qkv(heads, lengths, dim)
    mask = torch.ones(1, 1, 1, lengths[1], dtype=torch.bool) if call is masked else None

    def repeated():
        pasa.attention(q, k, v, attn_mask=mask, backend="triton", **how)

    repeated()
    pretended_gpu.clear()
    repeated()
    assert len(pretended_gpu) == launches
    inputs = {x.data_ptr() for x in (q, k, v)}
    for arguments in pretended_gpu:
        assert arguments[3] == 7  # the stream
        assert inputs & set(arguments)
    assert calls_of(repeated) <= most


LENGTHS = range(130, 250)  # of one size of tiles


def padded(q, k, v, **how):
    """Attend to a left-padded batch below a mask of rows and keys, as models make it."""
    rows, keys = q.shape[2], k.shape[2]
    shown = torch.arange(keys) >= torch.arange(q.shape[0])[:, None]
    return attend(q, k, v, attn_mask=torch.ones(rows, keys).tril(keys - rows).bool() & shown[:, None, None], **how)


GROWING = {
    name: (function, *CASES[name][1:])
    for name, function in (
        ("decode", attend),
        ("decode masked", padded),
        ("prefill", attend),
        ("gradients", differentiate),
    )
}
GROWING["prefill masked"] = padded, (2, 1), (1, 1), 64, {}


@portable
@pytest.mark.parametrize("name", GROWING)
def test_new_lengths_compile_next_to_nothing(name, pretended_gpu, monkeypatch):
    """A kernel is compiled for lengths that are multiples of 16, and for others.

    One that reads a mask may need a third version, where its rows do not begin at multiples of 16, but its heads or
    sequences do.
    Numbers of tiles, rows and heads made versions, too. A padded prompt that needs one takes some 8 s (H100).
    """
    function, heads, lengths, dim, how = GROWING[name]
    versions = {}

    def compiled(kernel, grid, tensors, numbers, constants, options):
        free = kernel.kwargs["do_not_specialize"] or ()
        names = kernel.arg_names[: len(tensors) + len(numbers)]
        stated = SimpleNamespace(params=[SimpleNamespace(do_not_specialize=each in free) for each in names])
        kind = launcher.kinds(stated, tensors, numbers), *constants.items(), *options.items()
        versions.setdefault((kernel.__name__, constants.get("FAST"), constants.get("EXACT")), set()).add(kind)
        return ready

    ready = launcher._compiled()
    monkeypatch.setattr(launcher, "_compiled", compiled)
    for n in LENGTHS:
        rows = min(lengths[0], n) if "decode" in name else n
        function(*normal_qkv(heads, (rows, n), dim, batch=2), **how)
    assert versions
    most = 3 if "masked" in name else 2
    assert {each: len(kinds) for each, kinds in versions.items() if len(kinds) > most} == {}


@portable
def test_a_plan_keeps_no_tensor_alive(pretended_gpu):
    """Neither a plan nor its recorder keeps a tensor of the call alive, not even until garbage is collected."""
    gc.disable()
    try:
        tensors = list(normal_qkv((4, 2), (1, 300), 64))
        out, lse = attend(*tensors)
        left = [weakref.ref(x) for x in (*tensors, out, lse)]
        storages = [x.untyped_storage()._weak_ref() for x in (*tensors, out, lse)]
        del tensors, out, lse
        pretended_gpu.clear()
        assert kept()[0] is not None
        assert not any(ref() is not None for ref in left)
        assert all(torch.UntypedStorage._expired(ref) for ref in storages)
    finally:
        gc.enable()


@portable
def test_threads_record_apart(pretended_gpu):
    """A thread records its own calls only, while other threads are within calls."""
    inputs = [normal_qkv((4, 2), (1, 300 + n), 64) for n in range(40)]
    alone = []
    for x in inputs:
        pretended_gpu.clear()
        attend(*x)
        alone.append(len(pretended_gpu))
    plans._plans.clear()

    def work(n):
        for x in inputs[n::4]:
            attend(*x)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept()) == 40
    assert sorted(len(plan.steps) for plan in kept()) == sorted(alone)


@portable
def test_work_of_the_host_for_gradients(pretended_gpu):
    q, k, v = normal_qkv((2, 1), (70, 300), 64)
    differentiate(q, k, v)
    pretended_gpu.clear()
    differentiate(q, k, v)
    assert len(pretended_gpu) == 4 + 4
    assert calls_of(lambda: differentiate(q, k, v)) <= 320


@portable
def test_a_plan_follows_the_stream(pretended_gpu, monkeypatch):
    tensors = normal_qkv((4, 2), (1, 300), 64)
    attend(*tensors)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 8)
    pretended_gpu.clear()
    attend(*tensors)
    assert {arguments[3] for arguments in pretended_gpu} == {8}
