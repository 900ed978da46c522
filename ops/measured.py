"""Read which of two backends serves a shape faster: measured on a device, never searched for while a program runs.

`pasa bench choice` writes measured.json from stored runs of `pasa bench speed`. The registry asks `chosen`, when both
backends can serve a call and give the same guarantee. What is measured on two kinds of data counts for all data, so
that a call's backend depends on its shape alone.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("measured.json")
PREFERRED, OTHER = "triton", "sdpa"  # the other one takes calls over where it is faster
MARGIN = math.log2(1.05)  # readings of one kernel differ by up to 5 % between runs
NEIGHBOURS = 8  # measurements that decide together
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
    eager, captured : float
        By how many octaves `OTHER` is faster for an eager call and for one in a CUDA graph; below 0 `PREFERRED` is.
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
    eager: float
    captured: float
    ratios: dict[str, float]
    case: str
    runs: tuple[str, ...]

    def gain(self, captured: bool) -> float:
        """Return by how many octaves `OTHER` is faster, for calls that a graph captures or for others."""
        return self.captured if captured else self.eager

    def best(self, captured: bool) -> str:
        """Return the name of the backend for calls that a graph captures, or for others; see `faster`."""
        return faster(self.gain(captured))


def faster(gain: float) -> str:
    """Return the name of the faster backend, for the octaves by which `OTHER` is; empty if neither clearly is."""
    if abs(gain) <= MARGIN:
        return ""
    return OTHER if gain > 0 else PREFERRED


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


def expected_gain(
    capability: str, shape: Shape, measurements: Sequence[Measurement] | None = None, *, captured: bool = False
) -> float | None:
    """Return by how many octaves `OTHER` is faster for a shape, or None if no shape of its kind was measured.

    That is the mean of the `NEIGHBOURS` most similar measured shapes, each weighted by the inverse cube of its
    distance, or what was measured of the shape itself. They count however far they are.
    """
    found = _of_kind(capability, shape.kind) if measurements is None else measurements
    known = [each for each in found if each.capability == capability and each.shape.kind == shape.kind]
    near = heapq.nsmallest(NEIGHBOURS, [(shape.distance(each.shape), each.gain(captured)) for each in known])
    if not near:
        return None
    same = [gain for distance, gain in near if distance == 0]
    weights = [1.0] * len(same) or [distance**-3 for distance, _ in near]
    return math.fsum(weight * gain for weight, (_, gain) in zip(weights, near, strict=False)) / math.fsum(weights)


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
    return faster(expected_gain(capability, shape, captured=captured) or 0.0)


@cache
def rivals(capability: str, dim: int, mask: str) -> frozenset[str]:
    """Return the backends that are faster for some shape like a head dimension and a mask on such a device."""
    like = [each for each in table() if (each.capability, each.shape.mask) == (capability, mask)]
    like = [each for each in like if kind_of_dim(each.shape.dim) == kind_of_dim(dim)]
    return frozenset(name for each in like for name in (each.best(False), each.best(True)) if name)
