"""How many decimals figures are shown with, on the console, in reports and in messages."""

from __future__ import annotations

import math
from collections.abc import Iterable


def decimals(figures: Iterable[float]) -> int:
    """Return the decimals that figures are shown with, by the size of the largest that is finite.

    None from 10,000 on, one from 10 on, two above 1, three up to 1: a share of episodes won is 0.672, a return 497.3.
    """
    largest = max((abs(x) for x in figures if math.isfinite(x)), default=0.0)
    return 0 if largest >= 10_000 else 1 if largest >= 10 else 2 if largest > 1 else 3


def number(value: float, digits: int | None = None) -> str:
    """A return or a loss as short text: 12,345 or 231.5 or 0.012; `digits` after the point, if not as its size asks."""
    return f"{value:,.{decimals([value]) if digits is None else digits}f}"
