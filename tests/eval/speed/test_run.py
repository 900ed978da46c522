"""The runner on a clock without a device: gate first, ratios, reasons, and the form of the result."""

import dataclasses
import importlib.util
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import pasa
from pasa.eval.commands import app
from pasa.eval.kit import output
from pasa.eval.kit.timing import PROBES, Call
from pasa.eval.speed import run
from pasa.eval.speed import time_split as parts
from pasa.eval.speed.cases import Inputs, SpeedCase
from pasa.eval.speed.implementations import IMPLEMENTATIONS, OWN, Implementation, select_implementations
from tests.eval.speed.fakes import BANDWIDTH, ENTRANTS, FP32, TINY, TINY_DECODE, FakeClock, Timed

OURS = ENTRANTS[4:5]
EAGER = dataclasses.replace(TINY, graphed=False)


def measure(
    case: SpeedCase, clock: FakeClock | None = None, implementations: Sequence[Implementation] = OURS
) -> dict[str, Any]:
    return run.measure([case], implementations, clock or FakeClock(), BANDWIDTH, 2)


def select(result: dict[str, Any], **fields: str) -> list[dict[str, Any]]:
    return [each for each in result["records"] if all(each[name] == value for name, value in fields.items())]


def only(result: dict[str, Any], case: str, name: str, how: str = "eager") -> dict[str, Any]:
    (record,) = select(result, case=case, implementation=name, how=how)
    return record


def test_ratios_tflops_and_the_fastest_variant(result: dict[str, Any]) -> None:
    ours = only(result, "tiny", "pasa")
    assert (ours["median_ms"], ours["variant"], ours["cold"], ours["to_floor"]) == (1.6, "fast", True, None)
    assert ours["to_cudnn"] == pytest.approx(2.0 / 1.6)
    assert ours["to_flash"] == pytest.approx(5.0 / 1.6)
    assert only(result, "tiny", "sdpa-cudnn")["to_cudnn"] == 1.0
    assert ours["tflops"] == pytest.approx(4 * 4 * 150 * 150 * 32 / 2 / 1.6e-3 * 1e-12)
    read_once = 2 * 2 * 300 * 32 * 2 / BANDWIDTH
    assert only(result, "decode", "pasa")["to_floor"] == pytest.approx(1.6e-3 / read_once)


def test_graphs_are_compared_with_graphs(result: dict[str, Any]) -> None:
    ours = only(result, "tiny", "pasa", "graph")
    assert ours["median_ms"] == 0.8
    assert ours["to_cudnn"] == pytest.approx(2.0 / 1.6)
    assert only(result, "tiny", "sdpa-efficient", "graph")["status"] == "not run"
    assert select(result, case="decode", how="graph") == []


def test_who_fails_the_gate_has_an_error_and_no_time(result: dict[str, Any]) -> None:
    for failed in select(result, implementation="pasa-paper", case="tiny"):
        assert failed["status"] == "failed gate"
        assert failed["rmse"] > failed["rmse_limit"]
        assert "RMSE" in failed["why"]
        assert not {"median_ms", "tflops", "to_cudnn", "host_us"} & set(failed)
    assert not result["gate"]["passed"]
    assert {each["implementation"] for each in result["gate"]["failures"]} == {"pasa-paper"}


def test_everyone_has_a_record_and_a_reason_in_one_line(result: dict[str, Any]) -> None:
    for case in ("tiny", "decode", "tiny+constant"):
        names = [each["implementation"] for each in select(result, case=case, how="eager")]
        assert names == [each.name for each in ENTRANTS]
    refused = only(result, "tiny", "sdpa-efficient")
    assert (refused["status"], refused["why"]) == ("not run", "RuntimeError: No available kernel. Aborting execution.")
    missing = only(result, "tiny", "flash-attn")
    assert (missing["status"], missing["why"]) == ("not installed", "flash_attn is not installed")


