"""Cases come from the seed and the index alone, and cover what they should."""

import pytest
import torch

from pasa.eval.random_calls import attention, kernels, paged, run
from pasa.eval.random_calls.cases import draw_case
from pasa.eval.random_calls.inputs import MASKS, SINKS, STRIDES, Call, make
from pasa.eval.random_calls.number_draws import LARGEST, SCORES, VALUES
from pasa.eval.random_calls.run import API
from pasa.ops.attention.options import CHOICES

SMALL = kernels.kinds(0, "triton", small=True, device="cpu")
KERNELS = [draw_case(kernels.kinds(0, "triton", small=False, device="cpu"), 0, index).params for index in range(2000)]
CALLS = [draw_case(API, 0, index) for index in range(2000)]


def test_a_case_is_the_same_every_time_and_unlike_others():
    for index in range(0, 60, 7):
        first, second = (draw_case(SMALL, 3, index).params for _ in range(2))
        assert first == second
        for a, b in zip(vars(make(first)).values(), vars(make(second)).values(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, check_stride=True)
    assert len({str(params) for params in KERNELS}) == len(KERNELS)
    assert draw_case(SMALL, 1, 5) != draw_case(SMALL, 0, 5)
    assert kernels.draw_families(0) != kernels.draw_families(1)


def test_everything_occurs():
    families = {"family": {family["family"] for family in kernels.draw_families(0)}, "group": kernels.GROUPS}
    both = {"data": SCORES, "values": VALUES, "accumulate": CHOICES["accumulate"], "dtype": kernels.DTYPES}
    both |= {"garbage": ("none", "query", "key", "value", "mask"), "where": ("seen", "hidden"), "causal": (False, True)}
    ours = both | families | {"mask": ("none", *kernels.MASKS), "strides": kernels.LAYOUTS, "dim": kernels.DIMS}
    ours |= {"scale": kernels.SCALES, "poisoned": (False, True), "emulated": (False, True), "tile": range(3)}
    api = both | {"mask": MASKS, "strides": STRIDES, "layout": ("HND", "BNSD", "NHD", "BSND"), "view": paged.VIEWS}
    api |= {"backend": ("reference", "sdpa", "triton", "npu"), "fill": paged.FILLS} | CHOICES
    api |= {"softcap": (None, *attention.SOFTCAPS), "sinks": (None, *SINKS)}
    api |= {"longest": ("none", "exact", "above"), "stale": range(3)}
    for drawn, expected in ((KERNELS, ours), ([case.params for case in CALLS], api)):
        for name, values in expected.items():
            assert {params[name] for params in drawn if name in params} == set(values), name
    windows = [case.params["window"] for case in CALLS if case.params["window"]]
    assert {str(window) for window in windows} == set(map(str, attention.WINDOWS))
    assert {case.params["max_logits"] for case in CALLS} == {None, True}
    assert {case.kind for case in CALLS} == set(API)
    assert {case.params["slots"] for case in CALLS if "slots" in case.params} >= {1, 2, 7, 16, 32, 48, 64, 100, 128}
    assert 0.05 < sum(params["garbage"] != "none" for params in KERNELS) / len(KERNELS) < 0.15
    assert sum(params["dtype"] == "float16" for params in KERNELS) / len(KERNELS) > 0.5
    assert max(params["keys"] for params in KERNELS) > 9000
    paper = {"data": "randn", "values": "randn", "scale": None, "garbage": "none", "emulated": True}
    assert all(paper.items() <= params.items() for params in KERNELS if params["recovery"] == "paper")


def test_inputs_are_finite_in_fp16_unless_garbage_was_planted():
    for index in range(120):
        params = draw_case(SMALL, 0, index).params
        call = make(params)
        infected = [not torch.isfinite(x).all() for x in (call.q, call.k, call.v)]
        assert infected == [params["garbage"] == name for name in ("query", "key", "value")]
        assert all(x.abs().nan_to_num(0.0, 0.0).max() <= max(LARGEST.values()) for x in (call.q, call.k, call.v))


@pytest.mark.parametrize("name", STRIDES)
def test_strides_hold_the_same_numbers(name):
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    if name == "expanded":
        k, v = (x[:, :1].expand(x.shape).clone() for x in (k, v))
    assert all(torch.equal(a, b) for a, b in zip(STRIDES[name](q, k, v), (q, k, v), strict=True))


@pytest.mark.parametrize("name", ["key", "value"])
def test_garbage_is_put_where_fewest_rows_see_it(name):
    """The causal band ends with the last row, which alone sees the last key."""
    hidden = attention.SIMPLEST | {"rows": 3, "keys": 5, "causal": True, "garbage": name, "where": "hidden"}
    call = make(hidden | {"data_seed": 4})
    bad = ~torch.isfinite(call.k if name == "key" else call.v).all(-1)
    assert bad.nonzero()[:, 2].tolist() == [4]


def test_visible_keys_are_those_of_the_mask_and_the_causal_band():
    q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8)
    assert Call(q, k, k, None, True, 1.0).visible().sum((1, 2)).tolist() == [[12, 12, 12, 8, 4]] * 2
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., :2] = False
    assert Call(q, k, k, mask, False, 1.0).visible().sum((1, 2)).tolist() == [[12] * 5, [0, 0, 12, 12, 12]]
    assert not Call(q, k, k, torch.full((3, 5), -torch.inf), False, 1.0).visible().any()


def test_calls_of_the_npu_draw_what_its_kernels_serve(monkeypatch):
    """Masks of every kind, windows, sinks, largest scores, diagnostics and pages, in both overflow modes."""
    monkeypatch.setattr(attention.npu_backend, "architecture", lambda: "dav-2201")
    kinds = run.calls_of("npu")
    drawn = [draw_case(kinds, 1, index) for index in range(3000)]
    params = [case.params for case in drawn]
    assert {case.kind for case in drawn} == {"attention", "attention_varlen", "attention_paged"}
    assert {each["backend"] for each in params} == {"npu"}
    exact = [each for each in params if each["recovery"] == "exact"]
    assert {each["mask"] for each in exact} >= {"none", *MASKS}
    for name in ("window", "sinks", "max_logits", "diagnose"):
        assert any(each[name] for each in exact), name
        assert not any(each[name] for each in params if each["recovery"] == "paper"), name
    assert {each["overflow"] for each in exact} == {"inf", "saturate"}
    assert not any(each["softcap"] for each in params)
    assert all(each["mask"] == "none" for each in params if each["recovery"] == "paper")
    assert {each["garbage"] for each in params} == {"none", "query", "mask"}
    paged_ones = [case.params for case in drawn if case.kind == "attention_paged"]
    assert any(each["queries"] for each in paged_ones)
    assert any(each["queries"] is None and each["window"] for each in paged_ones)
