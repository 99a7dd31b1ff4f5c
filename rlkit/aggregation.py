"""Aggregation: how the rows of a rollout become one loss, as the weight of each row; `algo.aggregation=` names it.

Each is a function (rollout, horizon) -> [T, M, N], zero where a row is not valid. With `row` and `episode` a member's
weights average to one over its valid rows; `constant` divides by a fixed length instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlkit.buffer import Rollout


def row_weight(rollout: Rollout, horizon: int) -> Tensor:
    """Every valid row counts 1: the loss is the mean over steps."""
    return rollout.valid.to(rollout.reward.dtype)


def episode_weight(rollout: Rollout, horizon: int) -> Tensor:
    """Every episode counts the same: weight rows / (episodes * length of the row's episode).

    The original GRPO loss, 1/G sum 1/len sum (Shao et al. 2024, equation 3), biased by episode length (Liu et al.
    2025); in control tasks length is the return. Episodes cut by a window's edge count as episodes.
    """
    valid, ended = rollout.valid, rollout.ended
    length = torch.zeros_like(rollout.reward)
    running = torch.zeros_like(length[0])
    for t in range(len(length)):
        running = (running + 1) * valid[t]
        length[t] = running
        running = running * ~ended[t]
    for t in range(len(length) - 2, -1, -1):  # carry each episode's final length back to its first row
        inside = valid[t] & ~ended[t] & valid[t + 1]
        length[t] = torch.where(inside, length[t + 1], length[t])
    inverse = torch.where(valid, 1.0 / length.clamp(min=1.0), 0.0)
    episodes = inverse.sum((0, 2))  # [M]
    rows = valid.sum((0, 2))
    return inverse * (rows / episodes.clamp(min=1.0))[:, None]


def constant_weight(rollout: Rollout, horizon: int) -> Tensor:
    """Every row counts rows / (episodes * horizon): a sum over steps over a constant (Dr.GRPO, Liu et al. 2025)."""
    valid = rollout.valid
    last = torch.cat([~valid[1:], torch.ones_like(valid[:1])])
    episodes = (valid & (rollout.ended | last)).sum((0, 2))
    rows = valid.sum((0, 2))
    return valid * (rows / (episodes.clamp(min=1) * horizon))[:, None]


AGGREGATIONS: dict[str, Callable[[Rollout, int], Tensor]] = {
    "row": row_weight,
    "episode": episode_weight,
    "constant": constant_weight,
}
