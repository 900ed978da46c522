"""The versions that a library was built with, and those that are installed."""

from importlib import metadata

import pytest

from pasa.ops.attention.ascend import build_record


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("compiler/version.info", "Version=9.1.0\ntimestamp=20260730\n"),
        (
            "aarch64-linux/ascend_toolkit_install.info",
            "package_name=Ascend-cann-toolkit\nversion=9.1.0\narch=aarch64\n",
        ),
        ("ascend_toolkit_install.info", "version = 9.1.0\n"),
    ],
)
def test_cann_says_its_version_in_one_of_its_files(tmp_path, monkeypatch, file, text):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert build_record.cann_version() is None
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert build_record.cann_version() == "9.1.0"
    monkeypatch.delenv("ASCEND_HOME_PATH")
    assert build_record.cann_version() is None


def test_what_is_installed(tmp_path, monkeypatch):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert build_record.installed() == {"torch": metadata.version("torch")}
    assert build_record.record() == f"torch={metadata.version('torch')}"


@pytest.mark.parametrize(
    ("record", "different"),
    [
        (b"", {}),  # built before libraries said so
        (b"pasa-build:\0", {}),  # built by hand
        (b"pasa-build:torch=2.9.0 cann=9.1.0\0", {}),
        (b"pasa-build:torch=2.9.1 cann=9.1.0\0", {"torch": ("2.9.1", "2.9.0")}),
        (b"pasa-build:torch=2.9.0 torch_npu=2.9.0 cann=9.2.0\0", {"cann": ("9.2.0", "9.1.0")}),
    ],
)
def test_what_is_unknown_does_not_differ(tmp_path, monkeypatch, record, different):
    library = tmp_path / "libpasa_npu.so"
    library.write_bytes(b"\x7fELF" + bytes(100) + record + bytes(100))
    monkeypatch.setattr(build_record, "installed", lambda: {"torch": "2.9.0", "cann": "9.1.0"})
    assert build_record.differences(library) == different
