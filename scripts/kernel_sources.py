"""Return the code that a Triton kernel is compiled from, as text that changes only where the compiled kernel may.

The records of what was compiled are keyed by it: the table of lower_triton_ascend.py, and nvidia_compiled.json.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def source_of(case: dict) -> str:
    """Return a hash of what is lowered: code that the kernel reaches, types, constants; not of files or comments."""
    kernel = case["kernel"]
    reached: dict[tuple[str, str], str] = {}
    reach(kernel.fn.__module__, kernel.__name__, reached)
    code = sorted({(name, text) for (_, name), text in reached.items() if text})
    parts = [code, sorted(case.get("aligned", ()))]
    parts += [sorted(case[field].items()) for field in ("signature", "constexprs")]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def reach(module: str, name: str, reached: dict[tuple[str, str], str]) -> None:
    """Add the code that gives a module's name its value, and that of all names of ops/ in it, to `reached`."""
    if (module, name) in reached or not module.startswith("pasa."):
        return
    statements = definitions(ROOT / f"{module.removeprefix('pasa.').replace('.', '/')}.py")
    reached[module, name] = ""
    for statement in statements[name]:
        if isinstance(statement, ast.ImportFrom):
            original = next(alias.name for alias in statement.names if name in (alias.asname, alias.name))
            reach(statement.module or "", original, reached)
            continue
        reached[module, name] += code_of(statement)
        for each in names_in(statement):
            if each in statements:
                reach(module, each, reached)


@functools.cache
def names_in(statement: ast.stmt) -> list[str]:
    """Return the names that stand in a statement."""
    return sorted({node.id for node in ast.walk(statement) if isinstance(node, ast.Name)})


@functools.cache  # because most kernels share most of their code
def code_of(statement: ast.stmt) -> str:
    """Return a statement as code without docstrings, comments and line breaks, which no compiler sees."""
    statement = copy.deepcopy(statement)
    for node in ast.walk(statement):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(statement)


@functools.cache
def definitions(path: Path) -> dict[str, list[ast.stmt]]:
    """Return the statements at a module's top that give each of its names a value."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        nodes = [statement] if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else list(ast.walk(statement))
        names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        names |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for name in names:
            found.setdefault(name, []).append(statement)
    return found
