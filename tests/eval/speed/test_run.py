"""The runner on a clock without a device: gate first, ratios, reasons, tables and files of the result."""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pasa
from pasa.eval.kit.timing import PROBES, Call
from pasa.eval.speed import report, run
from pasa.eval.speed.cases import Inputs, SpeedCase
from pasa.eval.speed.implementations import OWN, Implementation, select_implementations
from tests.eval.speed.fakes import BANDWIDTH, ENTRANTS, FP32, TINY, TINY_BIASED, TINY_DECODE, FakeClock, Timed

OURS = ENTRANTS[4:5]
EAGER = dataclasses.replace(TINY, graphed=False)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """Run everything on the CPU."""
    return run.measure((TINY, TINY_DECODE, TINY_BIASED), ENTRANTS, FakeClock(), BANDWIDTH, rounds=3)


def measure(
    case: SpeedCase, clock: FakeClock | None = None, implementations: Sequence[Implementation] = OURS
) -> dict[str, Any]:
    return run.measure([case], implementations, clock or FakeClock(), BANDWIDTH, 2)


def select(result: dict[str, Any], **fields: str) -> list[dict[str, Any]]:
    return [each for each in result["records"] if fields.items() <= each.items()]


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
    alone = only(measure(TINY_DECODE), "decode", "pasa")
    assert (alone["to_cudnn"], alone["median_ms"]) == (None, 1.6), "no ratio without the peer"


def test_graphs_are_compared_with_graphs(result: dict[str, Any]) -> None:
    ours = only(result, "tiny", "pasa", "graph")
    assert ours["median_ms"] == 0.8
    assert ours["to_cudnn"] == pytest.approx(2.0 / 1.6)
    assert only(result, "tiny", "sdpa-efficient", "graph")["status"] == "not run"
    assert select(result, case="decode", how="graph") == []
    part, decoding = result["parts"]
    assert (part["case"], part["whole"]) == ("tiny", 0.8)
    assert part["main loop"] == part["whole"] - part["pre-pass"]
    assert (decoding["case"], decoding["reading"]) == ("decode", 0.5)


def test_who_fails_the_gate_has_an_error_and_no_time(result: dict[str, Any]) -> None:
    for failed in select(result, implementation="pasa-paper", case="tiny"):
        assert failed["status"] == "failed gate"
        assert failed["rmse"] > failed["rmse_limit"]
        assert "RMSE" in failed["why"]
        assert not {"median_ms", "tflops", "to_cudnn", "host_us"} & set(failed)
    assert not result["gate"]["passed"]
    assert all(each.startswith("pasa-paper on ") for each in result["gate"]["failures"])


def test_everyone_has_a_record_and_a_reason_in_one_line(result: dict[str, Any]) -> None:
    for case in ("tiny", "decode", "tiny+constant"):
        names = [each["implementation"] for each in select(result, case=case, how="eager")]
        assert names == [each.name for each in ENTRANTS]
    text = run.EXPERIMENT.markdown(result)
    assert "flash-attn: not installed on all cases: flash_attn is not installed" in text
    assert "sdpa-efficient: not run on all cases: RuntimeError: No available kernel. Aborting execution." in text
    assert "Ours FAIL the accuracy gate:" in text
    assert "nothing was run on an NPU" in text


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


def fail(*_: Any) -> Any:
    raise RuntimeError("an illegal memory access was encountered")


class NoGraphs(FakeClock):
    graph = fail


class Failing(FakeClock):
    def times(self, call: Call, count: int, cold: bool) -> Any:
        return fail() if count > PROBES else super().times(call, count, cold)


class Forgetful(FakeClock):
    def graph(self, call: Call) -> Call:
        return Call(lambda: torch.zeros_like(call.run()))


@pytest.mark.parametrize(
    ("case", "clock", "statuses", "why"),
    [
        (TINY, Forgetful(), ["ok", "failed gate"], "the replay of the graph gives other numbers"),
        (TINY, NoGraphs(), ["ok", "not run"], "in a CUDA graph: RuntimeError: an illegal memory access"),
        (EAGER, Failing(), ["not run"], "while timed: RuntimeError: an illegal memory access"),
    ],
)
def test_what_fails_has_a_reason_and_no_time(case: SpeedCase, clock: FakeClock, statuses: list[str], why: str) -> None:
    result = measure(case, clock)
    assert [each["status"] for each in result["records"]] == statuses
    last = result["records"][-1]
    assert why in last["why"]
    assert "median_ms" not in last
    assert run.EXPERIMENT.markdown(result)
    if isinstance(clock, NoGraphs):
        assert result["parts"][0]["whole"] is None
        assert "while timed: RuntimeError: an illegal memory" in result["parts"][0]["why"]
    else:
        assert bool(result["parts"]) == (statuses[0] == "ok")


