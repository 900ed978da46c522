"""A video pipeline as a regression: FP32, FP16 whose scores overflow, and FP16 with PASA, frame by frame."""
