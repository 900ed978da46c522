"""Lets the Python files of vllm-ascend be imported on a CPU, where there is neither torch_npu nor an NPU.

What is replaced is what is compiled: torch_npu, of which one function works here (it writes a cache), and what a build
of vllm-ascend records of its chip. vLLM then finds vllm-ascend's platform by its entry point, as on an NPU.
"""

import importlib.util
import os
import sys
import types

import pytest
import torch

from tests import fake_npu

ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_PLUGINS": "ascend,pasa"}


class Absent(types.ModuleType):
    """A module whose functions fail when they are called, and whose classes have no methods."""

    def __getattr__(self, name):
        if name.startswith(("npu_", "_npu")) or (self.__name__ == "torch.npu" and name[0].islower()):
            return lambda *arguments, **how: pytest.fail(f"{self.__name__}.{name} was called")
        if name[0].isupper():
            return type(name, (), {})
        raise AttributeError(f"{self.__name__} has no {name}")


def prepare():
    """Make vllm-ascend importable; call this before anything of vLLM is imported."""
    import transformers.modeling_flash_attention_utils  # looks for torch_npu, and then for its functions

    assert transformers.modeling_flash_attention_utils
    os.environ.update(ENVIRONMENT)
    chip = fake_npu.install(pytest.MonkeyPatch()).npu
    replaced = Absent("torch_npu")
    replaced.__spec__ = sys.modules["torch_npu"].__spec__
    replaced.npu = torch.npu = Absent("torch.npu")
    vars(torch.npu).update(vars(chip))
    replaced._C = types.SimpleNamespace(_NPUTaskGroupHandle=object)
    replaced._npu_reshape_and_cache = write_cache
    sys.modules |= {"torch_npu": replaced, "torch.npu": torch.npu}
    torch.utils.rename_privateuse1_backend("npu")  # torch.device("npu") then exists
    torch.Tensor.pin_memory = lambda x, *arguments: x
    if importlib.util.find_spec("vllm_ascend._build_info") is None:  # made by a build
        info = sys.modules["vllm_ascend._build_info"] = types.ModuleType("vllm_ascend._build_info")
        info.__device_type__ = "A2"
    import vllm_ascend.ops  # before its attention, as a worker does
    from vllm.model_executor.models import registry

    assert vllm_ascend.ops
    registry._run_in_subprocess = lambda function: function()  # where torch_npu would not be replaced


def write_cache(key, value, key_cache, value_cache, slot_indices):
    """Do what torch_npu's function of this name does: write each token into its slot, in place."""
    assert len(key) == len(value) == len(slot_indices)
    slots = key_cache.shape[1]
    for token, slot in enumerate(slot_indices.tolist()):
        key_cache[slot // slots, slot % slots] = key[token]
        value_cache[slot // slots, slot % slots] = value[token]
