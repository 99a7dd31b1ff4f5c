"""Exploration that lasts: offsets to the behaviour distribution's parameters, which action noise alone cannot give.

The action is drawn from pi(. | s, offset), whose logits (discrete) or mean (continuous) are those of pi(. | s) plus the
offset. The rollout keeps the offset, and the update evaluates the policy with the same one, so the ratio is that of two
real probabilities: no importance correction, no bias, however large the offset is. What is learned is the policy at
every offset; a schedule takes the scale to zero, and evaluation acts without one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.normalize import Normalizer
from rlkit.schedules import Schedule


class Exploration(ABC):
    """Gives the offset of every environment of every member, step by step.

    Args:
        scale: schedule of the offset's standard deviation, in nats of logit (discrete) or units of raw action.
        members: M.
        num_envs: N.
        obs_size: D.
        action_size: A.
    """

    def __init__(self, scale: Schedule, members: int, num_envs: int, obs_size: int, action_size: int) -> None:
        self.scale = scale
        self.shape = (members, num_envs)
        self.obs_size, self.action_size = obs_size, action_size
        self.rngs: list[np.random.Generator] = []

    def begin(self, rngs: list[np.random.Generator]) -> None:
        """Draw from these generators, one for each member, from now on."""
        self.rngs = rngs

    @abstractmethod
    def restart(self, lanes: np.ndarray) -> None:
        """Forget the past of environments in which an episode begins, bool [M*N]."""

    @abstractmethod
    def offset(self, obs: Tensor) -> Tensor:
        """Return the offsets [M, N, A] of one step at obs [M, N, D]."""

    @abstractmethod
    def observe(self, obs: Tensor, valid: Tensor) -> None:
        """Take note of a rollout's observations [T, M, N, D] (valid [T, M, N]) once it is complete."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What the next offset depends on; tensors start with the member axis."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""


class LinearExploration(Exploration):
    """offset = scale * W x / sqrt(D), W [A, D] standard normal, drawn once an episode; x the normalised observation.

    A random linear policy for each episode: it pushes one way in one part of the state space and another way in
    another, for the whole episode, and so reaches rewards that independent noise never meets (MountainCar's flag). The
    relative of parameter-space noise (Plappert et al. 2018) and of state-dependent exploration (Rueckstiess et al.
    2010) whose ratio is exact. x has statistics of its own, whether or not the policy normalises.
    """

    def __init__(self, scale: Schedule, members: int, num_envs: int, obs_size: int, action_size: int) -> None:
        super().__init__(scale, members, num_envs, obs_size, action_size)
        self.statistics = Normalizer(members, obs_size)
        self.weight = np.zeros((*self.shape, obs_size, action_size), np.float32)

    def restart(self, lanes: np.ndarray) -> None:
        for weight, rng, begins in zip(self.weight, self.rngs, lanes.reshape(self.shape), strict=True):
            count = int(np.count_nonzero(begins))
            if count:
                weight[begins] = rng.standard_normal((count, self.obs_size, self.action_size), dtype=np.float32)

    def offset(self, obs: Tensor) -> Tensor:
        x = self.statistics(obs)[..., None, :]  # [M, N, 1, D]
        scale = self.scale.value[:, None, None] / math.sqrt(self.obs_size)
        offset: Tensor = (x @ torch.from_numpy(self.weight))[..., 0, :] * scale
        return offset

    def observe(self, obs: Tensor, valid: Tensor) -> None:
        self.statistics.update(obs, valid)

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": self.statistics.state_dict(), "weight": torch.from_numpy(self.weight)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.statistics.load_state_dict(state["statistics"])
        self.weight = state["weight"].numpy().copy()


class CorrelatedExploration(Exploration):
    """offset_t = scale z_t, z_t = rho z_(t-1) + sqrt(1 - rho^2) e_t with rho = exp(-1 / time_constant), e_t normal.

    The Ornstein-Uhlenbeck process of Lillicrap et al. (2016) in its stationary state: z begins an episode as a standard
    normal. A time constant beyond the episode's length is a constant push.

    Args:
        time_constant: steps after which the correlation has fallen to 1/e.
    """

    def __init__(
        self,
        scale: Schedule,
        members: int,
        num_envs: int,
        obs_size: int,
        action_size: int,
        time_constant: float = 10.0,
    ) -> None:
        super().__init__(scale, members, num_envs, obs_size, action_size)
        self.rho = math.exp(-1.0 / time_constant)
        self.z = np.zeros((*self.shape, action_size), np.float32)
        self.fresh = np.ones(self.shape, bool)  # an episode begins

    def restart(self, lanes: np.ndarray) -> None:
        self.fresh |= lanes.reshape(self.shape)

    def offset(self, obs: Tensor) -> Tensor:
        noise = np.stack([rng.standard_normal(self.z.shape[1:], dtype=np.float32) for rng in self.rngs])
        going = self.rho * self.z + math.sqrt(1.0 - self.rho**2) * noise
        self.z = np.where(self.fresh[..., None], noise, going).astype(np.float32)
        self.fresh[:] = False
        return torch.from_numpy(self.z) * self.scale.value[:, None, None]

    def observe(self, obs: Tensor, valid: Tensor) -> None:
        return None  # nothing here depends on what was seen

    def state_dict(self) -> dict[str, Any]:
        return {"z": torch.from_numpy(self.z), "fresh": torch.from_numpy(self.fresh)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.z, self.fresh = state["z"].numpy().copy(), state["fresh"].numpy().copy()


EXPLORATIONS: dict[str, type[Exploration]] = {"linear": LinearExploration, "correlated": CorrelatedExploration}
