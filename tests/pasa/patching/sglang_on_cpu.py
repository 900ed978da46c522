"""Lets the Python files of SGLang's wheel be imported on a CPU.

What is replaced is compiled for GPUs, or images and sound that no language model needs. It is replaced where it is
imported, by modules whose attributes do nothing. Packages that find out by themselves what is installed are imported
before.
"""

import importlib.machinery
import sys
from unittest.mock import MagicMock

REPLACED = {"cuda", "flashinfer", "pynvml", "sgl_kernel", "torchvision"}


class Finder:
    """Finds the packages in `REPLACED`, and every module below them."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in REPLACED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__name__, module.__path__, module.__file__ = spec, spec.name, [], spec.name
        return module

    def exec_module(self, module):
        pass


def prepare():
    """Make SGLang importable; call this before anything of SGLang is imported."""
    import transformers.modeling_utils
    import tvm_ffi

    assert transformers.modeling_utils
    assert tvm_ffi
    sys.meta_path.insert(0, Finder())
