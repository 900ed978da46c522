"""The site builds strictly, and every link of every page leads somewhere."""

import os
import re
import subprocess
import sys

import pytest

from tests.docs.pages import BLOCK, PAGES, README, ROOT, hooks, load, name_of

SLUG = re.compile(r"[^\w\- ]")


def anchors(path):
    """Return the anchors that GitHub gives the headings of a Markdown file."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {SLUG.sub("", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page):
    """Return the links of a page that lead nowhere in the repository."""
    found = []
    for match in hooks.LINK.finditer(hooks.CODE.sub("", page.read_text("utf-8"))):
        link, anchor = match[2], (match[3] or "")[1:]
        target = hooks.target_of(name_of(page), link) if link else name_of(page)
        if target is None:
            continue
        path = ROOT / target
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            found.append(match[0])
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere_in_a_checkout(page):
    assert broken(page) == []


def test_links_that_lead_nowhere_are_noticed(monkeypatch):
    page = ROOT / "docs" / "index.md"
    monkeypatch.setattr(type(page), "read_text", lambda *_: "# A b\n[1](#a-b) [2](#c) [3](no.md) [4](limits.md#no)")
    assert broken(page) == ["](#c)", "](no.md)", "](limits.md#no)"]


def test_site_builds_strictly(tmp_path):
    """mkdocs warns of every link, anchor and name that it cannot find, and --strict makes that an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if not line.startswith("  - "))
    api = (tmp_path / "site" / "reference" / "index.html").read_text("utf-8")
    assert "broadcastable to (B, Hq, Sq, Skv)" in api, "docstrings are part of the reference"
    assert (tmp_path / "site" / "repository" / "ops" / "attention" / "index.html").is_file()


def test_links_out_of_the_documentation_lead_into_the_site():
    text = "[a](../ops/attention/README.md#glossary) `[b](../x)` [c](https://x.org) [d](limits.md)"
    expected = "[a](repository/ops/attention/README.md#glossary) `[b](../x)` [c](https://x.org) [d](limits.md)"
    assert hooks.rewrite(text, "docs/index.md") == expected
    assert hooks.rewrite("[a](../../docs/index.md)", "eval/speed/README.md") == "[a](../../../index.md)"


def test_picture_is_that_of_the_stored_run(monkeypatch):
    drawing = load(ROOT / "docs" / "assets" / "draw_rescue.py")
    monkeypatch.setattr(sys, "argv", ["draw_rescue.py", "--check"])
    assert drawing.main() == 0, "run: python docs/assets/draw_rescue.py"
    assert "docs/assets/rescue.svg" in README.read_text("utf-8")


def test_readme_is_short():
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 200
    assert not BLOCK.search(text), "generated tables belong to docs/"
