"""Groups by the returns of a pilot run, in place of one start state for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.collect import ActionMap, Actor, Episodes, action_noise, check_finite
from rlkit.envs import MaskedVectorEnv
from rlkit.exploration import Exploration
from rlkit.policy import Policy
from rlkit.streams import Purpose, Streams


class Pilots(Episodes):
    """Groups of episodes whose start states are as hard as each other, though not the same.

    Before the first rollout the untrained policy plays one episode from each of `rounds` start states a lane: the pilot
    run, whose steps are charged and not learned from. The start states are sorted by its returns and cut into one bin
    for each group, all of equal size; from then on an episode starts from any state of its group's bin.

    Where start states differ in what can be had from them, such a group compares more of them than exact groups do, at
    the price of a baseline that knows the state less well; where they hardly differ, groups are as good as random.

    Args:
        rounds: pilot episodes of each lane.
    """

    def __init__(
        self,
        envs: MaskedVectorEnv,
        actions: ActionMap,
        streams: Streams,
        group_size: int,
        exploration: Exploration | None = None,
        rounds: int = 8,
    ) -> None:
        super().__init__(envs, actions, streams, group_size, exploration)
        self.rounds = rounds
        self.pool = torch.zeros(self.members, rounds * self.num_envs, dtype=torch.int64)  # seeds, the worst start first
        self.known = False  # what the pool is

    def begin(self, policy: Policy, iteration: int, running: Tensor) -> np.ndarray:
        if not self.known:
            self._fly(policy, np.repeat(running.numpy(), self.num_envs))
        bins = self.pool.numpy().reshape(self.members, self.num_groups, -1)  # [M, K, seeds of a bin]
        rngs = self.streams.open(Purpose.PILOT_CHOICE, iteration)
        chosen = np.stack([rng.integers(0, bins.shape[2], (self.num_groups, self.group_size)) for rng in rngs])
        seeds = np.take_along_axis(bins, chosen, 2)  # [M, K, G]
        obs, _ = self.envs.reset(seed=seeds.flatten().tolist())
        first: np.ndarray = obs
        return first

    def _fly(self, policy: Policy, lanes: np.ndarray) -> None:
        """Play the pilot run in the lanes that are alive, bool [M*N], and sort its start states."""
        seeds = self.streams.integers(Purpose.PILOT_START, 0, self.rounds * self.num_envs)
        seeds = seeds.reshape(self.members, self.rounds, self.num_envs)
        returns = np.zeros(seeds.shape)
        for k in range(self.rounds):
            noise = action_noise(policy, self.streams.open(Purpose.PILOT_ACTION, k), self.num_envs)
            obs, _ = self.envs.reset(seed=seeds[:, k].flatten().tolist())
            steps = self.play(Actor(policy, self.envs, self.actions, noise), obs, lanes)
            check_finite("reward", steps["reward"], self.num_envs)
            returns[:, k] = steps["reward"].sum(0).reshape(self.members, self.num_envs)
            self.env_steps += torch.from_numpy(steps["valid"].sum(0).reshape(self.members, self.num_envs).sum(1))
        order = returns.reshape(self.members, -1).argsort(1, kind="stable")
        self.pool = torch.from_numpy(np.take_along_axis(seeds.reshape(self.members, -1), order, 1))
        self.known = True

    def state_dict(self) -> dict[str, Any]:
        known = torch.full((self.members,), self.known)
        return {**super().state_dict(), "pool": self.pool, "known": known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.pool, self.known = state["pool"].clone(), bool(state["known"].all())
