"""LongBench v1: the benchmark of the paper that overflows, with and without PASA."""
