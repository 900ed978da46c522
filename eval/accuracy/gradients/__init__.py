"""Gradients of attention: errors against FP64, and their time on a GPU."""
