"""Queries and keys of a model's attention while it runs: where FP16 scores overflow, and why."""
