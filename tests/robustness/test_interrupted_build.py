"""A build of the Ascend C kernels that is killed, and a library that is only half there."""

import os
import signal
import subprocess
import sys
import time

from tests.ascend_c.twin_build import BUILD_SCRIPT, build_environment, build_library

SAY = "from pasa.ops.attention import npu_backend; print(npu_backend.library_error())"


def says(library):
    """What a process finds in a library; it lives on."""
    environment = os.environ | {"PASA_ASCEND_LIBRARY": str(library)}
    done = subprocess.run([sys.executable, "-c", SAY], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_killed_build_leaves_no_library_and_the_next_one_is_whole(tmp_path):
    command = [BUILD_SCRIPT, "-DCMAKE_CXX_FLAGS=-DPASA_CPU_TWIN", "-DCMAKE_BUILD_TYPE=Debug"]
    with open(tmp_path / "log", "w") as log:
        first = subprocess.Popen(
            command, env=build_environment(tmp_path), stdout=log, stderr=log, start_new_session=True
        )
    end = time.monotonic() + 120
    while not list((tmp_path / "build").glob("CMakeFiles/*.dir/**/*.d")) and time.monotonic() < end:
        assert first.poll() is None, (tmp_path / "log").read_text()[-2000:]
        if "Building" in (tmp_path / "log").read_text():
            break
        time.sleep(0.1)
    time.sleep(1)  # in the middle of the compiler's work
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    library = tmp_path / "libpasa_npu.so"
    assert not library.exists()
    assert build_library(tmp_path) == library
    assert says(library) == "None"
    check_cut(library)


def check_cut(library):
    """Cut short or full of garbage it is refused with the loader's words, and takes no process down."""
    whole = library.read_bytes()
    for part in (b"", whole[:100], b"\x7fELF" + bytes(4000), b"garbage" * 100):
        library.write_bytes(part)
        assert "does not load" in says(library)
    library.unlink()
    assert "build it with scripts/build_ascend.sh" in says(library)
