"""The scores, against numbers that the published scorer gave (parity.json) and against their definitions."""

import json
from pathlib import Path

import pytest

from pasa.eval.models.longbench import metrics
from pasa.eval.models.longbench.tasks import TASKS

PARITY = json.loads((Path(__file__).parent / "parity.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", metrics.METRICS)
def test_parity_with_the_published_scorer(name):
    """Sixty pairs per metric, or more, scored by THUDM/LongBench at 2e00731 with rouge 1.0.1, jieba 0.42.1, fuzzywuzzy
    0.18.0 without python-Levenshtein; they show every oddity of the published scorer but the depth of its stack."""
    pairs = PARITY[name]
    assert len(pairs) >= 60
    assert len({score for *_, score in pairs}) >= 3, "pairs that all score the same would show nothing"
    for answer, reference, score in pairs:
        assert metrics.METRICS[name](answer, reference, PARITY["classes"]) == pytest.approx(score, abs=1e-6), answer


def test_rouge_of_two_long_sentences_is_zero_and_is_reported():
    """The package recurses: 700 equal words without a full stop are fine, 1,100 are not, however deep the caller is."""

    def deep(levels, action):
        return action() if levels == 0 else deep(levels - 1, action)

    words = [" ".join(f"w{i}" for i in range(size)) for size in (700, 1100)]
    assert deep(400, lambda: metrics.rouge(words[0], words[0])) == pytest.approx(1, abs=1e-6)
    assert metrics.rouge(words[1], words[1]) == 0.0
    lost = [metrics.ran_out_of_stack(TASKS["gov_report"], text, ["other", text]) for text in words]
    assert lost == [False, True]
    assert not metrics.ran_out_of_stack(TASKS["gov_report"], "", ["x"]), "an empty answer is a 0 of its own"
    assert not metrics.ran_out_of_stack(TASKS["qasper"], words[1], [words[1]])


def test_each_pair_is_given_to_the_package_once(monkeypatch):
    asked = []
    monkeypatch.setattr(metrics, "_rouge_l", lambda *pair: asked.append(pair) or 0.5)
    for _ in range(2):
        assert metrics.score_item(TASKS["gov_report"], "counted once", ["left", "right"], None) == 0.5
        assert not metrics.ran_out_of_stack(TASKS["gov_report"], "counted once", ["left", "right"])
    assert asked == [("counted once", "left"), ("counted once", "right")]


def test_the_best_reference_counts_and_none_is_zero():
    task = TASKS["hotpotqa"]
    assert metrics.score_item(task, "Paris", ["London", "paris."], None) == 1.0
    assert metrics.score_item(task, "Paris", [], None) == 0.0


def test_first_line_only_where_it_is_said():
    assert metrics.score_item(TASKS["triviaqa"], "\n\nParis\nPassage: x", ["Paris"], None) == 1.0
    assert metrics.score_item(TASKS["hotpotqa"], "Paris\nPassage: x", ["Paris"], None) == pytest.approx(0.5)


def test_a_reference_without_a_paragraph_is_refused():
    with pytest.raises(ValueError, match="'7' holds no 'Paragraph ' with a number"):
        metrics.retrieval("7", "7")


def test_dataset_and_buckets():
    assert metrics.score_dataset([1.0, 0.0, 0.5]) == 50.0
    assert metrics.score_dataset([1 / 3]) == 33.33
    assert metrics.score_dataset([]) is None
    lengths = [3999, 4000, 7999, 8000]
    assert metrics.score_buckets([1.0, 0.5, 0.0, 0.25], lengths) == {"0-4k": 100.0, "4-8k": 25.0, "8k+": 25.0}
    assert metrics.score_buckets([1.0], [1])["8k+"] is None
