"""Every stored run is shown by an experiment of its folder, and the page beside it is made of the JSON."""

import json
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from pasa.eval import commands
from pasa.eval.kit.experiment import Experiment
from pasa.eval.kit.stored import RESULTS, ROOT
from pasa.eval.kit.tables import Table
from pasa.eval.models.longbench import throughput

STORED = sorted((ROOT / "eval").rglob("results/**/*.json"))


def experiments(path: Path) -> list[Experiment]:
    """Return what the modules of a stored run's folder declare, and the variants of these."""
    assert commands.app, "the commands import every module with an experiment"
    assert throughput.EARLIER, "but for that of a command that measures something else now"
    folder = path.relative_to(ROOT).parts
    package = f"pasa.{'.'.join(folder[: folder.index('results')])}."
    modules = [module for name, module in sys.modules.items() if name.startswith(package)]
    declared = [each for module in modules for each in vars(module).values() if isinstance(each, Experiment)]
    return [*declared, *(variant for each in declared for variant in each.variants)]


@pytest.mark.parametrize("path", STORED, ids=[path.relative_to(ROOT / "eval").as_posix() for path in STORED])
def test_what_is_shown_is_what_is_stored(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    pages = []
    for each in experiments(path):
        with suppress(KeyError, TypeError, IndexError):  # a folder may hold results of several experiments
            each.show(result, Console(file=StringIO()))
            pages.append(f"# {each.title}\n\n{each.markdown(result)}\n")
    assert pages, "no experiment of the folder can show this result"
    page = path.with_suffix(".md")
    if page.is_file():
        assert page.read_text(encoding="utf-8") in pages, "the page is out of date: write it anew from the JSON"


def test_every_named_run_is_stored() -> None:
    assert set(RESULTS.values()) <= set(STORED)


@pytest.mark.parametrize("path", STORED, ids=[path.relative_to(ROOT / "eval").as_posix() for path in STORED])
def test_tables_fit_80_columns_without_breaking_a_word(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    for each in experiments(path):
        tables = []
        with suppress(KeyError, TypeError, IndexError):
            tables = [part for part in each.report(result) if isinstance(part, Table)]
        for table in tables:
            shown = StringIO()
            table.show(Console(file=shown, width=80))
            assert max(map(len, shown.getvalue().splitlines())) <= 80
            kept = [index for index, heading in enumerate(table.header) if heading != table.wraps]
            words = {word for row in (table.header, *table.rows) for index in kept for word in row[index].split()}
            assert not [word for word in words if len(word) <= 30 and word not in shown.getvalue()]
