"""Pack a report and its logs into one archive without names of the machine or its user."""

from __future__ import annotations

import getpass
import re
import socket
import zipfile
from pathlib import Path

from pasa.eval.kit import output

SHORTEST = 3  # letters of a name that is looked for: a shorter one would be found in every other word


def private_names() -> dict[str, str]:
    """Return what must not be in the archive, and what stands there instead."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no such user, as in some containers
        user = ""
    host = socket.gethostname()
    names = {
        str(Path.home()): "~",
        socket.getfqdn(): "HOST",
        host: "HOST",
        host.partition(".")[0]: "HOST",
        user: "USER",
    }
    return {name: instead for name, instead in names.items() if len(name) >= SHORTEST and name != "localhost"}


def without_names(text: str, names: dict[str, str]) -> str:
    """Replace private names where they stand as words."""
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", names[name], text)
    return text


def pack(path: Path, texts: dict[str, str], logs: Path) -> Path:
    """Write texts and the logs of a folder into an archive; return its path."""
    names = private_names()
    logged = {f"logs/{log.name}": log.read_text(encoding="utf-8", errors="replace") for log in sorted(logs.iterdir())}
    part = path.with_name(f"{path.name}.part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in (texts | logged).items():
            file.writestr(name, without_names(text, names))
    output.move_file(part, path)
    return path
