"""A fixture for the tests of `pasa to-fp16`."""

import pytest

from pasa.eval import cli


@pytest.fixture
def refused(capsys):
    """Run a command that must exit with 2 and one line on stderr; return the line."""

    def refuse(*arguments):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        lines = capsys.readouterr().err.splitlines()
        assert (stopped.value.code, len(lines)) == (2, 1), lines
        return lines[0]

    return refuse
