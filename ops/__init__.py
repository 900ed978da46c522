"""Kernels and their references, behind one operator signature. Nothing here imports from the layers above."""
