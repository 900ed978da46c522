"""The cache of compiled kernels separates all arguments that Triton specialises differently; needs no device."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import BaseBackend
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import native_specialize_impl

from pasa.ops.attention.triton import c_launcher
from pasa.ops.attention.triton import launcher as triton_launch

ROOT = Path(__file__).resolve().parents[4]
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 15, 16, 17, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 16, 0.5, 1.0, 16.0]),
    st.integers(0, 2**40),
)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.int32]


def specialised(x):
    """Return the type and the specialisation key that Triton gives an argument."""
    return native_specialize_impl(BaseBackend, x, False, True, True)


@given(NUMBERS, NUMBERS)
def test_numbers_of_one_kind_are_one_to_triton(a, b):
    if triton_launch._number_kind(a) == triton_launch._number_kind(b):
        assert specialised(a) == specialised(b)


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 40), st.integers(0, 40))
def test_tensors_of_one_kind_are_one_to_triton(dtype, other, skip, skip_other):
    a, b = torch.empty(64, dtype=dtype)[skip:], torch.empty(64, dtype=other)[skip_other:]
    if triton_launch._pointer_kind(a) == triton_launch._pointer_kind(b):
        assert specialised(a) == specialised(b)


@pytest.mark.parametrize("skip", [0, 4, 16])
def test_a_pointer_is_the_tensor_it_stands_for(skip):
    owner = torch.empty(64, dtype=torch.uint8)
    pointer, view = triton_launch.Pointer(owner, skip, torch.float32), owner[skip:].view(torch.float32)
    assert triton_launch._pointer_kind(pointer) == triton_launch._pointer_kind(view)
    assert specialised(pointer) == specialised(view)


def test_parts_of_a_workspace_are_apart_and_aligned(monkeypatch):
    """The parts of a workspace begin at multiples of 16 bytes, one behind the other; checked in ordinary memory."""
    monkeypatch.setattr(triton_launch, "DIRECT", True)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device, empty=torch.empty: empty(size, dtype=dtype))
    sizes = [(3, torch.float32), (1, torch.float16), (5, torch.int32)]
    parts = triton_launch.workspace(torch.device("cuda", 0), *sizes)
    for part, (size, dtype), after in zip(parts, sizes, [*parts[1:], None], strict=True):
        assert part.dtype == dtype
        assert (part.address - parts[0].address) % 16 == 0
        end = part.address + size * dtype.itemsize
        assert end <= (after.address if after else part.owner.data_ptr() + part.owner.numel())


def test_elsewhere_a_workspace_is_tensors():
    a, b = triton_launch.workspace(torch.device("cpu"), (3, torch.float32), (2, torch.int32))
    assert (a.shape, a.dtype, b.shape, b.dtype) == ((3,), torch.float32, (2,), torch.int32)


class Refused:
    """Mimic a compiled kernel that once did not fit: Triton sets its `run` to a callable that raises."""

    def __init__(self, error):
        self.run = functools.partial(self.fail, error)

    @staticmethod
    def fail(error, *arguments):
        raise error


def test_a_kernel_that_once_did_not_fit_says_so_again():
    """A kernel that did not fit raises OutOfResources again, which tuning takes as "not this tile".

    The second try used to end in an AttributeError.
    """
    with pytest.raises(OutOfResources):
        c_launcher.Ready.of(Refused(OutOfResources(300, 227, "shared memory")))


class Staged:
    """Mimic a kernel whose stages take 50 KiB each on a device with 99, and how Triton stores that they do not fit."""

    def __init__(self):
        self.tried = []

    def warmup(self, *arguments, num_stages, **options):
        self.tried.append(num_stages)
        return Compiled(OutOfResources(50 * num_stages, 99, "shared memory") if num_stages > 1 else None)


class StagedLaunch(Staged):
    def __getitem__(self, grid):
        return lambda **options: self.warmup(**options).run()


class Compiled(Refused):
    name, function, packed_metadata = "staged_kernel", 16, (4, 1, 0)

    def __init__(self, error):
        super().__init__(error)
        if error is None:
            sizes = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_pdl": False}
            self.run = Launcher(launch=print, arg_annotations=(), kernel_signature=b"", **sizes)


class Launcher(SimpleNamespace):
    def __call__(self):
        """Launch nothing."""


def test_stages_that_do_not_fit_are_left_out(monkeypatch):
    """A pipeline that is too deep for the shared memory of a device gets fewer stages, instead of failing the call.

    Story: Triton 3.8 takes more for the stages of decoding than an L40S has, and 3.6 and 3.9 do not.
    """
    monkeypatch.setattr(triton_launch, "CompiledKernel", Compiled)
    kernel = Staged()
    ready = triton_launch._prepare(kernel, (), {}, {"num_stages": 3, "num_warps": 4}, (1, 1, 1))
    assert kernel.tried == [3, 2, 1]
    assert ready.function == 16
    by_triton = StagedLaunch()
    triton_launch._launch_by_triton(by_triton, (1, 1, 1), (), {}, {"num_stages": 3})(())
    assert by_triton.tried == [3, 2, 1]
    too_big = SimpleNamespace(warmup=lambda **options: Compiled(OutOfResources(120, 99, "shared memory")))
    with pytest.raises(OutOfResources):
        triton_launch._prepare(too_big, (), {}, {"num_stages": 2}, (1, 1, 1))


def test_what_is_not_compiled_is_left_to_triton():
    """A kernel that is not compiled is left to Triton, for instance one that still compiles in the background."""
    kernel = SimpleNamespace(warmup=lambda **options: None)
    assert triton_launch._prepare(kernel, (), {}, {}, (1, 1, 1)) is None


def test_the_key_of_a_compiled_kernel_does_not_depend_on_other_kernels():
    """Story: each order of first launches gave most kernels other keys (Triton 3.6), and compiled them for seconds."""
    names = "short.kernel.short_kernel", "decode.kernel.decode_kernel", "prefill.kernel.attention_kernel"
    program = """if True:
        import importlib, sys
        from pasa.ops.attention.triton.c_launcher import hash_callees
        keys = {}
        for name in sys.argv[1:]:
            module, _, kernel = name.rpartition(".")
            function = getattr(importlib.import_module("pasa.ops.attention.triton." + module), kernel)
            hash_callees(function)
            keys[name] = function.cache_key
        print(sorted(keys.items()))
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = [
        subprocess.run([sys.executable, "-c", program, *order], env=environment, check=True, capture_output=True).stdout
        for order in (names, names[::-1])
    ]
    assert said[0].count(b"kernel.") == len(names)
    assert said[0] == said[1]


WAIT = r"\b(gdc_wait|wait_for_others)\b"


def early_kernels():
    for path in sorted((ROOT / "ops").rglob("*kernel.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            waits = isinstance(node, ast.FunctionDef) and re.search(WAIT, ast.unparse(node))
            if waits and node.name.endswith("_kernel"):
                yield pytest.param(node, id=node.name)


@pytest.mark.parametrize("kernel", list(early_kernels()))
def test_a_kernel_that_starts_early_waits_before_it_touches_memory(kernel):
    """The memory that later calls use again may still be read, and inputs may not be written yet."""
    calls = sorted((node for node in ast.walk(kernel) if isinstance(node, ast.Call)), key=lambda node: node.lineno)
    names = [(ast.unparse(call.func), call.lineno) for call in calls]
    waits = min(line for name, line in names if re.search(WAIT, name))
    harmless = ("in_steps", "range", "wait_for_others")
    touches = [
        line
        for name, line in names
        if re.search(r"\.(load|store|atomic_\w+)$", name) or ("." not in name and name not in harmless)
    ]
    assert waits < min(touches)
