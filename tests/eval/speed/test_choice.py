"""The faster of two backends: what runs show of it, what is chosen, and what the benchmark says of a wrong choice."""

import dataclasses
import json
import math

import pytest

from pasa.eval.kit.stored import ROOT
from pasa.eval.speed import choice, choice_run, run
from pasa.eval.speed.cases import CASES, SpeedCase
from pasa.eval.speed.choice import BACKENDS, gain, measurements, shape_of, wrong
from pasa.eval.speed.implementations import GUARDED
from pasa.ops import measured
from pasa.ops.measured import Shape
from tests.eval.speed import fakes

FIXED = "named", "decode", "padded", "prefill", "few", "decode_more", "prefill_more"
NAMES = *FIXED, "drawn", "drawn_more", "drawn_rest"
RUNS = tuple(f"choice/{name}.json" for name in NAMES)
STORED = [ROOT / "eval/speed/results" / name for name in RUNS]
CASE = SpeedCase("wide", 2, 8, 4, 1000, 3000, 80, graphed=True)


def stored_run(ms, case=CASE, commit="0", **fields):
    """Return a run of a case with these times by implementation and way of running."""
    records = [
        {"case": case.name, "implementation": name, "how": how, "status": "ok", "median_ms": each, "to_cudnn": 1 / each}
        | fields
        for (name, how), each in ms.items()
    ]
    environment = {"capability": "9.0", "device": "H200", "commit": commit}
    return {"cases": [case.described], "records": records, "environment": environment}


FASTER_EVERYWHERE = {("pasa", "eager"): 3.0, (GUARDED, "eager"): 2.0, ("pasa", "graph"): 3.0, (GUARDED, "graph"): 2.5}


@pytest.mark.parametrize("case", [*CASES, *choice_run.GRID], ids=lambda case: case.name)
def test_a_shape_is_read_from_its_text(case):
    shape = shape_of(case.described)
    assert shape == Shape(
        dim=case.dim,
        causal=case.causal and not case.padded,
        mask="bool" if case.padded else "none",
        heads=case.batch * case.heads,
        kv_heads=case.batch * case.kv_heads,
        rows=case.rows,
        keys=case.keys,
    )


def test_a_text_that_is_no_shape_is_refused():
    with pytest.raises(ValueError, match="'1 x 2' is no shape of a case"):
        shape_of({"shape": "1 x 2"})


@pytest.mark.parametrize(
    ("plain", "biased", "faster"),
    [
        (1.2, 1.2, "sdpa"),
        (1.0, 1.2, "sdpa"),
        (0.98, 1.2, "sdpa"),
        (0.9, 1.2, "sdpa"),  # each is faster on one kind of data, and sdpa loses less
        (0.7, 1.2, "triton"),
        (0.82, 1.2, ""),
        (1.04, 1.04, ""),
        (0.8, 1.0, "triton"),
        (0.8, 0.8, "triton"),
    ],
)
def test_the_chosen_one_loses_less_where_it_loses_most(plain, biased, faster):
    assert measured.faster(gain({"eager": plain, "eager biased": biased})) == faster
    assert gain({}) == 0.0


@pytest.mark.parametrize(
    ("triton", "sdpa", "chosen"),
    [
        ((0.4, 1.4), (1.02, 1.03), "sdpa"),  # on N(0, 1) it takes 2.5 times as long, and nowhere much longer than SDPA
        ((1.03, 1.03), (0.4, 1.4), "triton"),
        ((0.4, 1.07), (1.02, 1.03), ""),  # one reading of 1.07 may be 1.03 in another run
        ((0.4, 1.05), (1.02, 1.03), "triton"),  # neither is much slower than SDPA
        ((0.4, 1.4), (1.06, 1.07), "triton"),  # both are
        ((0.6, 0.9), (0.7, 0.7), "sdpa"),
    ],
)
def test_the_attention_that_a_caller_had_counts_first(triton, sdpa, chosen):
    """Times on N(0, 1) and on biased data, as times those of the fastest SDPA kernel."""
    ways = "graph", "graph biased"
    ratios = dict(zip(ways, [a / b for a, b in zip(triton, sdpa, strict=True)], strict=True))
    behind = {"triton": dict(zip(ways, triton, strict=True)), "sdpa": dict(zip(ways, sdpa, strict=True))}
    assert measured.faster(gain(ratios, behind=behind)) == chosen


