"""Bound the errors that roundings to FP16 and FP32 add to queries and keys, from the norm before them to the scores."""

from __future__ import annotations

import math

from pasa.ops.numerics.formats import FP16, FP16_MAX, FP32_UNIT

FP16_UNIT = 2.0 ** -(FP16.mantissa_bits + 1)
FP16_HALF_STEP = FP16.min_subnormal / 2
"""Half the smallest step of FP16, 2^-25.

FP16 rounds x to x (1 + a) + b with |a| <= u and |b| <= 2^-25, because below 2^-14 its steps no longer shrink with x.
"""

ROUNDINGS = 8
"""Number of roundings to FP16 between n and q (or k).

They are norm, gain and shift, projection and bias, and five in the rotation (two products, their sum, cosine and sine).
Each changes q by at most u times its length (plus `Projection.hidden`), and by its share of `Projection.absolute`.
"""

RELATIVE = (1.0 + FP16_UNIT) ** ROUNDINGS * (1.0 + 2.0 * FP16_HALF_STEP) - 1.0
"""Bound on the relative error of all `ROUNDINGS` together, each of which acts on the result of the one before.

Cosines and sines, which are at most 1, also have the absolute part of 2^-25. It moves either element of a pair (a, b)
by at most 2^-25 (|a| + |b|), and so the pair by at most 2^-24 of its length.
"""

MEAN_UNITS = 8
"""Largest error of a layer norm's mean m in FP32, in units of 2^-24 max|x|.

PyTorch's CPU kernels err by up to 3.3 units for rows of 48 to 12,288 elements. The bound is about twice that, to allow
for kernels that sum in another order.
"""
ELEMENT_UNITS = 2
"""Rounding error of an element y = r x - r m in FP32, in units of 2^-24 r max|x|: one unit for r x and one for r m.

Here r is 1 / sqrt(variance + epsilon).
"""

CONSTANT_UNITS = 6
"""Largest |y| of a constant row, in the same units.

The sum of up to 8192 equal FP16 numbers is exact in FP32, so a CPU errs by at most 2 units in the mean and 2 in y;
1.0 was measured. CUDA forms r (x - m), and its merges of partial means err by up to 5.7 units. This is the result of a
model of these merges over all significands and rows of up to 16,384 elements.
"""


def constant_level(epsilon: float) -> float:
    """Return the largest element that a layer norm makes of a constant row; in exact arithmetic it is 0.

    The variance is 0, so the rounding errors of x - m are divided by sqrt(epsilon) alone. |x| is at most 65504. All
    elements are equal, because the same operations act on each.
    """
    return CONSTANT_UNITS * FP32_UNIT * FP16_MAX / math.sqrt(epsilon) if epsilon > 0.0 else math.inf


def unevenness(elements: float) -> float:
    """Return the most that 2^-24 r max|x| can be (see `ELEMENT_UNITS`) if a row of FP16 numbers is not constant.

    Some element differs from the largest one by at least 2^-11 max|x|, the smallest distance of FP16 numbers. So n
    elements have a variance of at least (2^-11 max|x|)^2 (n - 1) / n^2, and r max|x| is at most 2^11 n / sqrt(n - 1).
    """
    return FP32_UNIT / FP16_UNIT * elements / math.sqrt(elements - 1.0) if elements > 1.0 else 0.0
