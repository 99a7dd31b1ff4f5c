"""Squares rounded as NumPy rounds them for single numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

# Relative error allowed to the C library's powf before it rounds to float32 (glibc: 2^-33 for squares).
_POWF_ERROR = 2.0**-30


def scalar_square(x: Any) -> Any:
    """Return x^2 with the bits of `x[i] ** 2`, number by number; for other arrays than NumPy's simply x * x.

    For single numbers NumPy calls the C library's pow, whose last bit is not always that of the product: about 1 in
    1,000 differ. An array raised to an array of twos is no way out, since NumPy then has a power function of its own on
    some processors (AVX-512); `float_power` has none, and calls pow for each number. It knows no float32: there the few
    squares whose rounding is in doubt are taken one by one.

    Args:
        x: float32 or float64, any shape.
    """
    if not isinstance(x, np.ndarray):
        return x * x
    if x.dtype == np.float64:
        return np.float_power(x, 2.0)
    exact = x.astype(np.float64)
    exact *= exact
    square = (exact * (1 - _POWF_ERROR)).astype(np.float32)
    in_doubt = square != (exact * (1 + _POWF_ERROR)).astype(np.float32)
    if np.count_nonzero(in_doubt):
        square[in_doubt] = [number**2 for number in x[in_doubt]]
    return square
