"""The exact recovery and plain flash attention for whole sequences, portable, with masks and windows."""
