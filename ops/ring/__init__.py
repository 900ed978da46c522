"""Attention over a sequence that several devices share; keys and values go round a ring of devices."""
