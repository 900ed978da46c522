"""A real language model whose scores overflow FP16, and the same model rescued by one call."""
