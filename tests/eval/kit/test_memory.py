"""Peak memory of a process and of a device."""

import torch

from pasa.eval.kit import memory

CPU = torch.device("cpu")


def test_the_peak_is_that_since_the_reset():
    """256 MiB that are gone again show in the peak, and no longer after a reset."""
    memory.reset_peak(CPU)
    before = memory.peak_bytes(CPU)
    torch.ones(2**26).sum()
    peak = memory.peak_bytes(CPU)
    assert peak - before > 200 * 2**20
    memory.reset_peak(CPU)
    assert memory.peak_bytes(CPU) < peak


def test_a_system_without_proc_has_no_peak(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / "absent" / name.strip("/"))
    memory.reset_peak(CPU)
    assert memory.peak_bytes(CPU) is None


def test_a_device_knows_its_own_peak(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    memory.reset_peak(torch.device("cuda:1"))
    assert (memory.peak_bytes(torch.device("cuda:1")), calls) == (7, [torch.device("cuda:1")])


def test_what_a_block_adds_is_its_peak_beyond_what_was_held(monkeypatch):
    """Story: a model's memory contained the static cache of the model that had run before it."""
    calls = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", calls.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 130)
    device = torch.device("cuda:1")
    with memory.added_peak(device) as peak:
        assert (peak.bytes, calls) == (None, [device])
    assert peak.bytes == 30
    with memory.added_peak(CPU) as peak:
        pass
    assert peak.bytes is None
