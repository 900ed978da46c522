"""Whole models: language models, video, every architecture at hand, predictions and diagnoses."""
