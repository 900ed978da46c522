"""The products that power iteration on a layer's query and key weights consists of."""
