"""Shifted keys K' and their block means."""
