"""Declare an experiment once, and get its command: `Experiment` holds the function, the tables and the file names.

`add_command` makes the command line from the parameters of the function.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.text import Text

from pasa.eval.kit import output
from pasa.eval.kit.options import Json, finish, folder_target, integer, integers, needs_models, real, stoppable, words
from pasa.eval.kit.tables import Table

Result: TypeAlias = dict[str, Any]
Folder = Annotated[
    Path | None, typer.Option(file_okay=False, callback=folder_target, help="Write JSON, Markdown and figures there.")
]


@dataclass(frozen=True)
class Experiment:
    """One experiment: a function that measures, and how its result is shown and stored.

    Attributes
    ----------
    name : str
        Name of the command in its group, such as ``speed`` in `pasa bench speed`, and of the files NAME.json and
        NAME.md.
    run : callable
        Takes the command's options by keyword, and `progress`. Returns a dict that JSON can hold, or None in a process
        that reports nothing. If the dict has a ``gate``, its ``passed`` decides the exit status. The first line of the
        function's docstring is the command's help. Each parameter is an option; its annotation gives type and help, as
        in ``rounds: Annotated[int, "Rounds to time."] = 5``, or holds a `typer.Option`. A parameter named `folder`
        takes --output-dir.
    report : callable
        Takes a result; returns the tables and paragraphs to show.
    title : str
        Heading of the Markdown file.
    figures : callable, optional
        Draws a result into a folder and returns the paths.
    needs_models : bool
        Whether the command builds models. It then refuses to start with a transformers that is too old.
    resume : str
        How to go on from the files that an interrupted run has left in --output-dir; ends the message, if there is a
        file.
    appendix : callable
        As `report`; its tables and paragraphs follow in the Markdown file only.
    variants : sequence of Experiment
        Experiments that run in place of this one if their switch --NAME is given.
    """

    name: str
    run: Callable[..., Result | None]
    report: Callable[[Result], Sequence[Table | str]]
    title: str
    figures: Callable[[Result, Path], Sequence[Path]] | None = None
    needs_models: bool = False
    resume: str = ""
    appendix: Callable[[Result], Sequence[Table | str]] = lambda result: ()
    variants: Sequence[Experiment] = ()

    def measure(self, progress: output.Report = output.silent, **options: Any) -> Result | None:
        """Run the experiment; add its name, its duration and, if the result has none, the environment."""
        started = time.perf_counter()
        result = self.run(progress=progress, **options)
        if result is None:
            return None
        duration = round(time.perf_counter() - started, 1)
        return {"experiment": self.name, "environment": output.environment(), "duration_s": duration} | result

    def show(self, result: Result, console: Console) -> None:
        """Print the tables and paragraphs of a result."""
        for part in self.report(result):
            if isinstance(part, Table):
                part.show(console)
            else:
                console.print(Text(part))

    def markdown(self, result: Result) -> str:
        """Return a result as Markdown, without the page title; a table of the same title has no heading of its own."""
        parts: list[str] = []
        for part in (*self.report(result), *self.appendix(result)):
            if isinstance(part, Table):
                parts += ["" if part.title == self.title else f"## {part.title}", part.markdown(), part.note]
            else:
                parts.append(part)
        return "\n\n".join(part for part in parts if part)

    def texts(self, folder: Path) -> list[Path]:
        """Return the paths of NAME.json and NAME.md (npu-model: npu_model) in a folder."""
        return [folder / f"{self.name.replace('-', '_')}.{suffix}" for suffix in ("json", "md")]

    def check_places(self, json: str | None, folder: Path | None) -> None:
        """Refuse, before a run, a folder in which a file cannot be written, and one that --json makes a file."""
        if folder is None:
            return
        for path in self.texts(folder):
            if path.is_dir():
                raise IsADirectoryError(f"cannot write {str(path)!r}: it is a folder; move it, or name another place")
        if json not in (None, "-") and folder.resolve().is_relative_to(Path(str(json)).resolve()):
            raise ValueError(
                f"--json {json!r} is a file, and --output-dir {str(folder)!r} needs a folder there: rename one"
            )

    def save(self, result: Result, folder: Path) -> list[Path]:
        """Write NAME.json, NAME.md and the figures; return their paths."""
        paths = self.texts(folder)
        stored = output.to_json(result)
        result = json.loads(stored)  # so that Markdown shows the rounded numbers of the JSON
        output.write_text(paths[0], stored)
        output.write_text(paths[1], f"# {self.title}\n\n{self.markdown(result)}\n")
        if self.figures:
            with tempfile.TemporaryDirectory(prefix=".pasa-", dir=folder) as scratch:  # no half-drawn figure
                for path in self.figures(result, Path(scratch)):
                    output.move_file(path, folder / path.name)
                    paths.append(folder / path.name)
        return paths


def gate(checks: Mapping[str, bool], **more: Any) -> dict[str, Any]:
    """Return a gate, which passes if all checks hold, for the field ``gate`` of a result."""
    return {"passed": all(checks.values()), "checks": dict(checks), **more}


def outcome(result: Mapping[str, Any]) -> str:
    """Return a sentence about the gate that `gate` made: the checks that failed, or that all hold."""
    checks = result["gate"]["checks"]
    if failed := [name for name, passed in checks.items() if not passed]:
        return f"FAILED: {', '.join(failed)}."
    return "All checks hold." if len(checks) > 1 else f"One check holds ({', '.join(checks)}); no other applies."


def verdict(result: Result, passed: str, failed: str) -> str:
    """Return `passed` if the gate passed; else `failed`, and a line for each of the gate's ``failures``."""
    gate = result["gate"]
    return passed if gate["passed"] else "\n  ".join([f"{failed}:", *gate["failures"]])


