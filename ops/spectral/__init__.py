"""Products that power iteration on a layer's query and key weights is made of."""
