"""Kernels and references behind one operator signature; imports nothing of the floors above."""
