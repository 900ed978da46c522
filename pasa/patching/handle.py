"""What a patch leaves in the caller's hand: how to undo it, and what it did. Every host returns this handle."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pasa.patching.guard import Guard


@dataclass(frozen=True)
class PatchReport:
    """Which attention modules of a model now run PASA, and which do not.

    Attributes
    ----------
    host : str
        The library the model comes from, and the model's class: ``"transformers: Qwen2ForCausalLM"``.
    patched : tuple of str
        Names of the modules that run PASA, as in ``model.named_modules()``.
    skipped : tuple of (str, str)
        Names of the attention modules that keep their own attention, each with the reason.
    notes : tuple of (str, str)
        Patched modules of which something is to be known, such as which backend alone can serve them.
    alarms : tuple of (str, str)
        Modules that ``policy="auto"`` left alone, and whose queries and keys have since been long enough for a score
        beyond FP16. Short of any, no score of an unpatched module can have overflowed.
    serves : tuple of (str, str)
        Types of this machine's devices, each with the backend that serves the patched modules' calls there: those of
        their dtype, head dimension and options without a mask. In brackets: why a preferred backend does not.
    removed : tuple of (str, str)
        Names of modules that were patched and no longer run PASA, each with what runs there instead.
    undone : bool
        Whether the patch was undone; all that it had patched is listed as removed then.
    """

    host: str
    patched: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[tuple[str, str], ...] = ()
    alarms: tuple[tuple[str, str], ...] = ()
    serves: tuple[tuple[str, str], ...] = ()
    removed: tuple[tuple[str, str], ...] = ()
    undone: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain containers, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        total = len(self.patched) + len(self.skipped) + len(self.removed)
        count = f"{len(self.patched)} of {total} attention modules run PASA"
        lines = [f"{self.host}: the patch is undone, {count} by it" if self.undone else f"{self.host}: {count}"]
        lines += [f"  patched  {name}" for name in self.patched]
        lines += [f"  REMOVED  {name}: {reason}" for name, reason in self.removed]
        lines += [f"  skipped  {name}: {reason}" for name, reason in self.skipped]
        lines += [f"  note     {name}: {note}" for name, note in self.notes]
        lines += [f"  ALARM    {name}: {alarm}" for name, alarm in self.alarms]
        lines += [f"  serves   {device}: {backend}" for device, backend in self.serves]
        return "\n".join(lines)


class PatchHandle:
    """A patch that is in force; undone by :meth:`unpatch`, at once, or by leaving the outermost ``with`` block.

    Parameters
    ----------
    report : PatchReport
        What was patched and what was not.
    undo : callable
        Takes no argument and restores the model; called at most once.
    find_removed : callable, optional
        Takes no argument and returns the patched modules that no longer run PASA, each with the reason.

    Examples
    --------
    >>> handle = pasa.patch_pipeline(model)
    >>> handle
    <PatchHandle active: transformers: Qwen2ForCausalLM, 2 modules>
    >>> handle.report().patched
    ('model.layers.0.self_attn', 'model.layers.1.self_attn')
    >>> handle.unpatch()
    >>> handle.active
    False
    """

    def __init__(
        self,
        report: PatchReport,
        undo: Callable[[], None],
        find_removed: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._report = report
        self._undo: Callable[[], None] | None = undo
        self.find_removed = find_removed
        self._warned = False
        self._blocks = 0  # `with` blocks that have been entered and not left
        self._guard: Guard | None = None

    @property
    def active(self) -> bool:
        """True until the patch is undone."""
        return self._undo is not None

    def unpatch(self) -> None:
        """Give the model its own attention back, bit for bit, inside a ``with`` block too; again, it does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            if self._guard is not None:
                self._guard.remove()
            undo()

    def report(self) -> PatchReport:
        """Return what is patched and what was skipped, with the reasons.

        Of a patch that is undone, the report says so, and lists as removed what had been patched.
        Modules from which somebody has taken PASA out since (`set_attn_implementation`, `fuse_qkv_projections`,
        `set_attention_slice`, `set_attention_backend`) are listed as removed, with a warning the first time.
        With a guard, this waits for the device, to read what it has counted; modules that another handle has patched
        since are not called skipped.
        """
        report, removed = self._report, self.check_removed()
        if not self.active:
            gone = tuple((name, "the patch is undone") for name in report.patched)
            alarms = () if self._guard is None else self._guard.alarms()
            return replace(report, patched=(), removed=gone, notes=(), serves=(), alarms=alarms, undone=True)
        if removed:
            kept = tuple(name for name in report.patched if name not in removed)
            report = replace(report, patched=kept, removed=tuple(removed.items()))
        if self._guard is None:
            return report
        since = self._guard.patched()
        return replace(
            report,
            patched=report.patched + since,
            skipped=tuple(pair for pair in report.skipped if pair[0] not in since),
            notes=report.notes + tuple((name, "patched by another handle") for name in since),
            alarms=self._guard.alarms(),
        )

    def serve(self, serves: tuple[tuple[str, str], ...]) -> None:
        """Note who serves the calls of the patched modules, by device type."""
        if serves != self._report.serves:
            self._report = replace(self._report, serves=serves)

    def check_removed(self) -> dict[str, str]:
        """Return the patched modules that no longer run PASA, with the reason, and warn of them once."""
        removed = self.find_removed() if self.active else {}
        if removed and not self._warned:
            self._warned = True
            name, reason = next(iter(removed.items()))
            warnings.warn(
                f"{self._report.host}: {len(removed)} of {len(self._report.patched)} patched attention modules no "
                f"longer run PASA ({name}: {reason}); call unpatch(), then patch again",
                stacklevel=2,
            )
        return removed

    def watch(self, guard: Guard, reasons: dict[str, str]) -> None:
        """Add a guard over modules that were skipped, and why each was."""
        skipped = tuple((name, reasons.get(name, reason)) for name, reason in self._report.skipped)
        self._report, self._guard = replace(self._report, skipped=skipped), guard

    @property
    def guarded(self) -> bool:
        """Whether there is a guard over what was not patched."""
        return self._guard is not None

    def __enter__(self) -> PatchHandle:
        self._blocks += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks -= 1
        if self._blocks == 0:
            self.unpatch()

    def __repr__(self) -> str:
        state = "active" if self.active else "undone"
        return f"<PatchHandle {state}: {self._report.host}, {len(self._report.patched)} modules>"


def already_patched(
    patched: Mapping[str, torch.nn.Module],
    in_force: Mapping[str, object],
    selected: Mapping[str, torch.nn.Module],
    asked: Mapping[str, object],
) -> ValueError:
    """Return the error for a call that would patch otherwise what is patched; it says what differs.

    Parameters
    ----------
    patched, selected : mapping of str to torch.nn.Module
        Modules by name: of the patch in force, and those that the call selects.
    in_force, asked : mapping of str to object
        Settings by name: of the patch in force, and of the call.
    """
    changed = [name for name in asked if asked[name] != in_force[name]]
    differs = [f"{name}={asked[name]!r} instead of {in_force[name]!r}" for name in changed]
    before, now = set(patched.values()), set(selected.values())
    added = [name for name, module in selected.items() if module not in before]
    left = [name for name, module in patched.items() if module not in now]
    differs += [f"{first_names(names)} {how}" for names, how in ((added, "added"), (left, "left out")) if names]
    return ValueError(
        f"patch_pipeline: already patched (modules: {len(patched)}), and this call differs ({'; '.join(differs)}); "
        "call unpatch() on that handle first"
    )


def first_names(names: Sequence[str]) -> str:
    """Return a few of the names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
