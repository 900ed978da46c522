"""The page as text; test_browser.py opens it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from pasa.eval.models.diagnose import report, run

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


def test_the_page_is_well_formed_has_its_parts_and_asks_for_nothing(text_diagnosis):
    """No script; no address but data; and a policy that would forbid others. Pictures bring their bytes."""
    made = run.render_page(*text_diagnosis)
    tags = parsed(made)
    kinds = [tag for tag, _ in tags]
    assert kinds.count("h1") == kinds.count("table") == kinds.count("svg") == 1
    assert kinds.count("figure") == kinds.count("img") == kinds.count("figcaption") == 10, "five matrices of two layers"
    assert report.verdict(text_diagnosis[0]).replace("'", "&#39;") in made
    parts = ('class="verdict', 'id="layers"', "<svg", 'id="heads"', 'id="matrices"', 'id="method"')
    order = [made.index(part) for part in parts]
    assert order == sorted(order), "the map comes first, the table below it"
    for tag, attributes in tags:
        assert tag != "script"
        if tag == "img":
            alt = r"Heat map of .+ of model\.layers\.\d\.self_attn, head \d: values from .+ to .+\."
            assert re.match(alt, attributes["alt"])
            assert attributes["src"].startswith("data:image/png;base64,")
            assert int(attributes["width"]) > 0 < int(attributes["height"])
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:")
    assert "default-src 'none'" in made
    assert not re.search(r"url\(|@import|https?:", made.replace('xmlns="http://www.w3.org/2000/svg"', ""))


def test_names_of_models_are_text(text_diagnosis):
    """A folder may be called anything, and so may a module."""
    result, maps = text_diagnosis
    evil = "<script>alert(1)</script>\"'&.x"
    modules = {**result["modules"], "skipped": [[evil, evil]], "calls": {evil: 1} | result["modules"]["calls"]}
    records = [*result["records"], result["records"][-1] | {"module": evil}]
    text = run.render_page(result | {"model": evil, "modules": modules, "records": records}, maps)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 5, "title, heading, map, table, list"
    parsed(text)
