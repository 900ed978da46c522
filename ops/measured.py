"""Read which of two backends serves a shape faster: measured on a device, never searched for while a program runs.

`pasa bench choice` writes measured.json from stored runs of `pasa bench speed`. The registry asks `chosen`, when both
backends can serve a call and give the same guarantee. What is measured on two kinds of data counts for all data, so
that a call's backend depends on its shape alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("measured.json")
OTHER = "sdpa"  # the backend that takes calls over where it is faster
DECODING = 16  # query rows of a head; with more, other kernels serve a call
SHAPES = 4096  # the most shapes whose answer is kept


@dataclass(frozen=True)
class Shape:
    """State what the time of a call depends on, beside its data.

    Attributes
    ----------
    dim : int
        Head dimension.
    causal : bool
    mask : str
        "none", "bool" or "float".
    heads, kv_heads : int
        Query and key heads of all batch entries.
    rows, keys : int
        Of a head.
    """

    dim: int
    causal: bool
    mask: str
    heads: int
    kv_heads: int
    rows: int
    keys: int

    def distance(self, other: Shape) -> float:
        """Return the distance of two shapes in octaves of their numbers; infinite if their kinds differ."""
        return math.dist(self.octaves, other.octaves) if self.kind == other.kind else math.inf

    @cached_property
    def octaves(self) -> tuple[float, ...]:
        """Return the binary logarithms of heads, key heads, rows, keys and head dimension."""
        return tuple(map(math.log2, (self.heads, self.kv_heads, self.rows, self.keys, self.dim)))

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Return what other kernels serve: head dimension, kind of mask, decoding or not, causal or not.

        A single row sees all keys, causal or not. For it alone, cuDNN divides the keys over the device.
        """
        single = self.rows == 1
        causal = self.causal and not single
        return *kind_of_dim(self.dim), self.mask, self.decodes, single, causal, causal and self.rows != self.keys

    @property
    def decodes(self) -> bool:
        """Return whether there are so few rows that kernels for decoding serve them."""
        return self.rows <= DECODING


def kind_of_dim(dim: int) -> tuple[int, bool]:
    """Return the head dimension of the kernels' tiles, at least 64, and whether a head fills it."""
    tile = max(64, 1 << (dim - 1).bit_length())
    return tile, dim == tile


@dataclass(frozen=True)
class Measurement:
    """Hold what was measured of a shape.

    Attributes
    ----------
    capability : str
        Of the device, such as "9.0".
    shape : Shape
    eager, captured : str
        The names of the backends that are to serve an eager call and one in a CUDA graph; empty if neither is faster.
    ratios : dict
        Maps "eager" and "graph", and the same on biased data ("eager biased"), to the speed of `sdpa` over that of
        `triton`.
    case : str
        Name of the case in the stored run.
    runs : tuple of str
        Device and commit of the runs.
    """

    capability: str
    shape: Shape
    eager: str
    captured: str
    ratios: dict[str, float]
    case: str
    runs: tuple[str, ...]

    def best(self, captured: bool) -> str:
        """Return the name of the backend for calls that a graph captures, or for others."""
        return self.captured if captured else self.eager


def to_json(measurements: Iterable[Measurement]) -> str:
    """Return the text of a table, one measurement a line."""
    lines = [json.dumps(asdict(each)) for each in measurements]
    return "[\n" + ",\n".join(lines) + "\n]\n"


@cache
def table() -> tuple[Measurement, ...]:
    """Return all measurements; a ValueError names a file that holds none."""
    try:
        rows: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
        return tuple(Measurement(**{**row, "shape": Shape(**row["shape"]), "runs": tuple(row["runs"])}) for row in rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{FILE} holds no table of choices ({error!r}): install pasa again") from error


def nearest(
    capability: str, shape: Shape, measurements: Sequence[Measurement] | None = None, *, captured: bool = False
) -> Measurement | None:
    """Return the measurement of the most similar shape of the same kind on such a device, or None if there is none.

    However far it is: the smallest and the largest shapes of a kind are measured, and beyond them the same backend
    stays the faster one. Of measurements that are equally far, one by which the preferred backend stays is returned,
    for calls that a graph captures (`captured`) or others.
    """
    found = _of_kind(capability, shape.kind) if measurements is None else measurements
    near = [(each.shape.distance(shape), each) for each in found if each.capability == capability]
    distance, best = min(
        near, key=lambda pair: (round(pair[0], 9), pair[1].best(captured) == OTHER), default=(math.inf, None)
    )
    return best if distance < math.inf else None


@cache
def _of_kind(capability: str, kind: tuple[object, ...]) -> tuple[Measurement, ...]:
    """Return the measurements of a kind of shapes: a call of a new shape looks at these alone."""
    return tuple(each for each in table() if (each.capability, each.shape.kind) == (capability, kind))


@lru_cache(maxsize=SHAPES)
def chosen(capability: str, shape: Shape, captured: bool) -> str:
    """Return the name of the backend that is to serve a shape on such a device; empty if none is known to be faster.

    `captured`: while a CUDA graph is captured. The graph's launches do not wait for the host, while an eager call may
    wait longer for the host than for the device.
    """
    measured = nearest(capability, shape, captured=captured)
    return "" if measured is None else measured.best(captured)


@cache
def rivals(capability: str, dim: int, mask: str) -> frozenset[str]:
    """Return the backends that are faster for some shape like a head dimension and a mask on such a device."""
    like = [each for each in table() if (each.capability, each.shape.mask) == (capability, mask)]
    like = [each for each in like if kind_of_dim(each.shape.dim) == kind_of_dim(dim)]
    return frozenset(name for each in like for name in (each.eager, each.captured) if name)
