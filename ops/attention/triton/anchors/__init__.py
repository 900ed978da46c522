"""Anchors of key blocks: the key that a block subtracts, the norms that are left, and the published shift."""
