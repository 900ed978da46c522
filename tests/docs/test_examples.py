"""Every file of examples/ runs as it is, and prints what its page says that it shows."""

import re
import runpy

import pytest

from tests.docs.pages import ROOT

EXAMPLES = ROOT / "examples"
SHOWN = {
    "attention": ["scores stored in FP16: 100%", "finite: True"],
    "patch_transformers": ["FP16: logits finite: False", "patched: logits finite: True", "2 of 2 attention modules"],
    "patch_diffusers": ["8 of 8 attention modules", "every bit is as before: True"],
    "paged_decode": ["finite: True"],
    "predict_overflow": ["not safe: model.layers.1.self_attn", "1 of 3 attention modules"],
    "watch": ["model.layers.1.self_attn", "rows sampled"],
}


@pytest.mark.parametrize("name", SHOWN)
def test_example_runs(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert [text for text in SHOWN[name] if text not in said] == []


def test_every_example_is_tested_and_listed():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHOWN)
    listed = re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text("utf-8"))
    assert sorted(listed) == sorted(SHOWN)
