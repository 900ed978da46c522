"""Files that are whole or absent, places that cannot be written, and progress where nobody looks at a bar."""

import os

import pytest

from pasa.eval.kit import output


@pytest.mark.parametrize(("rank", "pause", "lines"), [("0", 0, 2), ("0", 60, 0), ("1", 0, 0)])
def test_without_a_terminal_the_first_process_says_a_line_now_and_then(monkeypatch, capsys, rank, pause, lines):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", pause)
    with output.progress_bar("eval x") as report:
        report(0, 2, "first")
        report(1, 2, "second")
    assert capsys.readouterr().err.splitlines() == ["eval x: 0/2 first", "eval x: 1/2 second"][:lines]


def test_a_file_that_is_written_is_whole_or_absent(tmp_path, monkeypatch):
    def stop(*places):
        raise KeyboardInterrupt

    output.write_text(tmp_path / "deep" / "x.md", "first")
    monkeypatch.setattr(os, "replace", stop)
    for name in ("x.md", "y.md"):
        with pytest.raises(KeyboardInterrupt):
            output.write_text(tmp_path / "deep" / name, "second")
    assert [(path.name, path.read_text()) for path in (tmp_path / "deep").iterdir()] == [("x.md", "first")]


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.touch()
    link.symlink_to(target)
    output.write_text(link, "text")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that opening the pipe for writing does not wait
    output.write_text(pipe, "text")
    assert (link.is_symlink(), target.read_text()) == (True, "text")
    assert (pipe.is_fifo(), os.read(reader, 9)) == (True, b"text")
    os.close(reader)


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for place, folder in (("file", True), ("file/deep/x", True), ("file/x.json", False)):
        with pytest.raises(NotADirectoryError, match=r"file' is not a folder; name another place"):
            output.check_target(tmp_path / place, folder=folder)
    output.check_target(tmp_path / "new" / "deep", folder=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for place, folder in (("new/deep", True), ("new/x.json", False), ("file", False)):
        with pytest.raises(PermissionError, match=f"cannot write .*{place}': no permission to write '{tmp_path}"):
            output.check_target(tmp_path / place, folder=folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_error_is_one_line_of_class_and_message():
    assert output.error_line(ValueError("a\n  b")) == "ValueError: a b"
    assert output.error_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(output.error_line(ValueError("x" * 1000))) == len("ValueError: ") + output.MESSAGE_LETTERS
