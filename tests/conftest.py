"""Shared test settings: one torch thread per worker, no network, reproducible hypothesis runs."""

import dataclasses
import os

import pytest
import torch
from hypothesis import settings

from pasa.ops import registry

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by Triton when a kernel is defined
    from tests.interpreter import speed_up

    speed_up()
torch.set_num_threads(1)
settings.register_profile("pasa", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("pasa")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory, worker_id):
    """Return a folder that all test processes of the session share; take a lock to make something in it."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture
def by_reference(monkeypatch):
    """Let the reference serve calls that name no backend, by taking the backend before it away."""
    absent = dataclasses.replace(registry.BACKENDS["sdpa"], missing=lambda: "left out by this test", priority=-1)
    monkeypatch.setitem(registry.BACKENDS, "sdpa", absent)
