"""Launch Triton kernels with less overhead on the host.

A launch through Triton's Python layers takes as much host time as a short kernel takes device time,
because Triton inspects every argument again to choose a specialisation. Here compiled kernels are
cached by the same properties of the arguments, and passed to Triton's launcher in C (c_launcher.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction
from triton.runtime.errors import OutOfResources

from pasa.ops.attention.triton import c_launcher
from pasa.ops.attention.triton.c_launcher import Grid, Ready, hash_callees, is_hooked
from pasa.ops.recording import Operand, Place, Recorder, Step, recorder, unrecorded

DIRECT = c_launcher.KNOWN  # Triton's version is known, so launches are direct, and Gluon's kernels compile
# Triton 3.10 no longer joins a product and a sum by itself. The kernels' speed and bits rely on it, where they do not
# ask for it.
FUSED: dict[str, Any] = {"enable_fp_fusion": True} if c_launcher.ON_CUDA else {}
Launch: TypeAlias = Callable[[Sequence[Any]], None]


def ready_for(kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Ready:
    """Compile a kernel for arguments like these.

    The result takes addresses in place of tensors, and tensor maps with their sizes in place of descriptors.
    """
    hash_callees(kernel)
    compiled = kernel.warmup(*arguments, grid=(1, 1, 1), **FUSED, **options)
    return Ready.of(compiled, spelled_out=True)


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
    step, direct = _prepare_launch(kernel, grid, tensors, numbers, constants, options)
    if (record := recorder()) is not None:
        record.steps.append(Step(tuple([_operand(record, x, direct) for x in tensors]), step))
    with unrecorded() if record and not direct else nullcontext():  # the interpreter copies tensors
        step(tensors)


def prepared(
    kernel: Any, grid: Grid, tensors: Sequence[Any], numbers: Sequence[Any], constants: dict[str, Any],
    **options: Any,
) -> Launch:  # fmt: skip
    """Return a function of tensors like these that launches the kernel as `launch` does, and that no plan records."""
    return _prepare_launch(kernel, grid, tensors, numbers, constants, options)[0]


def _prepare_launch(
    kernel: Any, grid: Grid, tensors: Sequence[Any], numbers: Sequence[Any], constants: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Launch, bool]:  # fmt: skip
    """Return a function that launches a kernel, and whether it takes addresses as well as tensors."""
    ready = _compiled(kernel, grid, tensors, numbers, constants, options)
    if ready is None:
        return _launch_by_triton(kernel, grid, numbers, constants, options), False
    return _launch_directly(ready, grid, tensors[0].device, (*numbers, *(None,) * len(constants))), True


def _compiled(
    kernel: Any, grid: Grid, tensors: Sequence[Any], numbers: Sequence[Any], constants: dict[str, Any],
    options: dict[str, Any],
) -> Ready | None:  # fmt: skip
    """Return the kernel compiled for arguments like these, or None if Triton must launch it."""
    if not (DIRECT and tensors[0].is_cuda and type(kernel) is JITFunction):
        return None
    key = (kernel, tensors[0].device.index, kinds(kernel, tensors, numbers), *constants.items(), *options.items())
    ready = _ready.get(key)
    if ready is None:
        ready = _prepare(kernel, (*tensors, *numbers), constants, options, grid)
        if ready is not None:
            _ready[key] = ready
    return ready


def kinds(kernel: Any, tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
    """Return the properties of arguments by which Triton compiles a kernel anew."""
    free = kernel.params[len(tensors) :]
    numbered = [
        4 * (number >= 2**31) if each.do_not_specialize else _number_kind(number)
        for each, number in zip(free, numbers, strict=False)
    ]
    return *map(_pointer_kind, tensors), *numbered


def _launch_by_triton(
    kernel: Any, grid: Grid, numbers: Sequence[Any], constants: dict[str, Any], options: dict[str, Any]
) -> Launch:
    """Return a function that launches a kernel on tensors through Triton's Python layers."""
    hash_callees(kernel)

    def launch_on(tensors: Sequence[Any]) -> None:
        try:
            kernel[grid](*tensors, *numbers, **constants, **FUSED, **options)
        except OutOfResources:
            if (fewer := _fewer_stages(options)) is None:
                raise
            _launch_by_triton(kernel, grid, numbers, constants, fewer)(tensors)

    return launch_on


