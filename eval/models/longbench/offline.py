"""Makes questions in LongBench's form without a network: ten of its data sets, all six categories, from real texts.

Questions and answers follow from the texts alone: which paragraph another translation retells, how many paragraphs are
left without their copies, how a verse goes on, which book or line it is, what comes next in a source, what a function
is said to do. It is not LongBench: scores on it compare precisions of a model, not models.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterable, Sequence

from pasa.eval.models.longbench import texts
from pasa.eval.models.longbench.data import Item
from pasa.eval.models.longbench.tasks import TASKS

Count = Callable[[str], int]
Question = tuple[str, str, list[str], list[str] | None]
"""(context, input, answers, all_classes)"""

TOKENS = (1024,)
PARAGRAPHS = 30  # the prompt of passage_retrieval_en says so
BOOKS = ("Genesis", "Psalms", "Proverbs", "Isaiah", "Matthew", "Romans")
YANG, YIN = "阳爻", "阴爻"
SEED = 42  # the benchmark's
SHORTEST = 400
"""Shortest context, in tokens: passage_retrieval_en then has 13 for each passage, and no verse takes fewer."""
FILLED = 0.8
"""Least share of the requested length that a text has."""


def build(tokens: Sequence[int], items: int, count: Count, datasets: Iterable[str] = ()) -> dict[str, list[Item]]:
    """Return `items` questions of each length in `tokens`, of each data set (default: all); always the same ones.

    `count` returns the number of tokens of a text.
    """
    questions = {}
    for name in datasets or sorted(MAKERS):
        rng = random.Random(f"{SEED} {name}")
        made = [MAKERS[name](rng, size, count) for size in tokens for _ in range(items)]
        questions[name] = [_item(name, index, *question) for index, question in enumerate(made)]
    return questions


def check(tokens: Sequence[int], items: int, datasets: Sequence[str] | None = None, *, extended: bool = False) -> None:
    """Raise ValueError, with the value, for questions that cannot be made."""
    if not tokens or min(tokens) < SHORTEST:
        raise ValueError(f"tokens={min(tokens, default=0)} is below {SHORTEST}")
    if items < 1:
        raise ValueError(f"items={items} is below 1")
    if extended:
        raise ValueError("the offline set has nothing of LongBench-E: --e needs --data")
    for name in datasets or ():
        if name not in MAKERS:
            raise ValueError(f"the offline set has no {name!r}; it has {', '.join(MAKERS)}")


def _item(name: str, index: int, context: str, text: str, answers: list[str], classes: list[str] | None) -> Item:
    whole = f"{context} {text} {answers[0]}"
    length = len(whole) if TASKS[name].language == "zh" else len(whole.split())
    return Item(index, context, text, answers, length, classes)


def _fill(pieces: Iterable[str], budget: int, count: Count) -> list[str]:
    """Return the first pieces that fit, at least one."""
    taken: list[str] = []
    for piece in pieces:
        budget -= count(piece)
        if taken and budget < 0:
            break
        taken.append(piece)
    return taken


def _passage(rng: random.Random, budget: int, count: Count) -> list[texts.Verse]:
    """Return verses of one chapter, from a random one on."""
    all_verses = texts.verses()
    while True:
        start = rng.randrange(len(all_verses))
        first = all_verses[start]
        rest = [v for v in all_verses[start : start + 60] if (v.book, v.chapter) == (first.book, first.chapter)]
        taken = _fill([verse.king_james for verse in rest], budget, count)
        if sum(map(count, taken)) >= FILLED * budget:
            return rest[: len(taken)]


def _numbered(label: str, passages: Sequence[str], colon: str = ": ") -> str:
    return "\n\n".join(f"{label}{number}{colon}{text}" for number, text in enumerate(passages, 1))


def _plain(passage: Sequence[texts.Verse]) -> str:
    return " ".join(verse.king_james for verse in passage)


def passage_retrieval_en(rng: random.Random, size: int, count: Count) -> Question:
    """Ask which paragraph of the King James Bible the American Standard Version retells."""
    passages = [_passage(rng, size // PARAGRAPHS, count) for _ in range(PARAGRAPHS)]
    right = rng.randrange(PARAGRAPHS)
    abstract = " ".join(verse.american for verse in passages[right][:3])
    return _numbered("Paragraph ", [_plain(p) for p in passages]), abstract, [f"Paragraph {right + 1}"], None


def passage_count(rng: random.Random, size: int, count: Count) -> Question:
    """Ask how many paragraphs there are without the copies."""
    budget = max(size // 20, 40)
    total = max(size // budget, 4)
    unique = rng.randrange(2, total)
    passages = [_plain(_passage(rng, budget, count)) for _ in range(unique)]
    passages += rng.choices(passages, k=total - unique)
    rng.shuffle(passages)
    return _numbered("Paragraph ", passages), "", [str(len(set(passages)))], None


def multifieldqa_en(rng: random.Random, size: int, count: Count) -> Question:
    """Ask how a verse somewhere in the text goes on; either translation is right."""
    all_verses = texts.verses()
    start = rng.randrange(len(all_verses) - size // 5)  # no verse has fewer than five tokens on average
    context = _fill([verse.king_james for verse in all_verses[start:]], size, count)
    pool = [verse for verse in all_verses[start : start + len(context)] if len(verse.king_james.split()) >= 16]
    verse = rng.choice(pool)
    words, cut = verse.king_james.split(), len(verse.king_james.split()) // 2
    question = f'How does the sentence that begins with "{" ".join(words[:cut])}" go on?'
    return " ".join(context), question, [" ".join(words[cut:]), verse.american], None


def hotpotqa(rng: random.Random, size: int, count: Count) -> Question:
    """Ask whether two sentences stand in the same book, which only two passages together say."""
    passages = [_passage(rng, 150, count) for _ in range(max(size // 150, 2))]
    if rng.random() < 0.5:
        passages[1] = [verse for verse in texts.verses() if verse.book == passages[0][0].book][:4]
    first, second = passages[0], passages[1]
    rng.shuffle(passages)
    shown = [f"Passage {n}:\n{p[0].book} {p[0].chapter}\n{_plain(p)}" for n, p in enumerate(passages, 1)]
    question = f'Do "{first[0].king_james}" and "{second[0].king_james}" stand in the same book?'
    return "\n\n".join(shown), question, ["yes" if first[0].book == second[0].book else "no"], None


def trec(rng: random.Random, size: int, count: Count) -> Question:
    """Ask which book a verse is from, after examples."""
    pool = rng.sample([verse for verse in texts.verses() if verse.book in BOOKS], size // 20)
    examples = _fill([f"Question: {v.king_james}\nType: {v.book}" for v in pool[1:]], size, count)
    return "\n".join(examples) + "\n", f"Question: {pool[0].king_james}\nType:", [pool[0].book], list(BOOKS)


def lsht(rng: random.Random, size: int, count: Count) -> Question:
    """Ask whether a line of the Zhouyi is yang or yin, after examples; its label, which says so, is cut off."""
    pool = [(text.partition("：")[2], yang) for each in texts.hexagrams() for text, yang in each.lines]
    rng.shuffle(pool)
    examples = _fill([f"新闻内容：{text}\n类别：{YANG if yang else YIN}" for text, yang in pool[1:]], size, count)
    text, yang = pool[0]
    return "\n".join(examples) + "\n", f"新闻内容：{text}\n类别：", [YANG if yang else YIN], [YANG, YIN]


def multifieldqa_zh(rng: random.Random, size: int, count: Count) -> Question:
    """Ask which chapter of the Zhouyi says a sentence."""
    chapters = rng.sample(texts.hexagrams(), 64)
    shown = _fill([f"{each.name}卦\n{each.text}" for each in chapters], size, count)
    right = rng.choice(chapters[: len(shown)])
    return "\n\n".join(shown), f"哪一卦的象辞是“{right.image}”？", [right.name, f"{right.name}卦"], None


def passage_retrieval_zh(rng: random.Random, size: int, count: Count) -> Question:
    """Ask which chapter of the Zhouyi a commentary sums up."""
    chapters = rng.sample(texts.hexagrams(), 64)
    shown = _fill([each.text for each in chapters], size, count)
    right = rng.randrange(len(shown))
    return _numbered("段落", shown, "："), chapters[right].commentary, [f"段落{right + 1}"], None


def lcc(rng: random.Random, size: int, count: Count) -> Question:
    """Ask for the next line of a module of the standard library."""
    while True:
        lines = rng.choice(list(texts.modules().values())).splitlines()
        at = rng.randrange(len(lines))
        before = _fill(reversed([line + "\n" for line in lines[:at]]), size, count)
        code = lines[at].strip()
        if len(code) >= 10 and not code.startswith(("#", '"')) and sum(map(count, before)) >= FILLED * size:
            return "".join(reversed(before)), "", [lines[at]], None


def qmsum(rng: random.Random, size: int, count: Count) -> Question:
    """Ask what a function is for; its docstring, the answer, is cut out of the module that is shown."""
    while True:
        name, source = rng.choice(list(texts.modules().items()))
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        function = rng.choice(functions) if functions else None
        summary = (ast.get_docstring(function) or "") if function else ""
        if function is None or len(summary) < 40:
            continue
        lines, first, last = source.splitlines(), function.body[0].lineno - 1, function.body[0].end_lineno or 0
        behind = _fill([line + "\n" for line in lines[last:]], size // 2, count)
        before = _fill(reversed([line + "\n" for line in lines[:first]]), size // 2, count)
        if sum(map(count, [*before, *behind])) >= FILLED * size:
            return (
                "".join([*reversed(before), *behind]),
                f"What does {name}.{function.name} do?",
                [" ".join(summary.split("\n\n")[0].split())],
                None,
            )


MAKERS: dict[str, Callable[[random.Random, int, Count], Question]] = {
    each.__name__: each
    for each in (
        *(multifieldqa_en, multifieldqa_zh, hotpotqa, qmsum, trec),
        *(lsht, passage_count, passage_retrieval_en, passage_retrieval_zh, lcc),
    )
}
