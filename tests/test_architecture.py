"""The house rules that a machine can check: layers, optional packages, sizes, no assert, no print, no bare except."""

import ast
import functools
import graphlib
import os
import re
from pathlib import Path

import pytest

import pasa

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"ops": "pasa.ops", "pasa": "pasa", "eval": "pasa.eval"}
OPTIONAL = {"transformers", "diffusers", "triton", "torch_npu", "matplotlib", "datasets", "gguf", "typer", "rich"} | {
    "accelerate",
    "safetensors",
}
MAY_IMPORT_OPTIONAL = ("pasa/patching/transformers", "pasa/patching/diffusers", "eval/")
# The registry loads these when a call chooses their backend, never earlier.
TRITON_FILES = re.compile(r"ops/(spectral/half_step_(kernel|launch)|attention/triton/.+)\.py")
FILE_LINES, FUNCTION_LINES = 350, 60  # the aim is 150-300 and 15-30; these are the hard limits
KERNEL_FILE_LINES, KERNEL_LINES = 500, 120  # a kernel has one parameter on a line, and no helper elsewhere
TEST_FILE_LINES = 500


def is_kernel(path):
    """Return whether a file is device code."""
    return Path(path).name.endswith(("kernel.py", "tile_math.py"))


def sources():
    return [path for folder in FLOORS for path in sorted((ROOT / folder).rglob("*.py"))]


def module_name(path):
    relative = path.relative_to(ROOT).with_suffix("")
    return ".".join([FLOORS[relative.parts[0]], *relative.parts[1:]]).removesuffix(".__init__")


