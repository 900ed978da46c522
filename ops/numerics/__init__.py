"""The arithmetic of the hardware as data: number formats and their roundings, shifting matrices and their inverses."""
