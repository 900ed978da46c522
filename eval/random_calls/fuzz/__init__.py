"""Fuzzer: random calls of the whole public API, valid and not, and a search for inputs that break the guarantee."""
