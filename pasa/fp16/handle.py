"""The handle that `to_fp16` returns: what was scaled and why, and the way back."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from pasa.fp16.planning import LARGEST

WIDTH = 80
"""Columns of a terminal that a report should fit."""


@dataclass(frozen=True)
class ScaledModule:
    """A module whose largest result is near FP16's limit, or was before it was scaled.

    Attributes
    ----------
    module : str
        Path of the module.
    peak : float
        Largest magnitude of its results on the sample, before scaling.
    power : int
        Exponent e of the factor ``2**-e`` that its largest result now has.
    scaled : float
        That peak times the factor.
    margin : float
        65504 over the scaled peak.
    """

    module: str
    peak: float
    power: int
    scaled: float
    margin: float


@dataclass(frozen=True)
class Fp16Report:
    """A list of what `to_fp16` did to a model.

    Attributes
    ----------
    model : str
        Class of the model or pipeline.
    modules : tuple of ScaledModule
        Modules with a scaled result, or with a peak beyond 65504 / margin; in the order of the forward pass.
    parameters : int
        Number of parameters that were scaled.
    fp32 : tuple of (str, str)
        Modules and parameters that stay in FP32, each with the reason.
    underflow : float
        Share of the weights other than 0 that become 0 or subnormal in FP16 by scaling, and were not before.
    beyond : tuple of (str, float, int)
        Modules whose values have since passed the planned limit of 65504 / margin, each with its largest value and the
        number of forward passes in which that was seen. An outermost module is listed if it returned infinity or NaN.
    attention : str
        The report of :func:`pasa.patch_pipeline`.
    basis : str
        What the peaks rest on: "measured" on the sample. Inputs other than the sample may have larger ones.
    undone : bool
    """

    model: str
    modules: tuple[ScaledModule, ...]
    parameters: int
    fp32: tuple[tuple[str, str], ...]
    underflow: float
    beyond: tuple[tuple[str, float, int], ...]
    attention: str
    basis: str = "measured"
    undone: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain containers, ready for JSON; numbers that are not finite become None."""
        plain: dict[str, Any] = _without_infinities(asdict(self))
        return plain

    def __str__(self) -> str:
        over = sum(each.peak > LARGEST for each in self.modules)
        lines = [
            f"{self.model}: {'undone' if self.undone else 'runs in FP16'}; {over} modules would pass 65504",
            f"  {self.parameters} parameters are scaled by powers of two; peaks are {self.basis} on the sample",
        ]
        if self.modules:
            lines.append("       peak            scaled   65504 / scaled")
        for each in self.modules:
            factor = f"* 2^{-each.power}" if each.power else ""
            name = each.module or "(the model)"
            lines.append(f"  {each.peak:9.4g} {factor:7} {each.scaled:9.4g} {each.margin:9.3g}  {name}")
        lines += [line for name, why in self.fp32 for line in _entry("FP32", name, why)]
        for name, value, count in self.beyond:
            what = f"reached {value:.4g}" if math.isfinite(value) else "infinity or NaN"
            lines += _entry("BEYOND", name or "(the model)", f"{what}; seen in {count} forward passes")
        lines.append(f"  underflow: {self.underflow:.2%} of the weights")
        return "\n".join(lines)


def _entry(title: str, name: str, text: str) -> list[str]:
    """Return one line, or several where it would pass 80 columns."""
    line = f"  {title:8} {name}: {text}"
    if len(line) <= WIDTH:
        return [line]
    return [f"  {title:8} {name}:", *textwrap.wrap(text, WIDTH, initial_indent=" " * 11, subsequent_indent=" " * 11)]


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Fp16Handle:
    """A model that was converted by `to_fp16`; :meth:`undo` restores it where the original was kept.

    Leaving a ``with`` block undoes the conversion; of nested blocks, the outermost does. The model stays converted when
    the handle is deleted.

    Examples
    --------
    >>> handle = pasa.to_fp16(model, keep_original="cpu")
    >>> handle
    <Fp16Handle active: Qwen2ForCausalLM>
    >>> handle.undo()
    >>> handle.active
    False
    """

    def __init__(self, make_report: Callable[[], Fp16Report], undo: Callable[[], None], *, kept: bool = True) -> None:
        self._make_report, self._undo, self._kept = make_report, undo, kept
        self._blocks = 0
        self.active = True

    def report(self) -> Fp16Report:
        """Return what was scaled, what stayed in FP32, and what has passed the margin since; waits for the device."""
        return self._make_report()

    def undo(self) -> None:
        """Restore the model's parameters bit for bit, its epsilons and its attention. A second call does nothing.

        Raises
        ------
        RuntimeError
            The original was not kept: call `to_fp16` with ``keep_original="cpu"``. Or the model was offloaded to disk
            or in groups since the conversion, and stays as it is.
        """
        if self.active:
            self._undo()
            self.active = False

    def __enter__(self) -> Fp16Handle:
        if self.active and not self._kept:
            raise RuntimeError(
                'to_fp16: a with block undoes the conversion at its end, which needs keep_original="cpu": pass it, or '
                "leave out the with"
            )
        self._blocks += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks -= 1
        if not self._blocks:
            self.undo()

    def __repr__(self) -> str:
        return f"<Fp16Handle {'active' if self.active else 'undone'}: {self._make_report().model}>"
