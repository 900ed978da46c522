"""The Ascend C kernels on the CPU twin, for the checks that an NPU runs."""

import importlib.util
import sys

import pytest
import torch

from pasa.ops.attention.ascend import build_record
from tests.ascend_c.conftest import CHIP_310P, ready
from tests.ascend_c.twin_build import FAKES, build_library


@pytest.fixture(scope="session")
def npu_library(shared_folder):
    return build_library(shared_folder / "twin")


@pytest.fixture(scope="session")
def npu_310p_library(shared_folder):
    return build_library(shared_folder / "twin_310p", CHIP_310P)


@pytest.fixture
def npu(npu_library, monkeypatch):
    """Let the backend `npu` serve tensors of the CPU, by the library on the twin."""
    monkeypatch.setattr(build_record, "installed", dict)
    yield from ready(npu_library, monkeypatch)


@pytest.fixture
def npu_310p(npu_310p_library, monkeypatch):
    """The same by the library for an Ascend 310P, on a machine that has one."""
    monkeypatch.setattr(build_record, "installed", dict)
    monkeypatch.setenv("FAKE_SOC", CHIP_310P)
    yield from ready(npu_310p_library, monkeypatch)


@pytest.fixture
def deviate(monkeypatch):
    """Return a function that puts a fake torch_npu in place, with one deviation of this device or none."""

    def deviate(name):
        monkeypatch.setenv("FAKE_DEVIATION", name)
        path = FAKES / "python" / "torch_npu" / "__init__.py"
        spec = importlib.util.spec_from_file_location("fake_torch_npu", path)
        fake = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fake)
        monkeypatch.setitem(sys.modules, "torch_npu", fake)
        monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: False, raising=False)
        monkeypatch.setattr(torch.cpu, "NPUGraph", fake.NPUGraph, raising=False)
        monkeypatch.setattr(torch.cpu, "graph", fake.graph, raising=False)
        if name != "alignment":
            monkeypatch.setattr(torch, "empty", fake.aligned_empty)

    return deviate
