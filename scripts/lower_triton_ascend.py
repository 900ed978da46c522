#!/usr/bin/env python3
"""Do all Triton kernels lower for an Ascend 910B3, within its unified buffer? Needs neither an NPU nor CANN.

triton-ascend compiles in stages: Triton IR, linalg, and HIVM, the NPU's own dialect, for which `bishengir-compile`
splits cube from vector work, plans the unified buffer (UB, 192 KiB) and inserts synchronisation. Only the last step to
machine code, `hivmc`, belongs to CANN; a stub stands in for it and keeps what it was handed. So "lowered" means: the
compilers accept the kernel and its buffers fit. It says nothing of numbers, speed or launch: that takes an NPU.

Modules of ops/ that hold a list `ASCEND_CASES` say what to lower: dicts with
    name        of the case
    kernel      the jitted function
    signature   {argument: type} of pointers and floats ("*fp16", "fp32"); arguments named nowhere are "i32"
    constexprs  {argument: value}; also of plain arguments that are always 1, as a launch specialises those
    aligned     optional: names of integer arguments that are multiples of 16 (pointers always are)
Every function `*_kernel` under `@triton.jit` in ops/ needs a case, or an entry {name: reason} in a dict
`NOT_FOR_ASCEND` of such a module; the table shows the reason.

The table in the README is also the record of what need not be lowered again. A row's key is a hash of all that the row
depends on: the code that the kernel reaches, the case, what this script does to compile it, the compilers' versions,
and the row's own words. A row whose key is right is taken as it stands, but for --only; so `--check` lowers
nothing, and makes no environment, until one of these changes. The keys need any Triton, or else the environment.

Exit status: how many cases do not reach HIVM with every compiler version (at most 99).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernel_sources import code_of, source_of

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("VENV_ASCEND", ROOT / ".venv-ascend"))
README = ROOT / "ops" / "attention" / "README.md"
BEGIN, END = "<!-- lowering:begin -->", "<!-- lowering:end -->"

TARGET = "Ascend910B3"
FRONT_END = ["triton-ascend==3.2.0", "pybind11==3.1.0"]  # triton-ascend imports pybind11 and does not say so
COMPILERS = ["1.2.0", "1.1.0"]  # of ascendnpu-ir: they plan the unified buffer differently
PYTHONS = ((3, 10), (3, 11))  # our oldest, and the newest that triton-ascend 3.2.0 has wheels for
SECONDS = 120  # for one case: a hundred times what one takes that fits


def main() -> int:
    """Parse, prepare, lower, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="cases or kernels whose name contains NAME")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the table")
    parser.add_argument("--update-readme", action="store_true", help=f"put the table into {README}")
    parser.add_argument("--check", action="store_true", help="fail where that table is not what was measured")
    parser.add_argument("--work", metavar="MODULE:NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        print(json.dumps(work(args.work)))
        return 0
    if args.only and (args.update_readme or args.check):
        parser.error("--update-readme and --check are about all cases: leave --only out")
    results = lower_all(args.only, {} if args.only else rows_of(README.read_text(encoding="utf-8")))
    wrong = sum(result["failed"] for result in results)
    print(f"{wrong} of {len(results)} cases fail with ascendnpu-ir {' or '.join(COMPILERS)}")
    if args.json:
        stored = {"target": TARGET, "front_end": FRONT_END, "ascendnpu_ir": COMPILERS, "cases": results}
        args.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(markdown(results), encoding="utf-8")
    if args.update_readme:
        README.write_text(with_table(README.read_text(encoding="utf-8"), markdown(results)), encoding="utf-8")
    if args.check and with_table(text := README.read_text(encoding="utf-8"), markdown(results)) != text:
        print(f"{README}: the table is not what was measured; --update-readme writes it", file=sys.stderr)
        wrong = max(wrong, 1)
    return min(wrong, 99)


# --- environments


def make_venv() -> Path:
    """Python of one environment with the front end, beside a folder for each compiler; made where no stamp says so."""
    wanted = [*FRONT_END, *(f"ascendnpu-ir=={version}" for version in COMPILERS)]
    stamp = VENV / f".pasa-{hashlib.sha256(' '.join(wanted).encode()).hexdigest()[:16]}"
    python = VENV / "bin" / "python"
    if stamp.exists():
        return python
    print(f"Making {VENV}: {', '.join(wanted)} (about 400 MB to fetch)", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([find_python(), "-m", "venv", VENV], check=True)
    # --no-deps: nothing else is needed, and a second package that calls itself triton must not come
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, *FRONT_END], check=True)
    for version in COMPILERS:
        subprocess.run([*pip, "--target", compiler_home(version), f"ascendnpu-ir=={version}"], check=True)
    stamp.touch()
    return python