def test_the_fastest_kernel_of_sdpa_beside_a_backend_counts():
    """cuDNN takes as long as `triton` on N(0, 1), flash attention half as long; `sdpa` is a tenth slower than that."""
    times = {("pasa", "graph"): 2.0, (GUARDED, "graph"): 1.1}
    run = stored_run(times)
    for record in run["records"]:
        record |= {"to_cudnn": 2.0 / record["median_ms"], "to_flash": 1.0 / record["median_ms"]}
    behind = choice._behind(
        ["graph"], {("graph", BACKENDS[each["implementation"]]): (each, {}) for each in run["records"]}
    )
    assert behind == {"triton": {"graph": 2.0}, "sdpa": {"graph": pytest.approx(1.1)}}
    run["records"][0] |= {"to_cudnn": None, "to_flash": None}
    assert (
        choice._behind(["graph"], {("graph", BACKENDS[x["implementation"]]): (x, {}) for x in run["records"]}) is None
    )


def test_times_of_the_device_count_for_prompts_and_in_graphs():
    ratios = {"eager": 0.5, "eager biased": 0.8, "graph": 1.2, "graph biased": 0.9}
    assert gain(ratios) == gain(ratios, rows=16) == -1.0
    in_graph = gain(ratios, rows=17), gain(ratios, captured=True), gain(ratios, 17, captured=True)
    assert in_graph == pytest.approx([math.log2(1.2 * 0.9)] * 3)
    assert gain({"eager": 2.0}, captured=True) == gain({"graph": 2.0}) == 1.0  # what else was measured


@pytest.mark.parametrize(
    ("kind", "ms", "eagerly"),
    [
        ({}, 1.0, "sdpa"),
        ({"causal": True}, 1.0, "triton"),
        ({"padded": True}, 1.0, "triton"),
        ({"rows": 4}, 1.0, "triton"),
        ({"causal": True}, 8.0, ""),  # 1.3 ms are saved in each call, on the device, and 1 ms is spent
        ({"causal": True}, 16.0, "sdpa"),
        ({"rows": 4}, 4.0, "sdpa"),  # or where it waits for the host
    ],
)
def test_where_lengths_are_new_cudnn_has_to_save_the_time_of_its_preparation(kind, ms, eagerly):
    """A new length costs cuDNN 40 ms or more, which a model's 40 layers share: patched models took them every time."""
    case = dataclasses.replace(CASE, **kind)
    times = {key: ms * each / 3 for key, each in FASTER_EVERYWHERE.items()}
    (found,) = measurements([stored_run(times, case)])
    assert (found.best(False), found.best(True)) == (eagerly, "sdpa")


def test_a_run_gives_a_measurement_for_each_shape():
    (found,) = measurements([stored_run(FASTER_EVERYWHERE)])
    assert found.shape == Shape(80, False, "none", 16, 8, 1000, 3000)
    assert (found.capability, found.eager, found.captured, found.case) == ("9.0", 0.263, 0.263, "wide")
    assert found.ratios == {"eager": 1.5, "graph": 1.2}
    assert found.runs == ("H200, commit 0",)


def test_runs_are_compared_by_their_times_relative_to_cudnn():
    """The second run was made on a device that was twice as slow, which is in the times of both."""
    ours = stored_run({("pasa", "graph"): 3.0}, to_cudnn=0.5)
    other = stored_run({(GUARDED, "graph"): 4.0}, commit="1", to_cudnn=0.75)
    (found,) = measurements([ours, other])
    assert found.ratios == {"graph": 1.5}
    assert found.runs == ("H200, commit 0", "H200, commit 1")


def test_runs_are_not_compared_where_cudnn_was_not_timed():
    """cuDNN refuses some shapes. Then nothing says how fast the devices of two runs were."""
    ours = stored_run({("pasa", "eager"): 3.0}, to_cudnn=None)
    other = stored_run({(GUARDED, "eager"): 2.0}, to_cudnn=None)
    assert measurements([ours, other]) == []
    both = stored_run({("pasa", "eager"): 3.0, (GUARDED, "eager"): 2.0}, to_cudnn=None)
    assert measurements([both])[0].ratios == {"eager": 1.5}


