"""Counts of the kernels on the twin, the stored result, and refusals."""

import json
import shutil
from pathlib import Path

import pytest

from pasa.eval import cli, readme
from pasa.eval.kit import output
from pasa.eval.kit.stored import RESULTS
from pasa.eval.npu import report, run, twin
from pasa.eval.npu.precision_variants import allocations

SCORE_TILE = 128 * 128


@pytest.fixture(scope="module")
def built():
    with twin.build() as program:
        yield program


@pytest.fixture(scope="module")
def stored():
    return readme.stored("npu_model")


def attend(built, exact, dim, blocks, wide=0):
    return built.work("attend", exact, dim, blocks, wide)


@pytest.mark.parametrize("dim", run.DIMS)
@pytest.mark.parametrize("blocks", [2, 8, 9])
def test_multiplications_are_two_products_and_the_offsets(built, dim, blocks):
    tiles = 2 * blocks
    products = 2 * tiles * SCORE_TILE * dim
    assert attend(built, 0, dim, blocks)["macs"] == products
    references = tiles * SCORE_TILE * 16  # one more fractal of K
    offsets = 2 * -(-2 * blocks // 16) * 16 * 128 * dim  # for each lane: anchor rows, in whole fractals, and queries
    assert attend(built, 1, dim, blocks)["macs"] == products + references + offsets


@pytest.mark.parametrize("dim", run.DIMS)
def test_wide_data_rescues_every_tile_and_other_data_none(built, dim):
    tiles = 2 * 3
    narrow, wide = attend(built, 1, dim, 3), attend(built, 1, dim, 3, 1)
    assert wide["FIX"] - narrow["FIX"] == tiles * SCORE_TILE * 4
    references = tiles * 128 * 16 * 2  # written by the vector cores, read by the cube core
    assert narrow["FIX"] == tiles * (SCORE_TILE * 2 + 128 * dim * 4) + 2 * 2 * 3 * 128 * 4
    assert narrow["MTE3"] >= tiles * SCORE_TILE * 2 + references


def test_the_plan_is_the_kernels_own(built):
    """80 tasks of 20 tiles on 20 groups: 4 each."""
    assert run.plan(built, run.CASES[0]) == {"tasks": 4, "tiles": 80}


def test_stored_counts_are_those_of_the_kernels(built, stored):
    for what, name in (("attend", "paper"), ("attend", "exact"), ("attend", "exact wide"), ("shift", "exact")):
        exact, wide = run.KERNELS[name]
        [old] = [
            each["work"]
            for each in stored["counts"]
            if (each["kernel"], each["name"], each["dim"], each["blocks"]) == (what, name, 128, 4)
        ]
        assert built.work(what, exact, 128, 4, wide) == old, "run: pasa bench npu-model --output-dir ..."


def test_stored_result_follows_from_its_counts(stored):
    made = run.predict(stored["counts"], stored["plans"], stored["shares"])
    assert output.jsonable(made["records"], output.RECORD_DIGITS) == stored["records"]
    assert output.jsonable(made["tiles"]) == stored["tiles"]
    assert output.jsonable(made["fit_residuals"]) == stored["fit_residuals"]
    assert max(stored["fit_residuals"].values()) < run.RESIDUAL_LIMIT == 0.005


def test_allocations_store_the_tiles_that_they_name(stored):
    for dim in run.DIMS:
        ways = allocations(run.fits_of(stored["counts"], "attend", dim), dim, [0.0, 1.0])
        product = 128 * dim
        stores = {name: way.per_tile["FIX"] for name, way in ways.items()}
        assert stores["fp32"] == pytest.approx(4 * SCORE_TILE + 4 * product)
        assert stores["partial"] == stores["paper"] == pytest.approx(2 * SCORE_TILE + 4 * product)
        assert stores["paper-fp16"] == pytest.approx(2 * SCORE_TILE + 2 * product)
        assert stores["exact 100 %"] == pytest.approx(stores["exact 0 %"] + 4 * SCORE_TILE)
        left = ways["paper-fp16"].per_tile
        assert [left[f"{name} float"] for name in ("ReduceDataBlock", "Cast")] == pytest.approx([0, 0], abs=1e-6)


def test_more_rescued_tiles_are_never_faster(stored):
    for case in stored["cases"]:
        for scenario in stored["scenarios"]:
            own = report.select(stored, case=case["name"], scenario=scenario)
            times = {e["allocation"]: e["none_ms"] for e in own if e["allocation"].startswith("exact")}
            ordered = [times[name] for name in sorted(times, key=lambda name: float(name.split()[1]))]
            assert ordered == sorted(ordered)


def test_without_tiles_in_fp32_both_recoveries_are_modelled_faster_than_fp32_scores(stored):
    """Story: row reductions by whole repeats and a barrier behind every number of a row made both slower. In the other
    scenario of vector work, queues at their widths, they still are."""
    for name in ("paper", "exact 0 %"):
        ratios = [each["ratio_overlap"] for each in report.select(stored, scenario="as written", allocation=name)]
        assert min(ratios) > 1.0
        assert all(each["ratio_overlap"] < 1 for each in report.select(stored, scenario="peak", allocation=name))


def test_every_prediction_says_that_it_is_a_model(stored):
    tables = [*report.report(stored)[:-2], report.case_table(stored, "peak"), report.tile_table(stored, 64)]
    assert all(table.note.startswith("Model, not measured.") for table in tables)
    assert report.claim(stored).startswith("Model, not measured.")
    assert "not measured" in report.origin(stored)


def test_files_are_those_of_the_result(stored, tmp_path):
    paths = run.EXPERIMENT.save(stored, tmp_path)
    assert [path.name for path in paths] == ["npu_model.json", "npu_model.md"]
    folder = RESULTS["npu_model"].parent
    assert json.loads(paths[0].read_text()) == stored
    assert paths[1].read_text() == (folder / "npu_model.md").read_text()


@pytest.mark.parametrize("missing", ["g++", "/nowhere/ascend_c"])
def test_without_compiler_or_kernels_one_line_says_so(missing, monkeypatch, capsys):
    if missing == "g++":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        monkeypatch.setattr(twin, "KERNELS", Path(missing))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "npu-model"])
    shown = capsys.readouterr()
    assert (stopped.value.code, shown.out) == (2, "")
    assert len(shown.err.splitlines()) == 1
    assert missing in shown.err
