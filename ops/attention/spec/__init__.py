"""The specification: the operator in PyTorch with an NPU's roundings, and its definition in FP64."""
