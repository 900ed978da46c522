"""A build of the Ascend C kernels that is killed, and a library that is only half there."""

import os
import shutil
import subprocess
import sys

SAY = "from pasa.ops.attention import npu_backend; print(npu_backend.library_error())"


def says(library):
    """What a process finds in a library; it lives on."""
    environment = os.environ | {"PASA_ASCEND_LIBRARY": str(library)}
    done = subprocess.run([sys.executable, "-c", SAY], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_killed_build_leaves_no_library_and_the_next_one_is_whole(npu_library, tmp_path):
    """`npu_library` is built where a build was killed, which must not have left a library."""
    assert "Building" in (npu_library.parent / "killed.log").read_text()
    assert says(npu_library) == "None"
    library = tmp_path / npu_library.name
    shutil.copy(npu_library, library)
    check_cut(library)


def check_cut(library):
    """Cut short or full of garbage it is refused with the loader's words, and takes no process down."""
    whole = library.read_bytes()
    for part in (b"", whole[:100], b"\x7fELF" + bytes(4000), b"garbage" * 100):
        library.write_bytes(part)
        assert "does not load" in says(library)
    library.unlink()
    assert "build it with scripts/build_ascend.sh" in says(library)
