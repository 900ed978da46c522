"""The equations on hand-made counts, the fit, and the substitutions."""

import pytest

from pasa.eval.npu import roofline as model
from pasa.eval.npu.precision_variants import Fit, fit, mixed, substituted, substitutions
from pasa.eval.npu.roofline import cycles_of, load_rates, rate
from pasa.eval.speed.cases import select_cases


def test_an_engines_time_is_its_work_over_its_rate_and_the_efficiency() -> None:
    clock = rate("efficiency") * 1.8e9
    work = {"macs": 4096.0, "FIX": 128 * clock, "MTE2 vector": 2 * 128 * clock}
    times = model.engine_times(work)
    assert times["cube"] == pytest.approx(1 / clock)
    assert times["FIX"] == pytest.approx(1.0)
    assert times["MTE2 vector"] == pytest.approx(1.0), "two vector cores share it"
    assert times["L2 write"] == pytest.approx(work["FIX"] / (86 * clock))
    assert times["L2 read"] == pytest.approx(work["MTE2 vector"] / (110 * clock))
    assert times["vector"] == times["MTE1"] == times["MTE2 cube"] == times["MTE3"] == 0


def test_a_changed_rate_changes_its_engine_alone() -> None:
    work = {"macs": 1.0, "FIX": 1.0, "MTE1": 1.0, "MTE2 cube": 1.0, "MTE2 vector": 1.0, "MTE3": 1.0, "Exp float": 1.0}
    before = model.engine_times(work)
    for name in before:
        after = model.engine_times(work, model.changed_rates(name, 0.5))
        assert after == pytest.approx({**before, name: 2 * before[name]})
    assert model.engine_times(work, model.changed_rates("launch", 2.0)) == before
    slow = model.engine_times({"barriers": 2.0}, model.changed_rates("vector barrier", 2.0))
    assert slow["vector"] == pytest.approx(2 * model.engine_times({"barriers": 2.0})["vector"])


def test_each_kernel_pays_a_launch() -> None:
    """The exact recovery shifts its keys in a kernel of its own; a flow with FP32 scores has no such pass."""
    (case,) = select_cases(["paper"])
    work = Fit({}, {"macs": 1e6}, 0.0)
    plans = {"2": {"tasks": 1, "tiles": 10}}
    arguments = {"fp32": work, "exact, anchors": work}, {"exact": Fit({}, {}, 0.0)}, plans
    fp32, exact = model.predict_case(case, *arguments)
    assert exact["overlap_ms"] - fp32["overlap_ms"] == pytest.approx(exact["shift_ms"])
    no_launch = model.predict_case(case, *arguments, model.changed_rates("launch", 0.0))
    assert [old["overlap_ms"] - new["overlap_ms"] for old, new in zip((fp32, exact), no_launch, strict=True)] == (
        pytest.approx([1e3 * rate("launch"), 2e3 * rate("launch")])
    )


def test_vector_cycles_by_call_and_type_and_their_parts() -> None:
    work = {"Exp float": 10.0, "Exp half": 10.0, "Adds float": 3.0, "barriers": 2.0, "macs": 1e9, "MTE2 vector": 1e9}
    assert model.vector_cycles(work) == 10 * 2 + 10 * 4 + 3 + 2 * 18
    work = {"ReduceRepeat float": 30.0, "ReduceDataBlock float": 42.0, "Exp float": 9.0, "barriers": 4.0, "macs": 1.0}
    parts = model.vector_parts(work)
    assert sum(parts.values()) == pytest.approx(model.engine_times(work)["vector"])
    clock = rate("efficiency") * 1.8e9
    assert parts["row reductions"] == pytest.approx((7 * 30 + 42) / 2 / clock)
    assert parts["barriers"] == pytest.approx(18 * 4 / 2 / clock)
    with pytest.raises(KeyError, match="Gather"):
        model.vector_cycles({"Gather float": 1.0})


def test_overlap_and_none() -> None:
    times = {"cube": 3.0, "FIX": 2.0, "vector": 4.0, "L2 write": 1.0}
    assert model.bound(times) == ("vector", 4.0)
    assert model.serial(times) == 9.0
    assert model.serial({**times, "HBM": 20.0}) == 20.0


def test_the_fit_finds_a_line_and_reports_its_largest_residual() -> None:
    exact = fit([(n, {"macs": 5.0 + 3.0 * n, "FIX": 2.0 * n}) for n in (2, 4, 8)])
    assert exact.per_tile == pytest.approx({"macs": 3.0, "FIX": 2.0})
    assert exact.per_task == pytest.approx({"macs": 5.0, "FIX": 0.0})
    assert exact.residual < 1e-12
    assert fit([(1, {"macs": 10.0}), (2, {"macs": 20.0}), (3, {"macs": 33.0})]).residual == pytest.approx(1 / 20)


def test_shares_and_substitutions_change_the_work_per_tile() -> None:
    narrow, wide = Fit({}, {"FIX": 100.0}, 0.0), Fit({}, {"FIX": 300.0, "Adds float": 8.0}, 0.0)
    assert mixed((0.75, narrow), (0.25, wide)).per_tile == {"FIX": 150.0, "Adds float": 2.0}
    assert substituted(narrow, [("half of it", {"FIX": -50})]).per_tile == {"FIX": 50.0}
    with pytest.raises(ValueError, match="FIX"):
        substituted(narrow, [("too much", {"FIX": -101})])


def test_substituted_calls_have_a_rate_and_every_rate_a_source() -> None:
    lines = [line for found in substitutions(64).values() for line in found]
    for name in {key for _, change in lines for key in change if " " in key and key not in model.PIPES}:
        assert cycles_of(name) > 0
    assert all(
        each["value"] > 0 and "(git" in each["source"] and each["unit"] for each in load_rates()["rates"].values()
    )
