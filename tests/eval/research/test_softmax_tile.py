"""The softmax micro-benchmark: right in the interpreter, compiles without a device, and its figures."""

import os
import subprocess
import sys

import pytest
import torch

from pasa.eval.research import softmax_tile
from pasa.eval.research.softmax_tile import ARITHMETICS, BLOCK, IN_GRAPH, SIZES, Tiles, make_tiles, run_softmax
from tests.eval.speed.fakes import FakeClock

SCRIPT = """
from pasa.eval.research import softmax_tile as module
for arithmetic in module.ARITHMETICS[:2]:
    tiles = module.make_tiles(arithmetic, 64, 384, "cpu")
    tiles.repeat(1)
    print(tiles.error(), tiles.sums.min().item())
"""


def test_the_interpreter_gives_the_softmax_of_the_stored_scores() -> None:
    """In a process of its own: Triton reads the switch when a kernel is defined."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env={"TRITON_INTERPRET": "1"}
    )
    for line in done.stdout.splitlines():
        error, smallest = map(float, line.split())
        assert error <= softmax_tile.RMSE_LIMIT
        assert smallest > 0
    assert len(done.stdout.splitlines()) == 2


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pasa.eval.research.softmax_tile import ARITHMETICS, BLOCK, ROWS, WARPS, softmax_step
for arithmetic in ARITHMETICS:
    stored = {torch.float32: "*fp32", torch.float16: "*fp16"}[arithmetic.stored]
    names = {"p_s": stored, "p_p": "*fp16", "p_max": "*fp32", "p_sum": "*fp32", "rows": "i32", "blocks": "i32"}
    constants = {"ROWS": ROWS, "BLOCK": BLOCK, "HALF": arithmetic.half}
    source = ASTSource(softmax_step, names | dict.fromkeys(constants, "constexpr"), constants)
    made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options={"num_warps": WARPS})
    print(len(made.asm["cubin"]), int("ex2.approx.f16x2" in made.asm["ptx"]), int(arithmetic.half))
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_without_a_device(capability: int) -> None:
    """In a process of its own, where kernels are not interpreted."""
    script = COMPILE.replace("CAPABILITY", str(capability))
    env = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(lines) == len(ARITHMETICS)
    for cubin, packed, half in lines:
        assert cubin > 0
        assert packed == half


def steps_in_torch(scores: torch.Tensor) -> Tiles:
    """The same steps, written out."""
    tiles = make_tiles(ARITHMETICS[0], *scores.shape, "cpu")
    running = torch.full((scores.shape[0],), -torch.inf)
    total = torch.zeros(scores.shape[0])
    for block, part in enumerate(scores.split(BLOCK, 1)):
        new = torch.maximum(running, part.amax(1))
        weights = torch.exp(part - new.unsqueeze(1)).half()
        total = total * torch.exp(running - new) + weights.float().sum(1)
        running = new
        tiles.weights[:, block * BLOCK : (block + 1) * BLOCK] = weights
        tiles.maxima[block] = running
    tiles.sums.copy_(total)
    return Tiles(scores, tiles.weights, tiles.maxima, tiles.sums, False)


def test_the_check_passes_right_steps_and_stops_wrong_ones() -> None:
    scores = torch.randn(32, 5 * BLOCK, generator=torch.Generator().manual_seed(0))
    tiles = steps_in_torch(scores)
    assert 0 < tiles.error() <= softmax_tile.RMSE_LIMIT
    tiles.maxima[0] += 0.01
    assert tiles.error() > softmax_tile.RMSE_LIMIT
    tiles.weights[0, 0] = torch.nan
    assert not tiles.error() <= softmax_tile.RMSE_LIMIT


def test_half_tiles_move_two_thirds_of_the_bytes() -> None:
    full, half = (make_tiles(arithmetic, 64, 1024, "cpu").bytes for arithmetic in ARITHMETICS[:2])
    assert full - half == 64 * 1024 * 2
    assert half / full == pytest.approx(4 / 6, abs=0.01)


def test_every_row_has_a_time_unless_its_weights_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeat(tiles: Tiles, launches: int) -> torch.Tensor:
        made = steps_in_torch(tiles.scores.float())
        for name in ("weights", "maxima", "sums"):
            getattr(tiles, name).copy_(getattr(made, name))
        return tiles.weights.mul_(2) if tiles.half else tiles.weights

    monkeypatch.setattr(Tiles, "repeat", repeat)
    records = run_softmax(FakeClock(), 2)
    assert len(records) == len(SIZES) * len(ARITHMETICS)
    assert [each["status"] for each in records[:3]] == ["ok", "ok", "failed gate"]
    assert "median_ms" not in records[2]
    assert records[1]["to_fp32"] == 1.0
    cold, warm = records[0], records[-2]
    assert cold["median_ms"] == 1.0
    assert warm["median_ms"] == 0.5 / IN_GRAPH, "the fake graph takes half the time of what it holds"
    assert cold["bandwidth"] == pytest.approx(cold["bytes"] / 1e-3)
