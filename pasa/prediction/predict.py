"""Judge the heads of a model by their weights; each layer is read, bounded and freed before the next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pasa import geometry
from pasa.concentration import geometry_scale
from pasa.geometry import ScoreBounds
from pasa.keywords import hint_at_arguments
from pasa.ops.numerics.formats import E4M3_MAX, FP16_MAX
from pasa.prediction.checkpoint import Checkpoint, Live, Source
from pasa.prediction.families import (
    AUTOENCODERS,
    LARGEST,
    Layer,
    Part,
    architecture,
    find_layers,
    is_count,
    shown,
    supported,
    wrong,
)
from pasa.prediction.reading import read_norm, read_part, read_vector
from pasa.prediction.streams import bound_streams
from pasa.prediction.table import HeadPrediction, Prediction, StreamPrediction, Verdict, order
from pasa.projections import Norm, Projection, project
from pasa.roundings import ELEMENT_UNITS, MEAN_UNITS, constant_level, unevenness

DEFAULT_SEQ_LEN = 1024  # as in the paper's tables; used if the configuration names no length
LARGEST_SIDE = 2**15  # pixels; the square of a longer side is no count
Progress = Callable[[int, int, str], None]


@hint_at_arguments
def predict_overflow(
    model: object,
    *,
    delta: float = 1e-6,
    seq_len: int | None = None,
    streams: bool = False,
    progress: Progress | None = None,
) -> Prediction:
    """Predict from the weights alone which heads can form scores that FP16 cannot hold.

    Scores are judged, and residual streams and MLPs on request. A query or key may overflow FP16 before its scores are
    formed, as the output of q_proj may in Qwen3 before q_norm. It is then infinite whatever attention does;
    :func:`pasa.watch` or a run in BF16 finds it.

    The proven bound makes three assumptions about a layer norm, which hold in PyTorch. Its input is stored in FP16. Its
    mean is formed in FP32, with an error of at most 8 units of 2^-24 of the largest input. Its variance is formed from
    differences to that mean. The bound also covers constant rows, whose rounding noise is divided by the square root of
    epsilon.

    Parameters
    ----------
    model : torch.nn.Module, pipeline, str or Path
        A model or pipeline of transformers or diffusers, or a folder with ``config.json`` and safetensors files. The
        folder of a pipeline has ``model_index.json``. From a folder, one tensor is in memory at a time.
    delta : float, default 1e-6
        Probability of any overflow in the whole model up to which an overflow counts as unlikely.
    seq_len : int, optional
        Number of positions; by default the longest sequence that the configuration names.
    streams : bool, default False
        Bound the residual stream and the MLP of every layer too, of language models and of CLIP. The bounds hold for
        all token ids (GPT-2: without token types) or pixels, and are loose. All weights are read.
    progress : callable, optional
        Called with (done, total, layer) before each layer, and once more for its stream.

    Returns
    -------
    Prediction
        One row a head, worst first. ``str()`` prints it, and ``as_dict()`` returns plain containers for JSON.

    Raises
    ------
    NotImplementedError
        The architecture is unknown (in a pipeline: that of every part), the weights are quantised, or rotary embeddings
        also scale q and k.
    ValueError
        A projection is missing or has a wrong shape; the configuration has a wrong entry; `delta` is not a probability;
        `seq_len` is below 1 or above 2^31.
    FileNotFoundError
        The folder holds no model.
    TypeError
        The object is not a model; `delta` is not a number, or `seq_len` not an integer.

    Examples
    --------
    >>> prediction = pasa.predict_overflow(model)
    >>> print(prediction)
    Qwen2ForCausalLM: 2 attention modules by their heads: 2 safe
      safe      model.layers...
    >>> prediction.modules("certain", "at risk")
    ()
    """
    if not isinstance(delta, (int, float)):
        raise TypeError(f"predict_overflow: delta={delta!r} is not a number")
    if seq_len is not None and (isinstance(seq_len, bool) or not isinstance(seq_len, int)):
        raise TypeError(f"predict_overflow: seq_len={seq_len!r} is not an integer")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"predict_overflow: delta={delta} is not a probability between 0 and 1")
    if seq_len is not None and not is_count(seq_len):
        limits = f"not between 1 and {LARGEST}"
        raise ValueError(
            f"predict_overflow: seq_len={shown(seq_len)} is {limits}: leave it out for the config's length"
        )
    if not isinstance(streams, bool):
        raise TypeError(f"predict_overflow: streams={streams!r} is not a bool: pass True or False")
    if progress is not None and not callable(progress):
        raise TypeError(f"predict_overflow: progress={progress!r} is not a function: pass progress(done, total, layer)")
    parts = sources_of(model)
    if not parts:
        raise FileNotFoundError(f"predict_overflow: {str(model)!r} is a pipeline, none of whose parts is there")
    known = {prefix: source for prefix, source in parts.items() if len(parts) == 1 or supported(source.config)}
    if not known:
        architectures = ", ".join(shown(architecture(source.config)) for source in parts.values())
        raise NotImplementedError(f"predict_overflow: no part is of a known architecture ({architectures})")
    layers_by_prefix = {prefix: find_layers(source) for prefix, source in known.items()}
    announce = _announcer(progress, sum(map(len, layers_by_prefix.values())) * (1 + streams))
    rows: list[HeadPrediction] = []
    bounds: list[StreamPrediction] = []
    settings: dict[str, Any] = {"delta": delta, "limit": FP16_MAX, "parts": {}}
    for prefix, layers in layers_by_prefix.items():
        length = seq_len or _sequence(known[prefix])
        heads = sum(layer.heads for layer in layers)
        for layer in layers:
            announce(layer.name)
            rows += _predict_layer(known[prefix], layer, prefix, heads, length, delta)
        if streams:
            bounds += bound_streams(known[prefix], layers, prefix, announce)
        settings["parts"][prefix] = {"seq_len": length, "heads": heads, "layers": len(layers)}
    skipped = tuple(
        (prefix.rstrip("."), f"architecture {shown(architecture(source.config))} is not supported")
        for prefix, source in parts.items()
        if prefix not in known
    )
    label = str(model) if isinstance(model, (str, Path)) else type(model).__name__
    return Prediction(label, tuple(sorted(rows, key=order)), settings, skipped, tuple(bounds))


def _announcer(progress: Progress | None, total: int) -> Callable[[str], None]:
    """Return a function that counts its calls, and tells each of them to `progress`."""
    done = itertools.count()
    return lambda name: None if progress is None else progress(next(done), total, name)


def sources_of(model: Any) -> dict[str, Source]:
    """Return the models of a folder, pipeline or module, by the prefix of their modules' names in it."""
    if isinstance(model, (str, Path)):
        folder = Path(model)
        if not (folder / "model_index.json").is_file():
            return {"": Checkpoint(folder)}
        children = sorted(path for path in folder.iterdir() if (path / "config.json").is_file())
        return {f"{path.name}.": Checkpoint(path) for path in children}
    if isinstance(model, torch.nn.Module):
        return _live(model, "")
    components = getattr(model, "components", None)
    if isinstance(components, dict):
        modules = {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}
        return {key: value for name, part in modules.items() for key, value in _live(part, f"{name}.").items()}
    if isinstance(getattr(model, "model", None), torch.nn.Module):
        return _live(model.model, "")
    raise TypeError(f"predict_overflow: expected a model, a pipeline or a folder, got {type(model).__name__}")


