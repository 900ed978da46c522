"""Names, commands, variables and figures on the pages are those of the code and of the stored runs."""

import re

import generate
import pytest
import typer

import pasa
from pasa.eval.commands import app
from pasa.ops import envs
from tests.docs.pages import BLOCK, DOCS, PAGES, README, ROOT, blocks, name_of, prose

EVIDENCE = [page for page in DOCS if page.name.startswith("evidence")]
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?"
CLI = typer.main.get_command(app)
GROUPS = {name: command for name, command in CLI.commands.items() if hasattr(command, "commands")}


def page(name):
    return ROOT / "docs" / f"{name}.md"


def commands():
    """Return every command of `pasa` as it is typed."""
    single = [f"pasa {name}" for name in CLI.commands if name not in GROUPS]
    return {*single, *(f"pasa {group} {name}" for group, found in GROUPS.items() for name in found.commands)}


def unknown(line):
    """Return the parts of a command line `pasa ...` that `pasa` does not know."""
    words, command = line.split()[1:], CLI
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return [words[0]] if words[0].islower() else []
        command = command.commands[words.pop(0)]
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    return [word for word in words if word.startswith("--") and word not in options]


def test_every_generated_table_is_on_one_page():
    pages = [*DOCS, README, *(ROOT / "eval").rglob("*.md")]
    found = [match[1] for each in pages for match in BLOCK.finditer(each.read_text("utf-8"))]
    assert sorted(found) == sorted(set(found))
    assert set(found) == set(generate.PARTS)


def test_reference_names_every_public_name():
    names = {f"pasa.{name}" for name in pasa.__all__ if name != "__version__"}
    assert names - set(re.findall(r"^### `(.+)`$", page("reference").read_text("utf-8"), re.MULTILINE)) == set()


def test_every_command_is_listed_and_every_listed_command_exists():
    listed = set(re.findall(r"^\| `(pasa [^`]+)` \|", page("commands").read_text("utf-8"), re.MULTILINE))
    assert listed == commands()


def test_groups_of_commands_have_the_titles_of_their_help():
    headings = re.findall(r"^## `pasa (\w+)`: (.+)$", page("commands").read_text("utf-8"), re.MULTILINE)
    assert {name: f"{title.capitalize()}." for name, title in headings} == {
        n: group.help for n, group in GROUPS.items()
    }


@pytest.mark.parametrize("path", [*PAGES, *ROOT.glob("eval/*/*/README.md")], ids=name_of)
def test_commands_in_the_text_exist(path):
    typed = [*re.findall(r"`(pasa [a-z][^`\n]*)`", prose(path))]
    typed += [line for block in blocks(path, "bash") for line in block.splitlines() if line.startswith("pasa ")]
    wrong = {line: unknown(line.partition("#")[0]) for line in typed if "COMMAND" not in line}
    assert {line: parts for line, parts in wrong.items() if parts} == {}


def test_a_wrong_command_is_noticed():
    assert unknown("pasa bench nonsense") == ["nonsense"]
    assert unknown("pasa bench rmse --sides --sideways") == ["--sideways"]
    assert unknown("pasa bench soak --cases 3") == []


def test_environment_variables_are_those_that_are_read():
    first = page("environment").read_text("utf-8").partition("Scripts read")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", first, re.MULTILINE)) == set(envs.VARIABLES)


def figures():
    """Yield (page, number) of the README's table of figures, and of every `A to B times` outside generated tables."""
    text = README.read_text("utf-8").partition("## Six figures")[2].partition("All tables:")[0]
    for row in text.splitlines():
        if row.startswith("| ") and "question" not in row:
            question, figure, _ = (cell.strip() for cell in row.strip("| ").split(" | "))
            yield from (("README.md", number) for number in re.findall(NUMBER, f"{question} {figure}"))
    for each in [README, *(path for path in DOCS if path not in EVIDENCE)]:
        for pair in re.findall(rf"({NUMBER}) to\s({NUMBER})\stimes", prose(each)):
            yield from ((name_of(each), number) for number in pair)


def test_figures_come_from_generated_tables():
    """Figures of the README and of the pages are in a table that is made from a stored run."""
    tables = " ".join(match[2] for each in EVIDENCE for match in BLOCK.finditer(each.read_text("utf-8")))
    stored = set(re.findall(NUMBER, tables)) | {"15", "64", "16"}  # counts of cases and formats
    wrong = [(name, number) for name, number in figures() if number not in stored]
    assert len(list(figures())) > 40
    assert wrong == []
