"""Experiments on the bias that rounding leaves where rows repeat their maximum."""
