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
NARROWEST = 6  # width, with padding, down to which the column `wraps` gives way before a table is shown in pieces


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
        """Print the table; where the terminal is too narrow, in pieces that each begin with the first column."""
        from rich.table import Table as RichTable
        from rich.text import Text

        columns = list(zip(self.header, *self.rows, strict=True))
        wraps = self.header.index(self.wraps) if self.wraps else None
        widths = [max(map(len, cells)) + 3 for cells in columns]  # with padding and a line
        if wraps is not None and sum(widths) - widths[wraps] + NARROWEST < console.width:
            widths[wraps] = NARROWEST
        pieces = [[0]]
        for index in range(1, len(columns)):
            if len(pieces[-1]) > 1 and sum(widths[i] for i in (*pieces[-1], index)) >= console.width:
                pieces.append([0])
            pieces[-1].append(index)
        console.print(Text(self.title, style="italic"))
        for piece in pieces:
            shown = RichTable()
            fits = sum(widths[i] for i in piece) < console.width
            for index in piece:
                longest = max(map(len, " ".join(columns[index]).split()), default=0)
                shown.add_column(
                    self.header[index],
                    justify="left" if index in (0, wraps) else "right",
                    no_wrap=fits and index != wraps,
                    overflow="fold",
                    min_width=None if fits else min(LONGEST_WORD, longest),
                )
            for row in self.rows:
                shown.add_row(*(Text(row[index]) for index in piece))
            console.print(shown)
        if self.note:
            console.print(Text(self.note))


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