def test_data_and_failures_do_not_count():
    biased = dataclasses.replace(CASE, data="constant")
    assert measurements([stored_run(FASTER_EVERYWHERE, biased)]) == []
    assert measurements([stored_run(FASTER_EVERYWHERE, status="failed gate")]) == []
    assert measurements([stored_run({("pasa", "eager"): 1.0})]) == []


def test_a_wrong_choice_is_named():
    """Without a table `triton` is chosen; a table that follows the measurement has nothing to complain of."""
    measured_now = stored_run(FASTER_EVERYWHERE)
    lines = wrong(measured_now, ())
    ratios = "speed of sdpa over triton: 1.50 eager, 1.20 graph"
    ways = "eagerly", "in a graph"
    assert lines == [f"wide: triton is chosen {how}, although sdpa loses less ({ratios})" for how in ways]
    assert wrong(measured_now, measurements([measured_now])) == []
    opposite = {key: 1 / each for key, each in FASTER_EVERYWHERE.items()}
    lines = wrong(stored_run(opposite), measurements([measured_now]))
    assert [line.startswith("wide: sdpa is chosen") for line in lines] == [True, True]


def test_a_choice_may_be_wrong_in_a_graph_alone():
    case = dataclasses.replace(CASE, rows=1)
    times = {("pasa", "eager"): 1.0, (GUARDED, "eager"): 2.0, ("pasa", "graph"): 2.0, (GUARDED, "graph"): 1.0}
    (line,) = wrong(stored_run(times, case), ())
    assert line.startswith("wide: triton is chosen in a graph, although sdpa loses less")


def test_a_difference_within_the_margin_is_no_wrong_choice():
    close = {key: 2.0 if key[0] == "pasa" else 2.0 / 1.04 for key in FASTER_EVERYWHERE}
    assert wrong(stored_run(close), ()) == []


def test_the_benchmark_fails_on_a_wrong_choice(monkeypatch):
    monkeypatch.setitem(fakes.SPEED, GUARDED, 0.5)
    entrants = (fakes.ENTRANTS[4], fakes.implementation(GUARDED, fakes.FP32))
    monkeypatch.setattr(measured, "table", lambda: ())
    result = run.measure([fakes.TINY], entrants, fakes.FakeClock(), fakes.BANDWIDTH, 2)
    assert not result["gate"]["passed"]
    (failure,) = result["gate"]["failures"]
    assert failure.startswith("tiny: triton is chosen in a graph, although sdpa loses less")


