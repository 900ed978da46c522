"""Hooks of the documentation site: files of the repository that a page links to become part of the site.

A page links to a README or a source file by its relative path, so that the link also works in a checkout. The site
shows a linked Markdown file as a page below `repository/`, and holds any other linked file as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "repository/"  # where the site keeps files from outside docs/
LINK = re.compile(r"(?<!`)(\]\()([^)\s#]*)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```|`(?:[^`\n]|\n(?!\n))+`)", re.MULTILINE | re.DOTALL)  # also over a line's end


def source_of(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    return uri.removeprefix(PREFIX) if uri.startswith(PREFIX) else f"docs/{uri}"


def uri_of(path: str) -> str:
    """Return the address in the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{PREFIX}{path}"


def target_of(source: str, link: str) -> str | None:
    """Return the path in the repository that a link of `source` leads to, or None for a link that leaves it."""
    if not link or "://" in link or link.startswith("mailto:"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    readme = posixpath.join(target, "README.md")
    return readme if (ROOT / target).is_dir() and (ROOT / readme).is_file() else target


def rewrite(markdown: str, source: str) -> str:
    """Return the page with every link to a file of the repository led to its place in the site."""

    def replace(match: re.Match[str]) -> str:
        target = target_of(source, match[2])
        if target is None or (ROOT / target).is_dir():
            return match[0]
        here = posixpath.dirname(uri_of(source))
        return f"]({posixpath.relpath(uri_of(target), here or '.')}{match[3] or ''})"

    parts = CODE.split(markdown)
    return "".join(part if CODE.fullmatch(part) else LINK.sub(replace, part) for part in parts)


def linked(source: str) -> Iterator[str]:
    """Yield every existing file that a Markdown file links to."""
    text = CODE.sub("", (ROOT / source).read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        target = target_of(source, match[2])
        if target is not None and (ROOT / target).is_file():
            yield target


def on_files(files: Any, config: Any) -> Any:
    """Add the linked files of the repository, and what those that are Markdown link to in turn."""
    queue = [source_of(file.src_uri) for file in files.documentation_pages()]
    seen = set(queue)
    while queue:
        for target in linked(queue.pop()):
            if target in seen:
                continue
            seen.add(target)
            if not target.startswith("docs/"):
                files.append(File.generated(config, uri_of(target), abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                queue.append(target)
    return files


def options(group: Any, name: str) -> Iterator[str]:
    """Yield the options of every command: a heading, the help and a table; a heading for each group of commands."""
    for part, command in group.commands.items():
        if hasattr(command, "commands"):
            yield f"## Options of `{name} {part}`"
            yield from options(command, f"{name} {part}")
            continue
        rows = []
        for option in command.params:
            if option.param_type_name == "argument":
                rows.append(f"| `{option.metavar}` | | {option.help} |")
                continue
            default = "" if option.default in (None, False) else f"`{option.default}`"
            kind = "" if option.is_flag else f" {option.metavar or 'VALUE'}"
            rows.append(f"| `{', '.join(option.opts)}{kind}` | {default} | {option.help} |")
        yield f"### {name} {part}"
        yield command.help
        yield "| option | default | meaning |\n|---|---|---|\n" + "\n".join(rows)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page; add the options to the page of commands."""
    text = rewrite(markdown, source_of(page.file.src_uri))
    if page.file.src_uri != "commands.md":
        return text
    import typer.main

    from pasa.eval.commands import app

    parts = [text, "## Options of `pasa`", *options(typer.main.get_command(app), "pasa")]
    return "\n\n".join(parts) + "\n"
