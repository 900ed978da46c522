"""Programs for the CPU twin, compiled once however many test processes there are, and again when a source changes."""

import dataclasses

import pytest
import torch

from pasa.ops import registry
from pasa.ops.attention.ascend import backend as npu_backend
from tests import fake_npu
from tests.ascend_c.twin_build import FAST, PROGRAMS, SANITIZED, TWIN, Program, build, build_library

CHIP_310P = "Ascend310P3"


@pytest.fixture(scope="session")
def twin_folder(shared_folder):
    return shared_folder / "twin"


@pytest.fixture(scope="session")
def programs_folder(pytestconfig, twin_folder):
    """Return the folder of compiled programs: pytest's cache, in which later sessions find them."""
    cache = getattr(pytestconfig, "cache", None)  # None with -p no:cacheprovider
    return twin_folder if cache is None else cache.mkdir("twin")


@pytest.fixture
def twin_program(programs_folder, tmp_path):
    """Make a program out of the name of a file in `programs/`; arrays go through the test's own folder.

    Programs run under AddressSanitizer and UndefinedBehaviorSanitizer unless `optimise` says otherwise.
    """

    def make(name, *, optimise=SANITIZED, **settings):
        return Program(build(PROGRAMS / f"{name}.cpp", programs_folder, optimise=optimise, **settings), tmp_path)

    return make


@pytest.fixture
def twin(twin_program):
    """The program of all cases that test the twin itself."""
    return twin_program("twin")


@pytest.fixture(scope="session")
def npu_library(twin_folder):
    """The library of torch.ops.pasa.npu_*, its kernels on the CPU twin and its tensors the CPU's: what
    scripts/build_ascend.sh makes of a CANN and a torch_npu that are not there."""
    return build_library(twin_folder)


@pytest.fixture(scope="session")
def npu_310p_library(shared_folder):
    """The same for the Ascend 310P: torch.ops.pasa.npu_310p_*."""
    return build_library(shared_folder / "twin_310p", CHIP_310P)


@pytest.fixture
def npu(npu_library, monkeypatch):
    """torch.ops.pasa, and the backend `npu` ready for tensors of the CPU."""
    yield from ready(npu_library, monkeypatch)


@pytest.fixture
def npu_310p(npu_310p_library, monkeypatch):
    """The same as on a machine with an Ascend 310P."""
    monkeypatch.setenv("FAKE_SOC", CHIP_310P)
    fake_npu.install(monkeypatch, CHIP_310P)
    yield from ready(npu_310p_library, monkeypatch)


def ready(library, monkeypatch):
    """Yield torch.ops.pasa with a library loaded, whose backend takes tensors of the CPU."""
    monkeypatch.setenv("PASA_ASCEND_LIBRARY", str(library))
    npu_backend.library_error.cache_clear()
    assert npu_backend.library_error() is None  # loads it
    record = dataclasses.replace(registry.BACKENDS["npu"], devices=("cpu",), missing=lambda: None)
    monkeypatch.setitem(registry.BACKENDS, "npu", record)
    yield torch.ops.pasa
    npu_backend.library_error.cache_clear()


@pytest.fixture
def kernels(twin_program):
    """The kernels, and a launch of each."""
    return twin_program("kernels", optimise=FAST, include=[TWIN.parent], define=["PASA_CPU_TWIN"])


@pytest.fixture
def sanitized_kernels(twin_program):
    """The same under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return twin_program("kernels", include=[TWIN.parent], define=["PASA_CPU_TWIN"])


@pytest.fixture
def kernels_310p(twin_program):
    """The kernels for the Ascend 310P, and a launch of each."""
    return twin_program("kernels_310p", optimise=FAST, include=[TWIN.parent], define=["PASA_CPU_TWIN"])
