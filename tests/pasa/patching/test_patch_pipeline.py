"""Tests of `patch_pipeline` itself: policies, kinds of models, backends, and the cost of its import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import pasa


@pytest.mark.parametrize(
    ("policy", "error", "reason"),
    [
        ("some", ValueError, "'some'"),
        (3, ValueError, "3"),
    ],
)
def test_policies(tiny, policy, error, reason):
    with pytest.raises(error, match=reason):
        pasa.patch_pipeline(tiny("qwen2"), policy=policy)


def test_a_policy_that_selects_nothing_is_an_error(tiny):
    with pytest.raises(NotImplementedError, match=r"nothing to patch.*declined by the policy"):
        pasa.patch_pipeline(tiny("qwen2"), policy=lambda name, module: False)


def test_an_unknown_pipeline_is_named():
    """A pipeline class that claims to be of diffusers is named in the error; test_diffusers_models.py has real ones."""
    pipeline = type("MagicPipeline", (), {"__module__": "diffusers.pipelines.magic", "components": {"scheduler": 1}})
    with pytest.raises(TypeError, match="MagicPipeline holds no model"):
        pasa.patch_pipeline(pipeline())


@pytest.mark.parametrize(
    ("thing", "name"), [(None, "NoneType"), ("model", "'model'"), (torch.nn.Linear(2, 2), "Linear")]
)
@pytest.mark.parametrize("policy", ["all", "auto"])
def test_anything_else_is_a_type_error(thing, name, policy):
    """Story: with "auto" a name was taken for a folder, and the error was that there is none."""
    with pytest.raises(TypeError, match=name):
        pasa.patch_pipeline(thing, policy=policy)


def test_a_torch_module_is_refused_without_importing_a_host_library():
    code = (
        "import sys, torch, pasa\ntry: pasa.patch_pipeline(torch.nn.Linear(2, 2))\nexcept TypeError as error: assert "
    )
    code += "'pasa.attention' in str(error)\nsys.exit('transformers' in sys.modules or 'diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_loads_no_host_library():
    code = "import sys, pasa.patching; sys.exit('transformers' in sys.modules or 'diffusers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def machine_without_devices(monkeypatch):
    """Make the machine look as if it had neither accelerators nor Triton's interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "npu", None, raising=False)


def test_a_backend_that_cannot_run_on_the_machine_is_refused_at_patching(tiny, machine_without_devices):
    """A backend that cannot run on this machine is refused by `patch_pipeline`.

    Story: the report said "serves all devices: triton", and the first forward raised an error.
    """
    model = tiny("qwen2")
    with pytest.raises(NotImplementedError, match=r"backend='triton' cannot run .* neither a CUDA .*leave backend out"):
        pasa.patch_pipeline(model, backend="triton")
    with pytest.raises(NotImplementedError, match=r"backend='npu' cannot run .*(torch_npu|NPU)"):
        pasa.patch_pipeline(model, backend="npu")
    assert model.config._attn_implementation == "eager"
    pasa.patch_pipeline(model, backend="reference").unpatch()


def test_a_model_can_be_patched_before_it_is_moved_to_the_gpu(tiny, machine_without_devices, monkeypatch):
    """A backend for GPUs is accepted for a model that is still on the CPU, if the machine has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    pasa.patch_pipeline(tiny("qwen2"), backend="triton").unpatch()