def find_python() -> str:
    """An interpreter that triton-ascend has a wheel for: PYTHON_ASCEND, this one, or one on PATH."""
    oldest, newest = PYTHONS
    names = [f"python3.{minor}" for minor in range(newest[1], oldest[1] - 1, -1)]
    for name in (os.environ.get("PYTHON_ASCEND"), sys.executable, *names):
        ask = [name, "-c", "import sys; print(*sys.version_info[:2])"]
        if name and shutil.which(name):
            answer = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
            if oldest <= tuple(map(int, answer.split())) <= newest:
                return name
    sys.exit(f"{FRONT_END[0]} has wheels up to Python {newest[0]}.{newest[1]}; PYTHON_ASCEND names such an interpreter")


def compiler_home(version: str) -> Path:
    """Folder of one version of the package ascendnpu-ir."""
    return VENV / f"ascendnpu-ir-{version}"


# --- which cases there are, and what became of them. A run is {"stage": reached, "error": why no further, or ""}.


def lower_all(only: str | None, rows: dict[tuple[str, str], list[str]]) -> list[dict]:
    """Every case that `rows` does not answer, in a process of its own: where a compiler crashes, that case fails alone.

    `rows` are the table's, by kernel and case.
    """
    listed = run_worker("list", Path(sys.executable) if importlib.util.find_spec("triton") else make_venv())
    if "error" in listed:
        sys.exit(f"The kernel modules do not load: {listed['error']}")
    cases = [case for case in listed["cases"] if not only or only in case["name"] or only in case["kernel"]]
    if not cases:
        sys.exit(f"no case or kernel has {only!r} in its name" if only else "no module of ops/ has ASCEND_CASES")
    kept = [kept_runs(case, rows.get((case["kernel"], case["name"]), [])) for case in cases]
    python = None if all(kept) else make_venv()
    results = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda case, runs: runs or run_worker(f"{case['module']}:{case['name']}", python), cases, kept)
        for case, runs in zip(cases, found, strict=True):
            runs = stopped("none", runs["error"]) if "error" in runs else runs
            results.append({**case, "runs": runs, "failed": any(run["error"] for run in runs.values())})
            report(results[-1])
    without = set() if only else kernels_of(ROOT / "ops") - {case["kernel"] for case in cases}
    for kernel in sorted(without):
        reason = listed["excluded"].get(kernel)
        runs = stopped("not for Ascend" if reason else "none", reason or "no case in any ASCEND_CASES")
        results.append({"kernel": kernel, "name": "-", "source": "", "runs": runs, "failed": not reason})
        report(results[-1])
    return results


def kept_runs(case: dict, row: list[str]) -> dict[str, dict]:
    """Return the result of `work` when a row of the table was written; nothing where the row is out of date."""
    *cells, key = row or [""]
    runs = [re.fullmatch(r"HIVM, (?:UB (\d+) KiB|cube only)", text) for text in cells]
    if not all(runs) or key != key_of(case["source"], cells):
        return {}  # a failure is never kept: it may have been the machine's
    kib = [float(run[1] or 0) for run in runs if run]
    return {v: {"stage": "HIVM", "error": "", "ub_kib": size} for v, size in zip(COMPILERS, kib, strict=True)}


def key_of(source: str, cells: list[str]) -> str:
    """Eight digits for all that a row depends on, and for what it says."""
    compiling = (lower, make_source, to_hivm, refusal, unified_buffer, first_cause)
    code = [code_of(ast.parse(inspect.getsource(function)).body[0]) for function in compiling]
    depends = [*code, repr((TARGET, FRONT_END, COMPILERS, STUB)), source, *cells]
    return hashlib.sha256("\0".join(depends).encode()).hexdigest()[:8]


def run_worker(task: str, python: Path) -> dict:
    """Return the result of `work` from a process of its own; {"error": ...} where it crashed."""
    command = [python, Path(__file__), "--work", task]
    # Nothing of the caller's may get in: TRITON_INTERPRET, or a PYTHONPATH with another triton.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "PYTHON"))}
    done = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    )
    try:
        out, err = done.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)  # with the compiler that it waits for
        return {"error": f"no answer in {SECONDS} s"}
    if done.returncode:
        return {"error": f"exit status {done.returncode}: {(err.strip().splitlines() or ['no message'])[-1]}"}
    return json.loads(out.splitlines()[-1])


def stopped(stage: str, error: str) -> dict[str, dict]:
    """The runs of a case that came to an end before the compiler's version matters."""
    return {version: {"stage": stage, "error": error} for version in COMPILERS}


