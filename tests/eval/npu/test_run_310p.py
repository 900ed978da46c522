"""The model of the 310P's kernel: stored counts are those of the kernel, and times follow from them."""

import json
from pathlib import Path

import pytest

from pasa.eval.npu import decoding_310p, run_310p
from pasa.ops.attention.ascend import on_310p

STORED = json.loads((Path(run_310p.__file__).parent / "results" / "npu_model_310p.json").read_text("utf-8"))


def test_stored_counts_are_those_of_the_kernel():
    works, decoding, passes = run_310p.count(lambda *progress: None)
    again = "run: pasa bench npu-model-310p --output-dir eval/npu/results"
    assert {str(dim): work for dim, work in works.items()} == {
        str(tile["dim"]): tile["work"] for tile in STORED["tiles"]
    }, again
    assert decoding == [
        {name: each[name] for name in ("dim", "rows", "slots", "work")} for each in STORED["decoding"]
    ], again
    assert passes == [{name: each[name] for name in ("dim", "passes")} for each in STORED["choices"]], again


def test_times_follow_from_counts_and_rates():
    rates = {name: float(each["value"]) for name, each in STORED["rates"].items()}
    for tile in STORED["tiles"]:
        again = run_310p.predict(tile["dim"], tile["work"], rates)
        assert again["bound"] == tile["bound"] == "vector"
        assert again["ns"] == pytest.approx(tile["ns"])
        assert tile["tflops_without_overlap"] < tile["tflops"] < STORED["peak_tflops"]


@pytest.mark.parametrize("engine", ["cube", "L2 read"])
def test_a_slower_engine_is_the_bound(engine):
    rates = {name: float(each["value"]) for name, each in STORED["rates"].items()}
    tile = run_310p.predict(128, STORED["tiles"][1]["work"], rates | {engine: rates[engine] / 10})
    assert tile["bound"] == engine


def test_decoding_reads_each_key_once_and_is_bound_by_that():
    """The bound is memory but for whole tiles of short rows; pages of any size cost the engines nothing."""
    rates = {name: float(each["value"]) for name, each in STORED["rates"].items()}
    for block in STORED["decoding"]:
        assert decoding_310p.reads_keys_once(block)
        again = decoding_310p.predict(block, rates, run_310p.engine_cycles, [])
        assert again["ns"] == pytest.approx(block["ns"])
        assert again["bound"] == block["bound"]
        assert again["reading"] == pytest.approx(min(1.0, block["ns"]["memory"] / max(block["ns"].values())))
    alike = [each["ns"] for each in STORED["decoding"] if (each["dim"], each["rows"]) == (128, 7)]
    assert len(alike) == 3
    assert all(ns == pytest.approx(alike[0]) for ns in alike)


def test_decoding_is_chosen_where_the_model_says_that_it_is_faster():
    """Story: the choice was made by the times of an Atlas A2. Above 64 columns it keeps one tile of distance."""
    rates = {name: float(each["value"]) for name, each in STORED["rates"].items()}
    whole = {each["dim"]: each["ns"] for each in STORED["decoding"] if each["rows"] == 64}
    assert len(STORED["choices"]) == 3
    for stored, tile in zip(STORED["choices"], STORED["tiles"], strict=True):
        dim = stored["dim"]
        again = decoding_310p.choose(stored, tile["ns"], whole[dim], rates, run_310p.engine_cycles)
        assert again["tiles"] == stored["tiles"]
        taken = on_310p.most_tiles(1, 1, dim)
        for tiles in (taken, stored["tiles"] + 1):
            before = sum(stored["ns"].values())
            is_faster = tiles * whole[dim]["vector"] <= before + tiles * tile["ns"]["vector"]
            assert is_faster == (tiles == taken), (dim, tiles)
        assert stored["tiles"] - taken in (0, 1)


def test_a_slower_vector_unit_bounds_decoding():
    rates = {name: float(each["value"]) for name, each in STORED["rates"].items()} | {"vector": 0.1}
    block = next(each for each in STORED["decoding"] if (each["dim"], each["rows"]) == (128, 7))
    slowed = decoding_310p.predict(block, rates, run_310p.engine_cycles, [])
    assert (slowed["bound"], slowed["reading"] < 0.5) == ("vector", True)


def test_every_table_says_that_it_is_a_model():
    assert STORED["gate"]["passed"]
    assert "not measured" in run_310p.report(STORED)[0]
    assert all("modelled" in table.title for table in run_310p.report(STORED)[2:4])
