"""Whole models on a chip that saturates, emulated: an Ascend 310P, which leaves no NaN behind where FP16 overflows."""
