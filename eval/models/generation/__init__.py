"""Time of a whole model that generates, by its attention, and where the time of a token goes."""