def _live(root: torch.nn.Module, prefix: str) -> dict[str, Source]:
    """Return the outermost models below `root` with a known architecture, and the unknown ones beside them, by prefix.

    If no architecture is known, return the root alone.
    """
    known: dict[str, Source] = {}
    others: dict[str, Source] = {}
    for path, module in root.named_modules():
        if not hasattr(module, "config") or not hasattr(module, "dtype"):
            continue  # a model of either library has both
        path = f"{path}." if path else ""
        if not any(path.startswith(outer) for outer in known):
            source = Live(module)
            (known if supported(source.config) else others)[path] = source
    if not known:
        return {prefix: Live(root)}
    beside = [path for path in others if not any(inner.startswith(path) for inner in known)]
    outermost = [path for path in beside if not any(path != outer and path.startswith(outer) for outer in beside)]
    return {prefix + path: source for path, source in (known | {path: others[path] for path in outermost}).items()}


def _sequence(source: Source) -> int:
    """Return the longest sequence that a configuration names: positions of a text, or of a latent image.

    Configurations of VAEs name the pixels of the image, from which the size of the latent follows.
    """
    config = source.config
    for name in ("max_position_embeddings", "n_positions"):
        if positions := config.get(name):
            if not is_count(positions):
                raise wrong(source, name, f"an integer from 1 to {LARGEST}")
            return positions
    side = config.get("sample_size")
    if side is None or isinstance(side, (list, tuple)):  # of images that are not square
        return DEFAULT_SEQ_LEN
    if not is_count(side) or side > LARGEST_SIDE:
        raise wrong(source, "sample_size", f"an integer from 1 to {LARGEST_SIDE}")
    if config.get("_class_name") in AUTOENCODERS:
        blocks = config.get("block_out_channels")
        if not isinstance(blocks, (list, tuple)):
            raise wrong(source, "block_out_channels", "a list of numbers")
        side //= 2 ** (len(blocks) - 1)
    return max(side * side, 1)


