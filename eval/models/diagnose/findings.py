"""What was seen of a model's attention, by module and head."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pasa.eval.models.diagnose.maps import Gallery
from pasa.eval.models.diagnose.statistics import HeadStatistics, head_statistics
from pasa.ops.attention.spec.diagnostics import FIELDS
from pasa.patching.handle import PatchReport


@dataclass(frozen=True)
class Head:
    """One head over all calls of its module.

    Attributes
    ----------
    statistics : HeadStatistics
        Of the call in which its scores were largest. ``max_score`` there is over all pairs that a mask leaves, of all
        rows and batch entries, and over the sampled pairs that it hides.
    call : int
        Number of that call, from 1: the denoising step, where a model is called once a step.
    stored : float
        Largest magnitude of a score as PASA stored it, in any call; infinite where a score so far below its row's
        maximum that its weight is 0 was stored as -infinity.
    rescued_tiles, tiles : int
        Tiles kept in FP32, and all tiles, of all calls.
    """

    statistics: HeadStatistics
    call: int
    stored: float
    rescued_tiles: int
    tiles: int

    def joined(self, later: Head) -> Head:
        """This head and a later call of it."""
        worse = later if later.statistics.max_score > self.statistics.max_score else self
        return Head(
            worse.statistics,
            worse.call,
            max(self.stored, later.stored),
            self.rescued_tiles + later.rescued_tiles,
            self.tiles + later.tiles,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON."""
        own = {name: getattr(self, name) for name in ("call", "stored", "rescued_tiles", "tiles")}
        return self.statistics.as_dict() | own


class Findings:
    """What was seen, by module.

    Parameters
    ----------
    report : PatchReport
        Which modules are looked at.

    Attributes
    ----------
    calls : dict of str to int
        Attention calls of each module.
    heads : dict of str to list of Head
    broken : dict of str to int
        Calls that were left out, because a query or key was not finite.
    gallery : Gallery
        Matrices of the worst heads.
    """

    def __init__(self, report: PatchReport) -> None:
        self.report = report
        self.calls: dict[str, int] = {}
        self.heads: dict[str, list[Head]] = {}
        self.broken: dict[str, int] = {}
        self.gallery = Gallery()

    def add(self, module: str, q: Tensor, k: Tensor, counts: Tensor) -> None:
        """Take in one call: its queries and keys as `pasa.attention` has them, and what the operator counted.

        Parameters
        ----------
        q : Tensor (B, Hq, S, D)
        k : Tensor (B, Hkv, Skv, D)
        counts : Tensor (B, Hq, 6)
            Columns as in `pasa.ops.attention.spec.diagnostics.FIELDS`.
        """
        call = self.calls[module] = self.calls.get(module, 0) + 1
        if not all(bool(torch.isfinite(x).all()) for x in (q, k)):
            self.broken[module] = self.broken.get(module, 0) + 1
            return
        found = [_head(*each, call) for each in zip(head_statistics(q, k), counts.unbind(1), strict=True)]
        known = self.heads.get(module, found)
        self.heads[module] = found if known is found else [a.joined(b) for a, b in zip(known, found, strict=True)]
        worst = max(range(len(found)), key=lambda head: found[head].statistics.max_score)
        entry = int(counts[:, worst, FIELDS.index("max_score_before")].argmax())
        keys = k[entry, worst * k.shape[1] // q.shape[1]]
        self.gallery.offer(module, worst, call, found[worst].statistics.max_score, q[entry, worst], keys)

    def worst(self) -> list[tuple[str, int, Head]]:
        """(module, head, what was seen) of all heads, largest score first."""
        entries = [(name, index, head) for name, heads in self.heads.items() for index, head in enumerate(heads)]
        return sorted(entries, key=lambda entry: -entry[2].statistics.max_score)

    def uncalled(self) -> list[str]:
        """Modules that were to be looked at, and never ran."""
        return [name for name in self.report.patched if name not in self.calls]


def _head(statistics: HeadStatistics, counts: Tensor, call: int) -> Head:
    """One head of one call; counts (B, 6)."""
    column = dict(zip(FIELDS, counts.unbind(-1), strict=True))
    largest = max(statistics.max_score, float(column["max_score_before"].max()))
    return Head(
        dataclasses.replace(statistics, max_score=largest),
        call,
        float(column["max_score_after"].max()),
        int(column["rescued_tiles"].sum()),
        int(column["tiles"].sum()),
    )
