"""Builders that tests share: each test names only what it varies."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from omegaconf import DictConfig

import rlkit.envs
from rlkit.build import build_learner, to_config
from rlkit.conf.schema import options
from rlkit.loop import Learner
from rlkit.train import compose

SMALL = {
    "ppo": ("num_envs=4", "algo.num_steps=8", "algo.num_epochs=2", "algo.num_minibatches=2"),
    "grpo": (
        "num_envs=6",
        "algo.group_size=3",
        "algo.max_episode_steps=30",
        "algo.num_epochs=2",
        "algo.num_minibatches=2",
    ),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Sums differ with the number of threads; one is also the fastest at test sizes."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def registered_ids():
    """What one test registers no other sees, and what it takes away is back: files run in one process, in any order."""
    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


class Failing(gymnasium.Env):
    """Fails at its step number `at`: gives a reward that is no number, raises, or takes its process with it."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, how: str, at: int) -> None:
        self.how, self.at, self.steps = how, at, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        reward = 1.0
        if self.steps == self.at:
            if self.how == "raise":
                raise ZeroDivisionError("the motor is on fire")
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            reward = float("nan")
        return np.zeros(2, np.float32), reward, False, self.steps % 5 == 0, {}


gymnasium.register("Failing-v0", Failing, max_episode_steps=5)

_FOLDER = tempfile.TemporaryDirectory()  # goes with the process


@functools.cache
def demonstrations(id: str = "CartPole-v1", backend: str = "native") -> str:
    """The path of an NPZ file with 300 made-up steps of an environment."""
    envs = rlkit.envs.make(id, 1, backend=backend)
    envs.single_action_space.seed(3)
    obs = np.random.default_rng(3).normal(size=(300, envs.single_observation_space.shape[0]))
    path = Path(_FOLDER.name, f"{id}.npz")
    np.savez(path, obs=obs, action=np.array([envs.single_action_space.sample() for _ in obs]))
    envs.close()
    return str(path)


def every_stabilizer(algo: str, demonstrations: str) -> list[str]:
    """Overrides that switch on every stabiliser that an algorithm can have, each in its most active form."""
    critic = {"value_l2"}
    names = [name for name in options("stabilizer") if name != "recommended" and (algo == "ppo" or name not in critic)]
    return [
        f"stabilizer=[{','.join(names)}]",
        f"stabilizer.warm_up.demonstrations={demonstrations}",
        f"stabilizer.cloning.demonstrations={demonstrations}",
        "stabilizer.ref_kl.controller=adaptive",
        "stabilizer.ref_kl.refresh_every=2",
        "stabilizer.replay.sampling=priority",
        "stabilizer.rollback.patience=1",
        "algo.sync_every=2",
        "algo.ratio_bound=3.0",
        "algo.clip_high=0.28",
        "algo.aggregation=episode",
        "algo.schedule.clip.name=exponential",
        "algo.schedule.learning_rate.name=kl_adaptive",
        "algo.entropy_coef=0.01",
        "algo.schedule.entropy_coef.name=target_entropy",
        "algo.schedule.entropy_coef.target=0.5",
        "policy.layer_norm=true",
        "policy.dropout=0.2",
        *(["policy.value_normalization=popart"] if algo == "ppo" else []),
    ]


def small_learner(algo: str, *overrides: str) -> Learner:
    """A learner of a few rows on CartPole."""
    return build_learner(to_config(_composed(algo, overrides)))


@functools.cache
def _composed(algo: str, overrides: tuple[str, ...]) -> DictConfig:
    """Composing takes longer than the learning of most tests, and many make two learners of one configuration."""
    base = [f"algo={algo}", "tuned=none", "total_steps=100000", "policy.hidden=[8,8]", *SMALL[algo]]
    return compose([*base, *overrides])[0]


def weights(learner: Learner) -> torch.Tensor:
    """All parameters of each member, [M, P], actor first."""
    return torch.cat([p.detach().reshape(p.shape[0], -1) for p in learner.policy.parameters()], 1)


def train(learner: Learner, iterations: int) -> Learner:
    """Iterate, with phases before the first iteration and falling evaluations for the keepers after each."""
    for _ in range(iterations):
        learner.begin()
        learner.iterate()
        learner.judge(torch.tensor(learner.streams.seeds) % 3 - 10.0 * learner.iteration)
    return learner
