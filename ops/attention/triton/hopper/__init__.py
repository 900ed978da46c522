"""The exact recovery on Hopper (sm_90), in Gluon: warps that load, multiply and exponentiate at the same time."""