def kernels_of(folder: Path) -> set[str]:
    """Names of the functions `*_kernel` under `@triton.jit`; Gluon's are for NVIDIA alone."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                names |= {node.name for mark in node.decorator_list if ast.unparse(mark).startswith("triton.jit")}
    return names


def report(result: dict) -> None:
    """One line a case."""
    said = "; ".join(f"{version}: {cell(run)}" for version, run in result["runs"].items())
    print(f"{'FAIL' if result['failed'] else 'ok  '} {result['kernel']} {result['name']}: {said}", flush=True)


def cell(run: dict) -> str:
    """Return the table's words for one run."""
    if run["error"]:
        return f"{run['stage']}: {run['error']}"
    return f"HIVM, UB {run['ub_kib']:.0f} KiB" if run["ub_kib"] else "HIVM, cube only"


def markdown(results: list[dict]) -> str:
    """The table: kernel x case x compiler version, the stage that was reached, and the key of all that."""
    rows = [["Kernel", "Case", *(f"ascendnpu-ir {version}" for version in COMPILERS), "Key"]]
    rows.append(["---"] * len(rows[0]))
    for result in results:
        cells = [cell(result["runs"][version]) for version in COMPILERS]
        key = key_of(result["source"], cells) if result["source"] else "-"
        rows.append([f"`{result['kernel']}`", f"`{result['name']}`", *cells, key])
    lines = ["| " + " | ".join(text.replace("|", r"\|") for text in row) + " |" for row in rows]
    head = f"Lowered, not run on an NPU: {FRONT_END[0]} for {TARGET}.\nUB is the planned peak, of 192 KiB."
    head += "\nA key changes with the kernel, its case or the compilers: `scripts/lower_triton_ascend.py` says how."
    return "\n".join([head, "", *lines]) + "\n"


def rows_of(text: str) -> dict[tuple[str, str], list[str]]:
    """The rows of the table in a README: what follows kernel and case, by these two."""
    table = text.partition(BEGIN)[2].partition(END)[0]
    lines = [re.split(r" (?<!\\)\| ", line[2:-2]) for line in table.splitlines() if line.startswith("| `")]
    rows = [[text.replace(r"\|", "|") for text in line] for line in lines]
    return {(kernel.strip("`"), name.strip("`")): cells for kernel, name, *cells in rows}


