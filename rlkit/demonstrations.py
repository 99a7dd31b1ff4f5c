"""Demonstrations: what a teacher did in an environment, as rows that a policy learns to imitate."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlkit.buffer import Batch
from rlkit.policy import Policy
from rlkit.streams import Purpose

if TYPE_CHECKING:
    from rlkit.envs.spaces import ActionSpec

SOURCES = "an NPZ file, the folder of a finished run, or minari:ID"
NAMES = {"obs": ("obs", "observations"), "action": ("action", "actions")}  # of arrays in an NPZ file
ENDS = ("terminated", "terminals", "truncated", "timeouts")  # arrays that mark the last step of an episode
MINARI = "minari:"
PIECE = 4096  # rows evaluated at once


class Steps(NamedTuple):
    """Steps as a source holds them."""

    obs: np.ndarray  # [n, ...]
    action: np.ndarray  # [n, ...], as the environment takes them
    mean_length: float | None  # of an episode, in steps; None where the source does not tell


@dataclass(frozen=True)
class Demonstrations:
    """n steps of a teacher, in no particular order; all members learn from the same ones.

    `action` holds raw policy actions, as the column `action` of a batch does: int64 [n, heads] counted from 0, or
    float32 [n, A]. Observations are those of the environment, before any normalisation.
    """

    obs: Tensor  # float32 [n, D]
    action: Tensor
    mean_length: float | None = None  # of an episode, in steps, where it is known

    @classmethod
    def load(cls, source: str | None, policy: Policy, actions: ActionSpec, episodes: int = 20) -> Demonstrations:
        """Read demonstrations for a policy.

        Args:
            source: an NPZ file with arrays `obs` (or `observations`) [n, ...] and `action` (or `actions`) [n, ...],
                the latter as the environment takes them, and perhaps `terminated` (`terminals`) and `truncated`
                (`timeouts`), bool [n], which mark where episodes end; or the folder of a finished run, whose best
                member plays its most likely actions; or `minari:` and the id of a data set that is on this machine.
            policy: the one that is to learn from them; it says D, and whether its actions are squashed.
            actions: its action space.
            episodes: how many whole episodes a run's member plays, in environments as that run has them, from start
                states that are the same for every run. These steps do not count as the learner's.

        Raises:
            ValueError: there is nothing at `source`, it cannot be read, or it does not fit the environment.
        """
        if not source:
            raise ValueError(f"demonstrations must be given: {SOURCES}")
        try:
            steps = _steps(str(source), episodes)
            obs = _flat_observations(steps.obs, policy.obs_size)
            if len(obs) != len(steps.action):
                raise ValueError(f"it has {len(obs)} observations and {len(steps.action)} actions")
            action = actions.raw(steps.action, policy.squash)
        except (ValueError, OSError) as error:
            raise ValueError(f"demonstrations is {source}; {error}") from error
        return cls(torch.from_numpy(obs), torch.from_numpy(action), steps.mean_length)

    def __len__(self) -> int:
        return len(self.obs)

    def batch(self, rows: Tensor) -> Batch:
        """Return some rows, int64 [M, b] (indices for each member), as a batch in which each has weight 1."""
        columns = {"obs": self.obs[rows], "action": self.action[rows], "weight": torch.ones(rows.shape)}
        return Batch(columns, torch.full((len(rows),), rows.shape[1]), padded=False, uniform=True)

    @torch.no_grad()
    def loss(self, policy: Policy) -> Tensor:
        """Mean of -log pi(action | obs) over all rows, [M] nats."""
        total = torch.zeros(policy.members, dtype=torch.float64)
        for rows in torch.arange(len(self)).split(PIECE):
            batch = self.batch(rows.expand(policy.members, -1))
            total -= policy.distribution(batch.obs).log_prob(batch.action).double().sum(1)
        return total / len(self)


def _steps(source: str, episodes: int) -> Steps:
    path = Path(source)
    if source.startswith(MINARI):
        return _of_minari(source.removeprefix(MINARI))
    if path.is_dir():
        return _of_run(path, episodes)
    if path.is_file():
        return _of_file(path)
    raise ValueError(f"there is no such file or folder; it must be {SOURCES}")


def _flat_observations(obs: np.ndarray, size: int) -> np.ndarray:
    """Observations [n, ...] as float32 [n, D]."""
    if obs.dtype.kind not in "biuf":
        raise ValueError(f"its observations are of type {obs.dtype}; they must be numbers")
    if not obs.size:
        raise ValueError("it has no rows")
    flat: np.ndarray = obs.reshape(len(obs), -1).astype(np.float32)
    if flat.shape[1] != size:
        raise ValueError(f"its observations have {flat.shape[1]} numbers, those of the environment {size}")
    bad = np.flatnonzero(~np.isfinite(flat).all(1))
    if len(bad):
        raise ValueError(f"the observation of row {bad[0]} is not finite")
    return flat


def _of_file(path: Path) -> Steps:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # NumPy raises many kinds for a damaged or foreign file
        raise ValueError("it is not an NPZ file of plain arrays that can be read") from error
    obs, action = (_named(arrays, names) for names in NAMES.values())
    ends = [arrays[name].ravel().astype(bool) for name in ENDS if name in arrays]
    if not ends:
        return Steps(obs, action, None)
    if any(len(end) != len(action) for end in ends):
        raise ValueError(f"it has {len(action)} actions, but {', '.join(ENDS)} are not all as long")
    ended = np.any(ends, 0)
    episodes = int(ended.sum()) + (not ended[-1:].all())  # the last one may be cut off
    return Steps(obs, action, len(ended) / max(episodes, 1))


def _named(arrays: dict[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    for name in names:
        if name in arrays:
            return np.atleast_1d(arrays[name])
    raise ValueError(f"it has no array {' or '.join(names)}, only {', '.join(arrays) or 'none'}")


def _of_run(folder: Path, episodes: int) -> Steps:
    """Let the best member of a run play."""
    from rlkit.build import build_evaluator
    from rlkit.evaluate import load
    from rlkit.saved import read_config

    if not (folder / "summary.json").is_file():
        raise ValueError("it is not the folder of a finished run: it holds no summary.json")
    agent = load(folder)
    evaluator = build_evaluator(replace(read_config(folder), members=1), episodes)
    envs, lanes = evaluator.envs, evaluator.lanes
    rng = np.random.default_rng(np.random.SeedSequence([Purpose.DEMONSTRATION]))
    seeds = [int(seed) for seed in rng.integers(0, 2**31, episodes)]
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    try:
        for start in range(0, episodes, lanes):
            part = seeds[start : start + lanes]
            obs, _ = envs.reset(seed=part + part[:1] * (lanes - len(part)))
            alive = np.arange(lanes) < len(part)
            while alive.any():
                action = agent.act(obs, action_mask=envs.action_mask)
                rows.append((obs[alive], action[alive]))
                obs, _, terminated, truncated, _ = envs.step(action, None if alive.all() else alive)
                alive = alive & ~(terminated | truncated)
    finally:
        evaluator.close()
    obs, action = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return Steps(obs, action, len(obs) / episodes)


def _of_minari(id: str) -> Steps:
    """All episodes of a Minari data set; nothing is downloaded."""
    try:
        minari: Any = importlib.import_module("minari")
        dataset = minari.load_dataset(id)
        episodes = [(episode.observations, episode.actions) for episode in dataset.iterate_episodes()]
    except ImportError as error:
        raise ValueError(f"reading it takes the package minari: pip install 'minari[hdf5]' ({error})") from error
    except FileNotFoundError as error:
        raise ValueError(f"there is no such data set on this machine; `minari download {id}` fetches it") from error
    if not episodes:
        raise ValueError("it has no rows")
    if not all(isinstance(x, np.ndarray) for episode in episodes for x in episode):
        raise ValueError("its observations or actions are not plain arrays")
    # an episode has one observation more than actions: the one it ended with
    obs = np.concatenate([obs[: len(action)] for obs, action in episodes])
    action = np.concatenate([action for _, action in episodes])
    return Steps(obs, action, len(action) / len(episodes))
