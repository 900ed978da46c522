"""Faults that somebody could make, each with the tests that notice it; `python -m tests.mutants.run`."""
