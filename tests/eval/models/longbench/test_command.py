"""`pasa eval longbench`, `pasa eval ppl` and `pasa bench model` from the command line."""

import json

import pytest
import transformers
from typer.testing import CliRunner

from pasa.eval.commands import app
from pasa.eval.models.longbench import run as longbench


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


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
    ("options", "kept"), [((), "nothing is kept"), (("--output-dir", "out"), longbench.EXPERIMENT.kept)]
)
def test_a_run_that_is_stopped_from_the_keyboard_says_what_is_kept(monkeypatch, options, kept):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(longbench, "parse_precisions", stop)
    done = run("eval", "longbench", *options)
    assert (done.exit_code, done.stderr) == (130, f"pasa: stopped; {kept}\n")
