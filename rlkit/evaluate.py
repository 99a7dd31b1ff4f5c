"""Evaluation: a fixed number of episodes of each member, from start states that are the same for every run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from rlkit.envs.spaces import MASK, ActionSpec
from rlkit.policy import Policy
from rlkit.streams import Purpose


def start_seeds(episodes: int, seed: int = 0) -> list[int]:
    """Seeds of the start states of evaluation episodes 0, 1, ...: fixed, so that numbers of any two runs compare.

    Args:
        seed: 0 for those of every evaluation during training and at its end; another number for others.
    """
    rng = _generator(Purpose.EVALUATION, 0, seed)
    return [int(number) for number in rng.integers(0, 2**31, episodes)]


def _generator(purpose: Purpose, turn: int, seed: int) -> np.random.Generator:
    # zeros at the end of a SeedSequence change nothing
    return np.random.default_rng(np.random.SeedSequence([purpose, turn, seed]))


@dataclass(frozen=True)
class Episodes:
    """Evaluation episodes, member by member; episode i of each started from start seed i."""

    returns: Tensor  # [M, episodes] undiscounted
    lengths: Tensor  # int64 [M, episodes], steps
    cut: Tensor  # bool [M, episodes]: it would have gone on, but evaluation plays no more of an episode


class Evaluator:
    """Plays episodes in environments of its own; they and their steps are not part of training.

    Which episodes are played is fixed before the first step, and each lane plays its share of them to the end: were
    episodes taken as they finish, short ones would be counted too often.

    Args:
        envs: M * lanes environments in DISABLED autoreset mode, with a time limit.
        actions: the map to legal actions.
        members: M.
        cut_at: the environments' time limit where evaluation alone has it; None: it is that of the task.

    Attributes:
        watch: called after each reset and each step.
        progress: called after each step with the share of the episodes that have ended, in [0, 1].
        on_cut: called after an evaluation in which episodes were cut, with their number and that of all.
    """

    def __init__(self, envs: MaskedVectorEnv, actions: ActionMap, members: int, cut_at: int | None = None) -> None:
        self.envs, self.actions, self.members, self.cut_at = envs, actions, members, cut_at
        self.lanes = envs.num_envs // members
        self.watch: Callable[[], None] | None = None
        self.progress: Callable[[float], None] | None = None
        self.on_cut: Callable[[int, int], None] | None = None

    def __call__(self, policy: Policy, episodes: int, stochastic: bool = False) -> Tensor:
        """Return the undiscounted return of each episode, [M, episodes]; see `play`."""
        played = self.play(policy, episodes, stochastic)
        if self.on_cut is not None and bool(played.cut.any()):
            self.on_cut(int(played.cut.sum()), played.cut.numel())
        return played.returns

    @torch.no_grad()
    def play(self, policy: Policy, episodes: int, stochastic: bool = False, seed: int = 0) -> Episodes:
        """Play episodes: member m's episode i starts from start seed i.

        Args:
            stochastic: sample actions (from fixed streams) instead of taking the most likely.
            seed: which start states and which streams, 0 for those of training.
        """
        seeds = start_seeds(episodes, seed)
        returns, lengths = np.zeros((self.members, episodes)), np.zeros((self.members, episodes), np.int64)
        cut = np.zeros((self.members, episodes), bool)
        for turn, start in enumerate(range(0, episodes, self.lanes)):
            # a stream for each turn: how long one takes depends on the other members
            rngs = [_generator(Purpose.EVALUATION_ACTION, turn, seed) for _ in range(self.members)]
            noise = action_noise(policy, rngs, self.lanes) if stochastic else None
            part = seeds[start : start + self.lanes]
            places = slice(start, start + len(part))
            idle = self.lanes - len(part)
            ended = self.members * start
            played = self._play(policy, part + part[:1] * idle, len(part), noise, ended, self.members * episodes)
            returns[:, places], lengths[:, places], cut[:, places] = (x[:, : len(part)] for x in played)
        return Episodes(*map(torch.from_numpy, (returns, lengths, cut)))

    def _play(
        self, policy: Policy, seeds: list[int], real: int, noise: object, ended: int, episodes: int
    ) -> list[np.ndarray]:
        lanes = self.members * self.lanes
        obs, _ = self.envs.reset(seed=seeds * self.members)
        alive, pi = np.tile(np.arange(self.lanes) < real, self.members), policy.acting()
        total, steps = np.zeros(lanes), np.zeros(lanes, np.int64)
        if self.watch is not None:
            self.watch()
        while alive.any():
            dist = pi(obs.reshape(self.members, self.lanes, -1))
            if self.envs.action_mask is not None:
                dist = dist.shifted(forbidding(self.envs.action_mask).reshape(self.members, self.lanes, -1))
            raw = dist.mode() if noise is None else dist.sample(next(noise))  # type: ignore[call-overload]
            legal = self.actions.legal(raw.reshape(lanes, -1), policy.squash)
            obs, reward, terminated, truncated, _ = self.envs.step(legal, None if alive.all() else alive)
            total += reward
            steps += alive
            alive = alive & ~(terminated | truncated)
            if self.watch is not None:
                self.watch()
            if self.progress is not None:
                self.progress(float(ended + self.members * real - np.count_nonzero(alive)) / episodes)
        cut = ~terminated & (steps == self.cut_at)  # lanes step together: all that were cut were so in the last step
        return [x.reshape(self.members, self.lanes) for x in (total, steps, cut)]

    def close(self) -> None:
        self.envs.close()


class Agent:
    """One trained member: `act` gives legal actions for one observation or a batch.

    Args:
        space: the environment's observations.
        masked: it was trained with masks of legal actions, and acts with them alone.
        name: what it is, in words.
    """

    def __init__(
        self,
        policy: Policy,
        actions: ActionSpec,
        space: Space[Any],
        member: int,
        masked: bool = False,
        name: str = "",
    ) -> None:
        self.policy, self.actions, self.space, self.member = policy, actions, space, member
        self.masked, self.name = masked, name

    def __repr__(self) -> str:
        mask = f", action_mask [{self.policy.action_size}]" if self.masked else ""
        given = f"obs [{self.policy.obs_size}]{mask}"
        return f"Agent({self.name or f'member {self.member}'}: {given} -> {self.actions.space})"

    @torch.no_grad()
    def act(self, obs: Any, deterministic: bool = True, action_mask: Any = None) -> np.ndarray:
        """Return the action for an observation, or actions for a batch [B, D].

        Args:
            obs: an observation as the environment gives it, or flattened ones [D] or [B, D].
            deterministic: the most likely action; else a sample (torch's global generator).
            action_mask: the legal actions, as the environment gives them in info["action_mask"], or bool [B, A] for a
                batch; None allows all, and is refused where the run had `env.action_mask=true`.

        Raises:
            ValueError: the observation has another shape or a number that is not finite, or the mask is missing or does
                not fit.
        """
        with suppress(ValueError):  # what is of the environment's own space is one observation
            obs = flattened(self.space, obs)
        if np.ndim(obs) not in (1, 2) or np.shape(obs)[-1] != self.policy.obs_size:
            wanted = self.policy.obs_size
            raise ValueError(f"obs has shape {np.shape(obs)}; one observation is [{wanted}], a batch [B, {wanted}]")
        single = np.ndim(obs) == 1
        rows = np.atleast_2d(np.asarray(obs, dtype=np.float32))  # [B, D]
        if not np.isfinite(rows).all():
            place = np.argwhere(~np.isfinite(rows))[0].tolist()
            where = ", ".join(map(str, place[1:] if single else place))
            raise ValueError(f"obs[{where}] is {rows[tuple(place)]}; every number of an observation must be finite")
        stack = torch.from_numpy(rows).expand(self.policy.members, -1, -1)
        dist = self.policy.distribution(stack)
        if action_mask is not None or self.masked:
            dist = dist.shifted(torch.from_numpy(forbidding(self._masks(action_mask, len(rows), single))))
        if deterministic:
            raw = dist.mode()
        else:
            shape = (self.policy.members, len(rows), self.policy.action_size)
            gumbel = self.policy.noise_kind == "gumbel"
            noise = -torch.empty(shape).exponential_().log() if gumbel else torch.randn(shape)
            raw = dist.sample(noise.clamp(max=MOST_NOISE))
        legal = self.actions.legal(raw[self.member].numpy(), self.policy.squash)
        return legal[0] if single else legal

    def _masks(self, given: Any, rows: int, single: bool) -> np.ndarray:
        """Masks, bool [B, A], checked."""
        if given is None:
            raise ValueError(f"action_mask is None; a run with env.action_mask=true must be given info['{MASK}']")
        if not self.actions.maskable:
            raise ValueError(f"action_mask is given; actions in {self.actions.space} can have none")
        if single:
            return self.actions.mask(given)[None]
        if np.ndim(given) == 0 or len(given) != rows:
            has = f"has {len(given)} rows" if np.ndim(given) else f"is {given!r}"
            raise ValueError(f"action_mask {has}; obs has {rows}, and there must be a mask for each")
        return np.stack([self.actions.mask(mask, f"action_mask[{i}]") for i, mask in enumerate(given)])


def cut_note(cut: int, episodes: int, limit: int, key: str) -> str:
    """Say that episodes were cut at a limit that is not the task's own, and what sets it."""
    return f"{cut:,} of {episodes:,} evaluation episodes were still going at {limit:,} steps and were cut there ({key})"


def load(path: str | Path, member: int | str = "best", checkpoint: str = "last") -> Agent:
    """Load one member of a run.

    Args:
        path: the run directory.
        member: its number, or "best": the one with the highest mean return in the final evaluation.
        checkpoint: "last", or "best": what the member was at its best evaluation during training.

    Raises:
        FileNotFoundError: there is no run at `path`, or, for "best", it has not ended.
        ValueError: no such member, or the checkpoint is damaged or of another version or environment.
    """
    from rlkit.saved import SavedRun

    run = SavedRun.open(path, checkpoint)
    number = run.member(member)
    policy, actions = run.policy(range(run.config.members))
    env = gymnasium.make(run.config.env.id, **run.config.env.kwargs)
    space = env.observation_space
    env.close()
    name = f"{run.config.env.id} {run.config.algo.name}, {run.state_of(number)}"
    return Agent(policy, actions, space, number, run.config.env.action_mask, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m rlkit.evaluate`; returns the exit status."""
    from rlkit.scores import main as evaluate

    return evaluate(arguments)


if __name__ == "__main__":
    sys.exit(main())
