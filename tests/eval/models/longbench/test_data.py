"""Data sets that are read, and errors for those that cannot be."""

import json

import pytest

from pasa.eval.models.longbench import data

ROW = {"input": "Who?", "context": "Text.", "answers": ["He"], "length": 3, "dataset": "qasper", "all_classes": None}


def write(folder, name, *rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / f"{name}.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def test_a_folder_is_read_in_order(tmp_path):
    write(tmp_path, "qasper", ROW, b"", {**ROW, "answers": ["她", "He"], "length": 4})
    write(tmp_path, "qasper_e", {**ROW, "dataset": "qasper_e"})
    items = data.load_items(str(tmp_path))
    assert list(items) == ["qasper"]
    assert items["qasper"][0] == data.Item("Text.", "Who?", ["He"], 3, None)
    assert items["qasper"][1].answers == ["她", "He"]
    assert list(data.load_items(str(tmp_path), ["qasper_e"])) == ["qasper_e"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b'{"input": ', "Expecting value"),
        (b"[1]", "must be an object, not list"),
        ({k: v for k, v in ROW.items() if k != "context"}, "field 'context' must be str, not 'missing'"),
        ({**ROW, "answers": "He"}, "'answers' must be list, not 'He'"),
        ({**ROW, "answers": [1]}, "must be lists of strings"),
        ({**ROW, "dataset": "squad"}, "unknown dataset 'squad'"),
        ({**ROW, "dataset": "trec"}, "dataset 'trec' in the file of qasper"),
        ({**ROW, "answers": ["\ud800"]}, "'utf-8' codec can't encode .* surrogates not allowed"),
    ],
)
def test_bad_lines_are_named_with_file_and_line(tmp_path, row, reason):
    write(tmp_path, "qasper", ROW, row)
    with pytest.raises(ValueError, match=rf"qasper\.jsonl, line 2: .*{reason}"):
        data.load_items(str(tmp_path))


def test_folders_without_items_are_named(tmp_path):
    for folder in ("nowhere", str(tmp_path)):
        with pytest.raises(ValueError, match=f"data '{folder}' is no folder of JSON lines"):
            data.load_items(folder)
    write(tmp_path, "qasper", b"")
    with pytest.raises(ValueError, match="one of its data sets is empty"):
        data.load_items(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"has no trec\.jsonl; it has qasper"):
        data.load_items(str(tmp_path), ["trec"])
