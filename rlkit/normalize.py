"""Running statistics of observations and rewards, one set for each member, as tensors in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from rlkit.buffer import Rollout
from rlkit.link import Link

VALUE_RATE = 0.1  # a memory of ten rollouts: short enough for returns that grow, long enough for an odd rollout
LOWEST_STD = 1e-4  # of value targets, as in Hessel et al. 2019: equal ones are no reason to divide by zero


class Normalizer(nn.Module):
    """(x - mean) / std, clipped to +-`clip`, with running mean and variance of each member [M, D].

    Statistics move only in `update`, which the loop calls after an update: they are frozen within one rollout and the
    epochs on it, so that the ratio of the first minibatch is one. Batches are merged by the parallel-variance rule
    (Chan, Golub & LeVeque 1983). Before the first update the normaliser only clips.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, members: int, size: int, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.clip, self.epsilon = clip, epsilon
        self.register_buffer("mean", torch.zeros(members, size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(members, size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(members, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [M, B, D]."""
        scale = (self.var + self.epsilon).rsqrt()
        return ((x - self.mean[:, None].float()) * scale[:, None].float()).clamp(-self.clip, self.clip)

    def by_hand(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return the same function of arrays, with the statistics as they are now."""
        mean = self.mean[:, None].float().numpy()
        scale = (self.var + self.epsilon).rsqrt()[:, None].float().numpy()
        return lambda x: ((x - mean) * scale).clip(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x: Tensor, valid: Tensor) -> None:
        """Merge the valid rows of x [T, M, N, D] (valid [T, M, N]) into the statistics."""
        weight = valid.double()[..., None]  # [T, M, N, 1]
        new = weight.sum((0, 2))  # [M, 1]
        safe = new.clamp(min=1.0)
        x = x.double()
        mean = (weight * x).sum((0, 2)) / safe  # [M, D]
        var = (weight * (x - mean[:, None]) ** 2).sum((0, 2)) / safe
        old = self.count[:, None]
        total = (old + new).clamp(min=1.0)
        delta = mean - self.mean
        merged = (self.var * old + var * new + delta**2 * old * new / total) / total
        some = new > 0  # a frozen member has no valid row and keeps its statistics
        self.mean.copy_(torch.where(some, self.mean + delta * new / total, self.mean))
        self.var.copy_(torch.where(some, merged, self.var))
        self.count += new[:, 0]


class RewardScale(Link):
    """Divides rewards by the running standard deviation of the discounted return of each member's environments.

    R_t = gamma R_{t-1} + r_t restarts with each episode (Engstrom et al. 2020, code-level optimisation 2). The mean
    is not subtracted: that would change the task. The scale within one rollout is the one known before it;
    the first rollout is scaled by its own.
    """

    def __init__(self, members: int, gamma: float, clip: float = 10.0) -> None:
        self.gamma, self.clip = gamma, clip
        self.statistics = Normalizer(members, 1)
        self.running: Tensor | None = None  # [M, N]: each environment's discounted return so far

    @torch.no_grad()
    def rollout(self, rollout: Rollout) -> Rollout:
        running = torch.zeros_like(rollout.reward[0]) if self.running is None else self.running
        returns = torch.zeros_like(rollout.reward)
        for t in range(len(returns)):
            running = running * self.gamma + rollout.reward[t]
            returns[t] = running
            running = running * ~(rollout.ended[t] | ~rollout.valid[t])
        self.running = running
        known = self.statistics.count > 0  # [M]
        before = self.statistics.var.clone()
        self.statistics.update(returns[..., None], rollout.valid)
        var = torch.where(known[:, None], before, self.statistics.var)  # [M, 1]
        reward = rollout.reward * (var + self.statistics.epsilon).rsqrt().float()
        return rollout.replace(reward=reward.clamp(-self.clip, self.clip))

    def restart(self) -> None:
        self.running = None

    def state_dict(self) -> dict[str, Tensor]:
        state = dict(self.statistics.state_dict())
        return state if self.running is None else {**state, "running": self.running}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.running = state.get("running")
        self.statistics.load_state_dict({k: v for k, v in state.items() if k != "running"})


class ValueScale(nn.Module):
    """The critic's units: V = std raw + mean, with exponentially weighted statistics of each member's value targets.

    A rollout whose targets have mean m and variance v moves statistics of total weight w, which starts at zero, by

        w' = (1 - rate) w + rate,   c = rate / w',   mean' = mean + c (m - mean),
        var' = (1 - c) var + c v + c (1 - c) (m - mean)^2

    so they are averages with weights that sum to one from the first rollout on: the debiased ones of Adam (Kingma & Ba
    2015, section 3), as a merge that cannot turn negative. Until then V = raw. They move only in `update`, which the
    loop calls after an update: frozen within one rollout and the epochs on it, never those of the batch they scale.

    Source: van Hasselt et al. 2016 ("Learning values across many orders of magnitude", sections 2.1 and 2.2).

    Args:
        rate: weight of the newest rollout.
    """

    mean: Tensor
    var: Tensor
    weight: Tensor

    def __init__(self, members: int, rate: float = VALUE_RATE) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("mean", torch.zeros(members, dtype=torch.float64))
        self.register_buffer("var", torch.ones(members, dtype=torch.float64))
        self.register_buffer("weight", torch.zeros(members, dtype=torch.float64))

    @property
    def std(self) -> Tensor:
        """The unit, [M], in units of return."""
        return self.var.sqrt().clamp(min=LOWEST_STD)

    def units(self) -> tuple[Tensor, Tensor]:
        """Return mean and std as they apply to values [M, B], [M, 1] each."""
        return self.mean[:, None].float(), self.std[:, None].float()

    def forward(self, raw: Tensor) -> Tensor:
        """Return V for the critic's output, [M, B] each."""
        mean, std = self.units()
        return torch.addcmul(mean, std, raw)

    @torch.no_grad()
    def update(self, ret: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the valid rows of value targets [T, M, N].

        Returns:
            (a, b), [M] each: a raw + b is in the new units what raw was in the old; (1, 0) where nothing changed.
        """
        rows = valid.sum((0, 2)).double()
        m = ret.double().masked_fill(~valid, 0.0).sum((0, 2)) / rows
        v = ((ret - m[:, None]) ** 2).masked_fill(~valid, 0.0).sum((0, 2)) / rows
        some = (m + v).isfinite()  # 0 / 0 of a frozen member is not, nor are the targets of a critic that diverged
        old_mean, old_std = self.mean.clone(), self.std
        weight = (1 - self.rate) * self.weight + self.rate
        c = self.rate / weight
        var = (1 - c) * self.var + c * v + c * (1 - c) * (m - old_mean) ** 2
        self.weight.copy_(torch.where(some, weight, self.weight))
        self.mean.copy_(torch.where(some, old_mean + c * (m - old_mean), old_mean))
        self.var.copy_(torch.where(some, var, self.var))
        return old_std / self.std, (old_mean - self.mean) / self.std
