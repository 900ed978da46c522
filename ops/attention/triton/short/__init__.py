"""Short sequences: all keys of a head fit one tile, so one launch does everything."""
