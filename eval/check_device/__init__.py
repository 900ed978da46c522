"""Check a device: its backends against FP64, the format of its attention scores, and the time of a call."""