def _launch_directly(ready: Ready, grid: Grid, device: torch.device, rest: tuple[Any, ...]) -> Launch:
    """Return a function that launches a compiled kernel on tensors or addresses, on the current stream."""
    index, launch, fixed, in_one = device.index, ready.launch, ready.fixed, bool(ready.form)

    def launch_on(operands: Sequence[Any]) -> None:
        stream = torch._C._cuda_getCurrentRawStream(index)
        if is_hooked():
            ready.run(grid, stream, *operands, *rest)
        elif in_one:
            launch(*grid, stream, *fixed, (*operands, *rest))
        else:
            launch(*grid, stream, *fixed, *operands, *rest)

    return launch_on


@cache
def early(device: torch.device) -> bool:
    """Return whether kernels use programmatic dependent launch (PDL), which Hopper and later GPUs have.

    Such a kernel is set up while the previous kernel runs, and then waits for its results. It may start once all
    programs of the previous kernel have, so it takes no place from them. But waiting programs hold registers and shared
    memory. So a kernel of decoding lets the next one start only after its own wait: otherwise the programs of the next
    call, which need most, would crowd on the few multiprocessors with room.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launched_early(device: torch.device) -> dict[str, bool]:
    """Return Triton's launch option for PDL, or no option for devices whose Triton backend lacks it."""
    return {"launch_pdl": True} if early(device) else {}


def at_most(registers: int, device: torch.device) -> dict[str, int]:
    """Return Triton's option that limits the registers of a thread, or no option for devices that lack it.

    More programs then run at a time. What does not fit is kept in local memory: for code that seldom runs.
    """
    return {"maxnreg": registers} if c_launcher.ON_CUDA and device.type == "cuda" else {}


def _operand(record: Recorder, x: Any, direct: bool) -> Place | Operand | None:
    """Return where the memory of a kernel's argument lies; only for a `direct` launch is that enough."""
    if isinstance(x, Pointer):  # only direct launches have pointers
        return record.place(x.owner, x.address - x.owner.data_ptr())
    if isinstance(x, Tensor):
        return record.place(x) if direct else record.operand(x)
    found = record.operand(x.base)
    kept = list(x.shape), list(x.strides), list(x.block_shape)
    return found and found._replace(wrap=lambda base: type(x)(base, *kept))


# Has no limit, as Triton's own cache of compiled kernels has none.
_ready: dict[tuple[Any, ...], Ready] = {}


def _prepare(
    kernel: Any, arguments: Sequence[Any], constants: dict[str, Any], options: dict[str, Any], grid: Grid
) -> Ready | None:
    """Return the kernel ready to launch, or None where Triton must launch it: not compiled yet, or instrumented."""
    hash_callees(kernel)
    compiled = kernel.warmup(*arguments, **constants, **FUSED, **options, grid=grid)
    if not isinstance(compiled, CompiledKernel):
        return None
    try:
        return Ready.of(compiled)
    except NotImplementedError:
        return None
    except OutOfResources:
        if (fewer := _fewer_stages(options)) is None:
            raise
        return _prepare(kernel, arguments, constants, fewer, grid)


def _fewer_stages(options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the options with a shorter software pipeline, for a kernel that does not fit; None if there is none.

    The shared memory that a stage takes differs between versions of Triton: decoding on sm_89 gets 104 to 112 KiB from
    Triton 3.8, and from 3.6 and 3.9 less than the 99 that there are.
    """
    stages = options.get("num_stages", 1)
    return options | {"num_stages": stages - 1} if stages > 1 else None


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
