"""What an installation holds beside Python."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_ascend_c_is_installed_with_all_its_sources(tmp_path):
    """An NPU machine builds them: every header that a source includes has to be there, and no machine's library."""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    shipped = {str(p.relative_to(tmp_path / "pasa/ascend_c")) for p in (tmp_path / "pasa/ascend_c").rglob("*.*")}
    sources = {str(p.relative_to(ROOT / "ascend_c")) for p in (ROOT / "ascend_c").rglob("*.*")}
    assert shipped == {path for path in sources if not path.startswith("lib/")}
    assert {"CMakeLists.txt", "kernel/pasa.asc", "binding/binding.cpp", "tiling/plan.h"} <= shipped
    assert not [path for path in shipped if path.endswith(".so")]

    assert (tmp_path / "pasa/eval/diagnose/page.html").is_file(), "the template of the page"


def test_the_default_library_lies_beside_the_sources():
    from pasa.ops import envs

    assert envs.PACKAGE / "ascend_c" == ROOT / "ascend_c"
    assert envs.ascend_library().parent.parent == ROOT / "ascend_c"
