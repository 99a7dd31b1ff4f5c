"""Forks of foreign environments: copies go on as their originals would, and false copies are refused."""

import re

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.utils import EzPickle
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import OrderEnforcing, TimeLimit

import rlkit.envs
from rlkit.envs.fork import check_copies
from rlkit.envs.guard import Guarded
from rlkit.envs.gym import MaskedAsyncVectorEnv, MaskedSyncVectorEnv

COPYABLE = (
    "Acrobot-v1",
    "Blackjack-v1",
    "CartPole-v1",
    "CliffWalking-v1",
    "FrozenLake-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Pendulum-v1",
    "Taxi-v4",
)


class Walk(gymnasium.Env):
    """Observes (where the episode began, steps in it); ends after `length` steps."""

    observation_space = Box(0, 1000, (2,), np.float32)
    action_space = Discrete(2)
    length = 30

    def observe(self):
        return np.array([self.start, self.time], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.time = self.np_random.integers(1000), 0
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        return self.observe(), 1.0, self.time == self.length, False, {}


class MadeAnew(Walk, EzPickle):
    """Its copy has not been reset."""

    def __init__(self):
        EzPickle.__init__(self)


class MadeAnewBlind(MadeAnew):
    """Its copy has forgotten the time, which shows only when the episode ends."""

    start = time = 0

    def observe(self):
        return np.zeros(2, np.float32)


class SharedList(Walk):
    """All instances count in one list, which a reset empties."""

    steps: list[int] = []

    def observe(self):
        return np.array([self.start, len(self.steps)], np.float32)

    def reset(self, *, seed=None, options=None):
        self.steps.clear()
        return super().reset(seed=seed)

    def step(self, action):
        self.steps.append(action)
        return super().step(action)


class Forgetful(Walk):
    """Its copy has all but the random state, which shows only when the next episode begins."""

    def __deepcopy__(self, memo):
        copy = type(self)()
        copy.__dict__ |= self.__dict__ | {"_np_random": None}
        return copy


class Endless(Forgetful):
    """As Forgetful, and no episode ends by itself."""

    length = 10**6


class Unseeded(Walk):
    """Its observations do not follow from its seed."""

    observed = 0

    def observe(self):
        Unseeded.observed += 1
        return np.array([0, Unseeded.observed], np.float32)


class Handle(Walk):
    """Holds what deepcopy refuses."""

    def __init__(self):
        self.simulator = (i for i in range(3))


@pytest.mark.parametrize(
    "cls, why",
    [
        (MadeAnew, "after deepcopy the copy's step 1 raises AttributeError ('MadeAnew' object has no attribute"),
        (MadeAnewBlind, "after deepcopy the copy's terminated differs at step 20"),
        (SharedList, "once its copy has been stepped the original's observation differs at step 1"),
        (Forgetful, "after deepcopy the copy's observation differs at step 21"),
        (Endless, "after deepcopy the copy's observation differs at step 991"),
        (Unseeded, "of two environments with equal seeds the second's observation differs at step 1"),
        (Handle, "deepcopy raises TypeError (cannot pickle 'generator' object)"),
    ],
)
def test_environments_that_deepcopy_does_not_copy_are_refused(cls, why):
    """The copy is made after 10 steps; an episode of 30 ends 20 later, one without end is broken off after 1,000."""
    envs = MaskedSyncVectorEnv([cls] * 2)
    before, _ = envs.reset(seed=0)
    kept = list(envs.envs)
    words = f"{cls.__name__} cannot be copied in the middle of an episode: {why}"
    for _ in range(2):  # also the second time
        with pytest.raises(ValueError, match=re.escape(words) + ".*; vine groups need a native environment or one"):
            envs.fork([0], [1])
    assert envs.envs == kept
    np.testing.assert_array_equal(envs._observations, before)


@pytest.mark.parametrize("id", COPYABLE)
def test_the_installed_environments_pass_the_check(id):
    check_copies(lambda: gymnasium.make(id))


def test_the_check_leaves_the_forked_environments_alone_and_is_made_once():
    made = []
    envs = MaskedSyncVectorEnv([lambda: made.append(Walk()) or made[-1]] * 3)
    envs.reset(seed=[1, 2, 3])
    envs.fork([0], [1])
    assert len(made) == 5  # 3 lanes, and 2 for the check
    envs.fork([2], [0])
    assert len(made) == 5 and [env.time for env in envs.envs] == [0, 0, 0]


def test_copy_and_original_go_on_as_the_original_alone():
    rng = np.random.default_rng(0)
    actions = rng.integers(2, size=300)
    envs = rlkit.envs.make("CartPole-v1", 2, backend="sync")
    alone = gymnasium.make("CartPole-v1")
    envs.reset(seed=[3, 4])
    alone.reset(seed=3)
    for action in actions[:7]:
        obs, *_ = envs.step(np.array([action, 0]))
        alone.step(action)
    forked = envs.fork(np.array([0]), np.array([1]))
    np.testing.assert_array_equal(forked, obs[[0, 0]])
    expected = []
    for action in actions[7:]:
        _, *rest, _ = alone.step(action)
        ended = rest[1] or rest[2]
        expected.append((alone.reset()[0] if ended else alone.unwrapped.state, rest))
    assert sum(rest[1] for _, rest in expected) > 5  # the random state of later episodes matters too
    for lane in (1, 0):  # the copy runs far ahead of its original, which must not notice
        for action, (state, rest) in zip(actions[7:], expected, strict=True):
            obs, *flags, _ = envs.step(np.full(2, action), np.arange(2) == lane)
            np.testing.assert_array_equal(obs[lane], np.float32(state))
            assert [flag[lane] for flag in flags] == rest


def test_slips_of_frozen_lake_are_copied_through_the_wrappers():
    envs = rlkit.envs.make("FrozenLake-v1", 3, backend="sync", is_slippery=True)
    env, wrappers = envs.envs[0], set()
    while env is not env.unwrapped:
        wrappers.add(type(env))
        env = env.env
    assert {TimeLimit, OrderEnforcing, Guarded} <= wrappers
    envs.reset(seed=[0, 1, 2])
    rng = np.random.default_rng(0)
    envs.step(rng.integers(4, size=3))
    obs = envs.fork([0], [2])
    parted = 0
    for _ in range(300):
        np.testing.assert_array_equal(obs[0], obs[2])
        parted += (obs[0] != obs[1]).any()
        obs, reward, terminated, truncated, _ = envs.step(np.full(3, rng.integers(4)))
        assert (reward[0], terminated[0], truncated[0]) == (reward[2], terminated[2], truncated[2])
    assert parted > 100  # equal actions alone do not lead to equal places


def test_the_time_limit_counts_on_in_the_copy():
    envs = MaskedSyncVectorEnv([lambda: TimeLimit(Walk(), 5)] * 2, autoreset_mode="Disabled")
    envs.reset(seed=0)
    for _ in range(3):
        envs.step(np.zeros(2, int), np.array([True, False]))
    envs.fork([0], [1])
    truncated = [envs.step(np.zeros(2, int))[3].tolist() for _ in range(2)]
    assert truncated == [[False, False], [True, True]]


def test_a_lane_may_be_source_and_target():
    envs = MaskedSyncVectorEnv([Walk] * 4)
    start, _ = envs.reset(seed=0)
    np.testing.assert_array_equal(envs.fork([0, 1, 0, 3], [1, 0, 2, 3]), start[[1, 0, 0, 3]])
    obs, *_ = envs.step(np.zeros(4, int), np.array([True, False, True, False]))
    np.testing.assert_array_equal(obs, start[[1, 0, 0, 3]] + [[0, 1], [0, 0], [0, 1], [0, 0]])
    assert len(set(map(id, envs.envs))) == 4


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
def test_an_episode_that_is_over_is_over_in_the_copy(mode):
    envs = MaskedSyncVectorEnv([Walk] * 3, autoreset_mode=mode)
    envs.reset(seed=0)
    for _ in range(Walk.length):
        envs.step(np.zeros(3, int), np.array([True, False, False]))
    assert envs.fork([0, 1], [1, 0])[:, 1].tolist() == [0, 30, 0]
    if mode is AutoresetMode.DISABLED:
        with pytest.raises(RuntimeError, match="lane 1 has ended"):
            envs.step(np.zeros(3, int))
        envs.step(np.zeros(3, int), np.array([True, False, True]))
    else:
        obs, reward, *_ = envs.step(np.zeros(3, int))
        assert obs[:, 1].tolist() == [1, 0, 1] and reward.tolist() == [1, 0, 1]  # lane 1 began anew


@pytest.mark.parametrize(
    "source, target, words",
    [
        ([0], [1, 2], r"source has shape \(1,\) and target \(2,\)"),
        (0, 1, r"source has shape \(\)"),
        ([0, 3], [1, 2], r"source=\[0, 3\] must hold lanes, integers from 0 to 2"),
        ([0], [-1], r"target=\[-1\] must hold lanes"),
        ([True], [1], r"source=\[True\] must hold lanes"),
        ([0, 1], [2, 2], r"target=\[2, 2\] names a lane twice"),
    ],
)
def test_wrong_lanes_are_one_clear_sentence(source, target, words):
    envs = MaskedSyncVectorEnv([Walk] * 3)
    with pytest.raises(RuntimeError, match="reset"):
        envs.fork([0], [1])
    start, _ = envs.reset(seed=0)
    np.testing.assert_array_equal(envs.fork([], []), start)
    with pytest.raises(ValueError, match=words):
        envs.fork(source, target)


def test_async_is_refused_and_names_what_would_do():
    envs = MaskedAsyncVectorEnv([Walk])
    try:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match=r"env.backend=async .* use env.backend=sync, or env.backend=native"):
            envs.fork([0], [0])
        assert envs.step(np.zeros(1, int))[0][0, 1] == 1  # and goes on
    finally:
        envs.close()
