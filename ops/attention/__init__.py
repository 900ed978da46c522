"""The attention operator. README.md derives the mathematics; the folder spec/ specifies the operator."""
