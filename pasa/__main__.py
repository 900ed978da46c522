"""Run the command line as `python -m pasa`."""

from pasa_cli import main, restart

restart()
main()
