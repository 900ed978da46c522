"""Dotted paths of modules."""

import pytest

from pasa.fp16 import paths


def test_empty_parts_leave_no_dots():
    assert paths.join("", "layers", "", "0") == "layers.0"
    assert paths.join("", "") == paths.owner("weight") == ""
    assert paths.owner("layers.0.weight") == "layers.0"


@pytest.mark.parametrize(
    ("outer", "path", "expected"),
    [
        ("", "layers.1", True),
        ("layers.1", "layers.1", True),
        ("layers.1", "layers.1.mlp", True),
        ("layers.1", "layers.10", False),
        ("layers.1", "layers", False),
        ("layers.1", "", False),
    ],
)
def test_a_path_lies_within_a_module_only_behind_a_dot(outer, path, expected):
    assert paths.contains(outer, path) is expected
    assert paths.inside(path, [outer]) is expected
    assert not paths.inside(path, [])
