"""Random calls, judged against FP64: the whole API on a CPU (profile "api"), and one backend's kernels on a device."""
