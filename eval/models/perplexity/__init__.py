"""Perplexity of a long text in several precisions, with a sliding window."""
