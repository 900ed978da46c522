"""The handle that `to_fp16` returns: what was scaled and why, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any


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
    beyond : tuple of (str, float)
        Modules whose values have since passed the planned limit of 65504 / margin, each with its largest value.
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
    beyond: tuple[tuple[str, float], ...]
    attention: str
    basis: str = "measured"
    undone: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain containers, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        over = [each for each in self.modules if each.peak > 65504]
        lines = [
            f"{self.model}: {'undone' if self.undone else 'runs in FP16'}; {len(over)} modules would pass 65504, "
            f"{self.parameters} parameters are scaled by powers of two (peaks {self.basis} on the sample)"
        ]
        for each in self.modules:
            factor = f"2^{-each.power}" if each.power else "1"
            change = f"{each.peak:10.4g} * {factor:5} = {each.scaled:9.4g}"
            lines.append(f"  {change} {each.margin:7.3g} below 65504  {each.module or '(the model)'}")
        lines += [f"  FP32     {name}: {why}" for name, why in self.fp32]
        lines += [f"  BEYOND   {name or '(the model)'}: reached {value:.4g} since" for name, value in self.beyond]
        lines.append(f"  underflow: {self.underflow:.2%} of the weights")
        return "\n".join(lines)


class Fp16Handle:
    """A model that was converted by `to_fp16`; :meth:`undo` restores it where the original was kept.

    Leaving a ``with`` block undoes the conversion.

    Examples
    --------
    >>> handle = pasa.to_fp16(model, keep_original="cpu")
    >>> handle
    <Fp16Handle active: Qwen2ForCausalLM>
    >>> handle.undo()
    >>> handle.active
    False
    """

    def __init__(self, make_report: Callable[[], Fp16Report], undo: Callable[[], None]) -> None:
        self._make_report, self._undo = make_report, undo
        self.active = True

    def report(self) -> Fp16Report:
        """Return what was scaled, what stayed in FP32, and what has passed the margin since; waits for the device."""
        return self._make_report()

    def undo(self) -> None:
        """Restore the model's parameters bit for bit, its epsilons and its attention. A second call does nothing.

        Raises
        ------
        RuntimeError
            The original was not kept: call `to_fp16` with ``keep_original="cpu"``.
        """
        if self.active:
            self._undo()
            self.active = False

    def __enter__(self) -> Fp16Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<Fp16Handle {'active' if self.active else 'undone'}: {self._make_report().model}>"
