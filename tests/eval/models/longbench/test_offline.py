"""The set that needs no network: its form, its lengths, and that its answers are right."""

import ast
import random

import pytest
import transformers

from pasa.eval.kit import embedded_model
from pasa.eval.kit.stored import stored
from pasa.eval.models.longbench import data, offline
from pasa.eval.models.longbench.tasks import CATEGORIES, find_task, score_item

SIZES = (600, 600, 1500, 1500)


def tokens(text):
    return len(text.encode()) // 4


@pytest.fixture(scope="module")
def items():
    return offline.build(SIZES, tokens)


def test_ten_data_sets_of_all_categories(items):
    assert len(items) == 10
    assert {find_task(name).category for name in items} == set(CATEGORIES)
    for questions in items.values():
        for item, size in zip(questions, SIZES, strict=True):
            assert 0.75 * size <= tokens(item.context) <= 2.2 * size


def test_the_questions_are_those_of_the_stored_run():
    """Digests of all data sets that do not depend on the version of Python: the stored run can be repeated."""
    path, run = embedded_model.find_weights(), stored("longbench")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    sizes = [size for size in run["settings"]["tokens"] for _ in range(run["settings"]["items"])]
    names = [name for name in offline.MAKERS if name not in ("lcc", "qmsum")]
    made = offline.build(sizes, lambda text: len(tokenizer(text).input_ids), names)
    for name in names:
        assert f"{len(made[name])} items, {data.digest(made[name])}" == run["identity"]["data"][name]


def test_every_answer_scores_full_marks(items):
    for name, questions in items.items():
        for item in questions:
            assert score_item(find_task(name), item.answers[0], item.answers, item.all_classes) > 0.999, name


def test_counts_are_right(items):
    for item in items["passage_count"]:
        paragraphs = [part.partition(": ")[2] for part in item.context.split("\n\n")]
        assert item.answers == [str(len(set(paragraphs)))]
        assert len(set(paragraphs)) < len(paragraphs)


def test_retrieval_is_right(items):
    """The paragraph holds the King James verses of which the abstract is the other translation."""
    other = {verse.american: verse.king_james for verse in offline.verses()}
    for item in items["passage_retrieval_en"]:
        paragraphs = dict(part.split(": ", 1) for part in item.context.split("\n\n"))
        assert len(paragraphs) == 30
        begun = next(king for american, king in other.items() if item.input.startswith(american))
        assert begun in paragraphs[item.answers[0]]
    for item in items["passage_retrieval_zh"]:
        chapter = next(each for each in offline.hexagrams() if each.commentary == item.input)
        assert f"{item.answers[0]}：{chapter.text}" in item.context


def test_books_are_compared_rightly():
    seen = set()
    for seed in range(8):
        context, question, answers, _ = offline.hotpotqa(random.Random(seed), 600, len)
        books = [
            passage.split("\n")[1].rpartition(" ")[0]
            for quote in (question.split('"')[1], question.split('"')[3])
            for passage in context.split("\n\n")
            if quote in passage
        ]
        seen.add(answers[0])
        assert answers == ["yes" if len(set(books)) == 1 else "no"]
    assert seen == {"yes", "no"}


def test_examples_do_not_hold_the_question(items):
    for name in ("trec", "lsht"):
        for item in items[name]:
            assert item.input.split("\n")[0] not in item.context
            assert item.answers[0] in item.all_classes
            assert item.context.count(item.all_classes[0]) >= 1


def test_the_docstring_is_cut_out(items):
    for item in items["qmsum"]:
        module, name = item.input.removeprefix("What does ").removesuffix(" do?").split(".")
        nodes = ast.parse(offline.modules()[module]).body
        [function] = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
        assert " ".join(ast.get_docstring(function).split()).startswith(item.answers[0])
        assert ast.get_docstring(function, clean=False) not in item.context


def test_questions_that_cannot_be_made_are_named():
    with pytest.raises(ValueError, match="tokens=300 must be at least 400"):
        offline.build([500, 300], tokens)
    with pytest.raises(ValueError, match="the offline set has no 'samsum'; it has multifieldqa_en, "):
        offline.build([500], tokens, ["samsum"])