def test_a_case_that_does_not_fit_leaves_reasons_and_the_others_run() -> None:
    class Large(SpeedCase):
        def inputs(self, device: torch.device | str) -> Inputs:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB.")

    large = Large("large", 1, 1, 1, 8, 8, 16)
    result = run.measure([large, TINY_DECODE], ENTRANTS[:2], FakeClock(), BANDWIDTH, 1)
    assert {each["status"] for each in select(result, case="large")} == {"not run"}
    assert "CUDA out of memory" in only(result, "large", "sdpa-cudnn")["why"]
    assert {each["status"] for each in select(result, case="decode")} == {"ok"}
    assert run.EXPERIMENT.markdown(result)


def test_warnings_of_a_refusal_are_its_reason() -> None:
    """Story: torch raises "No available kernel" and says in warnings which condition a backend wants."""

    def prepare(inputs: Any) -> dict[str, Call]:
        warnings.warn("cuDNN attention requires head dim of at most 128", UserWarning, stacklevel=1)
        raise RuntimeError("No available kernel")

    result = measure(TINY_DECODE, implementations=[Implementation("sdpa-cudnn", "", prepare)])
    assert "requires head dim of at most 128" in only(result, "decode", "sdpa-cudnn")["why"]


def test_the_first_failure_is_raised_when_no_variant_runs() -> None:
    works = Call(Timed(lambda: torch.zeros(1), 3.0))
    with pytest.raises(RuntimeError, match="illegal"):
        run.fastest({"a": Call(fail), "b": Call(lambda: 1 / 0)}, FakeClock())  # type: ignore[arg-type,return-value]
    assert run.fastest({"a": Call(fail), "b": works}, FakeClock()) == ("b", works)


def test_the_reader_reads_everything_once() -> None:
    """Ones, of a size that no program's share divides: the sums count them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    k = torch.ones(1, 3, 1000, 7, dtype=torch.float16, device=device)
    assert run.reading(Inputs(k, k, k, False, True)).run().sum() == 2 * k.numel()


def test_options_reach_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CudaClock", FakeClock)
    monkeypatch.setattr(run, "copy_bandwidth", lambda clock: BANDWIDTH)
    monkeypatch.setattr(run, "select_cases", lambda names, data: [TINY] if (names, data) == (["a", "b"], ["e"]) else [])
    monkeypatch.setattr(run, "select_implementations", lambda names, device: OURS if names == ["c", "d"] else ())
    result = run.run_speed(case=["a", "b"], implementation=["c", "d"], data=["e"], rounds=2)
    assert [each["how"] for each in result["records"]] == ["eager", "graph"]
    assert result["rounds"] == 2


def test_the_real_table_runs_or_says_why_on_a_cpu() -> None:
    """Every row of the real table ends in a time or a reason; ours all run and pass, interpreted."""
    table = select_implementations()
    result = measure(SpeedCase("one row", 1, 4, 2, 1, 256, 64, decode=True), implementations=table)
    records = {each["implementation"]: each for each in result["records"]}
    assert list(records) == [each.name for each in table]
    assert {records[name]["status"] for name in ("flash-attn", "sageattention")} <= {"ok", "not installed"}
    assert all(each["status"] == "ok" or each["why"] for each in records.values())
    assert {records[name]["status"] for name in ({*OWN} & {*records}) | {"sdpa-flash"}} == {"ok"}


def test_tables_show_ratios_and_errors_and_no_time_of_who_failed(result: dict[str, Any]) -> None:
    table = report.ratio_table(result)
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert set(rows) == {"tiny", "tiny, graph"}
    assert (rows["tiny"]["sdpa-cudnn ms"], rows["tiny"]["pasa"]) == ("2", "1.25")
    assert rows["tiny"]["pasa-paper"].startswith("failed gate, ")
    assert [row[0] for row in report.decode_table(result).rows] == ["decode"]
    biased = report.bias_table(result).rows
    assert [row[0] for row in biased] == ["tiny+constant: x cuDNN", "time / unbiased", "RMSE"]
    assert biased[1][1] == "1.00"
    table = report.every_table(result)
    assert len(table.rows) == len(result["records"])
    for cells in (dict(zip(table.header, row, strict=True)) for row in table.rows):
        if cells["status"] != "ok":
            assert {cells[name] for name in ("median ms", "p20", "p80", "TFLOPS", "x cuDNN")} == {"-"}
    assert report.cell({"status": "failed gate", "rmse": None}, "to_cudnn") == "failed gate, NaN"


def test_files_hold_tables_and_figure(result: dict[str, Any], tmp_path: Path) -> None:
    paths = run.EXPERIMENT.save(result, tmp_path)
    assert [path.name for path in paths] == ["speed.json", "speed.md", "speed_ratios.png"]
    assert paths[2].read_bytes()[:4] == b"\x89PNG"
    assert "| tiny | (1, 4/2, 150, 32) causal | Q, K, V from N(0, 1) |" in paths[1].read_text(encoding="utf-8")
    untimed = result | {"records": [each for each in result["records"] if each["status"] != "ok"]}
    assert report.draw(untimed, tmp_path) == []
    assert run.EXPERIMENT.markdown(untimed)
