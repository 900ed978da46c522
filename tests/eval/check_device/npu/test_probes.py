"""Each probe finds the device as the twin is, and reports the one thing that a device does otherwise."""

from dataclasses import dataclass, field

import pytest
import torch

from pasa.eval.check_device.npu import probes, probes_310p
from pasa.eval.check_device.npu.finding import in_ulps
from pasa.ops.attention.ascend import on_310p

# The deviation that each probe has to notice: of the twin (tests/ascend_c/programs/fake_device.h) or of torch_npu.
BOTH = {
    "Exp": "exp",
    "Ln": "ln",
    "Div": "div",
    "Compare bits": "compare_bits",
    "Compare NaN": "compare_nan",
    "order of sums": "sum_order",
    "rows behind a tile": "tail_rows",
    "Fill": "fill",
    "two accumulators": "accumulator",
    "chip": "chip",
    "alignment": "alignment",
    "stream order": "stream_order",
    "capture": "capture",
}


@dataclass(frozen=True)
class Chip:
    """Hold the probes of a chip, the deviation that each has to notice, and what that does.

    A deviation in `harmless` leaves results within their bounds. One in `faults` makes the twin end the launch, as it
    does a race.
    """

    cores: str
    probes: probes.Probes
    deviations: dict[str, str]
    harmless: set[str]
    faults: dict[str, str] = field(default_factory=dict)


UNDEFINED = '"kind": "(race|uninitialised)", "kernel": "{}"'
CHIPS = {
    "npu": Chip(
        "20",
        probes.PROBES,
        BOTH
        | {
            "overflow mode": "overflow_mode",
            "integers": "integers",
            "half a tile": "fixpipe_rows",
            "repeated launches": "scalar_cache",
            "merged parts": "sync_all",
            "unbiased rounding": "integers",
            "vendor's scores": "vendor_scores",
            "vendor's masks": "vendor_masks",
            "vendor's log-sum-exp": "vendor_lse",
        },
        {"Exp", "Ln", "Div", "order of sums", "unbiased rounding", "chip"},
        {
            "repeated launches": "DataCacheCleanAndInvalid is missing",
            "merged parts": UNDEFINED.format("pasa_decode"),
        },
    ),
    "npu_310p": Chip(
        "8",
        probes_310p.PROBES,
        BOTH
        | {
            "saturation": "no_saturation",
            "FP32 overflow": "float_saturation",
            "rounding to FP16": "half_rounding",
            "FP32 sums": "float_sums",
            "subnormal results": "subnormal_results",
            "subnormal operands": "subnormal_operands",
            "L0C to UB": "l0c_fractals",
            "UB to L1": "l1_gaps",
            "rows without keys": "stored_infinities",
            "repeated launches": "launch_order",
            "merged parts": "launch_order",
        },
        {"Exp", "Ln", "Div", "order of sums", "FP32 overflow", "chip"},
        {
            "L0C to UB": UNDEFINED.format("probe_product_310p"),
            "repeated launches": UNDEFINED.format("make_frames"),
            "merged parts": UNDEFINED.format("merge_decoded_310p"),
        },
    ),
}
CASES = [(name, probe) for name, chip in CHIPS.items() for probe in chip.probes]


@pytest.fixture
def chip(request, monkeypatch):
    """Make the backend `npu` that of a chip, by name."""
    request.getfixturevalue(request.param)
    found = CHIPS[request.param]
    monkeypatch.setenv("FAKE_CORES", found.cores)
    return found


@pytest.mark.parametrize("name", CHIPS)
def test_every_probe_has_a_deviation(name):
    chip = CHIPS[name]
    assert set(chip.deviations) == set(chip.probes)


@pytest.mark.parametrize(("chip", "name"), CASES, indirect=["chip"])
def test_the_twin_is_as_assumed(chip, deviate, name):
    deviate("")
    found = chip.probes[name][1]("cpu")
    assert not found.deviates, found.detail


@pytest.mark.parametrize(("chip", "name"), CASES, indirect=["chip"])
def test_a_deviation_is_reported(chip, deviate, monkeypatch, name):
    deviate(chip.deviations[name])
    if name == "chip":
        monkeypatch.setenv("FAKE_CORES", "6")  # some boards are sold with fewer
    if name in chip.faults:
        with pytest.raises(RuntimeError, match=chip.faults[name]):
            chip.probes[name][1]("cpu")
        return
    found = chip.probes[name][1]("cpu")
    assert found.deviates
    assert found.harmless == (name in chip.harmless), found.detail


@pytest.mark.parametrize("kernel", ["attend", "decode"])
def test_rows_without_keys_are_looked_at_in_both_kernels(npu_310p, deviate, monkeypatch, kernel):
    """Story: the probe of prefill took the kernel of decoding, which serves calls of so few rows."""
    deviate("")
    right = getattr(on_310p, kernel)

    def wrong(call, *arguments):
        out, lse, *rest = right(call, *arguments)
        return out, lse.masked_fill(lse.isneginf(), torch.finfo(torch.float32).min), *rest

    monkeypatch.setattr(on_310p, kernel, wrong)
    found = probes_310p.check_rows_without_keys("cpu")
    expected = {"attend": "decoding: 0 of 160 results differ, prefill: 80", "decode": "decoding: 80 of 160"}
    assert found.deviates
    assert found.detail.startswith(expected[kernel])


@pytest.mark.parametrize("chip", CHIPS, indirect=True)
def test_an_order_of_sums_is_named(chip, deviate):
    deviate("sum_order")
    assert chip.probes["order of sums"][1]("cpu").detail.startswith("the last term first")


def test_flushed_results_are_counted_apart():
    expected = torch.tensor([1.0, 2.0**-130, 2.0**-140, -3.0])
    found = in_ulps(torch.tensor([1.0, 0.0, 0.0, -3.0]), expected)
    assert (found.deviates, found.harmless) == (True, True)
    assert found.detail == "0 of 4 results differ, by at most 0 ulp; 2 subnormal results are 0"
    two = torch.nextafter(torch.nextafter(expected, torch.tensor(9.0)), torch.tensor(9.0))
    assert not in_ulps(two, expected).harmless
