"""The cost of `pasa.watch` on a GPU, its counts checked first."""
