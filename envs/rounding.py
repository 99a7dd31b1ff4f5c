"""Squares rounded as NumPy rounds them for single numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

# The C library's pow is at most this many units in the last place off the true square (glibc: 0.51), so the rounding y
# is in doubt where x^2 lies near the middle between two numbers: y + _DOUBT * (x^2 - y) is then no longer y.
_POW_ERROR = 0.52
_DOUBT = 0.5 / (1 - _POW_ERROR)
_HIGH_HALF = -(1 << 27)  # mask of a double's upper 26 digits


def scalar_square(x: Any) -> Any:
    """Return x^2 with the bits of `x[i] ** 2`, number by number; for other arrays than NumPy's simply x * x.

    For single numbers NumPy calls the C library's pow, whose last bit is not always that of the product: about 1 in
    1,000 differ. An array raised to an array of twos is no way out, since NumPy then has a power function of its own on
    some processors (AVX-512). So the few squares whose rounding is in doubt are taken one by one.

    Args:
        x: float32 or float64, any shape.
    """
    square = x * x
    if not isinstance(x, np.ndarray):
        return square
    if x.dtype == np.float64:  # the exact error of the product, after Dekker
        high = (x.view(np.int64) & _HIGH_HALF).view(np.float64)
        error = (high * high - square) + (x + high) * (x - high)
    else:
        error = x.astype(np.float64) ** 2 - square
    in_doubt = (square + _DOUBT * error).astype(x.dtype, copy=False) != square
    if np.count_nonzero(in_doubt):
        numbers = x[in_doubt]
        square[in_doubt] = [number**2 for number in (numbers.tolist() if x.dtype == np.float64 else numbers)]
    return square
