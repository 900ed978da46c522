"""Which rows stochastic rounding should draw."""
