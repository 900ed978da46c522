"""What experiments share: options, tables, stored runs, timing, descriptions of devices, built-in models."""
