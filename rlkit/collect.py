"""Collection: step M*N environments with the policy and write a rollout.

`Windows` (PPO) takes the same number of steps in every environment and goes on where the last window ended; `Episodes`
(GRPO) plays one whole episode in each lane, the G lanes of a group from one start state; `rlkit.vine` from one midway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlkit.buffer import Rollout, gather_rows, valid_rows
from rlkit.distributions import forbidding
from rlkit.envs import MaskedVectorEnv
from rlkit.envs.failure import EnvironmentFailure
from rlkit.exploration import Exploration
from rlkit.policy import Policy
from rlkit.streams import Purpose, Streams

_NOISE_BLOCK = 64  # steps of action noise drawn at once
MOST_NOISE = 1e4  # in place of infinite Gumbel noise, which would take an action that a mask forbids; the rest is < 110


class ActionMap(Protocol):
    """Turns raw policy actions into legal environment actions (`rlkit.envs.spaces.ActionSpec`)."""

    def legal(self, raw: np.ndarray, squash: bool = False) -> np.ndarray: ...


class NonFiniteError(EnvironmentFailure):
    """An environment gave a reward or an observation that is not a number, or infinite."""


def action_noise(
    policy: Policy, rngs: Sequence[np.random.Generator], num_envs: int
) -> Iterator[np.ndarray]:  # each [M, N, A]
    """Yield standard action noise step by step, drawn in blocks, each member's from its own generator."""
    shape = (_NOISE_BLOCK, num_envs, policy.action_size)
    while True:
        if policy.noise_kind == "gumbel":  # -log of a standard exponential is a standard Gumbel
            block = np.stack([rng.standard_exponential(shape, dtype=np.float32) for rng in rngs], 1)
            with np.errstate(divide="ignore"):
                np.negative(np.log(block, out=block), out=block)
            np.minimum(block, MOST_NOISE, out=block)
        else:
            block = np.stack([rng.standard_normal(shape, dtype=np.float32) for rng in rngs], 1)
        yield from block


class Actor:
    """Acts in M*N environments step by step while the weights stay as they are, and keeps what it did.

    Args:
        envs: M*N environments, whose action masks, if they have any, are obeyed.
        noise: standard action noise of each step, [M, N, A].
        exploration: what offsets the policy's distribution, if anything.
    """

    def __init__(
        self,
        policy: Policy,
        envs: MaskedVectorEnv,
        actions: ActionMap,
        noise: Iterator[np.ndarray],
        exploration: Exploration | None = None,
    ) -> None:
        self.members, self.lanes, self.num_envs = policy.members, envs.num_envs, envs.num_envs // policy.members
        self.envs, self.actions, self.noise, self.exploration = envs, actions, noise, exploration
        self.pi, self.squash, self.discrete = policy.acting(), policy.squash, policy.discrete
        self.raw: list[np.ndarray] = []  # each [M, N, A]
        self.offset: list[np.ndarray] = []  # the same; empty without exploration and masks

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Return legal actions [M*N, ...] at obs [M*N, D]."""
        stacked = obs.reshape(self.members, self.num_envs, -1)
        dist = self.pi(stacked)
        offset = self._offset(stacked)
        if offset is not None:
            self.offset.append(offset)
            dist = dist.shifted(offset)
        raw = dist.sample(next(self.noise))
        if not self.discrete and not np.isfinite(raw).all():  # before the environment sees it
            check_finite("obs", obs[None], self.num_envs, len(self.raw))
        self.raw.append(raw)
        return self.actions.legal(raw.reshape(self.lanes, -1), self.squash)

    def _offset(self, obs: np.ndarray) -> np.ndarray | None:
        """What exploration adds to the distribution's parameters, and what forbids illegal actions, [M, N, A]."""
        explored = None if self.exploration is None else self.exploration.offset(torch.from_numpy(obs)).numpy()
        if self.envs.action_mask is None:
            return explored
        forbidden = forbidding(self.envs.action_mask).reshape(*obs.shape[:2], -1)
        return forbidden if explored is None else explored + forbidden


