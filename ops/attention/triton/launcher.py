"""Launch Triton kernels with less overhead on the host.

A launch through Triton's Python layers takes as much host time as a short kernel takes device time,
because Triton inspects every argument again to choose a specialisation. Here compiled kernels are
cached by the same properties of the arguments, and passed to Triton's launcher in C.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from pasa.ops.plans import Operand, Recorder, Step, recorder, unrecorded

# The arguments of the C launcher are internal to Triton and differ between versions. The
# interpreter has no launcher.
_CUDA = torch.version.hip is None and not triton.knobs.runtime.interpret
DIRECT = triton.__version__.startswith("3.6.") and _CUDA
# Gluon is experimental: the kernels are compiled in tests for these versions.
GLUON = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9.")) and _CUDA

Grid: TypeAlias = tuple[int, int, int]
Launch: TypeAlias = Callable[[Sequence[Any]], None]


@dataclass(frozen=True)
class Ready:
    """Hold a compiled kernel and the C function that launches it.

    Attributes
    ----------
    launch : callable
        Triton 3.6 takes: grid, stream, function, cooperative or not, early launch or not, two
        scratch buffers, metadata, three hooks, then the kernel's arguments. Pointers may be
        integers. Values for compile-time arguments are ignored.
    kernel : triton.compiler.CompiledKernel
    function, packed
        The kernel's handle and packed metadata.
    early : bool
        Whether Triton compiled it for programmatic dependent launch (it may start before the previous
        kernel ends).
    """

    launch: Callable[..., None]
    kernel: Any
    function: int
    packed: Any
    early: bool

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
            If the kernel needs scratch memory, as instrumented kernels do.
        """
        launcher = kernel.run
        if not hasattr(launcher, "launch"):
            launcher()  # for a kernel that did not fit, Triton stores a function that raises the error again
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise NotImplementedError(f"{kernel.name} needs scratch memory, which this launch does not allocate")
        launch = launcher.launch
        if spelled_out and inspect.isfunction(launch):
            launch = inspect.getclosurevars(launch).nonlocals.get("launcher", launch)
        return cls(launch, kernel, kernel.function, kernel.packed_metadata, launcher.launch_pdl)

    def run(self, grid: Grid, stream: int, *arguments: Any) -> None:
        """Launch the kernel, and call a profiler's hooks if there are any."""
        runtime = triton.knobs.runtime  # older versions, such as triton-ascend's, lack this
        enter, leave, meta = runtime.launch_enter_hook, runtime.launch_exit_hook, None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            meta = self.kernel.launch_metadata(grid, stream, *arguments)
        else:
            enter = leave = None
        self.launch(
            *grid, stream, self.function, False, self.early, None, None, self.packed, meta, enter, leave, *arguments
        )


@dataclass(frozen=True)
class Jit:
    """Launch a kernel through Triton's Python layers, with more time on the host.

    Attributes
    ----------
    kernel : triton.runtime.JITFunction
    options : dict
        Options of the compiler.
    """

    kernel: Any
    options: dict[str, Any]

    def run(self, grid: Grid, stream: int, *arguments: Any) -> None:
        """Launch the kernel on the current stream, which is `stream`."""
        self.kernel[grid](*arguments, **self.options)


