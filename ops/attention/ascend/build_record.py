"""Compare the versions that the library of Ascend C kernels was built with to those that are installed.

The library holds its versions as text (`ascend_c/binding/binding.cpp`), so that they can be read
without loading it. A library that was built for another torch can crash the process that loads it.
"""

from __future__ import annotations

import re
from pathlib import Path

from pasa.ops import envs
from pasa.ops.versions import package_version

RECORD = re.compile(rb"pasa-build:([^\0]*)\0")
VERSION_LINE = re.compile(r"^version\s*=\s*(\S+)", re.IGNORECASE | re.MULTILINE)
# Where CANN says its version, below ASCEND_HOME_PATH.
VERSION_FILES = ("compiler/version.info", "*/ascend_toolkit_install.info", "ascend_toolkit_install.info")


def built_with(library: Path) -> dict[str, str]:
    """Return the versions in a library by name, such as {"cann": "9.1.0", "torch": "2.9.0"}; empty if it has none."""
    found = RECORD.search(library.read_bytes())
    words = found[1].decode(errors="replace").split() if found else []
    return dict(word.split("=", 1) for word in words if "=" in word)


def installed() -> dict[str, str]:
    """Return the versions of torch, torch_npu and CANN that are here, by the names of `built_with`."""
    versions = {"torch": package_version("torch"), "torch_npu": package_version("torch-npu"), "cann": cann_version()}
    return {name: version for name, version in versions.items() if version}


def differences(library: Path) -> dict[str, tuple[str, str]]:
    """Return the versions that differ: name to (built with, installed). What is not known does not differ."""
    built, here = built_with(library), installed()
    return {name: (built[name], here[name]) for name in here if built.get(name, here[name]) != here[name]}


def cann_version() -> str | None:
    """Return the version of the CANN in ASCEND_HOME_PATH, or None if there is no CANN or it does not say."""
    home = envs.ascend_home()
    if home is None:
        return None
    for pattern in VERSION_FILES:
        for path in sorted(home.glob(pattern)):
            if found := VERSION_LINE.search(path.read_text(encoding="utf-8", errors="replace")):
                return found[1]
    return None


def record() -> str:
    """Return the text of `installed` that a build puts into its library."""
    return " ".join(f"{name}={version}" for name, version in installed().items())
