"""What `pasa.watch` costs on a GPU, its counts checked first."""
