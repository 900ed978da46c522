"""The fuzzer's paged caches: bugs that are planted are found."""

import pytest
import torch

import pasa
from pasa.eval.random_calls import paged
from pasa.eval.random_calls.cases import Case, run_case, shrink
from pasa.eval.random_calls.run import API
from pasa.ops.attention.spec import pages as paging

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets: infinity is meant


def simple(kind="attention_paged", **changes):
    """Three sequences, the second with a page of the first, in caches with drafts that were rejected."""
    params = paged.KINDS["attention_paged"].simplest | {"batch": 1, "lse": True, "data_seed": 5, "dim": 16, "stale": 0}
    params |= {"lengths": [40, 3, 20], "keys": 63, "rows": 3, "prefix": [0, 1, 0], "queries": None, "padding": 0}
    return Case(0, 0, kind, params | {"data": "bias", "anchors": True, "heads": 2, "fill": "cut"} | changes)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("changes", [{}, {"queries": [2, 0, 1], "rows": 5, "padding": 2}, {"fill": "grown"}], ids=str)
@pytest.mark.parametrize("view", ["gapped", "heads first"])
def test_simple_cases_are_correct(backend, changes, view):
    outcome = run_case(API, simple(backend=backend, view=view, spaced=True, operator=backend == "reference", **changes))
    assert outcome.verdict == "correct", outcome.why
    assert {"cache", "anchors", "blind", "error", "naive"} <= set(outcome.measures)


def test_a_key_too_few_is_found_and_shrunk(monkeypatch):
    right = pasa.attention_paged

    def wrong(**arguments):
        return right(**arguments | {"seq_lens": (arguments["seq_lens"] - 1).clamp(min=0)})

    monkeypatch.setattr(pasa, "attention_paged", wrong)
    case = simple(data="randn", anchors=False)
    outcome = run_case(API, case)
    assert outcome.verdict == "wrong"
    assert "lse" in outcome.why
    smaller = shrink(API, case).params
    assert (smaller["heads"], smaller["dim"], smaller["fill"]) == (1, 1, "at once")


def test_stale_slots_that_are_read_are_found(monkeypatch):
    right = pasa.attention_paged

    def wrong(**arguments):
        slots = arguments["k_cache"].shape[1]
        return right(**arguments | {"seq_lens": -(-arguments["seq_lens"] // slots) * slots})

    monkeypatch.setattr(pasa, "attention_paged", wrong)
    outcome = run_case(API, simple(fill="at once", anchors=False))
    assert outcome.verdict == "wrong"
    assert "finite" in outcome.why


def test_writing_beside_the_cache_is_found(monkeypatch):
    """A row of a head is wider than the cache's in memory."""
    right = pasa.write_pages

    def wrong(k, v, k_cache, v_cache, slot_mapping, key_anchors):
        right(k, v, k_cache, v_cache, slot_mapping, key_anchors)
        k_cache.new_empty(0).set_(k_cache.untyped_storage())[0] += 1

    monkeypatch.setattr(pasa, "write_pages", wrong)
    outcome = run_case(API, simple("write_pages", view="gapped"))
    assert outcome.why.startswith("cache ")


@pytest.mark.parametrize("kind", ["attention_paged", "write_pages"])
def test_padding_that_is_written_is_found(kind, monkeypatch):
    def wrong(k, v, k_cache, v_cache, slot_mapping, key_anchors):
        k_cache.copy_(torch.where(k_cache.isnan(), 1.0, k_cache))

    monkeypatch.setattr(pasa, "write_pages", wrong)
    outcome = run_case(API, simple(kind))
    assert outcome.verdict == "wrong"
    assert "cache" in outcome.why


def test_anchors_off_the_grid_are_found(monkeypatch):
    """Means in FP16: k - a would be rounded."""
    assert run_case(API, simple("write_pages", data="randn")).verdict == "correct"
    monkeypatch.setattr(paging, "can_shift", lambda k, anchor: torch.ones_like(k, dtype=torch.bool))
    monkeypatch.setattr(paging, "anchor_near", lambda mean, largest: mean.half().float())
    outcome = run_case(API, simple("write_pages", data="randn"))
    assert outcome.verdict == "wrong"
    assert outcome.why.startswith("anchors")


def test_anchors_of_slots_that_are_not_reached_are_found(monkeypatch):
    """All slots of a page count, and what is stale there is NaN."""
    right = paging._write_anchors

    def wrong(slots, k_cache, key_anchors):
        right(slots // k_cache.shape[1] * k_cache.shape[1] + k_cache.shape[1] - 1, k_cache, key_anchors)

    monkeypatch.setattr(paging, "_write_anchors", wrong)
    outcome = run_case(API, simple("write_pages", fill="at once"))
    assert outcome.verdict == "wrong"
    assert "anchors" in outcome.why