def test_the_stored_table_comes_from_stored_runs():
    """`pasa bench choice --write`, with the runs in eval/speed/results, writes the table that is in use."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in STORED]
    assert measured.to_json(measurements(runs)) == measured.FILE.read_text(encoding="utf-8")


def test_the_command_writes_the_table_and_says_what_is_open(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "FILE", tmp_path / "measured.json")
    result = choice_run.run_choice(STORED, write=True)
    assert measured.FILE.read_text(encoding="utf-8").count("\n") == len(result["measurements"]) + 2
    assert result["to_measure"] == {"9.0": []}, "a case of every kind was measured"
    table, *_, written = choice_run.report(result)
    shown = [tuple(row[-2:]) for row in table.rows]
    assert shown == [
        tuple(each.best(how) or "neither" for how in (False, True)) for each in measured.table.__wrapped__()
    ]
    assert len(table.rows) == len(result["measurements"])
    assert str(measured.FILE) in written


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "run.json holds no run of `pasa bench speed`"),
        ('{"experiment": "speed", "cases": []}', "run.json holds no run of `pasa bench speed`"),
        (
            '{"experiment": "rmse", "cases": [], "records": [], "environment": {}}',
            "run.json holds no run of `pasa bench speed`",
        ),
        *(
            (json.dumps({"experiment": "speed", "cases": cases, "records": records, "environment": {}}), "holds no run")
            for cases, records in ((1, []), ([1], []), ([{"name": "a", "shape": "?"}], []), ([], [{"case": "a"}]))
        ),
        ('{"experiment": "speed", "cases": [], "records": [], "environment": {}}', "no case has times of both"),
    ],
)
def test_the_command_writes_no_table_without_a_measurement(text, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "FILE", tmp_path / "measured.json")
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=reason):
        choice_run.run_choice([tmp_path / "run.json"], write=True)
    assert not measured.FILE.exists()


def test_the_command_names_the_cases_of_which_no_kind_was_measured(tmp_path):
    """A case counts as measured if another one of its kind was, however far it is."""
    run_of_one = json.loads(STORED[RUNS.index("choice/prefill.json")].read_text(encoding="utf-8"))
    one = next(case for case in run_of_one["cases"] if case["name"] == "causal-8x128-d80")
    (tmp_path / "run.json").write_text(json.dumps(run_of_one | {"cases": [one]}), encoding="utf-8")
    result = choice_run.run_choice([tmp_path / "run.json"])
    open_cases = result["to_measure"]["9.0"]
    assert "causal-64x8192-d80" not in open_cases
    assert {"full-8x128-d80", "causal-8x128-d128", "decode-1x32x1x256-d80"} <= set(open_cases)
    _, text = choice_run.report(result)
    assert f"{len(open_cases)} of {len(choice_run.GRID)} cases" in text


def test_random_shapes_of_the_grid_are_shown_by_kind():
    """Every one of them has other sizes, so a row for each size would be a row for each shape."""
    drawn = [case for case in choice_run.PLAIN if case.name.startswith("random-")]
    assert [case.name for case in drawn] == [f"random-1-{index}" for index in range(400)], "not seed 0, which judges"
    assert {case.data for case in drawn} == {"randn"}
    assert choice_run._group(Shape(64, True, "none", 22, 22, 4, 4), drawn=True) == "prompts, D up to 128"
    labels = {choice_run._group(shape_of(case.described), drawn=True) for case in drawn}
    kinds = "decoding", "prompts", "cross-attention"
    halves = {f"{kind}, D {side} 128" for kind in kinds for side in ("up to", "above")}
    assert labels == halves | {f"left-padded {each}" for each in halves}
    sized = Shape(80, False, "bool", 16, 8, 1000, 3000)
    assert choice_run._group(sized, drawn=False) == (
        "cross-attention, left-padded, D up to 128, 1,000 rows and 3,000 keys"
    )


def test_the_grid_fits_the_limits_of_a_case():
    assert max(case.flops for case in choice_run.GRID) <= 5e12
    assert max(case.bytes for case in choice_run.GRID) <= 10e9
    assert len({case.name for case in choice_run.GRID}) == len(choice_run.GRID)


def test_a_run_of_the_grid_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """A case that was measured is not run again, and a run without all cases does not pass."""
    names, run = ["one", "two", "three"], []
    monkeypatch.setattr(choice_run, "GRID", tuple(dataclasses.replace(CASE, name=name) for name in names))
    monkeypatch.setattr(choice_run, "CudaClock", fakes.FakeClock)
    monkeypatch.setattr(choice_run, "copy_bandwidth", lambda clock: 1e12)

    def measure_case(case, *arguments, split_up):
        assert not split_up
        if case.name == "two" and "two" not in run:
            run.append("two")
            raise KeyboardInterrupt
        run.append(case.name)
        return [{"case": case.name, "implementation": "pasa", "how": "eager", "status": "ok", "median_ms": 1.0}], []

    monkeypatch.setattr(choice_run, "measure_case", measure_case)
    with pytest.raises(KeyboardInterrupt):
        choice_run.run_grid(folder=tmp_path)
    cut = choice_run.run_grid(folder=tmp_path, minutes=0.0)
    assert [case["name"] for case in cut["cases"]] == ["one"]
    assert cut["gate"] == {"passed": False, "failures": ["2 of 3 cases are left"]}
    whole = choice_run.run_grid(folder=tmp_path)
    assert run == ["one", "two", "two", "three"]
    assert [record["case"] for record in whole["records"]] == names
    assert whole["gate"]["passed"]
    part = choice_run.run_grid(case=["t"])
    assert [case["name"] for case in part["cases"]] == ["two", "three"]
    assert part["gate"]["passed"]
    with pytest.raises(ValueError, match="no case of the grid begins with 'four'"):
        choice_run.run_grid(case=["one", "four"])
