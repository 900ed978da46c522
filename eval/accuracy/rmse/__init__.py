"""Accuracy against FP64: the paper's random cases, resonance, and large biases."""
