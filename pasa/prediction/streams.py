"""Bounds on residual streams and MLPs from the weights alone, layer by layer.

Each layer adds to the stream what attention and an MLP make of a norm's result, whose length is bounded. So the stream
is at most the largest embedding plus the sum of these bounds. They are proven and loose: a bound below 65504 proves
that FP16 holds the values, one above it says nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pasa.ops.numerics.formats import FP16_MAX
from pasa.prediction import branches
from pasa.prediction.checkpoint import Source
from pasa.prediction.families import FAMILIES, Family, Layer, Part, architecture, part, shown
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


def bound_streams(source: Source, layers: list[Layer], prefix: str) -> Iterator[StreamPrediction]:
    """Yield the bounds of a model layer by layer; one row without numbers if no weight bounds them.

    Parameters
    ----------
    source : Source
    layers : list of Layer
        Its attention layers, in the order of the forward pass.
    prefix : str
        Begins the names of its layers.
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
            kind, epsilon = self.family.kind, layer.epsilon
            return branches.normed(read_norm(self.source, self._path(self.writers.first), kind, epsilon))
        tables = [self.source.get(f"{self._path(name)}.weight") for name in self.writers.embeddings]
        return branches.stored(sum((table.detach().double().cpu().abs().amax(0) for table in tables), torch.zeros(())))

    def _path(self, name: str) -> str:
        """Return the only path of the model that ends with this name."""
        ends = (f"{name}.weight", f".{name}.weight")
        paths = [each for each in self.source.names if each == ends[0] or each.endswith(ends[1])]
        if len(paths) != 1:
            raise ValueError(f"{self.source.label}: {len(paths)} tensors are called {ends[0]}, not one")
        return paths[0].removesuffix(".weight")

    def _norm(self, path: str, layer: Layer) -> Norm:
        return read_norm(self.source, path, self.family.kind, layer.epsilon)

    def _affine(self, place: Part, norm: Norm) -> branches.Affine:
        return branches.affine(*read_part(self.source, place), norm)

    def _part(self, path: str) -> Part:
        return replace(part(self.source, path), transposed=self.family.transposed)

    def attention(self, layer: Layer) -> Tensor:
        """Return the largest magnitude of each element that attention adds to the stream, (d,)."""
        path = layer.name
        norm = self._norm(f"{self.block(layer)}.{self.family.norm}", layer)
        value = self._affine(self._value(layer), norm)
        output = read_part(self.source, self._part(f"{path}.{self.writers.output}"))
        if (
            len(value.constant) % layer.kv_heads
            or output[0].shape[1] * layer.kv_heads != len(value.constant) * layer.heads
        ):
            raise ValueError(f"{self.source.label}: {path} has values and an output that its heads do not fit")
        return branches.attended(value, *output, layer.heads, layer.kv_heads)

    def _value(self, layer: Layer) -> Part:
        """Return the projection of values, which may be the last rows of one with queries and keys."""
        fused = f"{layer.name}.{self.family.fused}"
        if f"{fused}.weight" not in self.source.names:
            return self._part(f"{layer.name}.{self.writers.value}")
        whole, shape = self._part(fused), self.source.shape(f"{fused}.weight")
        end = (layer.key.rows or (0, 0))[1]
        return replace(whole, rows=(end, shape[1] if self.family.transposed else shape[0]))

    def mlp(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return bounds on all that an MLP computes, (n,), and on each element that it adds to the stream, (d,)."""
        block = self.block(layer)
        norm = self._norm(f"{block}.{self.writers.norm}", layer)
        path = next(path for name in self.writers.mlp if self._has(path := f"{block}.{name}"))
        results = [self._expert(*each, norm) for each in self._experts(path)]
        largest = torch.cat([branches.normed(norm), *(inner for inner, _ in results)])
        added = [rows for _, rows in results]
        return largest, added[0] if len(added) == 1 else branches.mixed(added)

    def _has(self, path: str) -> bool:
        return any(name.startswith(f"{path}.") for name in self.source.names)

    def _experts(self, path: str) -> Iterator[tuple[Matrix | None, Matrix, Matrix]]:
        """Yield gate (if there is one), up and down of an MLP, or of each of its experts."""
        fused = f"{path}.experts.gate_up_proj"
        if fused in self.source.names:
            for both, down in zip(self.source.get(fused), self.source.get(f"{path}.experts.down_proj"), strict=True):
                gate, up = both.chunk(2)
                yield (gate, None), (up, None), (down, None)
            return
        pattern = re.compile(rf"{re.escape(path)}\.experts\.(\d+)\.")
        indices = {int(match[1]) for match in map(pattern.match, self.source.names) if match}
        for each in [f"{path}.experts.{index}" for index in sorted(indices)] or [path]:
            yield self._dense(each)

    def _dense(self, path: str) -> tuple[Matrix | None, Matrix, Matrix]:
        old = f"{path}.{OLD_EXPERTS['gate_proj']}.weight" in self.source.names

        def read(name: str) -> Matrix:
            return read_part(self.source, self._part(f"{path}.{OLD_EXPERTS[name] if old else name}"))

        gate = read(self.writers.gate) if self.writers.gate else None
        return gate, read(self.writers.up), read(self.writers.down)

    def _expert(self, gate: Matrix | None, up: Matrix, down: Matrix, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return bounds on the products of one MLP and what they make, and on each element of its result."""
        upper = branches.affine(*up, norm)
        if gate is None:
            product = branches.activated(upper)
            return torch.cat([upper.rows, product.rows]), branches.projected(product, *down)
        gates = branches.affine(*gate, norm)
        product = branches.gated(gates, upper)
        return torch.cat([gates.rows, upper.rows, product.rows]), branches.projected(product, *down)
