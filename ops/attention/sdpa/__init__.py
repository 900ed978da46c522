"""The guarantee on top of a device's own fused attention."""
