"""Predictions of overflow from weights: on a model, against what models do, and the paper's tables."""
