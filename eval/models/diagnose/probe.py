"""Record every attention call of a running model, head by head: its scores, and the two causes of overflow.

A patched model calls one operator, ``torch.ops.pasa.attention``. A dispatch mode reads the operator's queries and keys.
Hooks on the patched modules tell which module makes the call. The causes are those of arXiv:2503.01873, section 3.3.2:

* keys share a bias along the sequence;
* queries and keys resonate along the head dimension: in phase, scores are large and positive; in opposition, negative.

For the worst heads, small pictures of Q, K, K', S and S' are kept, as in the paper's figures 11 to 14.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

import pasa
from pasa.eval.accuracy.rmse.resonance import shifted_keys, stored_scores
from pasa.eval.kit.attention_calls import AttentionCalls
from pasa.eval.models.diagnose.report import Record
from pasa.first_nonfinite import models_of
from pasa.ops.attention.spec.diagnostics import FIELDS
from pasa.ops.numerics.formats import FP16_MAX
from pasa.patching.handle import PatchReport

ROWS = 512  # sampled queries, evenly spread; with 2 batch entries and 9,216 keys their scores are 38 MB a head
POINTS = 128  # most rows and columns of a picture
MATRICES = {  # title, rows and columns of each
    "Q": ("Q", "query", "head dimension"),
    "K": ("K", "key", "head dimension"),
    "K'": ("K′", "key", "head dimension"),
    "S": ("S = Q Kᵀ", "sampled query", "key"),
    "S'": ("S′", "sampled query", "key"),
}
MODULES = 3  # pictures show the worst head of so many modules, because heads of one module often look the same
BATCH = 2  # sampled batch entries, evenly spread: the frames of a video, or the pixels of a temporal layer
CHANCE = 4.0  # independent vectors correlate beyond so many times 1/sqrt(D) once in 16,000 times


class Picture(NamedTuple):
    """A matrix reduced by `extremes`, and the shape before; scores have at most `ROWS` rows before."""

    values: Tensor
    shape: tuple[int, ...]

    def png(self) -> str:
        """Return the picture as a data URL of a PNG: a pixel per value, colours from lowest to highest."""
        from matplotlib.image import imsave

        stream = BytesIO()  # viridis is ordered by lightness, so it can be read in grey and with any colour vision
        imsave(stream, self.values.numpy(), cmap="viridis", format="png")
        return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


class HeadMaps(NamedTuple):
    """Pictures of one head in one call, by the names of `MATRICES`."""

    module: str
    head: int
    call: int
    max_score: float
    pictures: dict[str, Picture]


@torch.no_grad()
def head_pictures(q: Tensor, k: Tensor) -> dict[str, Picture]:
    """Return pictures of one head's q (S, D) and k (Skv, D), as FP16 holds them.

    K' and S' are those of the exact recovery, in the units of K and q.k. Scores are formed for `ROWS` queries, never
    all at once; masks are left out, as in the paper's figures.
    """
    q, k = (x.half().float() for x in (q, k))
    rows, config = sample(q, 0, ROWS), pasa.PasaConfig()
    moved = shifted_keys(k[None, None], config)[0, 0]
    matrices = (q, k, moved, rows @ k.mT, stored_scores(rows[None, None], k[None, None], config))
    return {name: Picture(extremes(x).cpu(), tuple(x.shape)) for name, x in zip(MATRICES, matrices, strict=True)}


def sample(x: Tensor, dim: int, most: int) -> Tensor:
    """Return at most `most` entries along a dimension, evenly spread, the first and the last among them."""
    size = x.shape[dim]
    if size <= most:
        return x
    return x.index_select(dim, torch.linspace(0, size - 1, most, device=x.device).round().long())


def extremes(matrix: Tensor) -> Tensor:
    """Return the value of largest magnitude in every cell of a grid of at most `POINTS` x `POINTS`.

    A large score often stands alone, in a single key's column, which every n-th column would miss.
    """
    size = [min(POINTS, length) for length in matrix.shape]
    high = adaptive_max_pool2d(matrix[None], size)[0]
    low = -adaptive_max_pool2d(-matrix[None], size)[0]
    return torch.where(high >= -low, high, low)


class Findings:
    """Collect the statistics of a model's attention, by module.

    Attributes
    ----------
    report : PatchReport
        Names the modules that are probed.
    calls : dict of str to int
        Number of calls of each module.
    broken : dict of str to int
        Number of calls that are left out because a query or key was not finite.
    heads : dict of str to list of dict
        One record per query head: `head_statistics` of the ``call`` (counted from 1) with the largest score. Its
        ``max_score`` also covers all pairs that the mask leaves, not only the sampled ones. Over all calls: ``stored``
        is the largest score as PASA stored it (infinite if one of weight 0 was), ``tiles`` the number of score tiles,
        and ``rescued_tiles`` the number of tiles kept in FP32.
    maps : list of HeadMaps
        Pictures of the worst head of each of the `MODULES` worst modules, worst first.
    """

    def __init__(self, report: PatchReport) -> None:
        self.report = report
        self.calls: dict[str, int] = {}
        self.heads: dict[str, list[Record]] = {}
        self.broken: dict[str, int] = {}
        self.maps: list[HeadMaps] = []

    def add(self, module: str, q: Tensor, k: Tensor, counts: Tensor) -> None:
        """Add one call: q (B, Hq, S, D), k (B, Hkv, Skv, D), and the operator's counts (B, Hq, len(FIELDS))."""
        call = self.calls[module] = self.calls.get(module, 0) + 1
        if not all(bool(torch.isfinite(x).all()) for x in (q, k)):
            self.broken[module] = self.broken.get(module, 0) + 1
            return
        new = [_with_counts(*each, call) for each in zip(head_statistics(q, k), counts.unbind(1), strict=True)]
        known = self.heads.get(module)
        self.heads[module] = [_joined(*pair) for pair in zip(known, new, strict=True)] if known else new
        worst = max(range(len(new)), key=lambda head: new[head]["max_score"])
        entry = int(counts[:, worst, FIELDS.index("max_score_before")].argmax())
        matrices = q[entry, worst], k[entry, worst * k.shape[1] // q.shape[1]]
        self.offer(module, worst, call, new[worst]["max_score"], *matrices)

    def offer(self, module: str, head: int, call: int, max_score: float, q: Tensor, k: Tensor) -> None:
        """Keep pictures of a head, q (S, D) and k (Skv, D), if it is worse than those that are kept."""
        others = [each for each in self.maps if each.module != module]
        rivals = [each for each in self.maps if each.module == module] or self.maps[MODULES - 1 :]
        if all(max_score > each.max_score for each in rivals):
            new = HeadMaps(module, head, call, max_score, head_pictures(q, k))
            self.maps = sorted([*others, new], key=lambda each: -each.max_score)[:MODULES]

    def worst(self) -> list[Record]:
        """Return the records of all heads with their ``module`` and ``head``, largest score first."""
        heads = [
            {"module": name, "head": head, **record}
            for name, records in self.heads.items()
            for head, record in enumerate(records)
        ]
        return sorted(heads, key=lambda each: -float(each["max_score"]))


def _with_counts(numbers: Record, counts: Tensor, call: int) -> Record:
    """Return the record of one head in one call: its statistics and the operator's counts (B, len(FIELDS))."""
    largest, total = (dict(zip(FIELDS, each.tolist(), strict=True)) for each in (counts.amax(0), counts.sum(0)))
    tiles = {name: int(total[name]) for name in ("rescued_tiles", "tiles")}
    max_score = max(numbers["max_score"], largest["max_score_before"])
    return {**numbers, "max_score": max_score, "call": call, "stored": largest["max_score_after"], **tiles}


def _joined(known: Record, later: Record) -> Record:
    """Merge the record of a head over its calls so far with that of a later call."""
    totals = {name: known[name] + later[name] for name in ("rescued_tiles", "tiles")}
    worse = later if later["max_score"] > known["max_score"] else known
    return {**worse, "stored": max(known["stored"], later["stored"]), **totals}


@contextmanager
def probe(model_or_pipeline: Any) -> Iterator[Findings]:
    """Patch a model as :func:`attention_calls` does; add every attention call inside the context to the findings."""
    with attention_calls(model_or_pipeline, lambda *call: findings.add(*call)) as report:
        findings = Findings(report)
        yield findings


@contextmanager
def attention_calls(
    model_or_pipeline: Any, on_call: Callable[[str, Tensor, Tensor, Tensor], None]
) -> Iterator[PatchReport]:
    """Patch a model; inside the context, pass every attention call to `on_call`.

    The model runs PASA on the reference backend, so no overflow distorts its activations. Compiled models run eagerly,
    because a captured graph does not tell which module makes a call. `on_call` takes the name of the innermost
    module, q (B, Hq, S, D), k (B, Hkv, Skv, D) and the operator's counts (B, Hq, len(FIELDS)).
    """
    running: list[str] = []

    def leave(*call: Any) -> None:
        running.pop()

    def hand_on(q: Tensor, k: Tensor, counts: Tensor) -> None:
        if running:
            records.clear()  # the tables of all batch entries and heads of a video would grow to gigabytes
            on_call(running[-1], q, k, counts)

    with pasa.patch_pipeline(model_or_pipeline, backend="reference") as handle, ExitStack() as stack:
        report, modules = handle.report(), _modules(model_or_pipeline)
        for name in report.patched:
            enter = modules[name].register_forward_pre_hook(lambda *_, name=name: running.append(name))
            stack.callback(enter.remove)
            stack.callback(modules[name].register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        records = stack.enter_context(pasa.record_diagnostics())
        stack.enter_context(AttentionCalls(hand_on, counts=True))
        yield report


def _modules(model_or_pipeline: Any) -> dict[str, torch.nn.Module]:
    """Return all modules by the names that patch reports use: in a pipeline, the component comes first."""
    if not hasattr(model_or_pipeline, "components") and not isinstance(model_or_pipeline, torch.nn.Module):
        model_or_pipeline = model_or_pipeline.model  # a pipeline of transformers
    models = models_of(model_or_pipeline).items()
    return {f"{part}.{path}".strip("."): module for part, model in models for path, module in model.named_modules()}


@torch.no_grad()
def head_statistics(q: Tensor, k: Tensor) -> list[dict[str, Any]]:
    """Return the statistics of every query head of a call.

    At most `BATCH` entries and `ROWS` queries of q (B, Hq, S, D) are sampled against all keys k (B, Hkv, Skv, D),
    without the mask, because kernels form and store masked-out scores too. ``max_score`` is the largest |q.k|,
    unscaled, and ``overflow_share`` the share beyond 65504; ``scores``, ``keys`` and ``shifted_keys`` are the smallest
    and largest q.k, K, and K' of the exact recovery in the units of K. ``sequence_bias``, ``resonance`` and ``phase``
    are those of the functions below; None for a single key, whose weight is 1 whatever its score.
    """
    q, k = (sample(x, 0, BATCH).half().float() for x in (q, k))
    group, rows, (seen, dim) = q.shape[1] // k.shape[1], sample(q, 2, ROWS), k.shape[2:]
    shifted = torch.cat([shifted_keys(part, pasa.PasaConfig()) for part in k.flatten(0, 1)[:, None, None]])
    shifted, records = shifted.reshape(k.shape), []
    for head in range(q.shape[1]):
        keys = k[:, head // group]
        scores = rows[:, head] @ keys.mT
        low, high = span(scores)
        resonance = correlation(q[:, head].mean((0, 1)), keys.mean((0, 1))) if seen > 1 else None
        records.append(
            {
                "queries": q.shape[2],
                "keys_seen": seen,
                "head_dim": dim,
                "max_score": max(-low, high),
                "overflow_share": float((scores.abs() > FP16_MAX).float().mean()),
                "scores": (low, high),
                "keys": span(keys),
                "shifted_keys": span(shifted[:, head // group]),
                "sequence_bias": sequence_bias(keys) if seen > 1 else None,
                "resonance": resonance,
                "phase": phase(resonance, dim),
            }
        )
    return records


def span(x: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value."""
    low, high = x.aminmax()
    return float(low), float(high)


def sequence_bias(keys: Tensor) -> float:
    """Return the length of the mean key over that of the keys (B, S, D): 1 if all are alike, 1/sqrt(S) by chance."""
    mean, length = (x.square().sum(-1).mean().sqrt() for x in (keys.mean(1), keys))
    return float(mean / length) if length > 0 else 0.0


def correlation(first: Tensor, second: Tensor) -> float:
    """Return Pearson's correlation of two vectors (D,), about 1/sqrt(D) if independent; 0 if one is constant."""
    return float(torch.cosine_similarity(first - first.mean(), second - second.mean(), dim=0))


def phase(resonance: float | None, dim: int) -> int | None:
    """Return 0 or 180 degrees where the resonance is beyond `CHANCE` / sqrt(D), else None."""
    if resonance is None or abs(resonance) <= CHANCE / math.sqrt(dim):
        return None
    return 0 if resonance > 0 else 180
