"""Checks of values, and when they are skipped."""

from types import SimpleNamespace

import pytest
import torch

from pasa.ops.attention.call import capturing, edges, to_fp16


class OnNpu(torch.Tensor):
    """A tensor that claims to be on an NPU."""

    device = SimpleNamespace(type="npu")


@pytest.fixture
def npu(monkeypatch):
    """Provide torch.npu as torch_npu would, as far as the code asks; `captures` says whether it is capturing."""
    stream = SimpleNamespace(captures=False)
    fake = SimpleNamespace(is_current_stream_capturing=lambda: stream.captures)
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    return stream


@pytest.mark.parametrize("captures", [False, True])
def test_an_npu_is_asked_whether_it_captures(npu, captures):
    npu.captures = captures
    assert capturing(torch.zeros(1).as_subclass(OnNpu)) is captures


def test_a_value_beyond_fp16_is_reported_unless_a_graph_is_captured(npu):
    x = torch.tensor([1.0, -1e6]).as_subclass(OnNpu)
    with pytest.raises(ValueError, match=r"q has 1 values beyond the FP16 range \(largest 1e\+06 > 65504\)"):
        to_fp16(x, "q")
    npu.captures = True
    assert to_fp16(x, "q").tolist() == [1.0, -torch.inf]


def test_the_cpu_captures_nothing():
    assert not capturing(torch.zeros(1))


@pytest.mark.parametrize("lengths", [[1, 3], [0, 2], [0, 2, 1, 3]])
def test_cumulative_lengths_rise_to_the_number_of_tokens(lengths):
    with pytest.raises(ValueError, match="does not rise from 0 to the 3 tokens of q"):
        edges(torch.tensor(lengths), "q", torch.zeros(3, 1, 8))