def _predict_layer(
    source: Source, layer: Layer, prefix: str, heads: int, seq_len: int, delta: float
) -> list[HeadPrediction]:
    """Return the verdicts on the heads of one layer."""
    name = prefix + layer.name
    if layer.unknown:
        return [_row(name, None, {"proven": math.inf, "probable": math.inf}, 1, layer.unknown)]
    if layer.kind == "head":
        query, key, note = _gains(source, layer.query, layer.heads), _gains(source, layer.key, layer.kv_heads), ""
    else:
        norm, note = _norm(source, layer, seq_len)
        query, key = _project(source, layer.query, layer.heads, norm), _project(source, layer.key, layer.kv_heads, norm)
    if not layer.rotary <= query.gram.shape[-1] == key.gram.shape[-1] or layer.heads % layer.kv_heads:
        raise ValueError(
            f"{source.label}: {layer.name} has query heads of {query.gram.shape[-1]} and key heads of "
            f"{key.gram.shape[-1]} with {layer.heads} and {layer.kv_heads} heads: a part of a model, or another config"
        )
    bounds = geometry.score_bounds(query, key, heads=heads, seq_len=seq_len, delta=delta, rotary=layer.rotary)
    return _rows(name, bounds, query.gram.shape[-1], note)


def _norm(source: Source, layer: Layer, seq_len: int) -> tuple[Norm, str]:
    """Return the norm that bounds the layer's input, and a note on the condition under which the bound holds.

    All bounds depend on the norm, so it must exist. A group norm bounds all positions of a group together, so its bound
    depends on `seq_len`.
    """
    norm = read_norm(source, layer.norm, layer.kind, layer.epsilon)
    if layer.kind == "group":
        channels = 0 if norm.gain is None else len(norm.gain)
        radius = group_radius(channels, seq_len, layer.epsilon)
        return Norm(radius, norm.gain, norm.shift), f"up to {seq_len} positions"
    return norm, ""


def group_radius(channels: int, positions: int, epsilon: float) -> float:
    """Return the largest length of one position after a group norm, including FP32 errors in nearly constant groups.

    In exact arithmetic one position may have the length of all positions together. A group holds at most all elements.
    """
    elements = channels * positions
    rounding = (MEAN_UNITS + ELEMENT_UNITS) * unevenness(elements)
    return (
        math.hypot(math.sqrt(elements), math.sqrt(channels) * constant_level(epsilon)) + math.sqrt(channels) * rounding
    )


def _gains(source: Source, part: Part, heads: int) -> Projection:
    """Return q or k of heads with an RMS norm of their own.

    Such a head is gain * n with |n| = sqrt(D), whatever the projection before the norm gives.
    """
    gain = read_vector(source, part.weight)
    return _finite(source, part, project(gain.diag().repeat(heads, 1), None, heads, Norm(math.sqrt(len(gain)))))


def _project(source: Source, part: Part, heads: int, norm: Norm) -> Projection:
    weight, bias = read_part(source, part)
    if norm.gain is None or weight.shape[1] != len(norm.gain) or weight.shape[0] % heads:
        raise ValueError(f"{source.label}: {part.weight} is {tuple(weight.shape)}, which {heads} heads do not fit")
    return _finite(source, part, project(weight, bias, heads, norm))


def _finite(source: Source, part: Part, projection: Projection) -> Projection:
    if not (projection.gram.isfinite().all() and projection.offset.isfinite().all()):
        raise ValueError(f"{source.label}: {part.weight}, its bias or the norm before it holds NaN or infinity")
    return projection


def _rows(name: str, bounds: ScoreBounds, head_dim: int, note: str) -> list[HeadPrediction]:
    lists = {field: values.tolist() for field, values in vars(bounds).items()}
    heads = len(lists["proven"])
    return [_row(name, h, {field: v[h] for field, v in lists.items()}, head_dim, note) for h in range(heads)]


def _row(name: str, head: int | None, bounds: dict[str, float], head_dim: int, note: str) -> HeadPrediction:
    """Return the verdicts on one head from bounds on q.k.

    FP16 is judged by q.k itself, and FP8 by q.k / sqrt(D), because these are the values stored in each format.
    """
    field = {"certain": 0.0, "constant": 0.0, "naive": math.inf, "interaction": math.inf, **bounds}
    judged = {"proven": field["proven"], "probable": field["probable"], "certain": field["certain"]}
    scaled = {key: value / math.sqrt(head_dim) for key, value in judged.items()}
    return HeadPrediction(
        name,
        head,
        verdict="unknown" if head is None else judge(**judged, limit=FP16_MAX),
        verdict_fp8="unknown" if head is None else judge(**scaled, limit=E4M3_MAX),
        fp8_scale=geometry_scale(scaled["probable"]),
        note=note,
        **field,
    )


def judge(proven: float, probable: float, certain: float, limit: float) -> Verdict:
    """Return the verdict on one head; bounds of NaN or infinity, from such weights, are never judged safe."""
    if certain > limit:
        return "certain"
    if proven <= limit:
        return "safe"
    return "unlikely" if probable <= limit else "at risk"
