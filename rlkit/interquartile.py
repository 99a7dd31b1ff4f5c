"""How the results of several members become one number."""

from __future__ import annotations

import numpy as np


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half over the last axis.

    Of n values, floor(n / 4) are cut at each end and the rest is averaged, as `scipy.stats.trim_mean` does
    with 0.25. Source: Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice", section 4.3.

    Args:
        values: [.., M]; nan marks a value that was not measured and is left out.

    Returns:
        [..] float64, nan where nothing was measured.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)  # nan comes last
    count = (~np.isnan(ordered)).sum(-1, keepdims=True)  # [.., 1]
    cut = count // 4
    rank = np.arange(ordered.shape[-1])
    total = np.where((rank >= cut) & (rank < count - cut), ordered, 0.0).sum(-1)
    size = (count - 2 * cut)[..., 0]
    mean: np.ndarray = np.divide(total, size, out=np.full(total.shape, np.nan), where=size > 0)
    return mean
