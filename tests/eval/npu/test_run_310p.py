"""The model of the 310P's kernel: stored counts are those of the kernel, and times follow from them."""

import json
from pathlib import Path

import pytest

from pasa.eval.npu import run_310p

STORED = json.loads((Path(run_310p.__file__).parent / "results" / "npu_model_310p.json").read_text("utf-8"))


def test_stored_counts_are_those_of_the_kernel():
    works = run_310p.count(lambda *progress: None)
    assert {str(dim): work for dim, work in works.items()} == {
        str(tile["dim"]): tile["work"] for tile in STORED["tiles"]
    }, "run: pasa bench npu-model-310p --output-dir eval/npu/results"


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


def test_every_table_says_that_it_is_a_model():
    assert STORED["gate"]["passed"]
    assert "not measured" in run_310p.report(STORED)[0]
