"""The host's side of the kernels: what is refused, what fits, how work is dealt."""

import numpy as np
import pytest

from tests.ascend_c.kernel_runs import Call, launch_attention, shifted_by_reference
from tests.ascend_c.test_attention import make_call

GOOD = {"batch": 1, "heads": 8, "kv_heads": 2, "rows": 1000, "keys": 1000, "dim": 128, "scale": 0.0884, "chip": 2}
TILE, BLOCK = 128, 128


def plan(program, **changes):
    report = program.run("plan", **(GOOD | changes))
    assert report["ok"], report["fault"]["sentence"]
    lanes, blocks, lane_bytes, workspace_bytes, groups, *tiles = program.load("plan", np.uint64).tolist()
    assert len(tiles) == groups
    return lanes, blocks, lane_bytes, workspace_bytes, tiles


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch": 0}, "batch=0 must be above 0"),
        ({"rows": 0}, "rows=0 must be above 0"),
        ({"keys": 0}, "keys=0 must be above 0"),
        ({"kv_heads": 3}, "heads=8 must be a multiple of kv_heads=3"),
        ({"kv_heads": 0}, "heads=8 must be a multiple of kv_heads=0"),
        ({"dim": 72}, "dim=72 must be a multiple of 16, from 16 to 256"),
        ({"dim": 272}, "dim=272 must be a multiple of 16, from 16 to 256"),
        ({"scale": 0}, "scale must be positive and finite"),
        ({"scale": "inf"}, "scale must be positive and finite"),
        ({"exact": 0, "lengths": 1}, "the published recovery takes no lengths"),
    ],
)
def test_what_does_not_fit_is_refused(kernels, changes, sentence):
    report = kernels.run("plan", **(GOOD | changes))
    assert report["fault"]["sentence"] == sentence


@pytest.mark.parametrize("chip", range(4))
def test_all_tiles_are_dealt_and_evenly(kernels, chip):
    """All tiles are dealt out, and no group gets an eighth more work than its share, also with a causal mask."""
    for causal, heads, rows in ((0, 28, 8192), (1, 28, 8192), (1, 28, 16384), (1, 3, 500)):
        *_, tiles = plan(kernels, heads=heads, kv_heads=1, rows=rows, keys=rows, causal=causal, chip=chip)
        rows_of = [min((i + 1) * TILE, rows) for i in range(-(-rows // TILE))]
        assert sum(tiles) == heads * sum(-(-(r if causal else rows) // BLOCK) for r in rows_of)
        if rows > 1000:
            assert max(tiles) <= 1.125 * sum(tiles) / len(tiles)


def test_workspace_is_twice_that_of_a_tile_for_each_group(kernels):
    lanes, blocks, lane_bytes, workspace_bytes, tiles = plan(kernels)
    assert (lanes, blocks) == (1, 8)
    tile = 128 * 128
    assert lane_bytes == tile * (2 + 4 + 2 + 4) + 128 * 16 * 4 + 128 * 16 * 2 + 512 + 2 * blocks * 128 * 4
    assert workspace_bytes == 2 * len(tiles) * lane_bytes


@pytest.mark.parametrize("dim", range(16, 257, 16))
def test_every_head_dim_fits_and_runs(kernels, dim):
    """The twin knows how large the memories are; the published recovery has two lanes as long as their outputs fit."""
    assert plan(kernels, dim=dim)[0] == 1
    assert plan(kernels, dim=dim, exact=0)[0] == (2 if dim <= 144 else 1)
    for exact in (True, False):
        x: Call = make_call(1, 1, 1, 140, 130, dim, False, exact=exact)
        result = launch_attention(kernels, x, shifted_by_reference(x))
        assert result.report["ok"], result.report["fault"]
