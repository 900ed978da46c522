"""Interpret the Hopper kernels on a CPU: Triton has no interpreter for Gluon.

The sources of plain_kernel.py and exact_kernel.py are executed with a `gl` of numpy arrays. Each partition is a thread.
Barriers count arrivals and bytes, and have phases. Copies by TMA come late and in any order. A matrix product reads its
operands when it is waited for. So a wait or an arrival that is missing shows as a wrong number or a deadlock. Rounding,
the layout of registers and the memory model are not modelled.
"""

import builtins
import importlib.util
import operator
import random
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from pasa.ops.attention.triton.centre_kernel import TILE
from pasa.ops.attention.triton.tile_math import ANCHOR_LIMIT

HERE = "pasa.ops.attention.triton"
SECONDS = 20  # without progress of a partition
POISON = np.nan  # what shared memory holds at first


class Deadlock(Exception):
    """A partition waited for too long."""


# --- numbers


def raw(x):
    """Return a number or an array of numpy."""
    return x.array if isinstance(x, Tensor) else getattr(x, "value", x)


class Tensor:
    """An array in registers; scalars too."""

    def __init__(self, array):
        self.array = np.asarray(array)

    type = types.SimpleNamespace(layout=None)

    @property
    def shape(self):
        return self.array.shape

    def to(self, dtype, bitcast=False):
        assert not bitcast
        return Tensor(self.array.astype(dtype))

    def __getitem__(self, key):
        return Tensor(self.array[key])

    def __bool__(self):
        return bool(self.array)

    def __index__(self):
        return int(self.array)

    def __neg__(self):
        return Tensor(-self.array)


def _define(name, apply):
    setattr(Tensor, f"__{name}__", lambda self, other: Tensor(apply(self.array, raw(other))))
    setattr(Tensor, f"__r{name}__", lambda self, other: Tensor(apply(raw(other), self.array)))


for _name, _apply in (
    *((name, getattr(operator, name)) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "xor")),
    ("or", operator.or_),
    ("and", operator.and_),
):
    _define(_name, _apply)
for _name in ("lt", "le", "gt", "ge", "eq"):
    _define(_name, getattr(operator, _name))


# --- memory


class Pointer:
    """A place in a tensor in global memory."""

    def __init__(self, flat, offset=0):
        self.flat, self.offset = flat, offset

    def __add__(self, offset):
        return Pointer(self.flat, raw(self.offset) + raw(offset))


