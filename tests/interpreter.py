"""Triton's interpreter without the work that it repeats: the same operations on the same numbers, three times as fast.

Written for Triton 3.6, which the extra `dev` pins; what is replaced here has to be there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
from triton.runtime import interpreter


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that a kernel calls. Triton sets up the language again for every call, and never takes that back."""
    return function.rewrite()(*args, **kwargs)


def set_up(_: Any, set_up_for: Any = interpreter._patch_lang) -> Any:
    """The language for a launch: as kernels know it, and as the functions that come with Triton do."""
    return set_up_for(SimpleNamespace(__globals__={"tl": triton.language, "core": triton.language.core}))


def reduce_by_halves(reduction: Any, values: tuple[Any, ...]) -> list[Any]:
    """`tl.reduce` along an axis with a function of ours, on whole halves; Triton takes element after element."""
    types, axis = [value.dtype for value in values], reduction.axis
    arrays = [value.handle.data for value in values]
    while (count := arrays[0].shape[axis]) > 1:  # a power of two, as all shapes of Triton
        halves = [array.take(part, axis) for part in (range(count // 2), range(count // 2, count)) for array in arrays]
        found = reduction.combine_fn.fn(*map(reduction.to_tensor, halves, types * 2))
        arrays = [one.handle.data for one in (found if isinstance(found, tuple) else (found,))]
    if not reduction.keep_dims:
        arrays = [array.squeeze(axis) for array in arrays]
    return list(map(reduction.to_tensor, arrays, types))


def remembered(find: Any) -> Any:
    """NumPy's type of a Triton type, once for each; Triton makes a table of all of them every time."""
    known: dict[str, Any] = {}

    def of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    return of


def alike(make: Any) -> Any:
    """Fields of a type of blocks, found once for each; Triton checks and names a shape for every result."""
    known: dict[Any, Any] = {}

    def of(block: Any, element: Any, shape: Any) -> None:
        key = element.name, tuple(shape)
        if key not in known:
            make(block, element, shape)
            known[key] = dict(vars(block))
        vars(block).update(known[key])

    return of


def speed_up() -> None:
    """Replace these in this process, and do not compute which integers overflow: nothing looks at that."""
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.InterpretedFunction.__call__ = call
    interpreter._patch_lang = set_up
    interpreter.ReduceOps.generic_reduce = reduce_by_halves
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    triton.language.core.block_type.__init__ = alike(triton.language.core.block_type.__init__)
