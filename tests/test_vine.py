"""Vine groups: G branches from one restored state in the middle of an episode, every probe step charged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small_learner, train, weights
from gymnasium import Env, register
from gymnasium.spaces import Box, Discrete
from gymnasium.utils import EzPickle

from rlkit.advantage import find_estimator
from rlkit.build import ConfigError
from rlkit.loop import Learner

LENGTH = 5
VINE = ("algo.groups=vine", "algo.max_episode_steps=100")


class Counting(Env[np.ndarray, int]):
    """Observes [start, step] and ends after LENGTH steps; counts the steps of all copies."""

    executed = 0

    def __init__(self) -> None:
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = Discrete(2)
        self.start, self.t = 0.0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.t = self.np_random.uniform(), 0
        return np.array([self.start, 0], np.float32), {}

    def step(self, action):
        Counting.executed += 1
        self.t += 1
        return np.array([self.start, self.t], np.float32), float(self.t), self.t == LENGTH, False, {}


class Fresh(EzPickle, Counting):
    """A deep copy of it is made anew, without its state."""

    def __init__(self) -> None:
        EzPickle.__init__(self)
        Counting.__init__(self)


@pytest.fixture(autouse=True)
def registered():
    register("Counting-v0", Counting)
    register("Fresh-v0", Fresh)


def vine(*overrides: str, env: str = "Counting-v0", backend: str = "sync") -> Learner:
    return small_learner("grpo", "env=gym", f"env.id={env}", f"env.backend={backend}", *VINE, *overrides)


def collect(learner: Learner):
    return learner.collector.collect(learner.policy, learner.iteration, learner.running)


def test_branches_share_a_state_and_every_probe_step_is_charged():
    learner = vine("num_envs=12", "algo.group_size=4")
    Counting.executed = 0
    rollout = collect(learner)
    first = rollout.obs[0, 0].view(3, 4, 2)
    assert (first == first[:, :1]).all()
    assert len(first[:, 0, 0].unique()) == 3
    step = first[:, 0, 1]
    assert rollout.valid.sum(0).view(3, 4).tolist() == [[LENGTH - int(t)] * 4 for t in step]
    assert rollout.terminated.sum(0).flatten().tolist() == [1] * 12
    assert learner.env_steps.tolist() == [Counting.executed]
    assert Counting.executed == 3 * LENGTH + int(rollout.valid.sum())


def test_finished_episodes_are_the_trunks():
    learner = vine("members=2")
    collect(learner)
    whole = float(sum(range(1, LENGTH + 1)))
    assert learner.collector.finished == [[(whole, LENGTH)] * 2] * 2


def test_each_step_of_a_trunk_is_branched_from_with_the_same_chance():
    learner = small_learner("grpo", "env=Pendulum", "algo.groups=vine", "algo.max_episode_steps=5", "num_envs=4000",
                            "algo.group_size=2")  # fmt: skip
    lengths = collect(learner).valid.sum(0).flatten()[::2]
    share = torch.bincount(lengths, minlength=6)[1:] / len(lengths)
    assert share.numpy() == pytest.approx(np.full(5, 0.2), abs=0.03)  # 2,000 groups: 3.3 deviations


def test_a_branch_goes_on_as_its_trunk_would_have():
    """Equal actions from the restored state give equal rewards to all lanes, the time limit included."""
    learner = small_learner("grpo", "env=MountainCarContinuous", "num_envs=8", "algo.group_size=4", *VINE,
                            "policy.log_std_init=-20")  # fmt: skip
    rollout = collect(learner)
    reward, length = rollout.reward[:, 0].view(-1, 2, 4), rollout.valid.sum(0).view(2, 4)
    torch.testing.assert_close(reward, reward[..., :1].expand_as(reward), atol=1e-6, rtol=0)
    assert (length == length[:, :1]).all() and (length < 100).any()
    assert rollout.truncated.sum() == 8


@pytest.mark.parametrize("exploration", ["none", "linear", "correlated"])
def test_members_and_resumption_do_not_change_a_vine(tmp_path, exploration):
    overrides = ["algo.groups=vine", f"exploration.name={exploration}"]
    together = train(small_learner("grpo", "members=2", "seed=3", *overrides), 3)
    alone = train(small_learner("grpo", "seed=4", *overrides), 3)
    assert together.env_steps[1] == alone.env_steps[0]
    torch.testing.assert_close(weights(together)[1], weights(alone)[0], rtol=1e-4, atol=1e-5)
    torch.save(alone.state_dict(), tmp_path / "state.pt")
    resumed = small_learner("grpo", "seed=4", *overrides)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(weights(train(resumed, 2)), weights(train(alone, 2)))


def test_a_member_that_has_stopped_plays_no_trunk():
    learner = vine("members=2")
    learner.frozen[0] = True
    Counting.executed = 0
    rollout = collect(learner)
    assert learner.env_steps.tolist() == [0, Counting.executed]
    assert not rollout.valid[:, 0].any()
    assert learner.collector.finished[0] == []


def test_the_advantage_of_a_vine_is_that_of_its_first_action():
    learner = small_learner("grpo", "env=Pendulum", "algo.groups=vine", "algo.advantage=vine",
                            "algo.max_episode_steps=4", "num_envs=4", "algo.group_size=2")  # fmt: skip
    rollout = collect(learner)
    rollout.reward[:] = 0
    rollout.reward[0, 0] = torch.tensor([1.0, 3.0, 5.0, 5.0])
    rollout.valid[:2] = True
    rollout.reward[1, 0] = torch.tensor([4.0, 0.0, 8.0, 8.0])
    rollout.truncated[:] = False
    advantage, ret = find_estimator("vine")(rollout, 0.5, 0.9)
    # returns 1 + 2 = 3 and 3: degenerate; 5 + 4 = 9 and 9: degenerate
    assert ret[0, 0].tolist() == [3, 3, 9, 9]
    assert not advantage.any()
    rollout.reward[1, 0, 1] = 4.0  # 3 + 2 = 5 against 3
    advantage, _ = find_estimator("vine")(rollout, 0.5, 0.9)
    assert advantage[0, 0].tolist() == [-1, 1, 0, 0]
    assert not advantage[1:].any()


def test_what_cannot_be_copied_is_refused_before_anything_is_trained():
    with pytest.raises(ConfigError, match="Fresh-v0 cannot be copied in the middle of an episode"):
        vine(env="Fresh-v0")
    with pytest.raises(ConfigError, match="env.backend=async cannot copy"):
        vine(backend="async")
    with pytest.raises(ConfigError, match="algo.advantage is vine and algo.groups is start"):
        small_learner("grpo", "algo.advantage=vine")
