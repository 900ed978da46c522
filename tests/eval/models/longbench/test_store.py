"""The folder of a run: whole lines only, the same settings only."""

import json

import pytest

from pasa.eval.models.longbench.store import Store, exclusive

SETTINGS = {"settings": {"max_length": 100}, "data": {"trec": "1"}}


def line(index, text="x"):
    return {"index": index, "pred": text, "answers": [], "all_classes": None, "length": 1, "broken": False, "s": 0.1}


def test_appended_lines_are_there(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.append("pasa", "trec", 0, [line(0), line(1)])
    store.append("pasa", "trec", 1, [line(2, "中\n文")])
    assert Store(tmp_path, SETTINGS).lines("pasa", "trec") == {0: line(0), 1: line(1), 2: line(2, "中\n文")}
    assert store.lines("pasa", "lsht") == store.lines("fp32", "trec") == {}


@pytest.mark.parametrize("torn", ['{"index": 1', '{"index": 1}', "\x00\x00"])
def test_a_torn_last_line_is_dropped_and_nothing_else(tmp_path, torn):
    """Without its line break even a line that can be read is not whole: it might be the beginning of a longer one."""
    store = Store(tmp_path, SETTINGS)
    store.append("pasa", "trec", 0, [line(0)])
    part = tmp_path / "parts/pasa/trec.0.jsonl"
    with part.open("a") as stream:
        stream.write(torn)
    assert list(store.lines("pasa", "trec")) == [0]
    store.append("pasa", "trec", 0, [line(1)])
    assert list(store.lines("pasa", "trec")) == [0, 1]
    assert [json.loads(row)["index"] for row in part.read_text().splitlines()] == [0, 1]


def test_a_broken_line_in_the_middle_is_named_and_kept(tmp_path):
    store = Store(tmp_path, SETTINGS)
    store.append("pasa", "trec", 0, [line(0)])
    part = tmp_path / "parts/pasa/trec.0.jsonl"
    text = "{broken\n" + part.read_text()
    part.write_text(text)
    with pytest.raises(ValueError, match=r"trec\.0\.jsonl, line 1: broken"):
        store.lines("pasa", "trec")
    assert part.read_text() == text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"settings": {"max_length": 200}}, r"settings\.max_length was 100 and is 200\): choose another folder"),
        ({"data": {"trec": "3"}}, r"data\.trec was '1' and is '3'"),
        ({"settings": {"max_length": 100, "chat": True}}, r"settings\.chat was None and is True"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, change, reason):
    Store(tmp_path, SETTINGS)
    Store(tmp_path, {**SETTINGS, "data": {"lsht": "2"}})
    with pytest.raises(ValueError, match=reason):
        Store(tmp_path, {**SETTINGS, **change})
    assert json.loads((tmp_path / "settings.json").read_text())["data"] == {"trec": "1", "lsht": "2"}


def test_a_folder_has_one_run_at_a_time(tmp_path):
    """Each process of a run has its lock, which ends with the run."""
    folder = tmp_path / "out"
    with exclusive(folder, 0), exclusive(folder, 1), pytest.raises(ValueError, match="another run is at work in"):
        exclusive(folder, 0).__enter__()
    with exclusive(folder, 0):
        assert folder.is_dir()


def test_the_finished_file_is_the_published_form_in_order_and_without_times(tmp_path):
    file = Store(tmp_path, SETTINGS).finish("pasa", "trec", [line(0), line(1)])
    rows = [json.loads(row) for row in file.read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1]
    assert list(rows[0]) == ["pred", "answers", "all_classes", "length", "index", "broken"]
    assert [path.name for path in file.parent.iterdir()] == ["trec.jsonl"]
