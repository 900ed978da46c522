"""scripts/_browser.sh: installation of a browser, and the message where that fails."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "_browser.sh"


def need_browser(folder, **programs):
    """Run the function where these programs (name: body of a shell script) are all there is."""
    for name, body in programs.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    command = ["/bin/bash", "-euo", "pipefail", "-c", f"source {SCRIPT}; need_browser; echo on"]
    return subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True, check=False)


def test_nothing_is_installed_where_both_are_there(tmp_path):
    done = need_browser(tmp_path, chromium="", chromedriver="", apt_get="exit 9", sudo="exit 9")
    assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", "")


@pytest.mark.parametrize("there", [{}, {"chromium": ""}, {"chromedriver": ""}])
def test_what_is_missing_is_installed(tmp_path, there):
    log = tmp_path / "log"
    done = need_browser(tmp_path, **there, apt_get=f"echo $* >>{log}", sudo='shift; "$@"')
    assert (done.returncode, done.stdout) == (0, "on\n")
    assert log.read_text().splitlines() == [
        "update -qq",
        "install -y -qq --no-install-recommends chromium chromium-driver",
    ]


@pytest.mark.parametrize("programs", [{}, {"apt_get": "exit 100", "sudo": "exit 1"}])
def test_where_nothing_can_be_installed_it_says_what_to_install(tmp_path, programs):
    done = need_browser(tmp_path, **programs)
    assert (done.returncode, done.stdout) == (1, "")
    assert "apt-get install --no-install-recommends chromium chromium-driver" in done.stderr
