"""The attention operator. README.md derives the mathematics; reference.py specifies the operator."""