def with_table(text: str, table: str) -> str:
    """The README with the table between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"{README} needs one line {BEGIN} and, below it, one line {END}")
    return f"{text.split(BEGIN)[0]}{BEGIN}\n{table}{END}{text.split(END)[1]}"


# --- the worker: runs in the environment, where triton is triton-ascend; `list` alone under any other Triton too


def work(task: str) -> dict:
    """`list`, or one case as MODULE:NAME."""
    # pasa.ops is ops/ although nothing is installed here, and pasa/__init__.py, which needs torch, does not run
    for name, folder in (("pasa", "pasa"), ("pasa.ops", "ops")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(ROOT / folder)]
    if task == "list":
        return list_cases()
    module, name = task.split(":")
    return lower(next(case for case in importlib.import_module(module).ASCEND_CASES if case["name"] == name))


def list_cases() -> dict:
    """Names of all cases; the modules that hold some are found by their text, since most others need torch."""
    cases, excluded = [], {}
    for path in sorted((ROOT / "ops").rglob("*.py")):
        if re.search(r"^(ASCEND_CASES|NOT_FOR_ASCEND)\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            name = ".".join(["pasa", *path.relative_to(ROOT).with_suffix("").parts])
            module = importlib.import_module(name)
            excluded.update(getattr(module, "NOT_FOR_ASCEND", {}))
            for case in getattr(module, "ASCEND_CASES", []):
                names_it = {"module": name, "kernel": case["kernel"].__name__, "name": case["name"]}
                cases.append({**names_it, "source": source_of(case)})
    names = [(case["module"], case["name"]) for case in cases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"cases of the same name: {sorted(twice)}")
    return {"cases": cases, "excluded": excluded}


def lower(case: dict) -> dict[str, dict]:
    """The backend's own stages: those of the front end once, the last one with each compiler."""
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler as ascend
    from triton.backends.compiler import GPUTarget

    ascend.NPUUtils = lambda: types.SimpleNamespace(get_arch=lambda: TARGET)  # it would ask a device
    backend = ascend.AscendBackend(GPUTarget("npu", TARGET, 0))
    options = backend.parse_options({})
    metadata = {"hash": "", "target": backend.target, **vars(options)}
    stages: dict = {}
    backend.add_stages(stages, options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    reached = "none"
    try:
        source = make_source(case, ascend.AscendAttrsDescriptor)
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        reached = "Triton IR"
        linalg = stages["ttadapter"](stages["ttir"](module, metadata), metadata)
    except Exception as error:  # whatever a compiler raises is this case's result
        return stopped(reached, first_cause(error))
    return {version: to_hivm(lambda: stages["npubin"](linalg, dict(metadata)), version) for version in COMPILERS}


def make_source(case: dict, attributes: type) -> object:
    """The kernel with the types and constants of a case, as a launch would specialise it."""
    from triton.compiler import ASTSource

    kernel, given, constants = case["kernel"], case["signature"], case["constexprs"]
    aligned, names = case.get("aligned", ()), kernel.arg_names
    if unknown := [name for name in (*given, *constants, *aligned) if name not in names]:
        raise ValueError(f"{kernel.__name__} has no argument {', '.join(unknown)}")
    signature = {name: given.get(name, "i32") for name in names if name not in constants}
    hints = {names.index(name): 16 for name, kind in signature.items() if kind.startswith("*") or name in aligned}
    return ASTSource(kernel, signature, constants, attributes.from_hints(hints))


# Stands in for CANN's hivmc: keeps the module it is given and makes the objects that the backend reads afterwards.
STUB = """#!/bin/sh
for a in "$@"; do
  case "$a" in *.mlir) cp "$a" "$HIVM" ;; esac
  if [ "$last" = -o ]; then : > "$a"; : > "$a.o"; : > "${a}_reloc.o"; fi
  last="$a"
done
"""


def to_hivm(last_stage, version: str) -> dict:
    """Run the last stage with one compiler version, and look at what it would hand to hivmc."""
    package = compiler_home(version) / "ascendnpuir"
    path = os.environ["PATH"]
    with tempfile.TemporaryDirectory() as folder:
        stub, hivm = Path(folder, "hivmc"), Path(folder, "kernel.hivm")
        stub.write_text(STUB, encoding="utf-8")
        stub.chmod(0o755)
        os.environ.update(PATH=os.pathsep.join([folder, str(package / "bin"), path]), HIVM=str(hivm), TMPDIR=folder)
        try:
            last_stage()
            text = hivm.read_text(encoding="utf-8", errors="replace")
        except Exception as error:
            return {"stage": "linalg", "error": first_cause(error)}
        finally:
            os.environ["PATH"] = path
    return {"stage": "HIVM", "error": refusal(text, package / "lib"), "ub_kib": round(unified_buffer(text) / 1024, 1)}


def refusal(hivm: str, library: Path) -> str:
    """Return what bishengir-compile lets through and no later stage can use: foreign assembly, missing functions."""
    if assembly := re.search(r"inline_asm.{0,60}", hivm):
        return f"refused: {assembly[0]}"
    files = list(library.glob("*.c220.bc")) or list(library.glob("meta_op*.bc"))  # c220: the cores of a 910B
    shipped = b"".join(file.read_bytes() for file in files)
    called = set(re.findall(r"func\.func private @(\w+)", hivm))
    missing = sorted(name for name in called if b"_mlir_ciface_" + name.encode() not in shipped)
    return f"refused: its library lacks {', '.join(missing)}" if missing else ""


def unified_buffer(hivm: str) -> int:
    """Bytes that the memory plan uses, from its lines `pointer_cast(%c<offset>_i64) : memref<<shape>x<type>, ..ub>`."""
    bits = {"i1": 1, "i8": 8, "i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64}
    cast = r"pointer_cast\(([^)]*)\)[^:\n]*: memref<((?:\d+x)*)(\w+), [^\n]*?address_space<ub>"
    highest = 0
    for offsets, shape, kind in re.findall(cast, hivm):
        size = math.prod(int(n) for n in shape.split("x") if n) * bits[kind] // 8
        highest = max([highest, *(int(offset) + size for offset in re.findall(r"%c(\d+)_i64", offsets))])
    return highest


def first_cause(error: BaseException) -> str:
    """The one line of a failure that says most."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    log = getattr(error, "stderr", None) or str(error)
    log = log.decode(errors="replace") if isinstance(log, bytes) else log
    if overflow := re.search(r"(\w+) overflow, requires (\d+) bits while (\d+)", log):
        needed, there = (int(n) // 8192 for n in overflow.groups()[1:])
        return f"{overflow[1].upper()} overflow, {needed} of {there} KiB"
    lines = [re.sub(r"loc\([^)]*\)+:? ?|/\S+/", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line and "Failed to run" not in line] or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[0])[:160]


if __name__ == "__main__":
    sys.exit(main())
