"""Calls use memory of earlier ones where nothing can be lost by it."""

import threading

import pytest
import torch

import pasa
from pasa.ops import memory, plans, recording
from tests.inputs import DEVICE, normal_qkv

X = torch.ones(3, device=DEVICE)


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch):
    monkeypatch.setattr(plans, "_plans", {})
    memory.release_memory()
    yield
    memory.release_memory()


def test_memory_grows_by_doubling_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(memory, "MOST_BYTES", 5000)
    sizes = [memory.kept_memory(X, size).numel() for size in (100, 90, 101, 150, 1000, 3000, 3001, 5000)]
    assert sizes == [100, 100, 200, 200, 1000, 3000, 5000, 5000]
    assert memory.kept_memory(X, 10).data_ptr() == memory.kept_memory(X, 5000).data_ptr()
    assert memory.kept_memory(X, 10).device == X.device
    memory.release_memory()
    assert memory.kept_memory(X, 10).numel() == 10


def test_each_thread_and_stream_has_its_own(monkeypatch):
    streams = iter([0, 1, 0, 1, 2, 0])
    monkeypatch.setattr(memory, "STREAMS", 2)
    monkeypatch.setattr(memory, "_place", lambda x: (0, next(streams)))
    one, other, again, still = (memory.kept_memory(X, 100) for _ in range(4))
    assert one.data_ptr() == again.data_ptr() != other.data_ptr() == still.data_ptr()
    memory.kept_memory(X, 100)  # a third stream
    assert len(memory._kept.buffers) == 1
    found = []
    mine = memory.kept_memory(X, 100)
    monkeypatch.setattr(memory, "_place", lambda x: (0, 0))
    thread = threading.Thread(target=lambda: found.append(memory.kept_memory(X, 100)))
    thread.start()
    thread.join()
    assert mine.data_ptr() == memory.kept_memory(X, 100).data_ptr() != found[0].data_ptr()


def test_graphs_streams_and_devices_are_told_apart(monkeypatch):
    """A graph is replayed beside eager calls; launches on two streams, or devices, run at the same time."""
    q = torch.ones(3)
    assert not memory.may_keep(q)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 1))
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda found=capturing: found)
        assert memory.may_keep(q) != capturing
    for stream in (0, 7):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _, found=stream: found, raising=False)
        assert memory._place(q) == (1, stream)


def test_calls_that_share_memory_do_not_change_each_other(monkeypatch):
    """Splits of a call lie where those of another one were."""
    monkeypatch.setattr(plans, "may_keep", lambda x: True)
    calls = [[x.half().to(DEVICE) for x in normal_qkv((4, 2), (rows, 700), 64, seed=rows)] for rows in (1, 3)]
    expected = [pasa.attention(*call, backend="triton", return_lse=True) for call in calls]
    for _ in range(2):
        for call, (out, lse) in zip(calls, expected, strict=True):
            found, found_lse = pasa.attention(*call, backend="triton", return_lse=True)
            assert torch.equal(found, out)
            assert torch.equal(found_lse, lse)
            assert torch.equal(pasa.attention(*call, backend="triton"), out)
    assert len(memory._kept.buffers) == 1
    large = max(x.numel() for x in memory._kept.buffers.values())
    monkeypatch.setattr(plans, "MOST_BYTES", large // 4)  # now no call keeps its workspace
    memory.release_memory()
    assert torch.equal(pasa.attention(*calls[1], backend="triton"), expected[1][0])
    assert sum(x.numel() for x in memory._kept.buffers.values()) <= large // 4


def plan_of(*, lse_as_tensor=False):
    """Return a plan with an output, a log-sum-exp and two parts of a workspace, and the operands of its last run."""
    got = []
    recorder = recording.Recorder([X])
    with recorder:
        out, first, lse, second = (X.new_empty(size) for size in (3, 70, 5, 2))
        places = [recorder.place(each) for each in (X, out, first, lse, second)]
        if lse_as_tensor:
            places[3] = recorder.operand(lse)
        recorder.steps.append(recording.Step(tuple(places), lambda operands: got.append(list(operands))))
    return plans.Plan(recorder, [out, lse, X.new_empty(0)]), got


def test_results_that_nobody_needs_lie_behind_the_workspace(monkeypatch):
    monkeypatch.setattr(plans, "may_keep", lambda x: True)
    plan, got = plan_of()
    out, *others = plan.run((X,), alone=True)
    assert others == [None, None]
    kept = memory.kept_memory(X, 0)
    x, at_out, first, lse, second = got.pop()
    assert (x, at_out) == (X.data_ptr(), out.data_ptr())
    assert first == kept.data_ptr()
    assert (second - first, lse - first) == (512, 768)  # 280 bytes, then 8, in steps of 256
    assert kept.numel() == 1024
    out, lse_needed, _ = plan.run((X,))
    assert got.pop()[1:4:2] == [out.data_ptr(), lse_needed.data_ptr()]
    assert lse_needed.shape == (5,)


def test_a_result_that_a_kernel_takes_as_a_tensor_is_one(monkeypatch):
    """Kernels that Triton launches itself take tensors, where others take addresses."""
    monkeypatch.setattr(plans, "may_keep", lambda x: True)
    plan, _ = plan_of(lse_as_tensor=True)
    _, lse, _ = plan.run((X,), alone=True)
    assert lse.shape == (5,)


def test_it_is_allocated_by_a_thread_without_modes():
    """A mode, such as a default device, or a pool to allocate from, is one of a thread."""
    with torch.inference_mode(), torch.device("meta"):
        kept = memory.kept_memory(X, 100)
    assert not kept.is_inference()
    assert kept.device == X.device


@pytest.mark.skipif(DEVICE == "cpu", reason="pools need a CUDA GPU")
@pytest.mark.parametrize("rows", [1, 1000])
def test_no_other_pool_holds_it(rows):
    """Story: torch.compile(mode="reduce-overhead") failed, because its pool still held memory after a call."""
    q, k, v = (x.half().to(DEVICE) for x in normal_qkv((8, 2), (rows, 1000), 64))
    pool = torch.cuda.MemPool()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.use_mem_pool(pool):
        for _ in range(3):
            out = pasa.attention(q, k, v, backend="triton")
    torch.cuda.synchronize()
    assert memory._kept.buffers
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert [block["address"] for block in blocks if block["state"] == "active_allocated"] == [out.data_ptr()]


@pytest.mark.skipif(DEVICE == "cpu", reason="streams and graphs need a CUDA GPU")
def test_graphs_and_streams_have_memory_of_their_own():
    """A replayed graph, and another stream, still find their splits after many eager calls."""
    q, k, v = (x.half().to(DEVICE) for x in normal_qkv((8, 2), (1, 4000), 64))
    expected = pasa.attention(q, k, v, backend="triton")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        captured = pasa.attention(q, k, v, backend="triton")
    assert len(memory._kept.buffers) <= 1
    others = [x.half().to(DEVICE) for x in normal_qkv((8, 2), (1, 3000), 64, seed=1)]
    torch.cuda.synchronize()
    results = []
    for turn in range(200):
        graph.replay()
        with torch.cuda.stream(side):
            results.append(pasa.attention(q, k, v, backend="triton"))
        pasa.attention(*others, backend="triton")
        if turn % 50 == 0:
            torch.cuda.synchronize()
            assert torch.equal(captured, expected)
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    assert all(torch.equal(each, expected) for each in results)
    assert len(memory._kept.buffers) == 2
