"""Wrong calls: ways to change arguments, and the documented error that must follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

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


def change(*names: str, by: Callable[[Tensor], Tensor]) -> Callable[[Arguments, Random], object]:
    """Change some tensors."""
    return lambda arguments, rng: arguments.update({name: by(arguments[name]) for name in names})


def elsewhere(name: str, message: str) -> Fault:
    """Put a tensor on the device meta."""
    return Fault(change(name, by=lambda x: x.to("meta")), ValueError, message)
