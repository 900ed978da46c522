"""Training of a small language model with biased and with unbiased rounding."""
