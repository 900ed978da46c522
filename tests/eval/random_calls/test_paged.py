"""The fuzzer's paged caches: right calls hold all bounds, and errors that are planted are found."""

import pytest
import torch

import pasa
from pasa.eval.random_calls import paged
from pasa.eval.random_calls.cases import Case, run_case, shrink
from pasa.eval.random_calls.run import API
from pasa.ops.attention.spec import pages as paging

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets: infinity is meant


def simple(kind="attention_paged", **changes):
    """Return three sequences, the second with a page of the first, in caches with drafts that were rejected."""
    params = paged.KINDS["attention_paged"].simplest | {"batch": 1, "lse": True, "data_seed": 5, "dim": 16, "stale": 0}
    params |= {"lengths": [40, 3, 20], "keys": 63, "rows": 3, "prefix": [0, 1, 0], "queries": None, "padding": 0}
    return Case(0, 0, kind, params | {"data": "bias", "anchors": True, "heads": 2, "fill": "cut"} | changes)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("changes", [{}, {"queries": [2, 0, 1], "rows": 5, "padding": 2}, {"fill": "grown"}], ids=str)
@pytest.mark.parametrize("view", ["gapped", "heads first"])
def test_simple_cases_are_correct(backend, changes, view):
    outcome = run_case(API, simple(backend=backend, view=view, spaced=True, operator=backend == "reference", **changes))
    assert outcome.verdict == "correct", outcome.why
    assert {"cache", "anchors", "fully-masked", "error", "naive"} <= set(outcome.measures)


def written_beside_the_cache(right, k_cache, **how):
    """Write beside the cache: a row of a head is wider in memory than in the cache."""
    right(k_cache=k_cache, **how)
    k_cache.new_empty(0).set_(k_cache.untyped_storage())[0] += 1


def padding_written(right, k_cache, **how):
    k_cache.copy_(torch.where(k_cache.isnan(), 1.0, k_cache))


PLANTED = {
    "a key too few": (
        (pasa, "attention_paged", lambda right, **how: right(**how | {"seq_lens": (how["seq_lens"] - 1).clamp(min=0)})),
        (simple(data="randn", anchors=False), "lse"),
    ),
    "stale slots are read": (
        (pasa, "attention_paged", lambda right, **how: right(**how | {"seq_lens": -(-how["seq_lens"] // 16) * 16})),
        (simple(fill="at once", anchors=False), "finite"),
    ),
    "anchors of stale slots": (
        (paging, "_write_anchors", lambda right, slots, *caches: right(slots // 16 * 16 + 15, *caches)),
        (simple("write_pages", fill="at once"), "anchors"),
    ),
    "anchors in FP16: k - a is rounded": (
        (paging, "anchor_near", lambda right, mean, largest: mean.half().float()),
        (simple("write_pages", data="randn"), "anchors"),
    ),
    "beside": ((pasa, "write_pages", written_beside_the_cache), (simple("write_pages", view="gapped"), "cache")),
    "padding": ((pasa, "write_pages", padding_written), (simple("write_pages"), "cache")),
    "padding, then a call": ((pasa, "write_pages", padding_written), (simple("attention_paged"), "cache")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_found(name, monkeypatch):
    (module, attribute, wrong), (case, measure) = PLANTED[name]
    right = getattr(module, attribute)
    assert run_case(API, case).verdict == "correct"
    monkeypatch.setattr(module, attribute, lambda *args, **how: wrong(right, *args, **how))
    if "FP16" in name:  # such anchors are not written where keys could lose a bit
        monkeypatch.setattr(paging, "can_shift", lambda k, anchor: torch.ones_like(k, dtype=torch.bool))
    outcome = run_case(API, case)
    assert outcome.verdict == "wrong"
    assert measure in outcome.why
    if name == "a key too few":
        smaller = shrink(API, case).params
        assert (smaller["heads"], smaller["dim"], smaller["fill"]) == (1, 1, "at once")
