"""Tile sizes of the Triton kernels: a small table for each architecture, and the choice among its rows.

How the rows were found: a CTA keeps BLOCK_M rows of Q, and `num_stages` tiles of K and V of BLOCK_N
rows, in shared memory. O, S and P are in registers, 255 for each thread. Two CTAs that fit side by
side hide each other's softmax. On sm_90, 128 rows on 4 warps spill at D = 128, and then ptxas
serialises the matrix products (warning C7512). Ascend offers no choice of warps or stages; its
unified buffer of 192 KiB holds 64 x 128 up to D = 128 (see README.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch


@dataclass(frozen=True)
class Tile:
    """A tile size: query rows, keys, warps of a CTA, and stages of the software pipeline.

    `descriptors`: K and V are loaded by tensor descriptors. `overlap`: P V of a block runs during
    the softmax of the next.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool = False
    overlap: bool = False


# (architecture, largest padded head dimension): candidates, the safest guess first
TABLE: dict[str, dict[int, tuple[Tile, ...]]] = {
    "sm_80": {
        64: (Tile(128, 64, 4, 3), Tile(128, 128, 8, 3)),
        128: (Tile(128, 64, 8, 3), Tile(128, 32, 4, 3)),
        256: (Tile(64, 32, 4, 2),),
    },
    "sm_89": {
        64: (Tile(128, 64, 4, 2), Tile(64, 64, 4, 3)),
        128: (Tile(128, 32, 8, 2), Tile(64, 64, 4, 2)),
        256: (Tile(64, 32, 8, 1),),
    },
    "sm_90": {
        64: (Tile(128, 64, 4, 3, True), Tile(64, 64, 4, 3, True)),
        128: (Tile(64, 64, 4, 3, True, True), Tile(64, 64, 4, 2, True, True), Tile(128, 64, 8, 2, True)),
        256: (Tile(128, 64, 8, 2),),
    },
    "ascend": {
        128: (Tile(64, 128, 1, 1),),
        256: (Tile(32, 64, 1, 1),),
    },
    "interpreter": {  # one tile for each form of the loop
        64: (Tile(64, 64, 1, 1),),
        128: (Tile(64, 64, 1, 1, overlap=True),),
        256: (Tile(64, 64, 1, 1),),
    },
}


def pad_dim(dim: int) -> int:
    """Return the padded head dimension, because the sides of Triton tiles are powers of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def hopper_pad(dim: int) -> int:
    """Return the padded head dimension of the kernels for Hopper, whose smallest tile has 64 columns.

    TMA pads tiles without a cost in memory. The portable kernels are faster where most of 64 columns would be padding.
    """
    return 64 if 32 <= dim <= 64 else pad_dim(dim)


def candidates(architecture: str, pad: int, block_k: int, rows: int) -> tuple[Tile, ...]:
    """Return the tiles for a padded head dimension, cut to divide the anchor block and to fit a call of `rows`."""
    by_dim = TABLE[architecture]
    tiles = by_dim[min(d for d in by_dim if d >= pad)]
    height = max(16, 1 << (rows - 1).bit_length())
    fitting = [
        replace(
            tile,
            block_m=min(tile.block_m, height),
            block_n=min(tile.block_n, block_k),
            warps=warps_for(architecture, min(tile.block_m, height), tile.warps),
        )
        for tile in tiles
    ]
    return tuple(dict.fromkeys(fitting))


def warps_for(architecture: str, rows: int, warps: int) -> int:
    """Return the warps of a CTA for a tile of `rows` rows; `warps` are those of a full-height tile.

    On Hopper each warp has 16 rows, and there are at least 4 warps. Triton 3.6 lets a warp without
    rows read what lies behind the tile in shared memory, if the product takes its rows from
    registers.
    """
    return min(warps, max(4, rows // 16)) if architecture == "sm_90" else warps


def architecture_of(device_type: str, capability: tuple[int, int] | None) -> str:
    """Return the key of `TABLE` for a device; newer or unlisted GPUs use the nearest older row."""
    if device_type == "npu":
        return "ascend"
    if capability is None:
        return "interpreter"
    if capability >= (9, 0):
        return "sm_90" if capability < (12, 0) else "sm_89"  # consumer Blackwell has the shared memory of sm_89
    if capability in ((8, 6), (8, 9)):
        return "sm_89"
    return "sm_80"


def paper_tile(device: torch.device, pad: int, block_k: int) -> Tile:
    """Return the tile of the published algorithm, whose keys are one whole block of the shifting matrix."""
    architecture = device_architecture(device)
    if architecture == "ascend":
        return Tile(64 if pad <= 128 else 32, block_k, 1, 1)
    if architecture == "interpreter":
        return Tile(64, block_k, 1, 1)
    rows = {"sm_80": 128 if pad <= 128 else 64, "sm_89": 8192 // max(pad, 64), "sm_90": 128}
    return Tile(rows[architecture], block_k, 8, 2 if architecture == "sm_90" and pad <= 128 else 1)


def tiles_for(device: torch.device, pad: int, block_k: int, rows: int) -> tuple[Tile, ...]:
    """Return the candidates for a call on a device, the safest guess first."""
    return candidates(device_architecture(device), pad, block_k, rows)


def fit_ascend(tile: Tile, mask: str, causal: bool) -> Tile:
    """Return a tile whose buffers fit the unified buffer of an NPU.

    The buffer has 192 KiB. A call with a float mask and a causal band needs 199 to 223 KiB at
    64 x 128 from D = 80 on, and 315 KiB with 64 keys. So such calls get 32 rows at every head
    dimension, which is one simple rule.
    """
    return replace(tile, block_m=min(tile.block_m, 32)) if mask == "float" and causal else tile


@cache
def device_architecture(device: torch.device) -> str:
    """Return the key of `TABLE` for a device, cached because every call needs it."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return architecture_of(device.type, capability)


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or of AI cores of an NPU."""
    if device.type == "npu":
        return 20
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
