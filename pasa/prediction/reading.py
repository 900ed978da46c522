"""Read the norms and projections of a checkpoint, and refuse tensors whose shapes would bound another model."""

from __future__ import annotations

import math

from torch import Tensor

from pasa.prediction.checkpoint import Source
from pasa.prediction.families import Part
from pasa.projections import Norm


def read_vector(source: Source, name: str, length: int | None = None) -> Tensor:
    """Return a tensor of one dimension; refuse other shapes, as broadcasting them would bound another model."""
    vector = source.get(name)
    if vector.ndim != 1 or len(vector) != (length or len(vector)):
        raise ValueError(f"{source.label}: {name} is {tuple(vector.shape)} in place of ({length or 'd'},)")
    return vector


def read_norm(source: Source, path: str, kind: str, epsilon: float) -> Norm:
    """Return the norm at a path; `kind` is "layer" for a layer norm, which is centred."""
    if f"{path}.weight" not in source.names:
        raise ValueError(f"{source.label}: {path}.weight is missing")
    gain = read_vector(source, f"{path}.weight")
    shift = read_vector(source, f"{path}.bias", len(gain)) if f"{path}.bias" in source.names else None
    return Norm(math.sqrt(len(gain)), gain, shift, centred=kind == "layer", eps=epsilon)


def read_part(source: Source, part: Part) -> tuple[Tensor, Tensor | None]:
    """Return the weight (outputs, inputs) of a projection and its bias, cut to the part's rows."""
    weight = source.get(part.weight)
    if weight.ndim != 2:
        raise ValueError(f"{source.label}: {part.weight} is {tuple(weight.shape)}, which is no matrix")
    if part.transposed:
        weight = weight.T
    bias = read_vector(source, part.bias, len(weight)) if part.bias is not None else None
    if part.rows is None:
        return weight, bias
    rows = slice(*part.rows)
    return weight[rows], bias[rows] if bias is not None else None
