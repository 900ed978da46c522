"""Scale factors of attention logits in FP8: from the weights, from a history, from the logits themselves."""
