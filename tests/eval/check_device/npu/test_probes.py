"""Each probe finds the device as the twin is, and reports the one thing that a device does otherwise."""

import pytest

from pasa.eval.check_device.npu.probes import PROBES

# The deviation that each probe has to notice: of the twin (tests/ascend_c/programs/fake_device.h) or of torch_npu.
DEVIATIONS = {
    "Exp": "exp",
    "Ln": "ln",
    "Div": "div",
    "overflow mode": "overflow_mode",
    "integers": "integers",
    "Compare bits": "compare_bits",
    "Compare NaN": "compare_nan",
    "order of sums": "sum_order",
    "rows behind a tile": "tail_rows",
    "half a tile": "fixpipe_rows",
    "Fill": "fill",
    "two accumulators": "accumulator",
    "repeated launches": "scalar_cache",
    "merged parts": "sync_all",
    "unbiased rounding": "integers",
    "chip": "chip",
    "alignment": "alignment",
    "stream order": "stream_order",
    "capture": "capture",
    "vendor's scores": "vendor_scores",
    "vendor's masks": "vendor_masks",
    "vendor's log-sum-exp": "vendor_lse",
}
HARMLESS = {"Exp", "Ln", "Div", "order of sums", "unbiased rounding"}  # results keep their bounds
# Where the twin ends the launch, as it does a race.
FAULTS = {
    "repeated launches": "DataCacheCleanAndInvalid is missing",
    "merged parts": '"kind": "(race|uninitialised)", "kernel": "pasa_decode"',
}


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setenv("FAKE_CORES", "20")


def test_every_probe_has_a_deviation():
    assert list(DEVIATIONS) == list(PROBES)


@pytest.mark.parametrize("name", PROBES)
def test_the_twin_is_as_assumed(npu, deviate, name):
    deviate("")
    found = PROBES[name][1]("cpu")
    assert not found.deviates, found.detail


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_deviation_is_reported(npu, deviate, monkeypatch, name):
    deviate(DEVIATIONS[name])
    if name == "chip":
        monkeypatch.setenv("FAKE_CORES", "18")  # some boards are sold with fewer
    if name in FAULTS:
        with pytest.raises(RuntimeError, match=FAULTS[name]):
            PROBES[name][1]("cpu")
        return
    found = PROBES[name][1]("cpu")
    assert found.deviates
    assert found.harmless == (name in HARMLESS | {"chip"}), found.detail


def test_an_order_of_sums_is_named(npu, deviate):
    deviate("sum_order")
    assert PROBES["order of sums"][1]("cpu").detail.startswith("the last term first")


def test_flushed_results_are_counted_apart():
    import torch

    from pasa.eval.check_device.npu.finding import in_ulps

    expected = torch.tensor([1.0, 2.0**-130, 2.0**-140, -3.0])
    found = in_ulps(torch.tensor([1.0, 0.0, 0.0, -3.0]), expected)
    assert (found.deviates, found.harmless) == (True, True)
    assert found.detail == "0 of 4 results differ, by at most 0 ulp; 2 subnormal results are 0"
    two = torch.nextafter(torch.nextafter(expected, torch.tensor(9.0)), torch.tensor(9.0))
    assert not in_ulps(two, expected).harmless
