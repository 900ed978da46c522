"""A build of the Ascend C kernels that is killed, and a library that is only half there."""

import subprocess
import sys

SAY = """
import os, sys
from pasa.ops.attention.ascend import backend as npu_backend
for library in sys.argv[1:]:
    if not (child := os.fork()):  # a process each: torch takes seconds to import, once for all
        os.environ["PASA_ASCEND_LIBRARY"] = library
        print(npu_backend.library_error(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, library
"""


def says(*libraries):
    """Return what a process reports on loading each library, a line each; the process must survive."""
    command = [sys.executable, "-c", SAY, *map(str, libraries)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_a_killed_build_leaves_no_library_and_the_next_one_is_whole(npu_library):
    """`npu_library` is built where a build was killed, which must not have left a library."""
    assert "Building" in (npu_library.parent / "killed.log").read_text()
    assert says(npu_library) == ["None"]


def test_half_a_library_is_refused_with_the_loaders_words(npu_library, tmp_path):
    """Cut short or full of garbage it takes no process down; nor does one that is not there."""
    whole, cut = npu_library.read_bytes(), []
    for part in (b"", whole[:100], b"\x7fELF" + bytes(4000), b"garbage" * 100):
        cut.append(tmp_path / f"{len(cut)}.so")
        cut[-1].write_bytes(part)
    *refused, absent = says(*cut, tmp_path / "none.so")
    assert len(refused) == len(cut)
    assert all("does not load" in line for line in refused)
    assert "run `pasa build-ascend`" in absent
