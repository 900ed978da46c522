"""Keep what a long run has measured, case by case, so that a run that stops goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pasa.eval.kit import output

Record = dict[str, Any]
SAME_MACHINE = ("device", "driver", "torch", "triton", "transformers", "cudnn", "pasa", "commit")
"""Fields of `device.describe` in which the parts of a run must agree."""


class CasesFile:
    """Records by the name of their case; in a folder they are the file ``cases.json``, which grows.

    Raise ValueError if the folder holds a run whose `identity` differs: numbers of two devices or commits do not mix.
    """

    def __init__(self, folder: Path | None, settings: Record, environment: Record) -> None:
        identity = settings | {name: environment[name] for name in SAME_MACHINE if name in environment}
        self.started = time.monotonic()
        self.file = folder and folder / "cases.json"
        self.identity = output.jsonable(identity)
        self.records: dict[str, Record] = {}
        if self.file is None or not self.file.is_file():
            return
        kept = output.read_json(self.file)
        changes = [
            f"{name} was {kept['identity'].get(name)!r} and is {value!r}"
            for name, value in self.identity.items()
            if kept["identity"].get(name) != value
        ]
        if changes:
            raise ValueError(f"{folder} holds another run ({'; '.join(changes)}): choose another folder")
        self.records = kept["cases"]

    def add(self, name: str, record: Record) -> None:
        """Add a record, and write the file."""
        self.records[name] = output.jsonable(record)
        if self.file is not None:
            output.write_text(self.file, json.dumps({"identity": self.identity, "cases": self.records}, indent=0))

    def fill(
        self,
        names: Sequence[str],
        measure: Callable[[str], Record],
        minutes: float | None,
        progress: output.Report,
        check: Callable[[], object] = lambda: None,
    ) -> list[Record]:
        """Measure the cases that are not there, in order, and return what is there.

        None begins so many minutes after this object was made. `check` is called when a case is written. If it raises,
        the next run goes on behind that case.
        """
        end = None if minutes is None else self.started + 60 * minutes
        for done, name in enumerate(names):
            if name in self.records:
                continue
            if end is not None and time.monotonic() >= end:
                break
            progress(done, len(names), name)
            self.add(name, measure(name))
            check()
        return self.present(names)

    def present(self, names: Iterable[str]) -> list[Record]:
        """Return the records of these cases that are there, in order."""
        return [self.records[name] for name in names if name in self.records]
