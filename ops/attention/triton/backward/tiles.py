"""Tile sizes of the backward pass, kept apart from torch and from any device so that compiled kernels can be listed.

A pass keeps in shared memory its own tiles, and `stages` tiles of the two operands that it loops
over. dK and dV together take BLOCK_N x D x 8 bytes of registers. The tiles of sm_90 up to 128 are
the fastest of four to six each on an H200 (4 x 12 heads x 1024 rows and 28 x 8192, causal). The
others have not been timed against alternatives.
"""

Sizes = tuple[int, int, int, int]  # BLOCK_M, BLOCK_N, warps, stages: fields of tiles.Tile

# (architecture, largest padded head dimension): tiles for row statistics, for dK and dV, and for dQ
BACKWARD: dict[str, dict[int, tuple[Sizes, Sizes, Sizes]]] = {
    "sm_80": {
        64: ((128, 64, 4, 3), (64, 128, 8, 2), (128, 64, 8, 2)),
        128: ((128, 64, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2)),
        256: ((64, 32, 8, 2), (32, 64, 8, 1), (64, 32, 8, 1)),
    },
    "sm_89": {
        64: ((128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
        128: ((64, 64, 4, 2), (32, 64, 8, 1), (64, 32, 4, 2)),
        256: ((64, 32, 8, 1), (16, 32, 8, 1), (32, 32, 8, 1)),
    },
    "sm_90": {
        64: ((128, 64, 4, 3), (32, 128, 8, 3), (64, 64, 4, 3)),
        128: ((128, 128, 8, 2), (64, 128, 8, 2), (128, 64, 8, 3)),
        256: ((64, 64, 4, 2), (32, 64, 8, 1), (64, 32, 4, 2)),
    },
    "interpreter": {256: ((64, 64, 1, 1), (64, 64, 1, 1), (64, 64, 1, 1))},
}
