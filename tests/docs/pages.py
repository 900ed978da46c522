"""The pages of the documentation, and what several tests read of them."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md", *DOCS]
BLOCK = re.compile(r"<!-- generated: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)


def load(path):
    """Return a Python file of docs/, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load(ROOT / "docs" / "hooks.py")


def name_of(page):
    return str(page.relative_to(ROOT))


def prose(page):
    """Return a page without its generated tables and its blocks of code."""
    return re.sub(r"^```.*?^```", "", BLOCK.sub("", page.read_text("utf-8")), flags=re.MULTILINE | re.DOTALL)


def blocks(page, language):
    """Return the fenced blocks of a page in one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
