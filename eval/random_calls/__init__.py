"""Random and hostile calls, judged against FP64 and the guarantee."""
