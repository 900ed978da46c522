"""Copies of the kernels in which one thing can be left out or made smaller, chosen when the program runs.

A mutant is a number: 0 is the kernel as it is written. All of them are one program, since compiling takes longest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.ascend_c.twin_build import TWIN

ASCEND_C = TWIN.parent
SYNCHRONISATION = (
    "PipeBarrier",
    "SetFlag",
    "WaitFlag",
    "CrossCoreSetFlag",
    "CrossCoreWaitFlag",
    "SyncAll",
    "DataCacheCleanAndInvalid",
)
CALL = re.compile(rf"AscendC::({'|'.join(SYNCHRONISATION)})(<[^;]*?>)?\([^;]*?\);", re.DOTALL)
BUFFER = re.compile(r"(pipe\.InitBuffer\(\w+,\s*(?:[\w.]+,\s*)?)([^;]*?)\);", re.DOTALL)
SWITCH = """
inline int pasa_mutant = 0;
// By a thirty-second, in blocks of 32 bytes.
inline uint32_t pasa_shrunk(uint64_t bytes, int mutant)
{
    const uint64_t less = (bytes / 32 + 31) / 32 * 32;
    return static_cast<uint32_t>(pasa_mutant == mutant ? bytes - (less < 32 ? 32 : less) : bytes);
}
"""


@dataclass(frozen=True)
class Mutant:
    """What is different, and where."""

    number: int
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.what}"


def write_mutants(folder: Path) -> list[Mutant]:
    """Write the kernels into `folder`/kernel, with a switch at every place that is worth a mutant."""
    found: list[Mutant] = []
    (folder / "kernel").mkdir(parents=True)
    for name in ("twin", "tiling"):
        (folder / name).symlink_to(ASCEND_C / name)
    for source in sorted((ASCEND_C / "kernel").glob("*.h")):
        text = source.read_text(encoding="utf-8")

        def note(match: re.Match[str], what: str, name: str = source.name, text: str = text) -> int:
            found.append(Mutant(len(found) + 1, name, text.count("\n", 0, match.start()) + 1, what))
            return len(found)

        def leave_out(match: re.Match[str], note=note) -> str:
            return f"if (pasa_mutant != {note(match, 'without ' + match[1])}) {match[0]}"

        def shrink(match: re.Match[str], note=note) -> str:
            what = "smaller " + match[1].split("(")[1].split(",")[0]
            return f"{match[1]}pasa_shrunk({match[2]}, {note(match, what)}));"

        changed = BUFFER.sub(shrink, CALL.sub(leave_out, text))
        if source.name == "port.h":
            changed += SWITCH
        (folder / "kernel" / source.name).write_text(changed, encoding="utf-8")
    return found
