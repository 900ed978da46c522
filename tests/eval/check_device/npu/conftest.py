"""The Ascend C kernels on the CPU twin, for the checks that an NPU runs."""

import dataclasses
import importlib.util
import sys

import pytest
import torch

from pasa.ops import registry
from pasa.ops.attention.ascend import backend, build_record
from tests.ascend_c.conftest import CHIP_310P
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
    yield from served_by(npu_library, monkeypatch)


@pytest.fixture
def npu_310p(npu_310p_library, monkeypatch):
    """The same by the library for an Ascend 310P, on a machine that has one."""
    monkeypatch.setenv("FAKE_SOC", CHIP_310P)
    yield from served_by(npu_310p_library, monkeypatch)


def served_by(library, monkeypatch):
    monkeypatch.setenv("PASA_ASCEND_LIBRARY", str(library))
    monkeypatch.setattr(build_record, "installed", dict)
    backend.library_error.cache_clear()
    assert backend.library_error() is None
    record = dataclasses.replace(registry.BACKENDS["npu"], devices=("cpu",), missing=lambda: None)
    monkeypatch.setitem(registry.BACKENDS, "npu", record)
    yield
    backend.library_error.cache_clear()


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