def outside_functions(node):
    """Yield what runs when the module is imported: everything but the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from outside_functions(child)


def imports(tree, *, top_level_only=False):
    """Yield imported module names, `from a import b` as a.b; without those under TYPE_CHECKING."""
    nodes = list(outside_functions(tree) if top_level_only else ast.walk(tree))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in nodes:
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the floor they come from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def parsed():
    """Return every source with its tree, parsed once, because one test per source would take longer than its check."""
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sources()]


@functools.cache
def imported():
    """Return every source with the names that it imports, anywhere and at the top."""
    return [(path, list(imports(tree)), list(imports(tree, top_level_only=True))) for path, tree in parsed()]


def test_floors():
    """Imports go down the layers eval -> pasa -> ops, never upwards."""
    for path, names, _ in imported():
        own = module_name(path)
        for name in names:
            if own.startswith("pasa.ops"):
                assert not name.startswith("pasa") or name.startswith("pasa.ops"), (path, name)
            elif not own.startswith("pasa.eval"):
                assert not name.startswith("pasa.eval"), (path, name)


# What a part of ops/ may import of the package beside itself; a part that is not listed may import all of ops/.
TRITON, TRITON_FOLDER = "pasa.ops.attention.triton", ROOT / "ops" / "attention" / "triton"
FAMILIES = [path.parent.name for path in TRITON_FOLDER.glob("*/__init__.py")]
SHARED = tuple(
    f"{TRITON}.{path.stem}" for path in TRITON_FOLDER.glob("*.py") if path.stem not in ("__init__", "backend")
)
BASE = ("pasa.ops.numerics", "pasa.ops.packed", "pasa.ops.notices", "pasa.ops.envs", "pasa.ops.versions")
CALL = ("pasa.ops.attention.call", "pasa.ops.attention.options")
SPEC = (*BASE, *CALL, "pasa.ops.attention.spec")
HOST = ("pasa.ops.devices", "pasa.ops.memory", "pasa.ops.recording")
MAY_IMPORT = {
    "pasa.ops.numerics": (),
    "pasa.ops.packed": (),
    "pasa.ops.notices": (),
    "pasa.ops.envs": (),
    "pasa.ops.versions": (),
    "pasa.ops.dispatch": ("pasa.ops.plans",),
    "pasa.ops.devices": BASE,
    "pasa.ops.memory": (),
    "pasa.ops.plans": ("pasa.ops.devices", "pasa.ops.memory", "pasa.ops.recording"),
    "pasa.ops.attention.options": BASE,
    "pasa.ops.attention.torch_sdpa": (),
    "pasa.ops.attention.call": (*BASE, *CALL),
    "pasa.ops.attention.spec": SPEC,
    "pasa.ops.attention.spec.exact_fp64": (),
    **{f"{TRITON}.{family}": (*SPEC, *SHARED, *HOST) for family in FAMILIES},
    **dict.fromkeys(SHARED, (*SPEC, *SHARED, *HOST)),
    f"{TRITON}.c_launcher": ("pasa.ops.devices",),
    TRITON: (*SPEC, *HOST),
    "pasa.ops.attention.ascend": (*SPEC, "pasa.ops.devices"),
    "pasa.ops.attention.sdpa": (*SPEC, *HOST, "pasa.ops.attention.ascend.inputs", f"{TRITON}.guard"),
    "pasa.ops.backends": (*BASE, *CALL, "pasa.ops.devices"),
    "pasa.ops.measured": (),
    "pasa.ops.registry": (*BASE, *CALL, "pasa.ops.devices", "pasa.ops.backends", "pasa.ops.measured"),
    "pasa.ops.operands": (*CALL, "pasa.ops.registry"),
}


def part_of(module):
    """Return the most specific entry of MAY_IMPORT that a module belongs to."""
    parts = [part for part in MAY_IMPORT if module == part or module.startswith(part + ".")]
    return max(parts, key=len, default=None)


def test_what_the_parts_of_ops_import():
    """Each part of ops/ imports what MAY_IMPORT lists. Every folder and file of ops/attention belongs to a part."""
    for path, names, _ in imported():
        module = module_name(path)
        part = part_of(module)
        assert part or not module.startswith("pasa.ops.attention.") or path.name == "__init__.py", path
        if part is None:
            continue
        allowed = (part, *MAY_IMPORT[part])
        wrong = [
            name
            for name in names
            if name.startswith("pasa") and not any(name == each or name.startswith(each + ".") for each in allowed)
        ]
        assert not wrong, (path, wrong)


def test_patching_is_above_attention():
    for path, names, _ in imported():
        if module_name(path) in ("pasa.attention", "pasa.paged"):
            assert not [name for name in names if name.startswith("pasa.patching")], path


def test_no_circles():
    """The entries of each folder, files and sub-folders alike, do not import each other in a circle.

    Imports inside functions count. A folder counts with all that it holds.
    """
    files = {module_name(path): path.relative_to(ROOT) for path in sources()}
    edges = {}
    for path, names, _ in imported():
        source = path.relative_to(ROOT)
        for name in names:
            while name and name not in files:
                name = name.rpartition(".")[0]
            target = files.get(name)
            if target is None or target == source or "__init__.py" in (source.name, target.name):
                continue
            folder = os.path.commonpath([source, target])
            entry, other = (file.relative_to(folder).parts[0] for file in (source, target))
            edges.setdefault(folder, {}).setdefault(entry, set()).add(other)
    for folder, graph in edges.items():
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            pytest.fail(f"{folder}: {' -> '.join(error.args[1])}")


def test_optional_packages_are_imported_where_they_are_used():
    for path, _, at_the_top in imported():
        relative = str(path.relative_to(ROOT))
        if not relative.startswith(MAY_IMPORT_OPTIONAL):
            allowed = {"triton"} if TRITON_FILES.fullmatch(relative) else set()
            assert not {name.split(".")[0] for name in at_the_top} & OPTIONAL - allowed, path


def test_kernel_files_import_triton_alone():
    """Kernel files import only triton, so that they can be compiled, lowered and read without torch."""
    kernels = [(path, names) for path, names, _ in imported() if is_kernel(path)]
    assert kernels
    for path, names in kernels:
        assert {name.split(".")[0] for name in names} <= {"triton", "pasa"}, path
        assert all(is_kernel(name.split(".")[-2] + ".py") for name in names if name.startswith("pasa")), path


def test_no_assert_no_bare_except_no_print():
    for path, tree in parsed():
        in_eval = path.relative_to(ROOT).parts[0] == "eval"
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Assert), f"{path}, line {node.lineno}: assert is for tests"
            bare = isinstance(node, ast.ExceptHandler) and node.type is None
            assert not bare, f"{path}, line {node.lineno}: bare except"
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
            assert in_eval or called != "print", f"{path}, line {node.lineno}: print"


def test_sizes():
    for path, tree in parsed():
        kernel = is_kernel(path)
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= (KERNEL_FILE_LINES if kernel else FILE_LINES), f"{path} has {lines} lines"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                limit = KERNEL_LINES if kernel else FUNCTION_LINES
                assert lines <= limit, f"{path}: {node.name} has {lines} lines below its docstring"


def test_sizes_of_tests():
    files = [path for path in (ROOT / "tests").rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: count for path, count in lines.items() if count > TEST_FILE_LINES} == {}


def test_no_file_shadows_triton():
    assert not [path for path in sources() if path.name == "triton.py"]


def test_environment_is_read_in_one_file():
    readers = [p for p in sources() if re.search(r"os\.environ|getenv", p.read_text(encoding="utf-8"))]
    assert [module_name(path) for path in readers] == ["pasa.ops.envs"]


def test_public_names_have_docstrings():
    for name in pasa.__all__:
        assert name == "__version__" or getattr(pasa, name).__doc__
