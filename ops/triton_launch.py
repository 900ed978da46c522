"""Launches Triton kernels at less cost to the host.

A launch through Triton's Python layers costs the host as much time as a short kernel costs the device: each argument is
specialised anew. Here the compiled kernel is remembered by what Triton would have specialised, and handed to the
launcher that Triton has in C.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

# The C launcher's arguments are Triton's own affair, and differ between its versions. The interpreter has none.
DIRECT = triton.__version__.startswith("3.6.") and torch.version.hip is None and not triton.knobs.runtime.interpret

Grid: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Ready:
    """A compiled kernel and the C function that launches it.

    Attributes
    ----------
    launch : callable
        Of Triton 3.6: grid, stream, function, cooperative or not, launched early or not, two scratch buffers, metadata,
        three hooks, then the kernel's arguments; pointers may be integers, and what stands for a compile-time argument
        is not looked at.
    kernel : triton.compiler.CompiledKernel
    function, packed
        Of the kernel: its handle and packed metadata.
    early : bool
    """

    launch: Callable[..., None]
    kernel: Any
    function: int
    packed: Any
    early: bool

    @classmethod
    def of(cls, kernel: Any, spelled_out: bool = False) -> Ready:
        """Loads it. spelled_out: tensor maps, shapes and strides will be given in place of tensor descriptors.

        Raises
        ------
        triton.runtime.errors.OutOfResources
            If it does not fit the device.
        NotImplementedError
            If it wants scratch memory, as instrumented kernels do.
        """
        launcher = kernel.run
        if not hasattr(launcher, "launch"):
            launcher()  # what Triton keeps of a kernel that once did not fit: a call that says so again
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise NotImplementedError(f"{kernel.name} wants scratch memory, which this launch does not give")
        launch = launcher.launch
        if spelled_out and inspect.isfunction(launch):
            launch = inspect.getclosurevars(launch).nonlocals.get("launcher", launch)
        return cls(launch, kernel, kernel.function, kernel.packed_metadata, launcher.launch_pdl)

    def run(self, grid: Grid, stream: int, *arguments: Any) -> None:
        """Launch it; a profiler's hooks are called if there are any."""
        runtime = triton.knobs.runtime  # which older versions, as triton-ascend's, lack
        enter, leave, meta = runtime.launch_enter_hook, runtime.launch_exit_hook, None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            meta = self.kernel.launch_metadata(grid, stream, *arguments)
        else:
            enter = leave = None
        self.launch(
            *grid, stream, self.function, False, self.early, None, None, self.packed, meta, enter, leave, *arguments
        )


class Pointer:
    """Part of a tensor, for a kernel: a view of it would cost the host as much as an allocation."""

    __slots__ = ("address", "dtype", "owner")

    def __init__(self, owner: Tensor, offset: int, dtype: torch.dtype) -> None:
        self.owner, self.address, self.dtype = owner, owner.data_ptr() + offset, dtype

    def data_ptr(self) -> int:
        """As Triton calls it."""
        return self.address


def workspace(device: torch.device, *parts: tuple[int, torch.dtype]) -> tuple[Any, ...]:
    """Uninitialised memory for a kernel: a pointer to so many elements of each kind, in one allocation."""
    if not DIRECT or device.type != "cuda":
        return tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in parts)
    ends = list(accumulate(-(-size * dtype.itemsize // 16) * 16 for size, dtype in parts))
    owner = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    return tuple(Pointer(owner, at, dtype) for at, (_, dtype) in zip([0, *ends], parts, strict=False))


def launch(
    kernel: Any, grid: Grid, tensors: Sequence[Any], numbers: Sequence[Any], constants: dict[str, Any],
    **options: Any,
) -> None:  # fmt: skip
    """Launch a kernel on the current device.

    Parameters
    ----------
    kernel
        Its parameters are pointers, then numbers, then `tl.constexpr`.
    grid : tuple of 3 int
    tensors : sequence of Tensor, Pointer or TensorDescriptor
        On one device, the first a Tensor.
    numbers : sequence of int or float
        Whole ones at least 0.
    constants : dict
        The `tl.constexpr`.
    options
        num_warps and the like.
    """
    ready = None
    if DIRECT and tensors[0].is_cuda and type(kernel) is JITFunction:
        device = tensors[0].device.index
        kinds = (*map(_pointer_kind, tensors), *map(_number_kind, numbers))
        key = (kernel, device, kinds, *constants.items(), *options.items())
        ready = _ready.get(key)
        if ready is None:
            ready = _prepare(kernel.warmup(*tensors, *numbers, **constants, **options, grid=grid))
            if ready is not None:
                _ready[key] = ready
    if ready is None:
        kernel[grid](*tensors, *numbers, **constants, **options)
        return
    stream = driver.active.get_current_stream(device)
    ready.run(grid, stream, *tensors, *numbers, *(None,) * len(constants))


# No more than Triton keeps compiled kernels, for which it has no bound either.
_ready: dict[tuple[Any, ...], Ready] = {}


def _prepare(compiled: Any) -> Ready | None:
    """None for what Triton has to launch itself: nothing compiled yet, or a kernel that is instrumented."""
    if not isinstance(compiled, CompiledKernel):
        return None
    try:
        return Ready.of(compiled)
    except NotImplementedError:
        return None


def _pointer_kind(x: Any) -> tuple[Any, ...]:
    """What Triton tells apart: element types, 16-byte alignment, tiles of descriptors."""
    if isinstance(x, (Tensor, Pointer)):
        return x.dtype, x.data_ptr() % 16 == 0
    return x.base.dtype, *x.block_shape


def _number_kind(number: Any) -> int:
    """Likewise: 1, multiples of 16, and what 32 bits do not hold."""
    if isinstance(number, float):
        return -1
    return 1 if number == 1 else 2 * (number % 16 == 0) + 4 * (number >= 2**31)