class Collector:
    """What both kinds share: the environments, the members' streams, the step count and the finished episodes."""

    anew = False  # episodes that would run on from the last rollout begin anew instead: the environments are new

    def __init__(
        self, envs: MaskedVectorEnv, actions: ActionMap, streams: Streams, exploration: Exploration | None = None
    ) -> None:
        self.envs, self.actions, self.streams, self.exploration = envs, actions, streams, exploration
        self.members = streams.members
        self.num_envs = envs.num_envs // self.members
        self.obs_size = envs.single_observation_space.shape[0]  # type: ignore[index]
        self.env_steps = torch.zeros(self.members, dtype=torch.int64)
        self.finished: list[list[tuple[float, int]]] = []  # of the last rollout: (return, length) by member

    def actor(
        self,
        policy: Policy,
        iteration: int,
        noise_of: Purpose = Purpose.ACTION,
        offsets_of: Purpose = Purpose.EXPLORATION,
    ) -> Actor:
        """Return what acts in this iteration's rollout; `iteration` is the index of its streams."""
        noise = action_noise(policy, self.streams.open(noise_of, iteration), self.num_envs)
        if self.exploration is not None:
            self.exploration.begin(self.streams.open(offsets_of, iteration))
        return Actor(policy, self.envs, self.actions, noise, self.exploration)

    def restart(self, lanes: np.ndarray) -> None:
        """Tell exploration that episodes begin in these environments, bool [M*N]."""
        if self.exploration is not None:
            self.exploration.restart(lanes)

    def record(
        self, policy: Policy, steps: dict[str, np.ndarray], actor: Actor, group: Tensor | None = None
    ) -> Rollout:
        """Build the rollout from arrays [T, M*N, ...], evaluating the behaviour distribution on all rows at once."""
        for name in ("reward", "obs", "final_obs"):
            check_finite(name, steps[name], self.num_envs)
        shaped = {
            name: torch.from_numpy(x).view(len(x), self.members, self.num_envs, *x.shape[2:])
            for name, x in steps.items()
        }
        obs = shaped["obs"]
        time = len(obs)
        action = torch.from_numpy(np.stack(actor.raw))
        offset = torch.from_numpy(np.stack(actor.offset)) if actor.offset else None

        def rows(x: Tensor) -> Tensor:  # [T, M, N, X] -> [M, T*N, X]
            return x.transpose(0, 1).reshape(self.members, time * self.num_envs, -1)

        dist = policy.distribution(rows(obs), None if offset is None else rows(offset))

        def back(x: Tensor) -> Tensor:  # [M, T*N, ...] -> [T, M, N, ...]
            return x.view(self.members, time, self.num_envs, *x.shape[2:]).transpose(0, 1)

        valid = shaped["valid"]
        self.env_steps += valid.sum((0, 2))
        if self.exploration is not None:
            self.exploration.observe(obs, valid)
        return Rollout(
            obs=obs,
            final_obs=shaped["final_obs"],
            action=action,
            log_prob=back(dist.log_prob(rows(action))),
            old={name: back(x.contiguous()) for name, x in dist.params.items()},
            reward=shaped["reward"],
            terminated=shaped["terminated"],
            truncated=shaped["truncated"],
            valid=valid,
            offset=offset,
            group=group,
        )

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"env_steps": self.env_steps}
        return state if self.exploration is None else {**state, "exploration": self.exploration.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.env_steps.copy_(state["env_steps"])
        if self.exploration is not None:
            self.exploration.load_state_dict(state["exploration"])

    def close(self) -> None:
        self.envs.close()


class Windows(Collector):
    """`num_steps` steps of every environment, autoreset in the same step; episodes run on from window to window."""

    def __init__(
        self,
        envs: MaskedVectorEnv,
        actions: ActionMap,
        streams: Streams,
        num_steps: int,
        exploration: Exploration | None = None,
    ) -> None:
        super().__init__(envs, actions, streams, exploration)
        self.num_steps = num_steps
        self._reset(0)
        self.running_return = np.zeros(envs.num_envs)
        self.running_length = np.zeros(envs.num_envs, dtype=np.int64)

    def _reset(self, index: int) -> None:
        """Begin episodes in all environments, from the start states that this index of their streams gives."""
        seeds = self.streams.integers(Purpose.START, index, self.num_envs)
        self.obs, _ = self.envs.reset(seed=seeds.flatten().tolist())
        self.anew = True  # these environments have not been stepped

    @torch.no_grad()
    def collect(self, policy: Policy, iteration: int, running: Tensor) -> Rollout:
        """Take one window.

        Args:
            iteration: index of the action and exploration streams.
            running: bool [M]; the environments of the others are not stepped.
        """
        lanes, time = self.envs.num_envs, self.num_steps
        steps = empty_steps(time, lanes, self.obs_size)
        steps["valid"][:] = mask = np.repeat(running.numpy(), self.num_envs)
        everyone = None if mask.all() else mask
        act = self.actor(policy, iteration)
        if self.anew:
            if iteration:  # of a resumed run, whose environments cannot be restored: it repeats no start states
                self._reset(iteration)
            self.restart(np.ones(lanes, bool))
            self.anew = False
        obs, final_obs = steps["obs"], steps["final_obs"]
        rewards, terminations, truncations = steps["reward"], steps["terminated"], steps["truncated"]
        for t in range(time):
            obs[t] = self.obs
            answer = self.envs.step(act(obs[t]), everyone)
            self.obs, rewards[t], terminations[t], truncations[t], info = answer
            if "final_obs" in info:
                ended = terminations[t] | truncations[t]
                put_final_obs(final_obs[t], info, ended)
                self.restart(ended)
        last = ~(terminations[-1] | truncations[-1]) & mask
        final_obs[-1][last] = self.obs[last]
        rollout = self.record(policy, steps, act)
        self._finish(rewards, terminations | truncations, mask)
        return rollout

    def _finish(self, reward: np.ndarray, ended: np.ndarray, mask: np.ndarray) -> None:
        """Note the episodes that ended in a window, and what the others have so far; arrays [T, lanes]."""
        total = self.running_return + reward.cumsum(0, dtype=np.float64)
        length = self.running_length + np.outer(np.arange(1, len(reward) + 1), mask)
        self.finished = [[] for _ in range(self.members)]
        self.running_return, self.running_length = total[-1], length[-1]
        lane, t = ended.T.nonzero()  # one lane after the other, each in the order of time
        first, last = np.diff(lane, prepend=-1) != 0, np.diff(lane, append=-1) != 0  # of a lane
        returns, lengths = total[t, lane], length[t, lane]
        self.running_return[lane[last]] -= returns[last]
        self.running_length[lane[last]] -= lengths[last]
        for sums in (returns, lengths):
            sums[1:] -= np.where(first[1:], 0, sums[:-1])
        member = lane // self.num_envs
        for m, ret, size in zip(member.tolist(), returns.tolist(), lengths.tolist(), strict=True):
            self.finished[m].append((ret, size))

    def state_dict(self) -> dict[str, Any]:
        shape = (self.members, self.num_envs)
        state = {
            **super().state_dict(),
            "running_return": torch.from_numpy(self.running_return.reshape(shape).copy()),
            "running_length": torch.from_numpy(self.running_length.reshape(shape).copy()),
        }
        if hasattr(self.envs, "get_state"):
            arrays = self.envs.get_state()  # lane first
            state["envs"] = {name: torch.from_numpy(x.reshape(*shape, *x.shape[1:])) for name, x in arrays.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if "envs" not in state:
            return  # foreign environments cannot be restored: new ones begin episodes
        self.anew = not bool(self.env_steps.any())
        lanes = {name: x.flatten(0, 1).numpy() for name, x in state["envs"].items()}
        self.obs = self.envs.set_state(lanes)  # type: ignore[attr-defined]
        self.running_return = state["running_return"].flatten().numpy().copy()
        self.running_length = state["running_length"].flatten().numpy().copy()


class Episodes(Collector):
    """One whole episode in each lane, the `group_size` lanes of a group from the same start state (equal seeds)."""

    def __init__(
        self,
        envs: MaskedVectorEnv,
        actions: ActionMap,
        streams: Streams,
        group_size: int,
        exploration: Exploration | None = None,
    ) -> None:
        super().__init__(envs, actions, streams, exploration)
        self.group_size = group_size
        self.num_groups = self.num_envs // group_size
        self.group = torch.arange(self.num_envs).div(group_size, rounding_mode="floor").repeat(self.members, 1)

    @torch.no_grad()
    def collect(self, policy: Policy, iteration: int, running: Tensor) -> Rollout:
        """Play every lane's episode to its end; a lane that is done is not stepped again.

        Args:
            iteration: index of the start-state, action and exploration streams.
            running: bool [M]; the lanes of the others stay idle.
        """
        obs = self.begin(policy, iteration, running)
        act = self.actor(policy, iteration)
        self.restart(np.ones(self.envs.num_envs, bool))
        steps = self.play(act, obs, np.repeat(running.numpy(), self.num_envs))
        rollout = self.record(policy, steps, act, self.group)
        self._finish(rollout)
        return rollout

    def begin(self, policy: Policy, iteration: int, running: Tensor) -> np.ndarray:
        """Put the lanes of each group into the state they share; return the observations [M*N, D]."""
        seeds = self.streams.integers(Purpose.START, iteration, self.num_groups)  # [M, K]
        obs, _ = self.envs.reset(seed=seeds.repeat(self.group_size, axis=1).flatten().tolist())
        first: np.ndarray = obs
        return first

    def play(self, act: Actor, obs: np.ndarray, alive: np.ndarray) -> dict[str, np.ndarray]:
        """Play the lanes that are alive, bool [M*N], from obs [M*N, D] to their ends; return arrays [T, M*N, ...]."""
        records: list[dict[str, np.ndarray]] = []
        while alive.any():
            row = empty_steps(1, len(alive), self.obs_size)
            row["valid"][0] = alive
            row["obs"][0][alive] = obs[alive]
            legal = act(obs)
            obs, reward, terminated, truncated, _ = self.envs.step(legal, None if alive.all() else alive)
            row["reward"][0], row["terminated"][0], row["truncated"][0] = reward, terminated, truncated
            ended = terminated | truncated
            if ended.any():
                row["final_obs"][0][ended] = obs[ended]
                alive = alive & ~ended
            records.append(row)
        return {name: np.concatenate([row[name] for row in records]) for name in records[0]}

    def _finish(self, rollout: Rollout) -> None:
        returns, lengths = rollout.reward.sum(0).tolist(), rollout.valid.sum(0).tolist()
        self.finished = [
            [(r, n) for r, n in zip(*member, strict=True) if n] for member in zip(returns, lengths, strict=True)
        ]


def empty_steps(time: int, lanes: int, obs_size: int) -> dict[str, np.ndarray]:
    """Zeroed arrays of a rollout, [T, lanes, ...]."""
    return {
        "obs": np.zeros((time, lanes, obs_size), np.float32),
        "final_obs": np.zeros((time, lanes, obs_size), np.float32),
        "reward": np.zeros((time, lanes), np.float32),
        "terminated": np.zeros((time, lanes), bool),
        "truncated": np.zeros((time, lanes), bool),
        "valid": np.zeros((time, lanes), bool),
    }


def put_final_obs(target: np.ndarray, info: dict[str, Any], ended: np.ndarray) -> None:
    """Copy the observations that ended episodes from a vector environment's info into target [lanes, D]."""
    final = info["final_obs"]
    target[ended] = final[ended] if final.dtype != object else np.stack(list(final[ended]))


def check_finite(name: str, x: np.ndarray, num_envs: int, first: int = 0) -> None:
    """Raise NonFiniteError naming member, environment and step if x [T, M*N, ...] is not finite.

    Args:
        name: of the column: reward, obs (before a step) or final_obs (after it).
        first: row of the rollout at which x begins.
    """
    if np.isfinite(x).all():
        return
    row, lane = np.argwhere(~np.isfinite(x))[0][:2] + (first, 0)
    what, step = ("reward" if name == "reward" else "observation"), row + (name != "obs")
    where = f"in step {step}" if step else "at the start"
    raise NonFiniteError(
        f"environment {lane % num_envs} of member {{member}} gave a non-finite {what} {where} of the rollout",
        int(lane // num_envs),
    )


@torch.no_grad()
def with_values(rollout: Rollout, policy: Policy) -> Rollout:
    """Add V(obs) and V(final_obs) [T, M, N] to a rollout, the latter only where an episode or the window ended."""
    time, members, envs = rollout.reward.shape

    def back(x: Tensor) -> Tensor:  # [M, T*N] -> [T, M, N]
        return x.view(members, time, envs).transpose(0, 1)

    value = policy.value(rollout.obs.transpose(0, 1).reshape(members, time * envs, -1))
    cut = rollout.ended.clone()
    cut[-1] = True
    cut &= ~rollout.terminated
    rows, _ = valid_rows(cut)
    final = torch.zeros(members, time * envs).scatter_(1, rows, policy.value(gather_rows(rollout.final_obs, rows)))
    return rollout.replace(value=back(value), final_value=back(final) * cut)
