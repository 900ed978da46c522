"""Wrong calls: ways to change arguments, and the documented error that must follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

SEED = "data_seed"
Params = dict[str, Any]
"""Plain values that JSON holds: what a case is made of. "fault" names what is wrong with the call, None if nothing."""
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """One way to call wrongly: it changes the arguments in place, and an error of this type and text must follow.

    `message` is a regular expression that names the argument or its value.
    """

    change: Callable[[Arguments, Random], object]
    error: type[Exception]
    message: str


def make_mistake(faults: Mapping[str, Fault], params: Params, arguments: Arguments) -> None:
    """Change the arguments as the case's fault says, if it has one."""
    if params["fault"] is not None:
        faults[params["fault"]].change(arguments, Random(params[SEED]))


def put(**values: Any) -> Callable[[Arguments, Random], object]:
    """Set arguments."""
    return lambda arguments, rng: arguments.update(values)


def pick(name: str, *values: Any) -> Callable[[Arguments, Random], object]:
    """Set an argument to one of several values."""
    return lambda arguments, rng: arguments.update({name: rng.choice(values)})


def altered(names: str, by: Callable[[Tensor], Tensor], error: type[Exception], message: str) -> Fault:
    """Return the mistake to change tensors of these names (between spaces) alike."""
    return Fault(lambda a, rng: a.update({name: by(a[name]) for name in names.split()}), error, message)


def elsewhere(name: str, message: str) -> Fault:
    """Return the mistake to put a tensor on the device meta."""
    return altered(name, lambda x: x.to("meta"), ValueError, message)


def doubled(axis: int) -> Callable[[Tensor], Tensor]:
    """Return a function that makes a tensor twice as long on an axis."""
    return lambda x: torch.cat([x, x], axis)


def other_type(x: Tensor) -> Tensor:
    """Return half the bits, or twice as many."""
    return x.to(torch.float32 if x.dtype != torch.float32 else torch.float16)


def with_gaps(x: Tensor) -> Tensor:
    """Return a tensor whose last stride is 2."""
    return torch.stack([x, x], -1)[..., 0]


def leaf(x: Tensor) -> Tensor:
    """Return a tensor that requires a gradient."""
    return x.detach().clone().requires_grad_()
