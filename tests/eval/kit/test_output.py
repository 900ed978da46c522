"""Progress where nobody looks at a bar."""

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
