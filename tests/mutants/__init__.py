"""Faults that somebody could introduce, each with the tests that notice it; run by `python -m tests.mutants.run`."""
