"""Counts of the kernels on the twin, the stored result, and refusals."""

import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from pasa.eval.kit import output
from pasa.eval.kit.stored import pick, stored
from pasa.eval.npu import run
from pasa.eval.npu.precision_variants import allocations

SCORE_TILE = 128 * 128
STORED = stored("npu_model")


@pytest.fixture(scope="module")
def built():
    with run.build() as program:
        yield program


@pytest.mark.parametrize("dim", run.DIMS)
@pytest.mark.parametrize("blocks", [2, 8, 9])
def test_multiplications_are_two_products_and_the_offsets(built, dim, blocks):
    tiles = 2 * blocks
    products = 2 * tiles * SCORE_TILE * dim
    assert built.work("attend", 0, dim, blocks, 0)["macs"] == products
    references = tiles * SCORE_TILE * 16  # one more fractal of K
    offsets = 2 * -(-2 * blocks // 16) * 16 * 128 * dim  # for each lane: anchor rows, in whole fractals, and queries
    assert built.work("attend", 1, dim, blocks, 0)["macs"] == products + references + offsets


@pytest.mark.parametrize("dim", run.DIMS)
def test_wide_data_rescues_every_tile_and_other_data_none(built, dim):
    tiles = 2 * 3
    narrow, wide = (built.work("attend", 1, dim, 3, wide) for wide in (0, 1))
    assert wide["FIX"] - narrow["FIX"] == tiles * SCORE_TILE * 4
    references = tiles * 128 * 16 * 2  # written by the vector cores, read by the cube core
    assert narrow["FIX"] == tiles * (SCORE_TILE * 2 + 128 * dim * 4) + 2 * 2 * 3 * 128 * 4
    assert narrow["MTE3"] >= tiles * SCORE_TILE * 2 + references


def test_stored_counts_are_those_of_the_kernels(built):
    """The paper's plan is 80 tasks of 20 tiles on 20 groups: 4 each."""
    assert run.plan(built, run.CASES[0]) == STORED["plans"]["paper"] == {"tasks": 4, "tiles": 80}
    for what, name in (("attend", "paper"), ("attend", "exact"), ("attend", "exact wide"), ("shift", "exact")):
        exact, wide = run.KERNELS[name]
        (old,) = pick(STORED["counts"], kernel=what, name=name, dim=128, blocks=4)
        assert built.work(what, exact, 128, 4, wide) == old["work"], "run: pasa bench npu-model --output-dir ..."


def test_stored_result_follows_from_its_counts():
    made = run.predict(STORED["counts"], STORED["plans"], STORED["shares"])
    assert output.jsonable(made["records"], output.RECORD_DIGITS) == STORED["records"]
    assert output.jsonable(made["tiles"]) == STORED["tiles"]
    assert output.jsonable(made["fit_residuals"]) == STORED["fit_residuals"]
    assert max(STORED["fit_residuals"].values()) < run.RESIDUAL_LIMIT == 0.005


@pytest.mark.parametrize(("residual", "passed"), [(0.00499, True), (0.005, False), (0.00501, False), (math.nan, False)])
def test_one_fit_beyond_the_limit_fails_the_gate(residual, passed, monkeypatch):
    residuals = STORED["fit_residuals"] | {"exact, D = 64": residual}
    monkeypatch.setattr(run, "build", nullcontext)
    for name in ("count", "plan", "count_roundings"):
        monkeypatch.setattr(run, name, lambda *_: None)
    monkeypatch.setattr(run, "predict", lambda *_: {"fit_residuals": residuals})
    assert run.run_npu_model()["gate"] == {"passed": passed}


def test_allocations_store_the_tiles_that_they_name():
    for dim in run.DIMS:
        ways = allocations(run.fits_of(STORED["counts"], "attend", dim), dim, [0.0, 1.0])
        product = 128 * dim
        stores = {name: way.per_tile["FIX"] for name, way in ways.items()}
        assert stores["fp32"] == pytest.approx(4 * SCORE_TILE + 4 * product)
        assert stores["partial"] == stores["paper"] == pytest.approx(2 * SCORE_TILE + 4 * product)
        assert stores["paper-fp16"] == pytest.approx(2 * SCORE_TILE + 2 * product)
        assert stores["exact 100 %"] == pytest.approx(stores["exact 0 %"] + 4 * SCORE_TILE)
        left = ways["paper-fp16"].per_tile
        assert [left[f"{name} float"] for name in ("ReduceDataBlock", "Cast")] == pytest.approx([0, 0], abs=1e-6)


def test_more_rescued_tiles_are_never_faster():
    for case in STORED["cases"]:
        for scenario in STORED["scenarios"]:
            chosen = pick(STORED["records"], case=case["name"], scenario=scenario)
            exact = [each for each in chosen if each["allocation"].startswith("exact")]
            times = [e["none_ms"] for e in sorted(exact, key=lambda each: float(each["allocation"].split()[1]))]
            assert times == sorted(times)


def test_without_tiles_in_fp32_both_recoveries_are_modelled_faster_than_fp32_scores():
    """Story: row reductions by whole repeats and a barrier behind every number of a row made both slower. In the other
    scenario of vector work, queues at their widths, they still are."""
    for name in ("paper", "exact 0 %"):
        ratios = {
            scenario: [each["ratio_overlap"] for each in pick(STORED["records"], scenario=scenario, allocation=name)]
            for scenario in ("as written", "peak")
        }
        assert min(ratios["as written"]) > 1.0 > max(ratios["peak"])


def test_every_prediction_says_that_it_is_a_model():
    shown = [*run.report(STORED), *run.appendix(STORED)[:-3]]
    assert all(getattr(each, "note", each).startswith("Model, not measured") for each in shown)


@pytest.mark.parametrize("missing", ["g++", "/nowhere/ascend_c"])
def test_without_compiler_or_kernels_one_line_says_so(missing, monkeypatch):
    if missing == "g++":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setattr(run, "ASCEND_C", Path(missing))
    with pytest.raises(OSError, match=re.escape(missing)), run.build():
        pass
