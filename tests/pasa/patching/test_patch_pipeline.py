"""The front door: policies, hosts, and what importing it costs."""

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
    """Any class that says it is of diffusers; what real ones are refused for is in test_diffusers_models.py."""
    pipeline = type("MagicPipeline", (), {"__module__": "diffusers.pipelines.magic", "components": {"scheduler": 1}})
    with pytest.raises(TypeError, match="MagicPipeline holds no model"):
        pasa.patch_pipeline(pipeline())


@pytest.mark.parametrize("thing", [None, "model", torch.nn.Linear(2, 2)])
def test_anything_else_is_a_type_error(thing):
    with pytest.raises(TypeError, match=type(thing).__name__):
        pasa.patch_pipeline(thing)


def test_importing_the_package_loads_no_host_library():
    code = "import sys, pasa.patching; sys.exit('transformers' in sys.modules or 'diffusers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
