"""Call what Triton calls below its Python layers: its C launcher, and the function that fills tensor maps.

Both are internal to Triton and differ between its versions. Everything that the launches know of them is in this file.
`ops.devices.TRITON_VERSIONS` lists the versions that it was written for; with any other, Triton launches (launcher.py).
tests/ops/attention/triton/test_c_launcher.py compares both ways of launching with the installed Triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pasa.ops.devices import NO_PAGE_ANCHORS, TRITON_VERSIONS, triton_version

Grid: TypeAlias = tuple[int, int, int]

# triton-ascend, which is older, has no knobs. The interpreter has no launcher.
_COMPILES = hasattr(triton, "knobs") and not triton.knobs.runtime.interpret
ON_CUDA = _COMPILES and torch.version.hip is None
KNOWN = ON_CUDA and triton_version() in TRITON_VERSIONS
PAGE_ANCHORS = triton_version() not in NO_PAGE_ANCHORS  # whether pages are read with their anchors
HOOKS_AT = {False: 10, True: 8}  # where metadata and hooks stand among what the C function takes, by `Ready.form`
_RUNTIME: Any = triton.knobs.runtime if hasattr(triton, "knobs") else None
_hashed: set[int] = set()  # ids of functions; a function as a member of a set would be hashed at once
_ARGUMENT_LAST = triton_version() != TRITON_VERSIONS[0]  # since 3.7 the kernel's arguments are one argument


@dataclass(frozen=True)
class Ready:
    """Hold a compiled kernel and the C function that launches it.

    Attributes
    ----------
    launch : callable
        Takes grid, stream, function, cooperative or not, early launch or not. Triton 3.6 has compiled it for this
        signature: two scratch buffers, metadata and hooks follow, then the kernel's arguments. Since 3.7 it serves all
        kernels: metadata, hooks and scratch buffers follow, then `form` and a sequence of the kernel's arguments.
        Pointers may be integers. Values for compile-time arguments are ignored.
    kernel : triton.compiler.CompiledKernel
    function, packed
        The kernel's handle and packed metadata.
    early : bool
        Whether Triton compiled it for programmatic dependent launch (it may start before the previous
        kernel ends).
    form : tuple
        What each argument is: compile-time or not, and its type. Empty for Triton 3.6.
    """

    launch: Callable[..., None]
    kernel: Any
    function: int
    packed: Any
    early: bool
    form: tuple[Any, ...]

    @classmethod
    def of(cls, kernel: Any, spelled_out: bool = False) -> Ready:
        """Load a compiled kernel onto the device.

        With `spelled_out`, the caller passes the parts of each tensor descriptor (tensor map, shape
        and strides) as separate arguments.

        Raises
        ------
        triton.runtime.errors.OutOfResources
            If the kernel needs more shared memory or registers than the device has.
        NotImplementedError
            If the kernel is instrumented: it needs scratch memory, or more arguments.
        """
        launcher = kernel.run
        if not hasattr(launcher, "launch"):
            launcher()  # for a kernel that did not fit, Triton stores a function that raises the error again
        scratch = launcher.global_scratch_size or launcher.profile_scratch_size
        if scratch or getattr(launcher, "gsan_enabled", False):
            raise NotImplementedError(f"{kernel.name} is instrumented: this launch has no scratch memory for it")
        form = (launcher.arg_annotations, launcher.kernel_signature) if _ARGUMENT_LAST else ()
        launch = _plain(launcher.launch) if spelled_out else launcher.launch
        return cls(launch, kernel, kernel.function, kernel.packed_metadata, launcher.launch_pdl, form)

    @cached_property
    def fixed(self) -> tuple[Any, ...]:
        """Return what `launch` takes between the stream and the kernel's arguments, without hooks."""
        start = self.function, False, self.early
        if self.form:
            return *start, self.packed, None, None, None, None, None, *self.form
        return *start, None, None, self.packed, None, None, None

    def bound(self, grid: Grid, stream: int, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return what `launch` takes for a launch that no profiler is told of."""
        return *grid, stream, *self.fixed, *((arguments,) if self.form else arguments)

    def run(self, grid: Grid, stream: int, *arguments: Any) -> None:
        """Launch the kernel, and call a profiler's hooks if there are any."""
        taken = self.bound(grid, stream, arguments)
        if is_hooked():
            meta = self.kernel.launch_metadata(grid, stream, *arguments)
            hooks = meta, _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
            at = HOOKS_AT[bool(self.form)]
            taken = *taken[:at], *hooks, *taken[at + len(hooks) :]
        self.launch(*taken)


def is_hooked() -> bool:
    """Return whether a profiler is to be told of launches."""
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _plain(launch: Callable[..., None]) -> Callable[..., None]:
    """Return the C function in a launcher that Triton wraps for kernels with tensor descriptors."""
    if not inspect.isfunction(launch):
        return launch
    plain: Callable[..., None] = inspect.getclosurevars(launch).nonlocals["launcher"]
    return plain


def map_kinds(kernel: Any) -> list[tuple[Any, ...]]:
    """Return, for each tensor descriptor of a compiled kernel, what its tensor map needs beside sizes and strides."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as TO_HOST  # triton-ascend does not have it

    return [
        (meta["swizzle"], meta["elem_size"], TO_HOST[meta["elem_type"]], meta["block_size"])
        for meta in kernel.metadata.tensordesc_meta
    ]


def hash_callees(function: Any) -> None:
    """Let Triton hash all functions that a kernel may call, each before those that call it; then its key is settled.

    Triton keeps compiled kernels on disk by a key. The key has the constants of a called function only if that was
    hashed before (`DependenciesFinder._update_hash`, 3.6). So it depended on the kernels that a process had launched
    earlier, and each order of launches compiled most kernels anew.
    """
    if id(function) in _hashed or not (_COMPILES and isinstance(function, JITFunction)):
        return
    _hashed.add(id(function))
    names, scope = function.fn.__code__.co_names, function.fn.__globals__
    modules = [x for x in map(scope.get, names) if inspect.ismodule(x)]
    for each in (*map(scope.get, names), *(getattr(x, name, None) for x in modules for name in names)):
        hash_callees(each)
    function.cache_key  # noqa: B018 - reading it computes it


def fill_map(address: int, kind: tuple[Any, ...], shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Return the tensor map of a tensor."""
    utils = driver.active.utils
    fill = utils.fill_tma_descriptor_tiled if _ARGUMENT_LAST else utils.fill_tma_descriptor
    return fill(address, *kind, shape, strides, 0)
