"""Tile tables, and the choice among their rows, without a device."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pasa.ops.attention.triton import tiles, tuning
from pasa.ops.attention.triton.anchor_launch import Centred
from pasa.ops.attention.triton.decode import cases as decode_cases
from pasa.ops.attention.triton.decode import paged_cases
from pasa.ops.attention.triton.decode.launch import LANES, decode_tiles, keys_of_a_lane, lane_stages
from pasa.ops.attention.triton.decode.paged_launch import anchored_stages, paged_stages
from pasa.ops.attention.triton.kernel_call import KernelCall, step_of
from pasa.ops.attention.triton.paged import cases as writing_cases
from pasa.ops.attention.triton.paged.launch import anchor_tile
from pasa.ops.attention.triton.prefill import cases as prefill_cases
from pasa.ops.attention.triton.prefill.launch import Pass
from pasa.ops.attention.triton.tiles import TABLE, Tile, architecture_of, candidates, fit_ascend, paper_tile

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(("dim", "step"), [(64, 1), (72, 8), (40, 8), (36, 1)])
def test_kernels_are_told_of_steps_that_triton_does_not_see(dim, step):
    """Triton sees multiples of 16. A STEP costs instructions before the first load, so no other call has one."""
    assert step_of(torch.empty(1, 2, 3, dim), torch.empty(1, 2, 5, dim)) == step
    assert step_of(torch.empty(1, 2, 3, dim), torch.empty(1, 2, 3, 72)) == (8 if dim % 8 == 0 else 1)


@pytest.mark.parametrize("architecture", TABLE)
@pytest.mark.parametrize("pad", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("block_k", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 17, 100, 5000])
def test_candidates_fit_the_call(architecture, pad, block_k, rows):
    result = candidates(architecture, pad, block_k, rows)
    assert result
    for tile in result:
        assert block_k % tile.block_n == 0, "a tile must not straddle two anchors"
        assert 16 <= tile.block_m <= max(16, 2 * rows)
        if architecture == "sm_90":
            assert tile.warps == 4 or tile.block_m >= 16 * tile.warps, "warps without rows"


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        ("cuda", (8, 0), "sm_80"),
        ("cuda", (8, 6), "sm_89"),
        ("cuda", (8, 7), "sm_80"),
        ("cuda", (8, 9), "sm_89"),
        ("cuda", (9, 0), "sm_90"),
        ("cuda", (10, 0), "sm_90"),
        ("cuda", (12, 0), "sm_89"),
        ("npu", None, "ascend"),
        ("cpu", None, "interpreter"),
    ],
)
def test_architectures(device, capability, expected):
    assert architecture_of(device, capability) == expected


@pytest.mark.parametrize(("capability", "kib"), [((8, 0), 163), ((8, 9), 99), ((9, 0), 227)])
@pytest.mark.parametrize("pad", [64, 128, 256])
def test_a_whole_block_of_the_published_algorithm_fits(monkeypatch, capability, kib, pad):
    """A whole block of the published algorithm fits shared memory: Q and, in every stage, K and V.

    test_compiles_for_nvidia.py compiles it for these architectures.
    """
    monkeypatch.setattr(tiles, "device_architecture", lambda device: architecture_of("cuda", capability))
    tile = paper_tile(CUDA, pad, 128)
    assert tile.block_n == 128
    assert 2 * pad * (tile.block_m + 128 * tile.stages) <= kib * 1024


@pytest.mark.parametrize("pad", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 64, 128])
def test_every_warp_has_rows_on_hopper(monkeypatch, pad, rows):
    """Every warp has rows on Hopper.

    Story: Triton 3.6 let warps without rows read what lies behind the tile (test_compiles_for_nvidia.py).
    """
    monkeypatch.setattr(tiles, "device_architecture", lambda device: "sm_90")
    for tile in (*decode_tiles("sm_90", pad, rows), paper_tile(CUDA, pad, 128)):
        assert tile.warps == 4 or tile.block_m >= 16 * tile.warps


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Fake a device on which the wider tile is faster, and list what was timed."""
    monkeypatch.setenv("PASA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "device")
    asked = []
    monkeypatch.setattr(tuning, "_milliseconds", lambda tile, run: asked.append(tile) or 1.0 / tile.block_n)
    return SimpleNamespace(asked=asked, file=tmp_path / "cache" / "triton_tiles.json", folder=tmp_path)


NARROW, WIDE = Tile(64, 32, 4, 2), Tile(64, 128, 4, 2)


def test_the_fastest_tile_is_chosen_once_and_kept(timed, monkeypatch):
    assert tuning.best_tile(CUDA, "variant", (NARROW, WIDE), print) == WIDE
    assert tuning.best_tile(CUDA, "variant", (NARROW, WIDE), print) == WIDE
    assert timed.asked == [NARROW, WIDE]
    monkeypatch.setattr(tuning, "_chosen", {})  # as another process that reads the file
    assert tuning.best_tile(CUDA, "variant", (NARROW, WIDE), print) == WIDE
    assert len(timed.asked) == 2
    assert tuning.best_tile(CUDA, "another", (NARROW, WIDE), print) == WIDE
    assert len(json.loads(timed.file.read_text())) == 2


@pytest.mark.parametrize("damage", ["{", "[1]", '{"device | triton": 3}', ""])
def test_a_damaged_file_is_replaced(timed, damage):
    timed.file.parent.mkdir()
    timed.file.write_text(damage)
    assert tuning.best_tile(CUDA, "variant", (NARROW, WIDE), print) == WIDE
    assert str(WIDE) in json.loads(timed.file.read_text()).values()


def test_a_choice_that_is_no_candidate_any_more_is_made_again(timed):
    timed.file.parent.mkdir()
    tuning.best_tile(CUDA, "variant", (NARROW, Tile(16, 256, 1, 1)), print)
    tuning._chosen.clear()
    assert tuning.best_tile(CUDA, "variant", (NARROW, WIDE), print) == WIDE


def test_a_folder_that_cannot_be_written_costs_only_time(timed, monkeypatch):
    timed.file.parent.write_text("a file where the folder should be")
    assert tuning.best_tile(CUDA, "variant", (NARROW, WIDE), print) == WIDE


def test_whatever_changes_the_time_changes_the_key():
    """Whatever changes the time changes the key.

    Plain and guarded passes, block sizes and row counts once shared a key, and so a tile that fitted only one of
    them.
    """

    def variant(rows=300, keys=300, block=128, causal=False, guarded=True, width=64, dropped=0):
        q, k = torch.zeros(1, 2, rows, 64).half(), torch.zeros(1, 2, keys, width).half()[..., :64]
        call, centred = KernelCall(q, k, k, 1.0, is_causal=causal, dropped=dropped), Centred(q, q, q, q, 64)
        return Pass(call, k, None, block, q, q, q, fast=True, centred=centred if guarded else None).variant

    others = [{"rows": 20}, {"keys": 3000}, {"block": 64}, {"causal": True}, {"guarded": False}, {"width": 65}]
    others.append({"dropped": 13})
    assert len({variant(**other) for other in [{}, *others]}) == 8


def test_nothing_is_timed_where_nothing_can_be(timed, monkeypatch):
    assert tuning.best_tile(CUDA, "variant", (NARROW,), print) == NARROW
    assert tuning.best_tile(torch.device("cpu"), "variant", (NARROW, WIDE), print) == NARROW
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuning.best_tile(CUDA, "variant", (NARROW, WIDE), print) == NARROW
    assert timed.asked == []
    assert tiles.processors(torch.device("cpu")) >= 1


def test_no_two_cases_have_one_name():
    """No two cases have the same name.

    Story: the second of two was compiled anew in every clone, because the record belonged to the first.
    """
    folder = Path(prefill_cases.__file__).parents[1]
    modules = [
        path.relative_to(folder).with_suffix("") for path in folder.rglob("*cases.py") if "hopper" not in path.parts
    ]
    lists = [importlib.import_module(".".join([tiles.__package__, *module.parts])) for module in modules]
    names = [case["name"] for each in lists for case in each.NVIDIA_CASES]
    assert len(lists) == 10
    assert len(set(names)) == len(names)


LANE_CASES = [x for x in (*decode_cases.NVIDIA_CASES, *paged_cases.NVIDIA_CASES) if x["name"].startswith("lanes")]


@pytest.mark.parametrize("case", LANE_CASES, ids=lambda x: x["name"])
def test_lanes_are_compiled_as_they_are_launched(case):
    architecture, sizes = f"sm_{case['architectures'][0]}", case["constexprs"]
    assert sizes["BLOCK_N"] == keys_of_a_lane(architecture, sizes["D_PAD"])
    exact = sizes["EXACT"]
    stages = 1 if exact else lane_stages(architecture)
    stages = paged_stages(stages) if "PAGE" in sizes else stages
    assert case["options"] == {"num_warps": 1 if exact else LANES, "num_stages": stages}
    assert sizes["LANES"] == LANES


ANCHORED_CASES = [x for x in paged_cases.NVIDIA_CASES if x["name"].startswith("anchored")]


@pytest.mark.parametrize("case", ANCHORED_CASES, ids=lambda x: x["name"])
def test_lanes_with_anchors_of_pages_are_compiled_as_they_are_launched(case):
    architecture, sizes = f"sm_{case['architectures'][0]}", case["constexprs"]
    assert sizes["BLOCK_N"] == keys_of_a_lane(architecture, sizes["D_PAD"])
    assert case["options"] == {"num_warps": LANES, "num_stages": anchored_stages(architecture)}
    assert sizes["LANES"] == LANES


def test_kernels_of_page_anchors_are_compiled_as_launched():
    cases = [x for x in writing_cases.NVIDIA_CASES if x["name"].startswith("page_anchors")]
    assert len(cases) == 3
    for case in cases:
        sizes = case["constexprs"]
        expected = sizes["WIDTH"], case["options"]["num_warps"]
        assert anchor_tile(sizes["PAGE_PAD"], sizes["D_PAD"]) == expected


MASKED = [
    x for x in prefill_cases.ASCEND_CASES if x["constexprs"].get("SHIFT") == "before" and "16_rows" not in x["name"]
]


@pytest.mark.parametrize("case", MASKED, ids=lambda x: x["name"])
def test_attention_is_lowered_for_ascend_as_it_is_launched(case):
    """Attention is lowered for Ascend with the tiles that it is launched with.

    A float mask with a causal band at 64 rows exceeded the unified buffer once the frame of a row moved.
    """
    sizes = case["constexprs"]
    (tile,) = candidates("ascend", sizes["D_PAD"], sizes["ANCHOR_BLOCK"], 4096)
    tile = fit_ascend(tile, sizes["MASK"], sizes["CAUSAL"])
    assert (sizes["BLOCK_M"], sizes["BLOCK_N"]) == (tile.block_m, tile.block_n)