@pytest.mark.parametrize("writer_first", [True, False])
def test_nobody_is_judged_on_inputs_that_another_has_written_into(writer_first: bool) -> None:
    """Story: a peer (SageAttention 1.0.6) takes the mean off its caller's K, in place. All who came after it were
    judged and timed on other keys than the truth was made of."""
    seen: list[Inputs] = []

    def prepare(inputs: Inputs) -> dict[str, Call]:
        seen.append(inputs)

        def attend() -> torch.Tensor:
            out = pasa.attention(*inputs.tensors, is_causal=inputs.causal, config=FP32)
            for x in inputs.tensors:
                x.fill_(torch.nan)
            return out

        return {"as given": Call(Timed(attend, 1.0))}

    entrants = [Implementation("sdpa-flash", "writes into its inputs", prepare), *OURS]
    result = measure(TINY, implementations=entrants if writer_first else entrants[::-1])
    for name in ("sdpa-flash", "pasa"):
        record = only(result, "tiny", name)
        assert record["status"] == "ok", record["why"]
    assert all(each.k is not other.k for each in seen for other in seen if each is not other)


def test_a_graph_that_replays_other_numbers_is_stopped() -> None:
    class Forgetful(FakeClock):
        def graph(self, call: Call) -> Call:
            return Call(lambda: torch.zeros_like(call.run()))

    result = measure(TINY, Forgetful())
    record = only(result, "tiny", "pasa", "graph")
    assert (record["status"], "median_ms" in record) == ("failed gate", False)
    assert only(result, "tiny", "pasa")["status"] == "ok"


def test_a_capture_that_fails_is_the_reason() -> None:
    class NoGraphs(FakeClock):
        def graph(self, call: Call) -> Call:
            raise RuntimeError("operation not permitted when stream is capturing")

    result = measure(TINY, NoGraphs())
    assert "in a CUDA graph: RuntimeError: operation not permitted" in only(result, "tiny", "pasa", "graph")["why"]
    assert "while timed: RuntimeError: operation not permitted" in result["parts"][0]["why"]
    assert run.EXPERIMENT.markdown(result)


def test_a_device_that_fails_while_timing_leaves_reasons_and_no_times() -> None:
    class Failing(FakeClock):
        def times(self, call: Call, count: int, cold: bool) -> list[float]:
            if count > PROBES:
                raise RuntimeError("an illegal memory access was encountered")
            return super().times(call, count, cold)

    result = measure(EAGER, Failing())
    record = only(result, "tiny", "pasa")
    assert (record["status"], "median_ms" in record) == ("not run", False)
    assert "illegal memory access" in record["why"]
    assert result["parts"] == []


def test_parts_that_fail_while_timed_leave_the_records() -> None:
    class Failing(FakeClock):
        def graph(self, call: Call) -> Call:
            def fail() -> torch.Tensor:
                raise RuntimeError("misaligned address")

            return Call(fail)

    result = measure(EAGER, Failing())
    assert only(result, "tiny", "pasa")["status"] == "ok"
    (part,) = result["parts"]
    assert part["whole"] is None
    assert "while timed: RuntimeError: misaligned address" in part["why"]
    assert run.EXPERIMENT.markdown(result)


def test_a_case_that_does_not_fit_leaves_reasons_and_the_others_run() -> None:
    class Large(SpeedCase):
        def inputs(self, device: torch.device | str) -> Inputs:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB.")

    large = Large("large", 1, 1, 1, 8, 8, 16)
    seen: list[tuple[int, int, str]] = []
    clock = FakeClock()
    result = run.measure([large, TINY_DECODE], ENTRANTS[:2], clock, BANDWIDTH, 1, lambda *what: seen.append(what))
    assert {each["status"] for each in select(result, case="large")} == {"not run"}
    assert "CUDA out of memory" in only(result, "large", "sdpa-cudnn")["why"]
    assert {each["status"] for each in select(result, case="decode")} == {"ok"}
    assert run.EXPERIMENT.markdown(result)
    assert seen == [(0, 2, "large"), (1, 2, "decode")]


def test_no_ratio_without_the_peer() -> None:
    record = only(measure(TINY_DECODE), "decode", "pasa")
    assert (record["to_cudnn"], record["median_ms"]) == (None, 1.6)


