"""Prompts that are the benchmark's, to the character."""

import hashlib

import pytest

from pasa.eval.models.longbench import templates
from pasa.eval.models.longbench.tasks import TASKS


@pytest.fixture(autouse=True)
def fresh():
    templates.template.cache_clear()
    yield
    templates.template.cache_clear()


@pytest.mark.parametrize("dataset", TASKS)
def test_every_template_is_the_original(dataset):
    text = templates.template(dataset)
    assert hashlib.sha256(text.encode()).hexdigest() == templates.DIGESTS[dataset]
    assert "{context}" in text
    assert "{{" not in text


def test_all_datasets_have_a_digest():
    assert set(templates.DIGESTS) == set(TASKS)


def test_another_text_is_refused(monkeypatch):
    monkeypatch.setattr(templates, "_read", lambda dataset: "Answer.\n{{context}}")
    with pytest.raises(ValueError, match=r"template of trec in lm-eval is not LongBench's; run: pip install --no-deps"):
        templates.template("trec")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(templates, "SOURCE", ("no-such-distribution", "1.0"))
    with pytest.raises(FileNotFoundError, match=r"run: pip install --no-deps no-such-distribution==1\.0"):
        templates.template("trec")
