"""Speed on a CUDA device: attention against its peers, accuracy first; and the softmax side alone."""
