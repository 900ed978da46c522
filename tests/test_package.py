"""An installation holds everything that it needs beside Python."""

import ast
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_ascend_c_is_installed_with_all_its_sources(tmp_path):
    """An NPU machine can build the kernels: every header that a source includes is installed, but no built library."""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    shipped = {str(p.relative_to(tmp_path / "pasa/ascend_c")) for p in (tmp_path / "pasa/ascend_c").rglob("*.*")}
    sources = {str(p.relative_to(ROOT / "ascend_c")) for p in (ROOT / "ascend_c").rglob("*.*")}
    assert shipped == {path for path in sources if not path.startswith("lib/")}
    assert {"CMakeLists.txt", "kernel/pasa.asc", "binding/binding.cpp", "tiling/plan.h"} <= shipped
    assert not [path for path in shipped if path.endswith(".so")]

    assert (tmp_path / "pasa/eval/models/diagnose/page.html").is_file(), "the template of the page"
    assert (tmp_path / "pasa/eval/models/zoo/fields.json").is_file(), "what makes models small"
    assert (tmp_path / "pasa/eval/npu/rates.json").is_file(), "the command line reads it when it starts"


def test_pre_commit_runs_the_same_ruff_as_the_test_script():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    calls = re.findall(r'^"\$VENV/bin/(ruff)" (.+)$', (ROOT / "scripts/test.sh").read_text("utf-8"), re.MULTILINE)
    assert re.findall(r"entry: (ruff) (.+)$", hooks, re.MULTILINE) == calls
    assert set(re.findall(r'"(ruff==.+?)"', hooks)) == set(
        re.findall(r'"(ruff==.+?)"', (ROOT / "setup.py").read_text())
    )


def test_the_default_library_lies_beside_the_sources():
    from pasa.ops import envs

    assert envs.PACKAGE / "ascend_c" == ROOT / "ascend_c"
    assert envs.ascend_library().parent.parent == ROOT / "ascend_c"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder with what pip installs from the source distribution, through a wheel."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "info").mkdir()
    command = ["setup.py", "-q", "egg_info", "--egg-base", str(folder / "info"), "sdist", "--dist-dir", str(folder)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("pasa-*.tar.gz")
    pip = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    subprocess.run([sys.executable, *pip, str(folder / "site"), str(archive)], check=True, capture_output=True)
    return folder / "site"


def run(folder, *command):
    """Run Python from another folder, with the installation first on its path."""
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder.parent, env=env, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_source_distribution_holds_what_is_installed_and_no_tests(installed):
    (archive,) = installed.parent.glob("pasa-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "pasa", "ops", "eval"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sources = {name for name in tracked.stdout.split() if name.endswith((".py", ".typed", ".html"))}
    assert sources - names == set()
    assert {"README.md", "LICENSE", "CHANGELOG.md", "setup.py", "pyproject.toml"} <= names
    beyond = {name for name in names if name.startswith(("tests/", "scripts/"))}
    assert beyond == {"scripts/build_ascend.sh", "scripts/pasa_cli.py"}
    roots = {"ops": "pasa/ops", "eval": "pasa/eval", "pasa": "pasa"}
    expected = {roots[name.split("/")[0]] + name[name.index("/") :] for name in sources}
    assert not [name for name in expected if not (installed / name).is_file()]


def test_installed_package_attends(installed):
    """The installed package keeps the guarantee far from the checkout: scores of 102,400 give a finite output."""
    program = """
import torch, pasa
print(pasa.__file__)
q = torch.full((1, 2, 70, 64), 40.0).half()
out = pasa.attention(q, q, torch.ones_like(q), is_causal=True)
print(bool((out == 1).all()), pasa.optimal_beta(0.99, 128).iterations, sorted(pasa.__all__) == sorted(dir(pasa)))
"""
    place, result = run(installed, "-c", program).splitlines()
    assert Path(place).is_relative_to(installed)
    assert result == "True 2 True"


def test_installed_command_line_runs(installed):
    assert "0.984497" in run(installed, "-m", "pasa.eval.cli", "bench", "beta")
    assert "reference" in run(installed, "-m", "pasa.eval.cli", "doctor")
    scripts = (installed / next(installed.glob("pasa-*.dist-info")) / "entry_points.txt").read_text()
    assert "pasa = pasa_cli:main" in scripts


def test_help_and_doctor_need_no_extra(installed):
    """Help and doctor run where no module of an extra can be imported."""
    program = """
import sys
from pasa.eval.kit.exits import EXTRAS
sys.modules.update(dict.fromkeys(EXTRAS))  # None makes an import fail
from pasa.eval.cli import main
main(sys.argv[1:])
"""
    assert "check-device" in run(installed, "-c", program, "--help")
    assert "Self check passed" in run(installed, "-c", program, "doctor")


def test_installed_package_builds_the_ascend_c_kernels(installed, tmp_path):
    """The installed package holds all that `pasa build-ascend` needs, which its messages name.

    Story: wheel and source distribution had the kernels' sources, and a message that named a script of the
    repository. Here the command runs as installed, with a fake cmake that only records its arguments.
    """
    message = run(installed, "-c", "from pasa.ops.attention.ascend import backend; print(backend.library_error())")
    assert "run `pasa build-ascend` where CANN is installed" in message
    for name, text in (
        ("bin/cmake", '#!/bin/sh\necho "$@" >> "$NOTES"\nmkdir -p "$BUILD"\ntouch "$BUILD/libpasa_npu.so"\n'),
        ("site/torch_npu.py", ""),
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = os.environ | {
        "PYTHONPATH": f"{installed}:{tmp_path / 'site'}",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONSAFEPATH": "1",
        "ASCEND_HOME_PATH": str(tmp_path),
        "BUILD": str(tmp_path / "build"),
        "NOTES": str(tmp_path / "notes"),
    }
    command = [sys.executable, "-m", "pasa.eval.cli", "build-ascend", "-DCMAKE_BUILD_TYPE=Debug"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    notes = (tmp_path / "notes").read_text()
    sources = Path(re.search(r"-S (\S+)", notes)[1])
    assert (sources / "CMakeLists.txt").is_file()
    assert sources.is_relative_to(installed)
    assert f"-DPython3_EXECUTABLE={sys.executable}" in notes
    assert "-DCMAKE_BUILD_TYPE=Debug" in notes
    assert (installed / "pasa/ascend_c/lib/libpasa_npu.so").is_file()
    library = installed / "pasa" / "ascend_c" / "lib" / "libpasa_npu.so"
    assert done.stdout.startswith(f"built {library} for torch=")
    library.unlink()


def test_metadata_names_the_pythons_whose_syntax_it_keeps(installed):
    metadata = (next(installed.glob("pasa-*.dist-info")) / "METADATA").read_text()
    minors = [int(minor) for minor in re.findall(r"Python :: 3\.(\d+)$", metadata, re.MULTILINE)]
    assert minors == [10, 11, 12, 13]
    assert "Requires-Python: >=3.10\n" in metadata
    for path in installed.glob("pasa/**/*.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, min(minors)))
