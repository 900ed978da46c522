"""The page as text; test_browser.py opens it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from pasa.eval.models.diagnose import page, report

VOID = {"meta", "link", "img", "br", "wbr", "hr"}


class Checker(HTMLParser):
    """Collects tags with their attributes; complains of any that is closed out of order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text):
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    return checker.tags


@pytest.fixture(scope="module")
def made(text_diagnosis):
    return page.render_page(*text_diagnosis[:2])


def test_the_page_is_well_formed_and_has_its_parts(made, text_diagnosis):
    tags = parsed(made)
    kinds = [tag for tag, _ in tags]
    assert kinds.count("h1") == 1
    assert kinds.count("table") == 2
    assert kinds.count("figure") == kinds.count("img") == kinds.count("figcaption") == 10, "five matrices of two layers"
    assert report.verdict(text_diagnosis[0]).replace("'", "&#39;") in made
    parts = ('class="verdict', 'id="heads"', 'id="layers"', 'id="matrices"', 'id="method"')
    order = [made.index(part) for part in parts]
    assert order == sorted(order)


def test_the_page_asks_for_nothing(made):
    """No script; no address but data; and a policy that would forbid others. Pictures bring their bytes."""
    for tag, attributes in parsed(made):
        assert tag != "script"
        if tag == "img":
            assert re.match(
                r"Heat map of .+ of model\.layers\.\d\.self_attn, head \d: values from .+ to .+\.", attributes["alt"]
            )
            assert attributes["src"].startswith("data:image/png;base64,")
            assert int(attributes["width"]) > 0 < int(attributes["height"])
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:")
    assert "default-src 'none'" in made
    assert not re.search(r"url\(|@import|https?:", made)


def test_names_of_models_are_text(text_diagnosis):
    """A folder may be called anything, and so may a module."""
    result, maps, _ = text_diagnosis
    evil = "<script>alert(1)</script>\"'&.x"
    text = page.render_page(result | {"model": evil, "modules": result["modules"] | {"skipped": [[evil, evil]]}}, maps)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    parsed(text)


def test_cells_of_the_map(text_diagnosis, video_diagnosis):
    """Colours change where FP16 ends; layers with fewer heads have empty cells."""
    result = text_diagnosis[0]
    grid = page.grid(result)
    assert grid["heads"] == 4
    assert list(grid["layers"]) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    healthy, broken = grid["layers"].values()
    assert {level for _, level, _ in healthy} == {0}
    assert {(text, level >= 5) for text, level, _ in broken} == {("2.00", True)}
    assert "peak 131,1" in broken[0][2]
    levels = {}
    for score in (65503.0, 65504.0, 1e9):
        record = result["records"][0] | {"max_score": score, "head": 0}
        levels[score] = page.grid(result | {"records": [record]})["layers"][record["module"]][0][1]
    assert list(levels.values()) == [4, 5, 7]
    assert len(page.legend()) == 8
    grid = page.grid(video_diagnosis[0])
    assert grid["heads"] == 4, "of the image encoder"
    assert [cell is None for cell in grid["layers"]["vae.encoder.mid_block.attentions.0"]] == [False, True, True, True]
