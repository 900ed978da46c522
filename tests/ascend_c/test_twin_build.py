"""A compiled program serves until a source, an option or the compiler changes."""

import os
import subprocess
import time

import pytest

from tests.ascend_c import twin_build
from tests.ascend_c.twin_build import build


@pytest.fixture
def compiled(tmp_path):
    """Return a function that builds a program of two files, and returns its path and what it says."""
    source, header = tmp_path / "sources" / "number.cpp", tmp_path / "include" / "kernel" / "number.h"
    source.parent.mkdir()
    header.parent.mkdir(parents=True)
    source.write_text('#include "kernel/number.h"\n#include <cstdio>\nint main() { std::printf("%d", NUMBER); }\n')

    def make(number, **how):
        header.write_text(f"#define NUMBER {number} + OFFSET\n")
        program = build(source, tmp_path / "built", include=[header.parents[1]], **{"define": ["OFFSET=0"]} | how)
        return program, int(subprocess.run([program], check=True, capture_output=True).stdout)

    return make


def test_a_change_of_a_header_or_an_option_makes_another_program(compiled):
    first, says = compiled(1)
    written = first.stat().st_ino
    assert says == 1
    assert compiled(2)[1] == 2
    assert compiled(1, define=["OFFSET=5"])[1] == 6
    assert compiled(1, optimise=("-O0",))[0] != first
    again, says = compiled(1)
    assert (again, says, again.stat().st_ino) == (first, 1, written), "the first program serves again"


def test_another_compiler_makes_another_program(compiled, monkeypatch):
    first, _ = compiled(1)
    monkeypatch.setattr(twin_build, "compiler_version", lambda: b"another")
    assert compiled(1)[0] != first


def test_programs_of_other_sources_are_removed_after_an_hour(compiled):
    first, _ = compiled(1)
    second, _ = compiled(2)
    assert first.exists(), "another session may still use it"
    os.utime(first, 2 * (time.time() - 4000,))
    third, _ = compiled(3)
    assert [each.exists() for each in (first, second, third)] == [False, True, True]


def test_a_program_that_does_not_compile_leaves_none(compiled, tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        compiled("nothing")
    assert not list((tmp_path / "built").glob("number-*-*"))
    assert compiled(4)[1] == 4
