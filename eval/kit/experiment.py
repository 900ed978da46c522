"""An experiment as a declaration: what runs, what it shows, where it is stored. The kit makes its command of it."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.options import NOTHING_KEPT, Json, finish, integer, needs_models, stoppable, words
from pasa.eval.kit.tables import Table

Result: TypeAlias = dict[str, Any]
Folder = Annotated[Path | None, typer.Option(file_okay=False, help="Write JSON, Markdown and figures there.")]


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes
    ----------
    name : str
        The command behind `pasa bench` or `pasa eval`; stored files are called NAME.json and NAME.md.
    run : callable
        Takes the command's options by keyword, and `progress`; returns a JSON-able dict with ``gate`` (its ``passed``
        is the exit status) and ``environment``, or None in a process that has nothing to say. The first line of its
        docstring is the command's help. An option is a parameter ``rounds: Annotated[int, "Rounds to time."] = 5``;
        where that is not enough, the annotation holds a `typer.Option`. A parameter `folder` is --output-dir.
    report : callable
        Takes a result; returns tables and paragraphs in the order in which they are shown.
    title : str
        Heading of the Markdown file.
    figures : callable, optional
        Draws a result into a folder and returns the paths.
    needs_models : bool
        Whether the command builds models, for which it refuses an older transformers by name.
    kept : str
        What a run that is stopped from the keyboard leaves, for the message.
    """

    name: str
    run: Callable[..., Result | None]
    report: Callable[[Result], Sequence[Table | str]]
    title: str
    figures: Callable[[Result, Path], Sequence[Path]] | None = None
    needs_models: bool = False
    kept: str = NOTHING_KEPT

    def show(self, result: Result, console: Console) -> None:
        """Print tables and paragraphs."""
        for part in self.report(result):
            if isinstance(part, Table):
                part.show(console)
            else:
                console.print(Text(part))

    def markdown(self, result: Result) -> str:
        """Return tables and paragraphs without the title, each table below its own where it differs from that."""
        parts: list[str] = []
        for part in self.report(result):
            if isinstance(part, Table):
                heading = [f"## {part.title}"] if part.title != self.title else []
                parts += [*heading, part.markdown(), *([part.note] if part.note else [])]
            else:
                parts.append(part)
        return "\n\n".join(part for part in parts if part)

    def save(self, result: Result, folder: Path) -> list[Path]:
        """Write NAME.json, NAME.md and the figures; return their paths."""
        paths = [folder / f"{self.name}.json", folder / f"{self.name}.md"]
        stored = output.to_json(result)
        result = json.loads(stored)  # both show numbers that are rounded alike
        output.write_text(paths[0], stored)
        output.write_text(paths[1], f"# {self.title}\n\n{self.markdown(result)}\n")
        return [*paths, *(self.figures(result, folder) if self.figures else ())]


def add_command(group: typer.Typer, experiment: Experiment) -> None:
    """Add the experiment's command to a group, with `--json` and `--output-dir`."""
    parameters = inspect.signature(experiment.run).parameters
    hints = typing.get_type_hints(experiment.run, include_extras=True)
    options = {name: _option(name, hints[name]) for name in parameters if name not in ("progress", "folder")}
    title = f"{group.info.name} {experiment.name}" if group.info.name else experiment.name

    def command(json: str | None, output_dir: Path | None, **arguments: Any) -> None:
        if experiment.needs_models:
            needs_models(title)
        if "folder" in parameters:
            arguments["folder"] = output_dir
        with stoppable(experiment.kept), output.progress_bar(title) as progress:
            result = experiment.run(**arguments, progress=progress)
        if result is not None:
            finish(result, json, output_dir, experiment.show, experiment.save)

    named = {"json": (Json, None), "output_dir": (Folder, None)}
    named |= {name: (options[name], parameters[name].default) for name in options}
    keyword = inspect.Parameter.KEYWORD_ONLY
    command.__annotations__ = {name: hint for name, (hint, _) in named.items()}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, keyword, default=default, annotation=hint) for name, (hint, default) in named.items()]
    )
    group.command(experiment.name, help=(experiment.run.__doc__ or "").partition("\n")[0])(command)


def _option(name: str, hint: Any) -> Any:
    """Return what typer reads of a parameter: a text in its annotation becomes the help of an option of that type."""
    kind, *extras = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    texts = [each for each in extras if isinstance(each, str)]
    if not texts:
        return hint
    kinds = typing.get_args(kind) or (kind,)
    if kind is bool:  # a switch without its opposite
        return Annotated[kind, typer.Option(f"--{name.replace('_', '-')}", help=texts[0])]
    if int in kinds:
        return Annotated[kind, typer.Option(parser=integer, metavar="N", help=texts[0])]
    if any(typing.get_origin(each) in (list, Sequence) for each in (kind, *kinds)):
        return Annotated[str | None, typer.Option(parser=words, metavar="A,B", help=texts[0])]
    return Annotated[kind, typer.Option(help=texts[0])]
