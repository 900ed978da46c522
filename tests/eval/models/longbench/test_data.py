"""What is read, and what is said of what cannot be."""

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
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


def test_a_folder_is_read_in_order(tmp_path):
    write(tmp_path, "qasper", ROW, "", {**ROW, "answers": ["她", "He"], "length": 4})
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


def test_a_hub_gives_the_same_zip(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    write(tmp_path, "qasper", ROW)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as file:
        file.write(tmp_path / "qasper.jsonl", "data/qasper.jsonl")
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path / "data.zip")
    )
    assert list(data.load_items("hf:THUDM/LongBench")) == ["qasper"]
    assert asked == [(("THUDM/LongBench", "data.zip"), {"repo_type": "dataset"})]


def test_a_hub_that_cannot_be_reached(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="'nobody/nothing' is not in the local cache and cannot be fetched"):
        data.load_items("hf:nobody/nothing")


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("qasper", '{"input": ', "broken JSON"),
        ("qasper", "[1]", "must be an object, not list"),
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


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "qasper.jsonl").write_bytes(b'{"input": "\xff"}\n')
    with pytest.raises(ValueError, match=r"qasper\.jsonl, line 1: .*utf-8"):
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
    write(tmp_path, "qasper", "")
    with pytest.raises(ValueError, match=r"no items in qasper\.jsonl"):
        data.load_items(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"has no trec\.jsonl; it has qasper"):
        data.load_items(str(tmp_path), ["trec"])
    with pytest.raises(ValueError, match="limit=0"):
        data.load_items(str(tmp_path), limit=0)


def test_the_digest_sees_every_field(tmp_path):
    write(tmp_path, "qasper", ROW, {**ROW, "length": 4})
    first, second = data.load_items(str(tmp_path))["qasper"]
    assert data.digest([first]) != data.digest([second])
    assert data.digest([first]) == data.digest([first])
