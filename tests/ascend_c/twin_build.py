"""Building and running C++ programs against the CPU twin: one process for many cases, a JSON report for each.

A program is a file in `programs/` made of `TWIN_CASE(name) { ... return report; }`. It runs as
`PROGRAM CASE key=value ...`, or reads such lines from standard input.
"""

import fcntl
import functools
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
TWIN = HERE.parents[1] / "ascend_c" / "twin"
PROGRAMS = HERE / "programs"
FAKES = HERE / "fakes"
BUILD_SCRIPT = HERE.parents[1] / "scripts" / "build_ascend.sh"
FLAGS = ["-std=c++17", "-fexcess-precision=16", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
# With -g1 a report has lines of the source, and the compiler takes a quarter longer.
SANITIZED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Vectorised, launches of large heads take a third less time, and the compiler takes a tenth longer. -O2 takes half as
# long again to compile.
FAST = ("-O1", "-ftree-vectorize", *(("-mf16c",) if platform.machine() == "x86_64" else ()))


def compile_command(source, output, *, optimise=(), include=(), define=()):
    """The g++ command line for one program."""
    folders = [f"-I{folder}" for folder in (TWIN, PROGRAMS, *include)]
    return ["g++", *FLAGS, *optimise, *folders, *(f"-D{name}" for name in define), str(source), "-o", str(output)]


def build(source, folder, *, optimise=FAST, include=(), define=()):
    """Compile `source` into `folder`, or find there what was compiled of the same sources, by any process.

    Returns the path of the program. Raises CalledProcessError, with the compiler's words on its stderr.
    """
    source, folder = Path(source), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = compile_command(source, "", optimise=optimise, define=define)
    kind = f"{source.stem}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:8]}"
    with open(folder / f"{kind}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [each for each in (source.parent, *include) if each not in (PROGRAMS, TWIN.parent)]
        sources = [compiler_version(), of_the_repository(), *map(contents, others)]
        output = folder / f"{kind}-{hashlib.sha256(b''.join(sources)).hexdigest()[:16]}"
        if not output.exists():
            new = folder / f"{kind}.new"  # half a program, if the compiler is killed
            command = compile_command(source, new, optimise=optimise, include=include, define=define)
            subprocess.run(command, check=True, capture_output=True, text=True)
            remove_old(folder.glob(f"{kind}-*"))
            new.rename(output)
        os.utime(output)
    return output


@functools.cache
def compiler_version():
    return subprocess.run(["g++", "--version"], check=True, capture_output=True).stdout


@functools.cache  # because nearly every test asks, and a session has the sources that it began with
def of_the_repository():
    return contents(PROGRAMS) + contents(TWIN.parent)


def contents(folder):
    """Return a hash of the names and the contents of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.digest()


def remove_old(programs):
    """Remove programs that nobody has used for an hour, as another test session would that has other sources."""
    for program in programs:
        if time.time() - program.stat().st_mtime > 3600:
            program.unlink()


def build_library(folder, chip="Ascend910B3"):
    """Run scripts/build_ascend.sh with the fake CANN and torch_npu of `fakes/`, once for all processes of a session.

    A first build for an A2 is killed while the compiler works, and a second one continues in the same folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libpasa_npu.so"
    with open(folder / "library.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            # without debug information, which takes a seventh of the time
            types = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]
            command = [BUILD_SCRIPT, "-DCMAKE_CXX_FLAGS=-DPASA_CPU_TWIN", *types]
            environment = build_environment(folder) | {"SOC_VERSION": chip}
            if chip == "Ascend910B3":
                kill_a_build(command, folder)
                assert not library.exists()
            done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return library


def kill_a_build(command, folder):
    """Start a build and kill it, with all processes that it has started, while the compiler works."""
    log = folder / "killed.log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, env=build_environment(folder), stdout=file, stderr=file, start_new_session=True
        )
    end = time.monotonic() + 120
    while "Building" not in log.read_text() and time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-2000:]
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def build_environment(folder):
    """Return the environment in which scripts/build_ascend.sh finds the fake CANN and torch_npu."""
    paths = [str(FAKES / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "ASCEND_HOME_PATH": str(FAKES / "cann"),
        "CMAKE_PREFIX_PATH": str(FAKES / "cann"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(paths),
        "BUILD": str(folder / "build"),
        "PASA_ASCEND_LIBRARY": str(folder / "libpasa_npu.so"),
    }


def compiler_says(snippet, folder):
    """Return the errors of the compiler's front end for a snippet; empty if it compiles."""
    source = Path(folder) / "snippet.cpp"
    source.write_text(f'#include "kernel_operator.h"\nusing namespace AscendC;\n{snippet}\n')
    command = [*compile_command(source, "/dev/null"), "-fsyntax-only"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stderr


@dataclass
class Program:
    """A built program and the folder through which it exchanges arrays."""

    path: Path
    data: Path

    def run_all(self, lines):
        """Run many `(case, {key: value})` in one process and return their reports."""
        text = "".join(self._line(case, settings) + "\n" for case, settings in lines)
        done = subprocess.run([self.path], input=text, check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}{done.stdout[-2000:]}{done.stderr[-6000:]}"
        return [json.loads(line) for line in done.stdout.splitlines()]

    def run(self, case, arrays=None, **settings):
        """Run one case on the given input arrays; returns its report."""
        for name, values in (arrays or {}).items():
            np.ascontiguousarray(values).tofile(self.data / f"{name}.bin")
        return self.run_all([(case, settings)])[0]

    def load(self, name, dtype):
        """An array that the program saved."""
        return np.fromfile(self.data / f"{name}.bin", dtype=dtype)

    def _line(self, case, settings):
        return " ".join([case, *(f"{key}={value}" for key, value in settings.items()), f"data={self.data}"])
