"""Tables, Markdown and figures of a result, fresh or read back."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from pasa.eval.kit import output
from pasa.eval.speed import plots, report
from pasa.eval.speed.run import EXPERIMENT


def shown(result: dict[str, Any]) -> str:
    console = Console(file=StringIO(), width=220)
    EXPERIMENT.show(result, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_ratios_stand_with_their_peer_and_formula(result: dict[str, Any]) -> None:
    table = report.ratio_table(result)
    assert table.header[:3] == ["case", "sdpa-cudnn ms", "TFLOPS"]
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert set(rows) == {"tiny", "tiny, graph"}
    assert (rows["tiny"]["sdpa-cudnn ms"], rows["tiny"]["pasa"]) == ("2", "1.25")
    assert rows["tiny"]["pasa-paper"].startswith("failed gate, ")
    assert "4 B Hq Sq Skv D" in table.note


def test_decoding_and_biased_cases_have_tables_of_their_own(result: dict[str, Any]) -> None:
    assert [row[0] for row in report.decode_table(result).rows] == ["decode"]
    rows = report.bias_table(result).rows
    assert [row[0] for row in rows] == ["tiny+constant: x cuDNN", "time / unbiased", "RMSE"]
    assert rows[1][1] == "1.00"


def test_nobody_is_left_out_in_silence(result: dict[str, Any]) -> None:
    text = shown(result)
    assert "flash-attn: not installed on all cases: flash_attn is not installed" in text
    assert "sdpa-efficient: not run on all cases: RuntimeError: No available kernel." in text
    assert "Ours FAIL the accuracy gate:" in text
    assert "nothing was run on an NPU" in text


def test_failed_rows_show_no_time_anywhere(result: dict[str, Any]) -> None:
    table = report.every_table(result)
    for row in table.rows:
        cells = dict(zip(table.header, row, strict=True))
        if cells["status"] != "ok":
            assert {cells[name] for name in ("median ms", "p20", "p80", "TFLOPS", "x cuDNN")} == {"-"}
    assert len(table.rows) == len(result["records"])


def test_stored_results_show_the_same_tables(result: dict[str, Any]) -> None:
    """JSON has no NaN and fewer digits; titles, headers and rows stay."""
    read = json.loads(output.to_json(result))
    fresh, again = ([*report.report(each), *report.appendix(each)] for each in (result, read))
    for one, other in zip(fresh, again, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            assert one == other
        else:
            assert (one.title, one.header, len(one.rows)) == (other.title, other.header, len(other.rows))
    assert shown(read)
    assert report.cell({"status": "failed gate", "rmse": None}, "to_cudnn") == "failed gate, NaN"


def test_files_hold_every_table_name_and_figure(result: dict[str, Any], tmp_path: Path) -> None:
    paths = EXPERIMENT.save(result, tmp_path)
    assert [path.name for path in paths] == ["speed.json", "speed.md", "speed_ratios.png"]
    assert paths[2].read_bytes()[:4] == b"\x89PNG"
    page = paths[1].read_text(encoding="utf-8")
    for table in (*report.report(result), *report.appendix(result)):
        assert (table if isinstance(table, str) else f"## {table.title}") in page
    assert all(f"| {name} |" in page for name in result["implementations"])
    assert "| tiny | (1, 4/2, 150, 32) causal | Q, K, V from N(0, 1) |" in page


def test_a_result_without_any_time_draws_nothing(result: dict[str, Any], tmp_path: Path) -> None:
    empty = result | {"records": [each for each in result["records"] if each["status"] != "ok"], "targets": []}
    assert plots.draw(empty, tmp_path) == []
    assert shown(empty)


def test_brackets_of_an_error_are_no_markup(result: dict[str, Any]) -> None:
    parts = [each | {"why": "[/dev/nvidia0] busy"} for each in result["parts"]]
    assert "[/dev/nvidia0] busy" in shown(result | {"parts": parts})
