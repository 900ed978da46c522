"""LongBench from end to end on a tiny model, resumed and judged; and `pasa eval ppl` on the same model."""

from __future__ import annotations

import json

import pytest
import transformers
from typer.testing import CliRunner

from pasa.eval.commands import app
from pasa.eval.models.longbench import run

PRECISIONS = ("fp32", "fp16-eager", "pasa")
OPTIONS = {"max_length": 400, "batch_size": 2, "offset": 131072, "precisions": PRECISIONS}
TIMES = ("prefill_s", "decode_s", "peak_bytes")


def predictions(folder):
    """All that is stored of each answer but its cost."""
    files = sorted((folder / "predictions").rglob("*.*"))
    lines = {str(file.relative_to(folder)): map(json.loads, file.read_text().split("\n")[:-1]) for file in files}
    return {name: [{k: v for k, v in line.items() if k not in TIMES} for line in rows] for name, rows in lines.items()}


@pytest.fixture(scope="module")
def finished(steady, questions, tmp_path_factory):
    """A run that nothing stopped: its folder and its result."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, run.run_longbench(str(steady), str(questions), folder=folder, **OPTIONS)


def test_fp16_collapses_and_pasa_agrees(finished):
    result = finished[1]
    checks = ["reference_finite", "pasa_finite", "pasa_agrees", "fp16_collapses"]
    assert result["gate"] == {"passed": True, "checks": dict.fromkeys(checks, True)}
    precisions = result["precisions"]
    assert precisions["fp16-eager"]["broken"] == precisions["fp16-eager"]["items"] == 6
    assert (precisions["fp16-eager"]["agreement"], precisions["pasa"]["broken"]) == (0, 0)
    assert precisions["fp32"]["agreement"] == precisions["fp32"]["identical"] == 1
    assert min(precisions["fp32"][f"{phase}_tokens_per_s"] for phase in ("prefill", "decode")) > 0
    assert precisions["fp16-eager"]["decode_tokens_per_s"] is None
    assert len(result["layers"]) == 2
    assert all(layer["overflows"] == layer["scores"] for layer in result["layers"])
    text = run.EXPERIMENT.markdown(result)
    assert "FP16, eager (emulated): 6 of 6 answers broken, 0 of 6 equal to FP32's." in text


def test_predictions_are_in_the_published_form(finished):
    files = {name: lines for name, lines in predictions(finished[0]).items() if "/pasa/" in name}
    assert list(map(len, files.values())) == [3, 1, 2], "hotpotqa, lcc, triviaqa"
    lines = [line for each in files.values() for line in each]
    assert all({"pred", "answers", "all_classes", "length"} <= line.keys() for line in lines)
    assert len({line["pred"] for line in lines}) >= 3, "files of equal answers could not be distinguished"


@pytest.mark.parametrize("stop", [1, 5, 12])
def test_a_run_that_was_stopped_goes_on_to_the_same_files(finished, steady, questions, tmp_path, stop):
    """Stopped within a data set, between two precisions, and while scores are counted: no file is made twice."""
    labels: list[str] = []

    def halt(done, total, label):
        labels.append(label)
        if len(labels) == stop + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run_longbench(str(steady), str(questions), folder=tmp_path, progress=halt, **OPTIONS)
    kept = predictions(tmp_path).keys()
    result = run.run_longbench(str(steady), str(questions), folder=tmp_path, progress=halt, **OPTIONS)
    work = [label.split() for label in labels[stop + 1 :] if not label.startswith("scores")]
    made = {f"predictions/{precision}/{dataset}.jsonl" for precision, dataset, _ in work}
    assert (len(kept), kept & made) == ({1: 0, 5: 3, 12: 9}[stop], set())
    assert predictions(tmp_path) == predictions(finished[0])
    assert (result["datasets"], result["layers"]) == (finished[1]["datasets"], finished[1]["layers"])


def test_another_run_in_the_same_folder_is_refused(finished, steady, questions, tmp_path):
    (tmp_path / "hotpotqa.jsonl").write_text((questions / "hotpotqa.jsonl").read_text().replace("Some", "Any"))
    with pytest.raises(ValueError, match=r"max_length was 400 and is 300\): choose another folder"):
        run.run_longbench(str(steady), str(questions), folder=finished[0], **{**OPTIONS, "max_length": 300})
    with pytest.raises(ValueError, match=r"data\.hotpotqa was '3 items, .*' and is '3 items, "):
        run.run_longbench(str(steady), str(tmp_path), folder=finished[0], **OPTIONS)


def test_samsum_alone_ends_with_its_line(steady, questions, tmp_path, monkeypatch):
    calls = []

    def answer(model, tokenizer, prompts, most, *, ends_at_newline):
        calls.append((most, ends_at_newline))
        line = {"pred": "x", "broken": False, "prompt_tokens": 1, "new_tokens": 1, "prefill_s": 0.1, "decode_s": 0.1}
        return [line] * 2

    monkeypatch.setattr(run, "answer", answer)
    for name in ("samsum", "triviaqa"):
        (tmp_path / f"{name}.jsonl").write_bytes((questions / "triviaqa.jsonl").read_bytes())
    run.run_longbench(str(steady), str(tmp_path), **{**OPTIONS, "precisions": ["fp32"]})
    assert calls == [(128, True), (32, False)]


def test_a_model_as_it_is_is_judged_by_finiteness_alone(steady, questions):
    options = {**OPTIONS, "offset": None, "precisions": ("pasa",), "dataset": ["lcc"]}
    result = run.run_longbench(str(steady), str(questions), **options)
    assert result["gate"]["checks"] == {"reference_finite": True, "pasa_finite": True}
    assert result["fixture"] is None
    assert list(result["precisions"]) == ["fp32", "pasa"]


def test_ppl_writes_its_files_and_shows_no_other_bar(steady, tmp_path):
    """Story: transformers drew a bar for the weights of every precision, into the log of a run without a terminal."""
    (tmp_path / "text.txt").write_text("In the beginning was the word. " * 10)
    options = ["--model", str(steady), "--text", str(tmp_path / "text.txt"), "--tokens", "200", "--window", "128"]
    chosen = ["--stride", "64", "--offsets", "0,131072", "--precisions", "fp16-eager,pasa"]
    transformers.logging.enable_progress_bar()
    try:
        done = CliRunner().invoke(app, ["eval", "ppl", *options, *chosen, "--output-dir", str(tmp_path / "out")])
    finally:
        transformers.logging.disable_progress_bar()
    assert (done.exit_code, done.stderr) == (0, "")
    records = json.loads((tmp_path / "out/ppl.json").read_text())["perplexities"]
    assert len(records) == 6
    assert [each["precision"] for each in records if each["perplexity"] is None] == ["fp16-eager"]


def test_a_run_that_is_stopped_from_the_keyboard_says_how_to_go_on(steady, questions, tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run._Run, "answer_all", stop)
    options = ["--model", str(steady), "--data", str(questions), "--precisions", "pasa"]
    for folder, kept in (
        ([], "nothing was written"),
        (["--output-dir", str(tmp_path)], f"complete: {tmp_path}/settings.json; {run.EXPERIMENT.resume}"),
    ):
        done = CliRunner().invoke(app, ["eval", "longbench", *options, *folder])
        assert (done.exit_code, done.stderr) == (130, f"pasa: stopped; {kept}\n")
