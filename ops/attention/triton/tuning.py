"""Choose among a few tiles by timing, once for each device, kernel variant and size class; keep it on disk."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.runtime.errors import OutOfResources

from pasa.ops import envs
from pasa.ops.attention.triton.tiles import Tile
from pasa.ops.recording import unrecorded

log = logging.getLogger("pasa")
_chosen: dict[str, Tile] = {}


def best_tile(device: torch.device, variant: str, tiles: tuple[Tile, ...], run: Callable[[Tile], object]) -> Tile:
    """Return the fastest of `tiles` for `variant`, timed at the first call on this device.

    Return the first of `tiles` if there is only one, if there is no GPU to time on, or if a CUDA
    graph is being captured before the first timing.

    Parameters
    ----------
    device : torch.device
    variant : str
        Names everything that the time depends on, except the device and Triton's version.
    tiles : tuple of Tile
    run : callable
        Launches with a tile. It is called many times, so it must not accumulate.
    """
    if len(tiles) == 1 or device.type != "cuda":
        return tiles[0]
    key = f"{torch.cuda.get_device_name(device)} | triton {triton.__version__} | {variant}"
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return tiles[0]
        stored = {str(tile): tile for tile in tiles}.get(_read().get(key, ""))
        with unrecorded():
            _chosen[key] = stored if stored is not None else _time(key, tiles, run)
    return _chosen[key]


def _time(key: str, tiles: tuple[Tile, ...], run: Callable[[Tile], object]) -> Tile:
    times = {tile: _milliseconds(tile, run) for tile in tiles}
    best = min(tiles, key=lambda tile: times[tile])
    log.info("%s: %s of %s ms", key, best, times)
    _write(key, str(best))
    return best


def _milliseconds(tile: Tile, run: Callable[[Tile], object]) -> float:
    """Return the median time; infinite for a tile that does not fit this device."""
    try:
        return float(triton.testing.do_bench(lambda: run(tile), warmup=5, rep=20, return_mode="median"))
    except OutOfResources:
        return float("inf")


def _file() -> Path:
    return envs.cache_dir() / "triton_tiles.json"


def _read() -> dict[str, str]:
    """Return the choices on disk. A missing or damaged file gives none, and tiles are timed again."""
    try:
        stored = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _write(key: str, choice: str) -> None:
    """Replace the file in one step, so that no reader sees half of it; a read-only home only costs repeated timing."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_file().parent, delete=False, encoding="utf-8") as draft:
            json.dump({**_read(), key: choice}, draft, indent=1)
        os.replace(draft.name, _file())
    except OSError as error:
        log.info("tiles are not kept: %s", error)
