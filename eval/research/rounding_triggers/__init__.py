"""Compare triggers that choose the rows to round stochastically."""