def launcher_of(kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Ready | Jit:
    """Compile a kernel for arguments like these; return what launches it.

    A `Ready` takes addresses in place of tensors, and tensor maps spelled out; a `Jit` takes the arguments as they are.
    """
    if not DIRECT:
        return Jit(kernel, options)
    return Ready.of(kernel.warmup(*arguments, grid=(1, 1, 1), **options), spelled_out=True)


class Pointer:
    """A pointer into a tensor, as a kernel argument; a view instead would cost as much host time as an allocation."""

    __slots__ = ("address", "dtype", "owner")

    def __init__(self, owner: Tensor, offset: int, dtype: torch.dtype) -> None:
        self.owner, self.address, self.dtype = owner, owner.data_ptr() + offset, dtype

    def data_ptr(self) -> int:
        """Return the address, under the name that Triton calls."""
        return self.address


def workspace(device: torch.device, *parts: tuple[int, torch.dtype]) -> tuple[Any, ...]:
    """Allocate uninitialised memory for a kernel: one pointer for each (elements, dtype), in a single allocation."""
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
        A kernel whose parameters are pointers, then numbers, then `tl.constexpr`.
    grid : tuple of 3 int
    tensors : sequence of Tensor, Pointer or TensorDescriptor
        All on one device; the first must be a Tensor.
    numbers : sequence of int or float
        Integers must not be negative.
    constants : dict
        Values of the `tl.constexpr` parameters.
    options
        Options of the compiler, such as num_warps.
    """
    ready = _compiled(kernel, grid, tensors, numbers, constants, options)
    if ready is None:
        step = _launch_by_triton(kernel, grid, numbers, constants | options)
    else:
        step = _launch_directly(ready, grid, tensors[0].device, (*numbers, *(None,) * len(constants)))
    if (record := recorder()) is not None:
        record.steps.append(Step(tuple([_operand(record, x) for x in tensors]), step, ready is not None))
    with unrecorded() if record else nullcontext():  # the interpreter copies tensors
        step(tensors)


def _compiled(
    kernel: Any, grid: Grid, tensors: Sequence[Any], numbers: Sequence[Any], constants: dict[str, Any],
    options: dict[str, Any],
) -> Ready | None:  # fmt: skip
    """Return the kernel compiled for arguments like these, or None if Triton must launch it."""
    if not (DIRECT and tensors[0].is_cuda and type(kernel) is JITFunction):
        return None
    kinds = (*map(_pointer_kind, tensors), *map(_number_kind, numbers))
    key = (kernel, tensors[0].device.index, kinds, *constants.items(), *options.items())
    ready = _ready.get(key)
    if ready is None:
        ready = _prepare(kernel.warmup(*tensors, *numbers, **constants, **options, grid=grid))
        if ready is not None:
            _ready[key] = ready
    return ready


def _launch_by_triton(kernel: Any, grid: Grid, numbers: Sequence[Any], named: dict[str, Any]) -> Launch:
    """Return a function that launches a kernel on tensors through Triton's Python layers."""
    return lambda tensors: kernel[grid](*tensors, *numbers, **named)


def _launch_directly(ready: Ready, grid: Grid, device: torch.device, rest: tuple[Any, ...]) -> Launch:
    """Return a function that launches a compiled kernel on tensors or addresses, on the current stream."""
    return lambda operands: ready.run(grid, current_stream(device), *operands, *rest)


def current_stream(device: torch.device) -> int:
    """Return the handle of the current stream of a GPU."""
    stream: int = driver.active.get_current_stream(device.index)
    return stream


def _operand(record: Recorder, x: Any) -> Operand | None:
    """Return where the memory of a kernel's argument lies."""
    if isinstance(x, Pointer):
        found = record.operand(x.owner)
        return found and found._replace(offset=x.address - x.owner.data_ptr(), dtype=x.dtype, size=(), stride=())
    if isinstance(x, Tensor):
        return record.operand(x)
    found = record.operand(x.base)
    kept = list(x.shape), list(x.strides), list(x.block_shape)
    return found and found._replace(wrap=lambda base: type(x)(base, *kept))


# Has no limit, as Triton's own cache of compiled kernels has none.
_ready: dict[tuple[Any, ...], Ready] = {}


def _prepare(compiled: Any) -> Ready | None:
    """Return the kernel ready to launch, or None where Triton must launch it: not compiled yet, or instrumented."""
    if not isinstance(compiled, CompiledKernel):
        return None
    try:
        return Ready.of(compiled)
    except NotImplementedError:
        return None


def _pointer_kind(x: Any) -> tuple[Any, ...]:
    """Return the properties by which Triton specialises a pointer: dtype, and 16-byte alignment or descriptor tile."""
    if isinstance(x, (Tensor, Pointer)):
        return x.dtype, x.data_ptr() % 16 == 0
    return x.base.dtype, *x.block_shape


def _number_kind(number: Any) -> int:
    """Return a code of the properties by which Triton specialises a number: 1, divisible by 16, beyond 32 bits."""
    if isinstance(number, float):
        return -1
    return 1 if number == 1 else 2 * (number % 16 == 0) + 4 * (number >= 2**31)
