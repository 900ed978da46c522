"""The attention operator: the mathematics is in README.md, the specification in reference.py."""
