"""Peak memory."""

import torch

from pasa.eval.kit import memory


def test_the_peak_is_that_since_the_reset():
    """256 MiB that are gone again show in the peak, and no longer after a reset."""
    cpu = torch.device("cpu")
    memory.reset_peak(cpu)
    before = memory.peak_bytes(cpu)
    torch.ones(2**26).sum()
    peak = memory.peak_bytes(cpu)
    assert peak - before > 200 * 2**20
    memory.reset_peak(cpu)
    assert memory.peak_bytes(cpu) < peak


def test_a_system_that_does_not_tell(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError

    monkeypatch.setattr(memory.Path, "read_text", refuse)
    monkeypatch.setattr(memory.Path, "write_text", refuse)
    memory.reset_peak(torch.device("cpu"))
    assert memory.peak_bytes(torch.device("cpu")) is None


def test_a_device_is_asked_itself(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(device))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    memory.reset_peak(torch.device("cuda:1"))
    assert memory.peak_bytes(torch.device("cuda:1")) == 7
    assert calls == [torch.device("cuda:1")]
