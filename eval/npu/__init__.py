"""A roofline model of the Ascend C kernels on an Ascend 910B3: a model, not a measurement."""