def add_command(group: typer.Typer, experiment: Experiment) -> None:
    """Add the experiment's command to a group, with `--json` and `--output-dir`."""
    title = f"{group.info.name} {experiment.name}" if isinstance(group.info.name, str) else experiment.name

    def command(json: str | None, output_dir: Path | None, **arguments: Any) -> None:
        switches = {each: arguments.pop(_switch(each)) for each in experiment.variants}
        chosen = _choose(experiment, switches)
        if experiment.variants:
            arguments = _accepted(experiment, chosen, arguments)
        with stoppable(chosen.resume):
            if chosen.needs_models:
                needs_models(title)
            if "folder" in inspect.signature(chosen.run).parameters:
                arguments["folder"] = output_dir
            chosen.check_places(json, output_dir)
            with output.progress_bar(title) as progress:
                result = chosen.measure(progress, **arguments)
            if result is not None:
                finish(result, json, output_dir, chosen.show, chosen.save)

    named: dict[str, tuple[Any, Any]] = {"json": (Json, None), "output_dir": (Folder, None), **_options(experiment)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    command.__annotations__ = {name: hint for name, (hint, _) in named.items()}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, keyword, default=default, annotation=hint) for name, (hint, default) in named.items()]
    )
    group.command(experiment.name, help=_help(experiment))(command)


def _choose(experiment: Experiment, switches: dict[Experiment, bool]) -> Experiment:
    """Return the variant whose switch is set, or the experiment itself."""
    chosen = [each for each, switched in switches.items() if switched]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(f'--{each.name}' for each in chosen)} exclude each other: choose one")
    return chosen[0] if chosen else experiment


def _accepted(experiment: Experiment, chosen: Experiment, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the user set; raise ValueError for one that the chosen variant does not have."""
    set_options = {name: value for name, value in arguments.items() if value is not None and value is not False}
    for name in set_options.keys() - inspect.signature(chosen.run).parameters:
        option = f"--{name.replace('_', '-')}"
        if chosen is experiment:
            having = [each.name for each in experiment.variants if name in inspect.signature(each.run).parameters]
            raise ValueError(f"{option} needs {' or '.join(f'--{each}' for each in having)}: add it")
        raise ValueError(f"{option} is no option of --{chosen.name}")
    return set_options


def _options(experiment: Experiment) -> dict[str, tuple[Any, Any]]:
    """Return annotation and default of each option: those of the experiment, of its variants, and their switches.

    Variants may have different defaults for one option. With variants, an option that is not set is therefore None,
    and `run` of the chosen variant fills in its own default.
    """
    options: dict[str, tuple[Any, Any]] = {}
    for each in (experiment, *experiment.variants):
        for name, hint, default in _parameters(each.run):
            unset_is_none = experiment.variants and not isinstance(default, bool)
            if isinstance(default, (list, tuple)):  # the parser of the option reads text
                default = ",".join(map(str, default))
            options.setdefault(name, (_option(name, hint), None if unset_is_none else default))
    for each in experiment.variants:
        options[_switch(each)] = (Annotated[bool, typer.Option(f"--{each.name}", help=_help(each))], False)
    return options


def _parameters(run: Callable[..., Any]) -> Iterator[tuple[str, Any, Any]]:
    hints = inspect.get_annotations(run, eval_str=True)  # Python 3.10 wraps hints with a default of None otherwise
    for name, parameter in inspect.signature(run).parameters.items():
        if name not in ("progress", "folder"):
            yield name, hints[name], parameter.default


def _switch(variant: Experiment) -> str:
    return f"run_{variant.name.replace('-', '_')}"


def _help(experiment: Experiment) -> str:
    return (experiment.run.__doc__ or "").partition("\n")[0]


def _option(name: str, hint: Any) -> Any:
    """Return the annotation of a parameter for typer; a text in `Annotated` becomes the help of the option."""
    kind, *extras = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    texts = [each for each in extras if isinstance(each, str)]
    if not texts:
        return hint
    if kind is bool:  # no --no-NAME
        return Annotated[kind, typer.Option(f"--{name.replace('_', '-')}", help=texts[0])]
    kinds = [kind, *typing.get_args(kind)]
    for each in kinds:
        if typing.get_origin(each) in (list, Sequence):
            parser, metavar = (integers, "N,N") if typing.get_args(each) == (int,) else (words, "A,B")
            return Annotated[str | None, typer.Option(parser=parser, metavar=metavar, help=texts[0])]
    if int in kinds:
        return Annotated[kind, typer.Option(parser=integer, metavar="N", help=texts[0])]
    if float in kinds:
        return Annotated[kind, typer.Option(parser=real, metavar="<float>", help=texts[0])]
    return Annotated[kind, typer.Option(help=texts[0])]
