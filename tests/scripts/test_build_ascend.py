"""scripts/build_ascend.sh: one clear line where something is missing. tests/ascend_c/ runs it to the end, with
fakes of CANN and torch_npu."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ascend_c.twin_build import BUILD_SCRIPT, FAKES, build_environment

CMAKE_FOLDER = BUILD_SCRIPT.parents[1] / "ascend_c"


def refusal(folder, **changed):
    """Return the script's error under the fakes' variables, with some changed or (None) removed."""
    environment = {name: value for name, value in (build_environment(folder) | changed).items() if value is not None}
    done = subprocess.run([BUILD_SCRIPT], env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert not (folder / "libpasa_npu.so").exists()
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_without_cann_it_says_what_to_source(tmp_path):
    said = refusal(tmp_path, ASCEND_HOME_PATH=None)
    assert said.startswith("build_ascend.sh: ASCEND_HOME_PATH is not set")
    assert "source /usr/local/Ascend/cann/set_env.sh" in said
    assert refusal(tmp_path, ASCEND_HOME_PATH="") == said


@pytest.mark.parametrize("soc", ["ascend310b4", "ascend910_9391", "910b"])
def test_a_chip_without_kernels_is_refused_by_name(tmp_path, soc):
    """Nothing else is asked first: CANN would be installed in vain."""
    said = refusal(tmp_path, SOC_VERSION=soc, ASCEND_HOME_PATH=None)
    served = "only for Ascend910B1 to B4 and Ascend310P"
    assert said.startswith(f"build_ascend.sh: no kernel was written for SOC_VERSION={soc}, {served}")
    assert said.endswith("'pasa doctor' says what serves it")


@pytest.mark.parametrize("soc", ["ascend910b3", "Ascend910B2C", "ascend310p1", "Ascend310P3", ""])
def test_a_chip_with_kernels_is_not_refused(tmp_path, soc):
    assert "ASCEND_HOME_PATH is not set" in refusal(tmp_path, SOC_VERSION=soc, ASCEND_HOME_PATH=None)


def test_another_architecture_is_refused_before_the_compiler_is_looked_for(tmp_path):
    command = ["cmake", "-S", CMAKE_FOLDER, "-B", tmp_path, "-DCMAKE_ASC_ARCHITECTURES=dav-3510"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode
    assert "no kernel was written for dav-3510, only for dav-2201 and dav-2002" in " ".join(done.stderr.split())
    assert done.stderr.count("CMake Error") == 1


def test_cann_that_is_not_there(tmp_path):
    assert refusal(tmp_path, ASCEND_HOME_PATH="/no/such/cann").endswith("/no/such/cann is not a folder")


@pytest.mark.parametrize("version", ["8.5.0", "9.0.0", "9.0.1", "8.0.RC3.alpha002"])
def test_cann_that_is_too_old(tmp_path, version):
    """CANN 9.0 lacks two calls of the kernels: a compiler would say so ten times and name no version."""
    info = tmp_path / "cann/x86_64-linux/ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\n")
    said = refusal(tmp_path, ASCEND_HOME_PATH=str(tmp_path / "cann"))
    assert said == (
        f"build_ascend.sh: CANN {version} has no ReduceRepeat and no SetSaturationFlag, which the kernels call; "
        "install CANN 9.1 or newer"
    )


def test_python_that_is_not_there(tmp_path):
    assert refusal(tmp_path, PYTHON="no-such-python").endswith("PYTHON=no-such-python is not a program")


def test_without_torch_npu(tmp_path):
    without = os.pathsep.join(
        p for p in build_environment(tmp_path)["PYTHONPATH"].split(os.pathsep) if str(FAKES) not in p
    )
    assert "torch_npu is not installed for PYTHON=" in refusal(tmp_path, PYTHONPATH=without)


def test_without_cmake(tmp_path):
    """A PATH with what the script needs before it asks for cmake, and no more."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname"):
        target = subprocess.run(["which", tool], check=True, capture_output=True, text=True).stdout.strip()
        (tools / tool).symlink_to(Path(target).resolve())
    assert refusal(tmp_path, PATH=str(tools)).endswith("cmake is not installed")


@pytest.mark.parametrize("relative", [False, True])
def test_the_interpreter_may_be_given_by_path(tmp_path, relative):
    """A relative path was looked for in another folder."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    given = os.path.relpath(python) if relative else str(python)
    paths = os.pathsep.join([str(tmp_path / "empty")])
    said = refusal(tmp_path, PYTHON=given, PYTHONPATH=paths)
    assert "is not installed for PYTHON=" in said
    assert said.endswith(os.path.abspath(python))
