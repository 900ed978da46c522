"""Errors against FP64, by arithmetic and by kernel."""
