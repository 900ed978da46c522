"""The published algorithm (arXiv:2503.01873), portable."""
