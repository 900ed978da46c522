"""Reinforcement learning with one FP16 arithmetic for rollout and training."""
