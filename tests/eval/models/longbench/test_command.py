"""`pasa eval longbench`, `pasa eval ppl` and `pasa bench model` from the command line."""

import json

import pytest
import transformers
from typer.testing import CliRunner

from pasa.eval.commands import app
from pasa.eval.models.longbench import run as longbench
from pasa.eval.models.longbench import throughput
from pasa.eval.models.perplexity import run as perplexity


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_longbench_writes_what_it_says(steady, questions, tmp_path):
    options = ["--model", str(steady), "--data", str(questions), "--offset", "131072", "--max-length", "400"]
    chosen = ["--precisions", "fp16-eager,pasa", "--dataset", "hotpotqa,lcc", "--limit", "1", "--no-chat"]
    done = run(
        "eval", "longbench", *options, *chosen, "--output-dir", str(tmp_path), "--json", str(tmp_path / "x.json")
    )
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "x.json").read_text())
    assert list(result["datasets"]) == ["hotpotqa", "lcc"]
    assert list(result["precisions"]) == ["fp32", "fp16-eager", "pasa"]
    assert result["settings"]["chat"] is False
    assert (tmp_path / "longbench.md").is_file()
    assert (tmp_path / "predictions/pasa/lcc.jsonl").is_file()


def test_a_failed_check_is_exit_status_1(tiny, questions):
    """Without an injection FP16 scores do not overflow; with one that FP16 can hold, the collapse fails to come."""
    options = ["--model", str(tiny), "--data", str(questions), "--offset", "1024", "--max-length", "400"]
    done = run("eval", "longbench", *options, "--precisions", "fp16-eager", "--dataset", "lcc", "--diagnose", "0")
    assert done.exit_code == 1
    assert "FAILED: fp16_collapses" in " ".join(done.output.split())


def test_ppl_writes_what_it_says_and_shows_no_other_bar(steady, tmp_path):
    """Story: transformers drew a bar for the weights of every precision, into the log of a run without a terminal."""
    (tmp_path / "text.txt").write_text("In the beginning was the word. " * 10)
    options = ["--model", str(steady), "--text", str(tmp_path / "text.txt"), "--tokens", "200", "--window", "128"]
    chosen = ["--stride", "64", "--offsets", "0,131072", "--precisions", "fp16-eager,pasa"]
    transformers.logging.enable_progress_bar()
    try:
        done = run("eval", "ppl", *options, *chosen, "--output-dir", str(tmp_path / "out"))
    finally:
        transformers.logging.disable_progress_bar()
    assert (done.exit_code, done.stderr) == (0, "")
    records = json.loads((tmp_path / "out/ppl.json").read_text())["perplexities"]
    assert len(records) == 6
    assert [each["precision"] for each in records if each["perplexity"] is None] == ["fp16-eager"]


def test_model_benchmark_writes_what_it_says(tmp_path):
    options = ["--config", "tiny", "--tokens", "32", "--attention", "sdpa,pasa", "--new-tokens", "1", "--rounds", "1"]
    done = run("bench", "model", *options, "--output-dir", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert len(json.loads((tmp_path / "model.json").read_text())["records"]) == 4
    assert "random weights" in (tmp_path / "model.md").read_text()


@pytest.mark.parametrize(
    ("command", "module", "function", "kept"),
    [
        ("eval longbench", longbench, "parse_precisions", "nothing is kept"),
        ("eval longbench --output-dir out", longbench, "parse_precisions", longbench.EXPERIMENT.kept),
        ("eval ppl --output-dir out", perplexity, "parse_precisions", "nothing is kept"),
        ("bench model", throughput, "pick_device", "nothing is kept"),
    ],
)
def test_a_run_that_is_stopped_from_the_keyboard_says_what_is_kept(monkeypatch, command, module, function, kept):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, function, stop)
    done = run(*command.split())
    assert (done.exit_code, done.stderr) == (130, f"pasa: stopped; {kept}\n")
