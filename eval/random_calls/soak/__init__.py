"""Soak: random calls of one backend, each judged against FP64 and against the guarantee."""
