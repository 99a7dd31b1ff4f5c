"""Evaluation: a fixed number of episodes of each member, from start states that are the same for every run."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Space
from torch import Tensor

from rlkit.collect import MOST_NOISE, ActionMap, action_noise
from rlkit.distributions import forbidding
from rlkit.envs import MaskedVectorEnv
from rlkit.envs.guard import flattened
from rlkit.envs.spaces import ActionSpec
from rlkit.policy import Policy
from rlkit.streams import Purpose

# which state of a run -> its file, and the column of summary.json that says which member is the best in it
CHECKPOINTS = {"last": ("checkpoint.pt", "eval_return"), "best": ("best.pt", "eval_peak")}


def start_seeds(episodes: int) -> list[int]:
    """Seeds of the start states of evaluation episodes 0, 1, ...: fixed, so that numbers of any two runs compare."""
    rng = np.random.default_rng(np.random.SeedSequence([Purpose.EVALUATION]))
    return [int(seed) for seed in rng.integers(0, 2**31, episodes)]


class Evaluator:
    """Plays episodes in environments of its own; they and their steps are not part of training.

    Args:
        envs: M * lanes environments in DISABLED autoreset mode, with a time limit.
        actions: the map to legal actions.
        members: M.
    """

    def __init__(self, envs: MaskedVectorEnv, actions: ActionMap, members: int) -> None:
        self.envs, self.actions, self.members = envs, actions, members
        self.lanes = envs.num_envs // members

    @torch.no_grad()
    def __call__(self, policy: Policy, episodes: int, stochastic: bool = False) -> Tensor:
        """Return the undiscounted return of each episode, [M, episodes]: member m's episode i starts from start seed i.

        Args:
            stochastic: sample actions (from fixed streams) instead of taking the most likely.
        """
        seeds = start_seeds(episodes)
        rngs = [np.random.default_rng(np.random.SeedSequence([Purpose.EVALUATION_ACTION])) for _ in range(self.members)]
        noise = action_noise(policy, rngs, self.lanes) if stochastic else None
        returns = np.zeros((self.members, episodes))
        for start in range(0, episodes, self.lanes):
            part = seeds[start : start + self.lanes]
            played = self._play(policy, part + part[:1] * (self.lanes - len(part)), len(part), noise)
            returns[:, start : start + len(part)] = played[:, : len(part)]
        return torch.from_numpy(returns)

    def _play(self, policy: Policy, seeds: list[int], real: int, noise: object) -> np.ndarray:
        lanes = self.members * self.lanes
        obs, _ = self.envs.reset(seed=seeds * self.members)
        alive, pi = np.tile(np.arange(self.lanes) < real, self.members), policy.acting()
        total = np.zeros(lanes)
        while alive.any():
            dist = pi(obs.reshape(self.members, self.lanes, -1))
            if self.envs.action_mask is not None:
                dist = dist.shifted(forbidding(self.envs.action_mask).reshape(self.members, self.lanes, -1))
            raw = dist.mode() if noise is None else dist.sample(next(noise))  # type: ignore[call-overload]
            legal = self.actions.legal(raw.reshape(lanes, -1), policy.squash)
            obs, reward, terminated, truncated, _ = self.envs.step(legal, None if alive.all() else alive)
            total += reward
            alive = alive & ~(terminated | truncated)
        return total.reshape(self.members, self.lanes)

    def close(self) -> None:
        self.envs.close()


class Agent:
    """One trained member: `act` gives legal actions for one observation or a batch."""

    def __init__(self, policy: Policy, actions: ActionSpec, space: Space[Any], member: int) -> None:
        self.policy, self.actions, self.space, self.member = policy, actions, space, member

    @torch.no_grad()
    def act(self, obs: Any, deterministic: bool = True, action_mask: Any = None) -> np.ndarray:
        """Return the action for an observation, or actions for a batch [B, D].

        Args:
            obs: an observation as the environment gives it, or flattened ones [D] or [B, D].
            deterministic: the most likely action; else a sample (torch's global generator).
            action_mask: the legal actions, as the environment gives them in info["action_mask"], or bool [B, A] for a
                batch; None allows all.

        Raises:
            ValueError: the observation has another shape, or the mask does not fit.
        """
        with suppress(ValueError):  # what is of the environment's own space is one observation
            obs = flattened(self.space, obs)
        if np.ndim(obs) not in (1, 2) or np.shape(obs)[-1] != self.policy.obs_size:
            wanted = self.policy.obs_size
            raise ValueError(f"obs has shape {np.shape(obs)}; one observation is [{wanted}], a batch [B, {wanted}]")
        single = np.ndim(obs) == 1
        rows = np.atleast_2d(np.asarray(obs, dtype=np.float32))  # [B, D]
        stack = torch.from_numpy(rows).expand(self.policy.members, -1, -1)
        dist = self.policy.distribution(stack)
        if action_mask is not None:
            dist = dist.shifted(torch.from_numpy(forbidding(self._masks(action_mask, single))))
        if deterministic:
            raw = dist.mode()
        else:
            shape = (self.policy.members, len(rows), self.policy.action_size)
            gumbel = self.policy.noise_kind == "gumbel"
            noise = -torch.empty(shape).exponential_().log() if gumbel else torch.randn(shape)
            raw = dist.sample(noise.clamp(max=MOST_NOISE))
        legal = self.actions.legal(raw[self.member].numpy(), self.policy.squash)
        return legal[0] if single else legal

    def _masks(self, given: Any, single: bool) -> np.ndarray:
        """Masks, bool [B, A], checked."""
        if not self.actions.maskable:
            raise ValueError(f"action_mask is given; actions in {self.actions.space} can have none")
        return np.stack([self.actions.mask(mask) for mask in ([given] if single else given)])


def load(path: str | Path, member: int | str = "best", checkpoint: str = "last") -> Agent:
    """Load one member of a run.

    Args:
        path: the run directory.
        member: its number, or "best": the one with the highest mean return in the final evaluation.
        checkpoint: "last", or "best": what the member was at its best evaluation during training.

    Raises:
        FileNotFoundError: there is no run at `path`, or, for "best", it has not ended.
        ValueError: no such member, or the checkpoint is damaged or of another version.
    """
    from omegaconf import OmegaConf

    from rlkit.build import build_policy, to_config
    from rlkit.keepers.checkpoint import load as load_state

    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"checkpoint is {checkpoint!r}; it must be one of {', '.join(CHECKPOINTS)}")
    folder = Path(path)
    if not (folder / ".hydra" / "config.yaml").is_file():
        raise FileNotFoundError(f"there is no run at {folder}: {folder / '.hydra' / 'config.yaml'} does not exist")
    config = to_config(OmegaConf.load(folder / ".hydra" / "config.yaml"))  # type: ignore[arg-type]
    file, column = CHECKPOINTS[checkpoint]
    state = load_state(folder / file, env=config.env.id, algo=config.algo.name)
    policy, actions = build_policy(config)
    env = gymnasium.make(config.env.id, **config.env.kwargs)
    space = env.observation_space
    env.close()
    policy.load_state_dict(state["learner"]["policy"])
    return Agent(policy, actions, space, _member(member, folder, config.members, column))


def _member(member: int | str, folder: Path, members: int, column: str) -> int:
    if member == "best":
        summary = folder / "summary.json"
        if not summary.is_file():
            raise FileNotFoundError(f"{summary} does not exist, so no member is known as best: give its number")
        return int(np.nanargmax(np.array(json.loads(summary.read_text())[column], float)))
    if not isinstance(member, int) or not 0 <= member < members:
        raise ValueError(f"member is {member!r}; it must be best or a number from 0 to {members - 1}")
    return member
