"""Data sets that are read, and errors for those that cannot be."""

import json
import zipfile

import pytest

from pasa.eval.models.longbench import data

ROW = {
    "input": "Who?",
    "context": "A text.",
    "answers": ["He"],
    "length": 3,
    "dataset": "qasper",
    "language": "en",
    "all_classes": None,
    "_id": "0",
}


def write(folder, name, *rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / f"{name}.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def test_a_folder_is_read_in_order(tmp_path):
    write(tmp_path, "qasper", ROW, b"", {**ROW, "answers": ["她", "He"], "length": 4})
    write(tmp_path, "qasper_e", {**ROW, "dataset": "qasper_e"})
    found = data.load_items(str(tmp_path))
    assert list(found) == ["qasper"]
    assert found["qasper"][0] == data.Item(0, "A text.", "Who?", ["He"], 3, None)
    assert found["qasper"][1].answers == ["她", "He"]
    assert list(data.load_items(str(tmp_path), extended=True)) == ["qasper_e"]
    assert len(data.load_items(str(tmp_path), ["qasper"], limit=1)["qasper"]) == 1


def test_the_published_zip_is_read_alike(tmp_path):
    write(tmp_path, "qasper", ROW)
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(tmp_path / "qasper.jsonl", "data/qasper.jsonl")
        file.writestr("__MACOSX/data/._qasper.jsonl", b"\0")
    assert data.load_items(str(archive)) == data.load_items(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("qasper", b'{"input": ', "broken JSON"),
        ("qasper", b"[" * 100_000, "broken JSON"),
        ("qasper", b'{"input": "\xff"}', "utf-8"),
        ("qasper", b"[1]", "must be an object, not list"),
        ("qasper", {k: v for k, v in ROW.items() if k != "context"}, "field 'context' is missing"),
        ("qasper", {**ROW, "answers": "He"}, "'answers' must be a list of strings, not 'He'"),
        ("qasper", {**ROW, "answers": [1]}, "'answers' must be a list of strings"),
        ("qasper", {**ROW, "length": True}, "'length' must be a number"),
        ("qasper", {**ROW, "input": None}, "'input' must be a string, not None"),
        ("qasper", {**ROW, "dataset": "squad"}, "unknown dataset 'squad'"),
        ("qasper", {**ROW, "dataset": "trec"}, "dataset 'trec' in the file of qasper"),
        ("qasper", {**ROW, "answers": ["\ud800"]}, "'utf-8' codec can't encode .* surrogates not allowed"),
        ("trec", {**ROW, "dataset": "trec"}, "all_classes is empty"),
        ("passage_retrieval_zh", {**ROW, "dataset": "passage_retrieval_zh"}, "'He' holds no '段落' with a number"),
    ],
)
def test_bad_lines_are_named_with_file_and_line(tmp_path, name, row, reason):
    good = {**ROW, "dataset": name, "answers": ["段落1"], "all_classes": ["段落1"]}
    write(tmp_path, name, good, row)
    with pytest.raises(ValueError, match=rf"{name}\.jsonl, line 2: .*{reason}"):
        data.load_items(str(tmp_path))


def test_sources_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="'nowhere' is neither a folder"):
        data.load_items("nowhere")
    with pytest.raises(ValueError, match=r"no items; looked for \*\.jsonl \(\*_e\.jsonl with --e\)$"):
        data.load_items(str(tmp_path))
    with pytest.raises(ValueError, match=r"no items; looked for \*_e\.jsonl$"):
        data.load_items(str(tmp_path), extended=True)
    write(tmp_path, "squad", ROW)
    with pytest.raises(ValueError, match=r"squad\.jsonl: unknown dataset 'squad'"):
        data.load_items(str(tmp_path))
    write(tmp_path, "qasper", ROW)
    assert list(data.load_items(str(tmp_path), ["qasper"])) == ["qasper"], "what is not asked for may lie there"
    (tmp_path / "squad.jsonl").unlink()
    write(tmp_path, "qasper", b"")
    with pytest.raises(ValueError, match=r"no items in qasper\.jsonl"):
        data.load_items(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"has no trec\.jsonl; it has qasper"):
        data.load_items(str(tmp_path), ["trec"])


def test_the_digest_sees_every_field(tmp_path):
    write(tmp_path, "qasper", ROW, {**ROW, "length": 4})
    first, second = data.load_items(str(tmp_path))["qasper"]
    assert data.digest([first]) != data.digest([second])
    assert data.digest([first]) == data.digest([first])
