"""Speed on a CUDA device: attention against its peers, accuracy first; several devices; the cost of watching."""
