"""Running statistics of observations and rewards, one set for each member, as tensors in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from rlkit.buffer import Rollout
from rlkit.link import Link


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

    def state_dict(self) -> dict[str, Tensor]:
        state = dict(self.statistics.state_dict())
        return state if self.running is None else {**state, "running": self.running}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.running = state.get("running")
        self.statistics.load_state_dict({k: v for k, v in state.items() if k != "running"})
