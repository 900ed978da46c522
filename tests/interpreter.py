"""Triton's interpreter without its repeated work: the same operations on the same numbers, seven times as fast.

Most of its time goes into types, shapes and constants. A kernel has few of them, but the interpreter makes them
again for every result. Written for Triton 3.6, which the extra `dev` pins; everything that is replaced here
must exist there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

KEPT = 10_000  # the most numbers that are cached as tensors
NUMBERS = (int, float)
OFFSETS = ("int32", "int64")  # types of an offset that is added to a pointer
# Types that an operation on two tensors of one type preserves. FP16 is not among them, as its quotients are in
# FP32.
CLOSED = ("fp32", "fp64", "int1", "int32", "int64", "uint32", "uint64")
# Types of what is not a constexpr.
UNWRAPPED = {core.tensor, int, float, bool, str, type(None), core.dtype, core.block_type}
# Casts that equal NumPy's.
PLAIN = {("fp16", "fp32"), ("fp32", "fp16"), ("int32", "int64"), ("int1", "int32"), ("int32", "fp32"), ("int1", "fp32")}


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function from a kernel; Triton would set up the language again for every call, and never undo that."""
    return function.rewrite()(*args, **kwargs)


class SetUp:
    """Set up the language for a launch, for kernels and for the functions that come with Triton.

    What must be replaced in it is determined at the first launch; Triton does so at every launch.
    """

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self.patch = patch
        self.semantic = Semantic(interpreter.interpreter_builder)
        self.changes: list[tuple[Any, str, Any]] = []

    def __call__(self, _: Any) -> Any:
        if not self.changes:
            scope = self.patch(SimpleNamespace(__globals__={"tl": triton.language, "core": core}))
            self.changes = [(where, name, self.direct(vars(where)[name])) for where, name, _ in scope._changes]
            self.changes.append((core.tensor, "__index__", index))
            scope.restore()
        scope = interpreter._LangPatchScope()
        for change in self.changes:
            scope.set_attr(*change)
        return scope

    def direct(self, member: Any) -> Any:
        """Return a builtin of the language with this semantic, without the check that a kernel calls it."""
        builtin = (getattr(member, "__kwdefaults__", None) or {}).get("member")
        if builtin is None:
            return member
        function, semantic = getattr(builtin, "__wrapped__", builtin), self.semantic

        def of(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return of


def index(number: Any) -> int:
    """Return the number that a tensor of one element holds; NumPy warns of each of Triton's own conversions."""
    return int(number.handle.data.item())


class Semantic(TritonSemantic):
    """Cache what operations do with types and shapes."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self.constants: dict[Any, Any] = {}
        self.shapes: dict[Any, Any] = {}

    def to_tensor(self, x: Any, check_type: bool = True) -> Any:
        if type(x) is core.tensor:
            return x
        if type(x) not in NUMBERS:
            return super().to_tensor(x, check_type)
        key = type(x), str(x)
        return self.constants[key] if key in self.constants else self.keep(key, super().to_tensor(x))

    def keep(self, key: Any, number: Any) -> Any:
        """Cache a number as a tensor, and return it."""
        if len(self.constants) >= KEPT:
            self.constants.clear()
        self.constants[key] = number
        return number

    def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        kind = dst_ty.scalar
        if input.dtype.name == kind.name:
            return input
        if fp_downcast_rounding is None and (input.dtype.name, kind.name) in PLAIN:
            to = core.block_type(kind, input.type.shape) if input.type.is_block() else kind
            return core.tensor(self.builder.cast_impl(input.handle, to), to)
        return super().cast(input, dst_ty, fp_downcast_rounding)

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *how: Any) -> Any:
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            left, right = lhs.dtype.name, rhs.dtype.name
            to_pointer = right in OFFSETS and lhs.dtype.is_ptr() and how == (True, True)
            if to_pointer or (left == right and left in CLOSED):
                return self.broadcast_impl_value(lhs, rhs)
        elif type(lhs) is core.tensor and type(rhs) in NUMBERS:
            key = lhs.type.name, type(rhs), str(rhs), how
            if key in self.constants:
                return lhs, self.constants[key]
            left, number = super().binary_op_type_checking_impl(lhs, rhs, *how)
            if left is lhs:  # and not an integer that was converted beside a floating-point number
                self.keep(key, number)
            return left, number
        return super().binary_op_type_checking_impl(lhs, rhs, *how)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = id(lhs.shape), id(rhs.shape)  # the ids stay valid because `alike` keeps the shapes
        if key not in self.shapes:
            self.shapes[key] = super().broadcast_impl_value(lhs, rhs)[0].shape
        return self.spread(lhs, self.shapes[key]), self.spread(rhs, self.shapes[key])

    @staticmethod
    def spread(value: Any, shape: Any) -> Any:
        """Broadcast a tensor to a larger shape."""
        if value.shape is shape:
            return value
        sizes = [size.value for size in shape]
        data = np.empty(sizes, value.handle.data.dtype)
        data[...] = value.handle.data
        return core.tensor(interpreter.TensorHandle(data, value.dtype), core.block_type(value.dtype, sizes))


def unwrapped(unwrap: Any) -> Any:
    """Return a fast form of `unwrap` for values that are rarely a constexpr."""
    return lambda x: x if type(x) in UNWRAPPED else unwrap(x)


def hold(handle: Any, data: Any, dtype: Any) -> None:
    """Make a handle without Triton's check of its numbers' size, as they come from operations on such handles."""
    handle.data, handle.dtype, handle.attr = data, dtype, {}


def reduce_by_halves(reduction: Any, values: tuple[Any, ...]) -> list[Any]:
    """Run `tl.reduce` along an axis on whole halves, with the kernel's function; Triton goes element by element."""
    types, axis = [value.dtype for value in values], reduction.axis
    arrays = [value.handle.data for value in values]
    while (count := arrays[0].shape[axis]) > 1:  # a power of two, as all shapes of Triton are
        halves = [array.take(part, axis) for part in (range(count // 2), range(count // 2, count)) for array in arrays]
        found = reduction.combine_fn.fn(*map(reduction.to_tensor, halves, types * 2))
        arrays = [one.handle.data for one in (found if isinstance(found, tuple) else (found,))]
    if not reduction.keep_dims:
        arrays = [array.squeeze(axis) for array in arrays]
    return list(map(reduction.to_tensor, arrays, types))


def remembered(find: Any) -> Any:
    """Cache NumPy's type of a Triton type; Triton makes a table of all of them every time."""
    known: dict[str, Any] = {}

    def of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    return of


def alike(make: Any, shapes: dict[Any, Any]) -> Any:
    """Cache the fields of a block type; Triton checks and names a shape for every result."""
    known: dict[Any, Any] = {}

    def of(block: Any, element: Any, shape: Any) -> None:
        key = element.name, *shape
        if key not in known:
            make(block, element, shape)
            sizes = tuple(block.shape)
            if sizes not in shapes:
                shapes[sizes] = shape_of(sizes)
            known[key] = vars(block) | {"of_tensors": shapes[sizes]}
        vars(block).update(known[key])

    return of


def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the shape of a tensor in Triton's form, and its number of elements."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def tensor_of(scalar: tuple[Any, Any]) -> Any:
    """Return a constructor of tensors that takes the shape from the type; Triton makes it anew, and names it."""

    def of(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = vars(kind).get("of_tensors", scalar)

    return of


def speed_up() -> None:
    """Install all replacements in this process, and skip the check for integer overflow, which nothing reads."""
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.InterpretedFunction.__call__ = call
    interpreter._patch_lang = set_up = SetUp(interpreter._patch_lang)
    interpreter.interpreter_semantic = set_up.semantic
    interpreter.ReduceOps.generic_reduce = reduce_by_halves
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    core.block_type.__init__ = alike(core.block_type.__init__, {})
    core.tensor.__init__ = tensor_of(shape_of(()))
    core._unwrap_if_constexpr = unwrapped(core._unwrap_if_constexpr)
    interpreter.TensorHandle.__init__ = hold
