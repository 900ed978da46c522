"""The kit of experiments: declarations, options, tables, stored runs, timing, devices, built-in models."""
