"""Scales a checkpoint on disk for FP16, and runs what was written."""
