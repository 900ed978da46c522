"""Tables of results, for the terminal and for Markdown, and how numbers stand in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Column: TypeAlias = str | tuple[str, str] | Callable[[Mapping[str, Any]], str]
"""What a record has in a column: a field, a field and the format of its number, or what a function makes of it."""
LONGEST_WORD = 30  # letters of a word that stays whole where a cell wraps


@dataclass(frozen=True)
class Table:
    """A title, a header and rows of text; the column `wraps` gives way where the terminal is narrow."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    wraps: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        records: Iterable[Mapping[str, Any]],
        columns: Mapping[str, Column],
        note: str = "",
        wraps: str = "",
    ) -> Table:
        """Return a table of records, a row each; the keys of `columns` are headings. None and absent give "-"."""
        rows = [[_cell(record, column) for column in columns.values()] for record in records]
        return cls(title, list(columns), rows, note, wraps)

    def markdown(self) -> str:
        """Return header and rows as a Markdown table, numbers to the right."""
        return markdown(self.header, self.rows)

    def captioned(self) -> str:
        """Return the Markdown table below its title and note, for a page with headings of its own."""
        caption = f"{self.title}. {self.note}".strip()
        return f"{caption}\n\n{self.markdown()}"

    def show(self, console: Console) -> None:
        """Print the table, in pieces where the terminal is too narrow for it and no column may wrap."""
        from rich.table import Table as RichTable
        from rich.text import Text

        widths = {
            head: 3 + max(map(len, cells)) for head, *cells in zip(self.header, self.header, *self.rows, strict=True)
        }
        others = sum(width for head, width in widths.items() if head != self.wraps)
        whole = bool(self.wraps) and others + 6 < console.width  # else nothing is left for the column that wraps
        for header, rows in [(self.header, self.rows)] if whole else self._pieces(console.width):
            note = Text(self.note) if self.note else None
            shown = RichTable(title=Text(self.title), caption=note, title_justify="left")
            fits = whole or sum(widths[heading] for heading in header) < console.width
            words = [" ".join(column).split() for column in zip(header, *rows, strict=True)]
            for index, heading in enumerate(header):
                shown.add_column(
                    heading,
                    justify="right" if index and heading != self.wraps else "left",
                    no_wrap=bool(fits) and heading != self.wraps,
                    overflow="fold",
                    min_width=None if fits else min(LONGEST_WORD, max(map(len, words[index]), default=0)),
                )
            for row in rows:
                shown.add_row(*map(Text, row))
            console.print(shown)

    def _pieces(self, width: int) -> list[tuple[Sequence[str], Sequence[Sequence[str]]]]:
        """Return pieces of the table that fit the terminal, each with the first column."""
        columns = [list(column) for column in zip(self.header, *self.rows, strict=True)]
        room = [max(len(cell) for cell in column) + 3 for column in columns]  # padding and a line
        pieces: list[list[int]] = [[0]]
        for index in range(1, len(columns)):
            if len(pieces[-1]) > 1 and sum(room[i] for i in pieces[-1]) + room[index] >= width:
                pieces.append([0])
            pieces[-1].append(index)
        return [([self.header[i] for i in piece], [[row[i] for i in piece] for row in self.rows]) for piece in pieces]


def _cell(record: Mapping[str, Any], column: Column) -> str:
    if callable(column):
        return column(record)
    field, form = (column, "") if isinstance(column, str) else column
    return number(record.get(field), form)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, numbers to the right; a | in a cell becomes a /, which needs no escape."""
    body = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(text.replace('|', '/') for text in line)} |" for line in body)


def number(value: float | None, form: str) -> str:
    """Return the number in this format; "-" for None."""
    return "-" if value is None else format(value, form)


def short(value: float | None) -> str:
    """Return two significant digits, as 2.7e-4. A stored result has None in place of NaN."""
    if value is None or math.isnan(value):
        return "NaN"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+00", "")


def percent(share: float) -> str:
    """Return three significant digits, as the paper's table 4."""
    return f"{100 * share:.3g} %"
