"""What random cases share: kernel, head dimension, mask, layout. A kernel compiles anew for each, so there are few."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

HEADS = ((1, 1), (3, 3), (2, 2), (4, 2), (6, 3), (8, 2), (7, 1), (14, 2), (8, 1), (16, 2))  # (Hq, Hkv)
DIMS = (16, 40, 64, 72, 80, 96, 128, 160, 192, 256)
HOPPER_DIMS = (64, 128)  # served by a kernel of its own there, without a mask and with 128 keys in a block
FEW_ROWS = (1, 1, 2, 3, 8, 16)  # decoding pads them to a power of two: one number for a family
SOME_ROWS = ((17, 32), (33, 64), (65, 128), (129, 300), (129, 300), (301, 1500))
PACKED_DECODE = (1, 16)
KEYS = ((1, 60), (61, 300), (200, 1000), (800, 3000))
LONG_KEYS = (9000, 12000)
MASKS = ("bool", "float", "padding", "padding-float", "row", "keys")
LAYOUTS = ("contiguous", "contiguous", "heads last", "sliced", "turned", "offset", "fused", "expanded")
PACKED_LAYOUTS = ("contiguous", "sliced")
DTYPES = ("float16",) * 8 + ("bfloat16", "float32")
GROUPS = {"hopper": 14, "portable": 14, "masked": 14, "decode": 14, "packed": 6, "paper": 8, "short": 8}
PACKED, PAPER = "packed", "paper"
SHORT_KEYS = (1, 64)


@dataclass(frozen=True)
class Family:
    """Everything that a kernel is compiled for, or nearly so.

    Attributes
    ----------
    name : str
        Group of `GROUPS` and a number.
    batch, heads, kv_heads, dim : int
        B, Hq, Hkv, D; the number of sequences in place of B if packed.
    rows, keys : (int, int)
        Smallest and largest Sq and Skv (of a sequence if packed).
    aligned : bool
        Lengths are multiples of 16; otherwise none is.
    causal, packed : bool
    mask : str
        "none" or one of `MASKS`.
    layout, dtype : str
        Of q, k and v.
    recovery, accumulate : str
    block_k : int
    tile : int
        Which of the candidates for a tile to take, modulo their number.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    dim: int
    rows: tuple[int, int]
    keys: tuple[int, int]
    aligned: bool
    causal: bool
    packed: bool
    mask: str
    layout: str
    dtype: str
    recovery: str
    accumulate: str
    block_k: int
    tile: int

    @property
    def group(self) -> str:
        """A key of `GROUPS`."""
        return self.name.partition("-")[0]


@cache
def draw_families(seed: int) -> tuple[Family, ...]:
    """The families of a seed, `GROUPS` of each kind."""
    names = [f"{group}-{number}" for group, count in GROUPS.items() for number in range(count)]
    return tuple(_family(name, Random(f"family {seed} {name}")) for name in names)


def _family(name: str, rng: Random) -> Family:
    heads, kv_heads = rng.choice(HEADS)
    drawn: dict[str, Any] = {
        "batch": rng.choice((1, 1, 2, 3)),
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": rng.choice(DIMS),
        "rows": rng.choice(SOME_ROWS),
        "keys": rng.choice(KEYS),
        "aligned": rng.random() < 0.25,
        "causal": rng.random() < 0.5,
        "packed": False,
        "mask": "none",
        "layout": rng.choice(LAYOUTS),
        "dtype": rng.choice(DTYPES),
        "recovery": "exact",
        "accumulate": "fp16" if rng.random() < 0.25 else "fp32",
        "block_k": rng.choice((32, 64, 128, 128)),
        "tile": rng.randrange(3),
    }
    return Family(name, **drawn | _of_group(name.partition("-")[0], drawn, rng))


def _of_group(group: str, drawn: dict[str, Any], rng: Random) -> dict[str, Any]:
    """What a group says of its own."""
    if group == "hopper":
        return {"dim": rng.choice(HOPPER_DIMS), "block_k": 128, "accumulate": rng.choice(("fp32", "fp16"))}
    if group == "portable":
        taken = drawn["dim"] in HOPPER_DIMS and drawn["block_k"] == 128
        return {"block_k": 64 if taken else drawn["block_k"]}
    if group == "masked":
        return {"mask": rng.choice(MASKS)}
    if group == "decode":
        few = rng.choice(FEW_ROWS)
        long = rng.random() < 0.25
        mask = "none" if rng.random() < 0.6 else rng.choice(MASKS)
        return {"rows": (few, few), "keys": LONG_KEYS if long else drawn["keys"], "mask": mask}
    if group == "short":
        rows = rng.choice(((1, 64), SOME_ROWS[-1]))
        return {"rows": rows, "keys": SHORT_KEYS, "mask": rng.choice(("none", *MASKS)), "aligned": False}
    if group == PACKED:
        rows = rng.choice((*SOME_ROWS, PACKED_DECODE))
        how = {"packed": True, "batch": rng.randint(2, 6), "layout": rng.choice(PACKED_LAYOUTS)}
        return how | {"rows": rows, "keys": KEYS[1]}
    packed = rng.random() < 0.25
    paper = {"recovery": PAPER, "accumulate": rng.choice(("fp32", "fp16")), "packed": packed, "keys": KEYS[1]}
    paper["rows"] = PACKED_DECODE if rng.random() < 0.25 else drawn["rows"]
    if packed:
        return paper | {"layout": rng.choice(PACKED_LAYOUTS)}
    return paper | {"keys": drawn["keys"], "mask": "none" if rng.random() < 0.5 else rng.choice(MASKS)}