def test_warnings_of_a_refusal_are_its_reason() -> None:
    """Story: torch raises "No available kernel" and says in warnings which condition a backend wants."""

    def prepare(inputs: Any) -> dict[str, Call]:
        warnings.warn("cuDNN attention requires head dim of at most 128", UserWarning, stacklevel=1)
        raise RuntimeError("No available kernel")

    result = measure(TINY_DECODE, implementations=[Implementation("sdpa-cudnn", "", prepare)])
    assert "requires head dim of at most 128" in only(result, "decode", "sdpa-cudnn")["why"]


def test_the_first_failure_is_raised_when_no_variant_runs() -> None:
    def fail(text: str) -> torch.Tensor:
        raise RuntimeError(text)

    first, second = Call(lambda: fail("first")), Call(lambda: fail("second"))
    with pytest.raises(RuntimeError, match="first"):
        run.fastest({"a": first, "b": second}, FakeClock())
    works = Call(Timed(lambda: torch.zeros(1), 3.0))
    assert run.fastest({"a": first, "b": works}, FakeClock()) == ("b", works)


def test_parts_are_timed_in_graphs(result: dict[str, Any]) -> None:
    part, decoding = result["parts"]
    assert (part["case"], part["whole"]) == ("tiny", 0.8)
    assert part["main loop"] == part["whole"] - part["pre-pass"]
    assert (decoding["case"], decoding["reading"]) == ("decode", 0.5)


def test_the_reader_reads_everything_once() -> None:
    """Ones, of a size that no program's share divides: the sums count them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    k, v = (torch.ones(1, 3, 1000, 7, dtype=torch.float16, device=device) for _ in range(2))
    assert parts.reading(Inputs(k, k, v, False, True)).run().sum() == 2 * k.numel()


def test_result_is_json_with_origin(result: dict[str, Any]) -> None:
    read = json.loads(output.to_json(result))
    assert {"schema", "note", "environment", "formula", "copy_bandwidth", "targets", "parts"} <= set(read)
    assert {"device", "processor", "torch", "triton", "commit"} <= set(read["environment"])
    assert len(read["records"]) == len(result["records"])
    assert "NPU" in read["note"]


def test_without_a_device_one_clear_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("is about machines without a CUDA device")
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        run.run_speed()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"case": ["nonsense"]}, "nonsense"),
        ({"implementation": ["nonsense"]}, "nonsense"),
        ({"rounds": 0}, "rounds=0"),
        ({"case": ["svd"], "quick": True}, "quick"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run.run_speed(**arguments)


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every option of the command reaches the runner, with a clock in place of the device."""
    monkeypatch.setattr(run, "CudaClock", FakeClock)
    monkeypatch.setattr(run, "copy_bandwidth", lambda clock: BANDWIDTH)
    monkeypatch.setattr(run, "select_cases", lambda names, quick: [TINY] if names == ["a", "b"] else [])
    monkeypatch.setattr(run, "select_implementations", lambda names: OURS if names == ["c", "d"] else ())
    options = ["--case", "a", "--case", "b", "--implementation", "c", "--implementation", "d", "--rounds", "2"]
    done = CliRunner().invoke(app, ["bench", "speed", *options, "--output-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    stored = json.loads((tmp_path / "speed.json").read_text())
    assert [each["how"] for each in stored["records"]] == ["eager", "graph"]
    assert stored["rounds"] == 2


def test_the_real_table_runs_or_says_why_on_a_cpu() -> None:
    """Every row of the real table ends in a time or a reason; ours all run and pass, interpreted."""
    result = measure(SpeedCase("one row", 1, 4, 2, 1, 256, 64, decode=True), implementations=IMPLEMENTATIONS)
    records = {each["implementation"]: each for each in result["records"]}
    assert list(records) == [each.name for each in IMPLEMENTATIONS]
    for name, module in (("flash-attn", "flash_attn"), ("sageattention", "sageattention")):
        if importlib.util.find_spec(module) is None:
            assert records[name]["status"] == "not installed"
    assert all(each["status"] == "ok" or each["why"] for each in records.values())
    assert {records[name]["status"] for name in (*OWN, "sdpa-flash")} == {"ok"}
    assert [each.name for each in select_implementations(["pasa", "sdpa-flash"])] == ["pasa", "sdpa-flash"]
