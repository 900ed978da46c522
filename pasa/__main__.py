"""Run the command line as `python -m pasa`."""

from pasa.eval.cli import main

main()
