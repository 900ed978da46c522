"""Define a mutant, and plant its text in a tree of sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """Describe a fault in one place of one file.

    Attributes
    ----------
    what : str
        The fault in words, which is also the mutant's name.
    file : str
        Below the root of the checkout.
    old, new : str
        The text that stands in the file exactly once, and what a mutant has in its place.
    tests : tuple of str
        Node ids of pytest, as few as notice it.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Plant the fault in a copy of the sources.

        Raises
        ------
        ValueError
            If the file does not hold the text exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"mutant {self.what!r}: its text stands {text.count(self.old)} times in {self.file}, not once; give it "
                f"the text that stands there now, or take it out: {self.old!r}"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
