"""Q, K and V recorded from layers of the embedded model on text, tiled to the shape of a case.

The model needs 30 s and packages that a machine with a GPU may lack. So its recording is a file in
:func:`pasa.ops.envs.cache_dir`, 20 MB, which can be copied to another machine.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pasa.eval.kit.attention_calls import show_layers
from pasa.eval.kit.embedded_model import load_model, read_essay, require_built_in
from pasa.eval.kit.output import move_file
from pasa.ops import envs

TOKENS = 1024
EVERY = 3  # layers: those between are left out, so that the file stays small
FILE = f"smollm2-135m-recorded-{TOKENS}x{EVERY}.pt"
TILING = (
    "each key head with its queries from one layer; layers, heads, tokens and channels repeat in turn, and Q is "
    "multiplied by sqrt(channels recorded / D), so that scores keep their spread"
)
Layer = tuple[Tensor, Tensor, Tensor]  # q (1, Hq, S, D), k and v (1, Hkv, S, D), FP16


@cache
def layers() -> list[Layer]:
    """Return the recorded layers, on the CPU; record and keep them if the file is not there."""
    path = envs.cache_dir() / FILE
    if not path.is_file():
        require_built_in(model=True, text=True)
        keep(record(), path)
    loaded: list[Layer] = torch.load(path, weights_only=True)
    return loaded


def record() -> list[Layer]:
    """Let the model read text; return Q, K and V of every third layer in FP16."""
    with torch.inference_mode(False):  # a tensor of inference mode cannot be a parameter of the model
        model, tokenizer = load_model()
        made: list[Layer] = []
        show_layers(model, read_essay(tokenizer, TOKENS), lambda *qkv: made.append(_half(*qkv)))
    return made[::EVERY]


def _half(q: Tensor, k: Tensor, v: Tensor) -> Layer:
    return q.half().contiguous(), k.half().contiguous(), v.half().contiguous()


def keep(recording: list[Layer], path: Path) -> None:
    """Write the recording; a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pasa-", dir=path.parent) as scratch:
        whole = Path(scratch, path.name)
        torch.save(recording, whole)
        move_file(whole, path)


def tile(
    batch: int, heads: int, kv_heads: int, rows: int, keys: int, dim: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, Hq, Sq, D), k and v (B, Hkv, Skv, D) in FP16 from the recorded layers; `TILING` says how.

    Queries are those of the last `rows` tokens, so that a decoded row is beside the keys that came before it.
    """
    recording = layers()
    k, v = (torch.cat([layer[part][0] for layer in recording]).to(device) for part in (1, 2))  # (all key heads, S, D)
    q = torch.cat([layer[0][0].unflatten(0, (layer[1].shape[1], -1)) for layer in recording]).to(device)
    head = torch.arange(batch * kv_heads, device=device) % len(k)
    query = torch.arange(heads // kv_heads, device=device) % q.shape[1]
    token, channel = torch.arange(keys, device=device) % k.shape[1], torch.arange(dim, device=device) % k.shape[2]
    first = max(0, keys - rows)
    asked = torch.arange(first, first + rows, device=device) % k.shape[1]
    scaled = (q.float() * (k.shape[2] / dim) ** 0.5).half()
    tiled = scaled[head[:, None, None, None], query[:, None, None], asked[:, None], channel]  # (B * Hkv, group, Sq, D)
    wide_k, wide_v = (x[head[:, None, None], token[:, None], channel].unflatten(0, (batch, kv_heads)) for x in (k, v))
    return tiled.reshape(batch, heads, rows, dim), wide_k, wide_v
