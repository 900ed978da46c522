"""Shared test settings: one torch thread per worker, no network, reproducible hypothesis runs."""

import gc
import os

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton when a kernel is defined
    from tests.interpreter import speed_up

    speed_up()
torch.set_num_threads(1)
settings.register_profile("pasa", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("pasa")


def pytest_collection_finish(session):
    """Exempt modules and collected tests from garbage collection, because all of them stay until the end."""
    gc.freeze()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory, worker_id):
    """Return a folder that all test processes of the session share; take a lock to make something in it."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture
def by_reference():
    """Let the reference serve calls that name no backend."""
    from tests.inputs import reference_serves  # loads Triton, which reads TRITON_INTERPRET

    with reference_serves():
        yield