class Memory:
    """Shared memory: an array, or barriers."""

    def __init__(self, array):
        self.array = array

    @property
    def shape(self):
        return self.array.shape

    def index(self, i):
        return Memory(self.array[operator.index(i)])

    def reshape(self, shape):
        view = self.array.reshape(shape)
        assert np.shares_memory(view, self.array)
        return Memory(view)

    def permute(self, order):
        return Memory(self.array.transpose(order))

    def slice(self, start, length, dim):
        return Memory(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def load(self, layout):
        return Tensor(self.array.copy())

    def store(self, value):
        self.array[...] = raw(value).reshape(self.array.shape)


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes of the phase have come."""

    def __init__(self):
        self.condition = threading.Condition()

    def init(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def change(self, arrivals, nbytes):
        with self.condition:
            self.pending -= arrivals
            self.bytes += nbytes
            assert self.pending >= 0, "more arrivals than the barrier was made for"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.condition.notify_all()

    def wait(self, parity):
        with self.condition:
            if not self.condition.wait_for(lambda: self.phase % 2 != parity, SECONDS):
                raise Deadlock(f"phase {parity} of a barrier for {self.count} never ended")


class Descriptor:
    """A tensor map."""

    def __init__(self, desc):
        self.view = torch.as_strided(desc.base, list(desc.shape), list(desc.strides)).numpy()
        self.block_shape, self.layout = list(desc.block_shape), None
        self.block_type = types.SimpleNamespace(nbytes=2 * int(np.prod(self.block_shape)))

    def inside(self, at):
        """Return the slices of a box that are inside the tensor, in the tensor and in the box."""
        at = [operator.index(each) for each in at]
        ends = [min(start + size, n) for start, size, n in zip(at, self.block_shape, self.view.shape, strict=True)]
        inside = [max(end - start, 0) for start, end in zip(at, ends, strict=True)]
        there = tuple(slice(start, start + n) for start, n in zip(at, inside, strict=True))
        return there, tuple(slice(n) for n in inside)


class Engine:
    """TMA: copies run on threads of their own, late and in any order."""

    def __init__(self, seed):
        self.random, self.pool, self.failed = random.Random(seed), ThreadPoolExecutor(4), []

    def load(self, desc, at, barrier, memory):
        delay = self.random.random() * 2e-3 * (self.random.random() < 0.3)

        def copy():
            try:
                threading.Event().wait(delay)
                there, here = desc.inside(at)
                memory.array[...] = 0
                memory.array[here] = desc.view[there]
                barrier.array.item().change(0, -desc.block_type.nbytes)
            except BaseException as error:
                self.failed.append(error)

        self.pool.submit(copy)

    def store(self, desc, at, memory):
        there, here = desc.inside(at)
        desc.view[there] = memory.array[here]


# --- the language


class Product:
    """A matrix product that has been started."""

    def __init__(self, a, b, acc, use_acc):
        self.operands, self.acc = (a, b), raw(acc) if use_acc else 0

    def finish(self):
        a, b = (raw(x) if isinstance(x, Tensor) else x.array for x in self.operands)
        return Tensor((a.astype(np.float32) @ b.astype(np.float32) + self.acc).astype(np.float32))


def wait_for_products(pending, deps):
    done = tuple(each.finish() for each in deps)
    return done if len(done) > 1 else done[0]


def load(pointer, mask=None, other=0.0):
    offset = np.asarray(raw(pointer.offset))
    if mask is None:
        return Tensor(pointer.flat[offset])
    seen = np.broadcast_to(np.asarray(raw(mask)), offset.shape)
    return Tensor(np.where(seen, pointer.flat[np.where(seen, offset, 0)], other).astype(pointer.flat.dtype))


def store(pointer, value, mask=True):
    offset = np.asarray(raw(pointer.offset))
    seen = np.broadcast_to(np.asarray(raw(mask)), offset.shape)
    pointer.flat[offset[seen]] = np.broadcast_to(raw(value), offset.shape)[seen]


def allocate(dtype, shape, layout):
    if dtype is np.int64:  # barriers
        barriers = np.empty(shape, dtype=object)
        barriers.flat = [Barrier() for _ in range(barriers.size)]
        return Memory(barriers)
    return Memory(np.full(shape, POISON, dtype=dtype) if dtype == np.float16 else np.zeros(shape, dtype=dtype))


def inline_asm(asm, constraints, arguments, dtype, is_pure, pack):
    if "griddepcontrol" in asm:
        return Tensor(0)
    if "redux.sync" in asm:
        return arguments[0]
    assert "0x7bff7bff" in asm, asm
    return Tensor(np.clip(raw(arguments[0]), np.float16(-65504), np.float16(65504)))


def reduce_by(function):
    return lambda x, axis: Tensor(function.reduce(raw(x), axis=axis))


def elementwise(function):
    return lambda *xs: Tensor(function(*map(raw, xs)))


class Language(types.ModuleType):
    """`gl`, as far as the kernels use it."""

    def __init__(self):
        super().__init__("gl")
        self.place = (0, 1)  # number of the program, and of all programs
        self.failed = []

    float16, float32, int32, int64, bfloat16 = np.float16, np.float32, np.int32, np.int64, None
    tensor = shared_memory_descriptor = object
    constexpr = staticmethod(lambda value: value)
    static_range, to_tensor = range, Tensor
    load, store, inline_asm_elementwise = map(staticmethod, (load, store, inline_asm))
    allocate_shared_memory = staticmethod(allocate)
    max, min, sum = (staticmethod(reduce_by(each)) for each in (np.fmax, np.fmin, np.add))
    maximum, minimum, where, exp2, log2, abs = (
        staticmethod(elementwise(each)) for each in (np.fmax, np.fmin, np.where, np.exp2, np.log2, np.abs)
    )
    fma = staticmethod(elementwise(lambda a, b, c: (np.float64(1) * a * b + c).astype(np.float32)))
    zeros_like = staticmethod(lambda x: Tensor(np.zeros_like(raw(x))))
    full_like = staticmethod(lambda x, value: Tensor(np.full_like(raw(x), value)))
    convert_layout = staticmethod(lambda x, layout: x)

    def __getattr__(self, name):
        if name.endswith("Layout"):
            return lambda *arguments, **fields: None
        raise AttributeError(name)

    @staticmethod
    def arange(start, end, layout=None):
        return Tensor(np.arange(start, end, dtype=np.int32))

    @staticmethod
    def full(shape, value, dtype, layout=None):
        return Tensor(np.full(shape, raw(value), dtype=dtype))

    @staticmethod
    def zeros(shape, dtype, layout=None):
        return Tensor(np.zeros(shape, dtype=dtype))

    def program_id(self, axis):
        return Tensor(np.int32(self.place[0]))

    def num_programs(self, axis):
        return Tensor(np.int32(self.place[1]))

    def warp_specialize(self, partitions, warps, registers):
        def run(function, arguments):
            try:
                function(*arguments)
            except BaseException as error:
                self.failed.append(error)

        threads = [threading.Thread(target=run, args=each) for each in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def next_frame(b_frame, b_anchor):
    """Return what tile_math.next_frame does."""
    frame, anchor = raw(b_frame), raw(b_anchor)
    return Tensor(np.where(abs(anchor - frame) <= np.minimum(abs(anchor), abs(frame)), frame, np.float32(0)))


def numbers(*bounds):
    """Take the place of `range`: loop variables are numbers of the language."""
    return (Tensor(np.int32(i)) for i in range(*map(operator.index, bounds)))


class Number(float):
    """A number that has the field of a compile-time constant."""

    @property
    def value(self):
        return float(self)


def same(function=None, **options):
    """Take the place of a decorator, with options or without."""
    return function if function else same


class Kernels:
    """Hold plain_kernel and exact_kernel, to be run on a CPU."""

    def __init__(self, seed=0):
        self.gl, self.engine = Language(), Engine(seed)
        self.modules = self._modules()
        for name in ("tile_math", "plain_kernel", "exact_kernel"):
            self.modules[f"{HERE}.hopper.{name}"] = self._execute(f"{HERE}.hopper.{name}")
        self.plain_kernel = self.modules[f"{HERE}.hopper.plain_kernel"].plain_kernel
        self.exact_kernel = self.modules[f"{HERE}.hopper.exact_kernel"].exact_kernel

    def _modules(self):
        """Return what the kernels import, by name."""
        mbarrier = types.SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda memory, count: memory.array.item().init(count),
            expect=lambda memory, nbytes: memory.array.item().change(1, nbytes),
            arrive=lambda memory, count: memory.array.item().change(count, 0),
            wait=lambda memory, phase: memory.array.item().wait(operator.index(phase)),
        )
        return {
            "triton.experimental.gluon": types.SimpleNamespace(jit=same, constexpr_function=same, language=self.gl),
            "triton.experimental.gluon.language": self.gl,
            "triton.experimental.gluon.language.nvidia.hopper": types.SimpleNamespace(
                fence_async_shared=lambda: None,
                mbarrier=mbarrier,
                tma=types.SimpleNamespace(
                    async_load=self.engine.load, async_store=self.engine.store, store_wait=lambda n: None
                ),
                warpgroup_mma=lambda a, b, acc, use_acc=True, is_async=False: Product(a, b, acc, use_acc),
                warpgroup_mma_wait=wait_for_products,
            ),
            "triton.language.core": types.SimpleNamespace(_aggregate=same),
            f"{HERE}.centre_kernel": types.SimpleNamespace(TILE=TILE.value),
            f"{HERE}.tile_math": types.SimpleNamespace(ANCHOR_LIMIT=Number(ANCHOR_LIMIT.value), next_frame=next_frame),
            f"{HERE}.rounding_kernel": types.SimpleNamespace(
                flag_rows=None, round_flagged=None, round_rows=lambda b_o, *rounding: b_o
            ),
        }

    def _execute(self, name):
        """Execute a source with these modules in place of those that it names."""

        def find(wanted, globals=None, locals=None, fromlist=(), level=0):
            if wanted not in self.modules:
                return builtins.__import__(wanted, globals, locals, fromlist, level)
            return self.modules[wanted] if fromlist else outermost

        outermost = types.SimpleNamespace(
            experimental=types.SimpleNamespace(gluon=self.modules["triton.experimental.gluon"])
        )
        path = importlib.util.find_spec(name).origin
        module = types.ModuleType(name)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": find, "range": numbers}
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), module.__dict__)
        return module

    def run(self, kernel, programs, arguments):
        """Run all programs, one after another; tensors and descriptors become pointers and tensor maps."""
        converted = [self._argument(each) for each in arguments]
        for number in range(programs):
            self.gl.place = (number, programs)
            kernel(*converted)
            if failed := self.gl.failed + self.engine.failed:
                raise failed[0]

    @staticmethod
    def _argument(x):
        if isinstance(x, torch.Tensor):
            assert x.is_contiguous()
            return Pointer(x.view(-1).numpy())
        return Descriptor(x) if hasattr(x, "block_shape") else x
