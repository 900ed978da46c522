"""Gradients, for GPUs: keys are centred first, then dK and dV by key tiles and dQ by row tiles."""
