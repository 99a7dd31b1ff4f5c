"""Vine groups: G branches from one restored state in the middle of an episode."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlkit.buffer import Rollout
from rlkit.collect import ActionMap, Episodes, check_finite
from rlkit.envs import MaskedVectorEnv
from rlkit.exploration import Exploration
from rlkit.policy import Policy
from rlkit.streams import Purpose, Streams


class Vines(Episodes):
    """Groups that branch off in the middle of an episode: the vine of Schulman et al. (2015) and VinePPO (2024).

    Each group plays one whole episode, the trunk, keeps one of its states, each with the same chance, and restores it
    in all its lanes, time-limit counter and random state included; the rollout holds the branches from there. Trunks
    are probes: their steps are charged and not learned from (how long a trunk turned out to be decides how likely its
    states are, so its own continuation is no fair branch). Finished episodes are the trunks, since branches are
    partial.

    Raises:
        ValueError: the environments cannot be copied in the middle of an episode.
    """

    def __init__(
        self,
        envs: MaskedVectorEnv,
        actions: ActionMap,
        streams: Streams,
        group_size: int,
        exploration: Exploration | None = None,
    ) -> None:
        super().__init__(envs, actions, streams, group_size, exploration)
        self.trunk = np.arange(0, envs.num_envs, group_size)  # the lane that plays a group's trunk, [M*K]
        envs.reset(seed=[0] * envs.num_envs)
        envs.fork([], [])  # an environment that cannot be copied says so now

    def begin(self, policy: Policy, iteration: int, running: Tensor) -> np.ndarray:
        obs = super().begin(policy, iteration, running)
        # streams of their own: how long the trunks of other members are decides nothing for the branches of one
        act = self.actor(policy, iteration, Purpose.TRUNK_ACTION, Purpose.TRUNK_EXPLORATION)
        self.restart(np.ones(self.envs.num_envs, bool))
        trunk, kept = self.trunk, self.trunk + 1  # the second lane of a group holds the state to branch from
        alive = np.zeros(self.envs.num_envs, bool)
        alive[trunk] = np.repeat(running.numpy(), self.num_groups)
        rngs = self.streams.open(Purpose.BRANCH, iteration)
        returns, lengths = np.zeros(len(trunk)), np.zeros(len(trunk), np.int64)
        while alive.any():
            on = alive[trunk]
            # keeping the state of step t with probability 1 / (t + 1) leaves each with the same chance in the end
            chosen = on & (np.concatenate([rng.random(self.num_groups) for rng in rngs]) * (lengths + 1) < 1)
            if chosen.any():
                obs = self.envs.fork(trunk[chosen], kept[chosen])
            legal = act(obs)
            obs, reward, terminated, truncated, _ = self.envs.step(legal, alive)
            check_finite("reward", reward[None], self.num_envs, int(lengths.max()))
            returns += reward[trunk] * on
            lengths += on
            alive = alive & ~(terminated | truncated)
        per_member = (self.members, self.num_groups)
        self.env_steps += torch.from_numpy(lengths.reshape(per_member).sum(1))
        self.finished = [
            [(r, n) for r, n in zip(*member, strict=True) if n]
            for member in zip(returns.reshape(per_member).tolist(), lengths.reshape(per_member).tolist(), strict=True)
        ]
        target = np.setdiff1d(np.arange(self.envs.num_envs), kept)
        branches: np.ndarray = self.envs.fork(kept[target // self.group_size], target)
        return branches

    def _finish(self, rollout: Rollout) -> None:
        """The trunks are noted already."""
