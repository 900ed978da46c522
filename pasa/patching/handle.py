"""The handle that every patch returns: it undoes the patch, and reports what was patched."""

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
    """A list of the attention modules of a model that run PASA, and of those that do not, with the reasons.

    Attributes
    ----------
    host : str
        Library and class of the model: ``"transformers: Qwen2ForCausalLM"``.
    patched : tuple of str
        Names of the modules that run PASA, as in ``model.named_modules()``.
    skipped : tuple of (str, str)
        Names of the attention modules that keep their own attention, each with the reason.
    notes : tuple of (str, str)
        Names of patched modules, each with a remark, such as which single backend can serve the module.
    alarms : tuple of (str, str)
        Modules that ``policy="auto"`` left unpatched, and whose queries and keys have since been long enough for a
        score beyond FP16. If the guard lists none, no score of the modules that it watches has overflowed.
    serves : tuple of (str, str)
        Device types of this machine, each with the backend that serves the patched modules' calls there. The calls
        considered are those of the modules' dtype, head dimension and options, without a mask. Brackets say why a
        preferred backend does not serve them.
    removed : tuple of (str, str)
        Names of modules that were patched and no longer run PASA, each with what runs there instead.
    undone : bool
        True if the patch was undone; all modules that it had patched are then listed as removed.
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
    """A patch in force, undone by :meth:`unpatch` at once or at the end of the outermost ``with`` block.

    Parameters
    ----------
    report : PatchReport
        The modules that were patched and those that were not.
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
        """Restore the model's original attention, so that outputs are the same bit for bit; also inside ``with``.

        A second call does nothing.
        """
        undo, self._undo = self._undo, None
        if undo is not None:
            if self._guard is not None:
                self._guard.remove()
            undo()

    def report(self) -> PatchReport:
        """Return which modules are patched and which were skipped, with the reasons.

        After the patch is undone, the report says so and lists its modules as removed.
        Modules from which PASA has been removed since (`set_attn_implementation`, `fuse_qkv_projections`,
        `set_attention_slice`, `set_attention_backend`) are listed as removed, with a warning the first time.
        With a guard (``policy="auto"``), this call waits for the device to read the guard's counts. Modules that
        another handle has patched since are listed as patched, with a note, and not as skipped.
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

    def record_backends(self, serves: tuple[tuple[str, str], ...]) -> None:
        """Record in the report which backend serves the patched modules' calls, by device type."""
        if serves != self._report.serves:
            self._report = replace(self._report, serves=serves)

    def check_removed(self) -> dict[str, str]:
        """Return the patched modules that no longer run PASA, each with the reason, and warn the first time."""
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
        """Attach a guard that watches the skipped modules, with the reason why each was skipped."""
        skipped = tuple((name, reasons.get(name, reason)) for name, reason in self._report.skipped)
        self._report, self._guard = replace(self._report, skipped=skipped), guard

    @property
    def guarded(self) -> bool:
        """Return whether a guard watches the modules that were not patched."""
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
    """Return the error for a call that conflicts with the patch in force; its message says what differs.

    Parameters
    ----------
    patched, selected : mapping of str to torch.nn.Module
        Modules by name: those of the patch in force, and those that the new call selects.
    in_force, asked : mapping of str to object
        Settings by name: those of the patch in force, and those of the new call.
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


def no_model(root: object) -> TypeError:
    """Return the error for a module that contains no model of transformers or diffusers."""
    return TypeError(
        f"patch_pipeline: {type(root).__name__} contains no transformers model and no diffusers model: call "
        "pasa.attention in its forward, where it calls scaled_dot_product_attention"
    )


def nothing_to_patch(root: object, skipped: Sequence[tuple[str, str]]) -> NotImplementedError:
    """Return the error for a model none of whose modules is patched; `skipped` has names and reasons."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped[:3]) or "no attention module found"
    return NotImplementedError(
        f"patch_pipeline: nothing to patch in {type(root).__name__} ({reasons}): call pasa.attention where the model "
        "computes attention, or select other modules with policy"
    )


def first_names(names: Sequence[str]) -> str:
    """Return the first three names as text, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
