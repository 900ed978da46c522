"""Counters of sampled score rows, beside the attention (`pasa.watch`)."""
