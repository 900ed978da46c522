"""Guards around a device's own fused attention: keys less their anchors before it, repaired rows after it."""
