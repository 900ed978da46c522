"""Bounds on residual streams and MLPs from the weights alone, layer by layer.

Each layer adds to the stream what attention and an MLP make of a norm's result, whose length is bounded. So the stream
is at most the largest embedding plus the sum of these bounds. They are proven and loose: a bound below 65504 proves
that FP16 holds the values, one above it says nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FP16_MAX
from pasa.prediction import branches
from pasa.prediction.checkpoint import Source
from pasa.prediction.families import FAMILIES, Family, Layer, architecture, part, shown
from pasa.prediction.reading import read_norm, read_part
from pasa.prediction.table import StreamPrediction
from pasa.projections import Norm

ACTIVATIONS = ("silu", "swish", "relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "tanh")
"""Activations with |act(t)| <= |t|, by their names in a configuration."""
Matrix = tuple[Tensor, Tensor | None]
"""A weight (outputs, inputs) and its bias."""


@dataclass(frozen=True)
class Writers:
    """The names of what starts a residual stream and of what adds to it, in checkpoints of one architecture.

    Attributes
    ----------
    embeddings : tuple of str
        Paths whose rows are added to start the stream.
    first : str
        The norm that starts the stream, if inputs that no weight bounds come before it.
    value, output : str
        Projections of attention.
    norm : str
        The norm before the MLP.
    mlp : tuple of str
        Names that the MLP may have.
    gate, up, down : str
        Projections of the MLP; `gate` is "" if it has none.
    """

    embeddings: tuple[str, ...] = ("embed_tokens",)
    first: str = ""
    value: str = "v_proj"
    output: str = "o_proj"
    norm: str = "post_attention_layernorm"
    mlp: tuple[str, ...] = ("mlp",)
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_LLAMA = Writers()
_CLIP = Writers(output="out_proj", norm="layer_norm2", gate="", up="fc1", down="fc2")
_TEXT = ("embeddings.token_embedding", "embeddings.position_embedding")
WRITERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"), _LLAMA),
    "mixtral": replace(_LLAMA, mlp=("mlp", "block_sparse_moe")),
    "clip_text_model": replace(_CLIP, embeddings=_TEXT),
    "clip_vision_model": replace(_CLIP, embeddings=(), first="pre_layrnorm"),
    "gpt2": Writers(("wte", "wpe"), value="", output="c_proj", norm="ln_2", gate="", up="c_fc", down="c_proj"),
}
"""Maps the `model_type` of a transformers configuration to its names, for every row of `FAMILIES`."""
OLD_EXPERTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}  # names in Mixtral's checkpoints


def bound_streams(
    source: Source, layers: list[Layer], prefix: str, announce: Callable[[str], None]
) -> Iterator[StreamPrediction]:
    """Yield the bounds of a model layer by layer; one row without numbers if no weight bounds them.

    Parameters
    ----------
    source : Source
    layers : list of Layer
        Its attention layers, in the order of the forward pass.
    prefix : str
        Begins the names of its layers.
    announce : callable
        Called with the name of each layer before it is bounded.
    """
    name = architecture(source.config)
    if not isinstance(name, str) or name not in FAMILIES:
        yield _unbounded(prefix, str(name), "convolutions and inputs are not bounded by weights")
        return
    reader = Reader(source, FAMILIES[name], WRITERS[name])
    if reason := reader.unknown(layers):
        yield _unbounded(prefix, name, reason)
        return
    stream = reader.start(layers[0])
    for layer in layers:
        announce(reader.block(layer))
        middle = branches.stored(stream + reader.attention(layer))
        inner, added = reader.mlp(layer)
        stream = branches.stored(middle + added)
        yield _judged(prefix + reader.block(layer), torch.maximum(middle, stream), inner)


def _judged(layer: str, residual: Tensor, mlp: Tensor) -> StreamPrediction:
    """Return the row of a layer; inf - inf is NaN, as with an epsilon of 0, where there is no bound."""
    stream, inner = (float(each.nan_to_num(math.inf, posinf=math.inf).max()) for each in (residual, mlp))
    return StreamPrediction(layer, stream, inner, "safe" if max(stream, inner) <= FP16_MAX else "not proven")


def _unbounded(prefix: str, name: str, reason: str) -> StreamPrediction:
    return StreamPrediction(prefix.rstrip(".") or name, math.inf, math.inf, "not proven", reason)


@dataclass(frozen=True)
class Reader:
    """Read what writes to the residual stream of one model, and bound it."""

    source: Source
    family: Family
    writers: Writers

    def block(self, layer: Layer) -> str:
        """Return the path of the decoder layer of an attention layer."""
        return layer.name.removesuffix(f".{self.family.attention}")

    def unknown(self, layers: list[Layer]) -> str:
        """Return why no bound is known: an activation or a module that is not understood; "" if there is one."""
        config = self.source.config
        act = config.get("hidden_act", config.get("activation_function", "silu" if self.writers.gate else None))
        if act not in ACTIVATIONS:
            return f"its activation {shown(act)} is not understood"
        parts = (self.family.attention, self.family.norm, self.writers.norm, *self.writers.mlp)
        known = tuple(f"{self.block(layer)}.{name}." for layer in layers for name in parts)
        blocks = tuple(f"{self.block(layer)}." for layer in layers)
        others = [each for each in self.source.names if each.startswith(blocks) and not each.startswith(known)]
        others += [each for each in self.source.names if "shared_expert" in each]
        return f"{min(others)} is not understood" if others else ""

    def start(self, layer: Layer) -> Tensor:
        """Return the largest magnitude of each element of the stream before the first layer, (d,)."""
        if self.writers.first:
            return branches.normed(self._norm(self._path(self.writers.first), layer))
        width = _width(self._norm(f"{self.block(layer)}.{self.family.norm}", layer))
        stream = torch.zeros(width, dtype=torch.float64)
        for name in self.writers.embeddings:
            table, _ = self._checked(f"{self._path(name)}.weight", width, self.source.get(f"{self._path(name)}.weight"))
            stream = branches.stored(stream + table.detach().double().cpu().abs().amax(0))
        return stream

    def _path(self, name: str) -> str:
        """Return the only path of the model that ends with this name."""
        ends = (f"{name}.weight", f".{name}.weight")
        paths = [each for each in self.source.names if each == ends[0] or each.endswith(ends[1])]
        if len(paths) != 1:
            raise ValueError(f"{self.source.label}: {len(paths)} tensors are called {ends[0]}, not one")
        return paths[0].removesuffix(".weight")

    def _norm(self, path: str, layer: Layer) -> Norm:
        norm = read_norm(self.source, path, self.family.kind, layer.epsilon)
        if not all(bool(each.isfinite().all()) for each in (norm.gain, norm.shift) if each is not None):
            raise ValueError(f"{self.source.label}: {path}.weight or its bias holds NaN or infinity")
        return norm

    def _read(self, path: str, inputs: int, last: int | None = None) -> Matrix:
        """Return the projection at a path, which must have so many inputs; with `last`, its last rows alone."""
        whole = replace(part(self.source, path), transposed=self.family.transposed)
        weight, bias = self._checked(whole.weight, inputs, *read_part(self.source, whole))
        return (weight, bias) if last is None else (weight[-last:], bias if bias is None else bias[-last:])

    def _checked(self, name: str, inputs: int, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        """Return a matrix; refuse another shape, and NaN or infinity."""
        if weight.ndim != 2 or weight.shape[1] != inputs:
            raise ValueError(f"{self.source.label}: {name} is {tuple(weight.shape)}, and {inputs} inputs come to it")
        if not all(bool(each.isfinite().all()) for each in (weight, bias) if each is not None):
            raise ValueError(f"{self.source.label}: {name} or its bias holds NaN or infinity")
        return weight, bias

    def attention(self, layer: Layer) -> Tensor:
        """Return the largest magnitude of each element that attention adds to the stream, (d,).

        It is infinite if FP16 may not hold the norm's result or the values, whatever the output projection makes of
        them.
        """
        norm = self._norm(f"{self.block(layer)}.{self.family.norm}", layer)
        output = f"{layer.name}.{self.writers.output}"
        columns = self.source.shape(f"{output}.weight")[0 if self.family.transposed else 1]
        size = columns // layer.heads * layer.kv_heads
        fused = f"{layer.name}.{self.family.fused}"  # with queries and keys, before values
        if f"{fused}.weight" in self.source.names:
            value = self._read(fused, _width(norm), last=size)
        else:
            value = self._read(f"{layer.name}.{self.writers.value}", _width(norm))
        if len(value[0]) != size or columns % layer.heads:
            raise ValueError(f"{self.source.label}: {layer.name} has values and an output that its heads do not fit")
        values = branches.affine(*value, norm)
        added = branches.attended(values, *self._read(output, columns), layer.heads, layer.kv_heads)
        held = float(torch.cat([branches.normed(norm), values.rows]).max()) <= FP16_MAX
        return self._fitting(output, added if held else torch.full_like(added, math.inf), norm)

    def mlp(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return bounds on all that an MLP computes, (n,), and on each element that it adds to the stream, (d,)."""
        block = self.block(layer)
        norm = self._norm(f"{block}.{self.writers.norm}", layer)
        present = (f"{block}.{name}" for name in self.writers.mlp if self._has(f"{block}.{name}"))
        path = next(present, f"{block}.{self.writers.mlp[0]}")
        results = [self._bounds(*each, norm) for each in self._experts(path, _width(norm))]
        router = f"{path}.gate.weight"
        if router in self.source.names and self.source.shape(router)[0] != len(results):
            raise ValueError(f"{self.source.label}: {path} has {len(results)} experts, and its router knows others")
        largest = torch.cat([branches.normed(norm), *(inner for inner, _ in results)])
        added = [self._fitting(path, rows, norm) for _, rows in results]
        return largest, added[0] if len(added) == 1 else branches.mixed(added)

    def _fitting(self, path: str, rows: Tensor, norm: Norm) -> Tensor:
        """Return what is added to a stream; refuse another number of elements, which broadcasting would hide."""
        if len(rows) != _width(norm):
            raise ValueError(f"{self.source.label}: {path} adds {len(rows)} elements to a stream of {_width(norm)}")
        return rows

    def _has(self, path: str) -> bool:
        return any(name.startswith(f"{path}.") for name in self.source.names)

    def _experts(self, path: str, width: int) -> Iterator[tuple[Matrix | None, Matrix, Matrix]]:
        """Yield gate (if there is one), up and down of an MLP, or of each of its experts."""
        names = [f"{path}.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        if names[0] in self.source.names:
            for both, down in zip(*map(self.source.get, names), strict=True):
                gate, up = self._checked(names[0], width, both)[0].chunk(2)
                yield (gate, None), (up, None), self._checked(names[1], len(up), down)
            return
        pattern = re.compile(rf"{re.escape(path)}\.experts\.(\d+)\.")
        indices = {int(match[1]) for match in map(pattern.match, self.source.names) if match}
        for each in [f"{path}.experts.{index}" for index in sorted(indices)] or [path]:
            yield self._dense(each, width)

    def _dense(self, path: str, width: int) -> tuple[Matrix | None, Matrix, Matrix]:
        old = f"{path}.{OLD_EXPERTS['gate_proj']}.weight" in self.source.names
        names = [self.writers.gate, self.writers.up, self.writers.down]
        gate, up, down = (f"{path}.{OLD_EXPERTS[name] if old else name}" if name else "" for name in names)
        upper = self._read(up, width)
        return self._read(gate, width) if gate else None, upper, self._read(down, len(upper[0]))

    def _bounds(self, gate: Matrix | None, up: Matrix, down: Matrix, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return bounds on gate, up and their product, (n,), and on each element of one MLP's result, (d,)."""
        upper = branches.affine(*up, norm)
        if gate is None:
            product = branches.activated(upper)
            return torch.cat([upper.rows, product.rows]), branches.projected(product, *down)
        gates = branches.affine(*gate, norm)
        product = branches.gated(gates, upper)
        return torch.cat([gates.rows, upper.rows, product.rows]), branches.projected(product, *down)


def _width(norm: Norm) -> int:
    """Return the number of elements that a norm reads."""
    return 0 if norm.gain is None else len(norm.gain)
