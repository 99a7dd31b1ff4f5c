"""The native environments against Gymnasium's scalar ones: equal bits in every mode, masks, state, errors."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.spaces import Discrete
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rlkit.envs
from rlkit.envs import acrobot, cartpole, compiled, mountain_car, mountain_car_continuous, pendulum
from rlkit.envs.acrobot import AcrobotVectorEnv
from rlkit.envs.cartpole import CartPoleVectorEnv
from rlkit.envs.native import NativeVectorEnv
from rlkit.envs.rounding import scalar_square
from rlkit.envs.streams import LaneStreams

MODES = list(AutoresetMode)
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


@dataclass(frozen=True)
class Case:
    """A native environment, and how to make Gymnasium's scalar one with the same settings."""

    id: str
    dynamics: Callable[..., Any]
    span: tuple[float, ...]  # largest numbers of the random states
    settings: dict[str, Any] = field(default_factory=dict)
    pump: Callable[[Any], Any] | None = None  # an action for each observation that ends episodes early

    def __str__(self):
        return "-".join([self.id, *map(str, self.settings.values())])

    def make(self, lanes=1, limit=None, mode=NEXT_STEP, **kwargs):
        return rlkit.envs.make(self.id, lanes, max_episode_steps=limit, autoreset_mode=mode, **self.settings, **kwargs)

    def scalar(self, limit=None, **kwargs):
        """Gymnasium's own; Acrobot takes its settings as attributes."""
        attributes = self.settings if self.id == "Acrobot-v1" else {}
        kwargs |= {} if attributes else self.settings
        env = gymnasium.make(self.id, max_episode_steps=limit, disable_env_checker=True, **kwargs)
        for name, value in attributes.items():
            setattr(env.unwrapped, name, value)
        return env

    def scalars(self, lanes, mode, limit=None):
        return SyncVectorEnv([lambda: self.scalar(limit)] * lanes, autoreset_mode=mode)

    def actions(self, *shape, seed=0):
        """Random actions [*shape], of a continuous space [*shape, 1] and some beyond its bounds."""
        space, rng = gymnasium.spec(self.id).make().action_space, np.random.default_rng(seed)
        if isinstance(space, Discrete):
            return rng.integers(0, space.n, shape)
        return rng.uniform(1.1 * space.low, 1.1 * space.high, (*shape, 1)).astype(np.float32)


CARTPOLE = Case("CartPole-v1", cartpole.cartpole, (3.0, 5.0, 0.3, 5.0))
ACROBOT = Case(
    "Acrobot-v1", acrobot.acrobot, (3.2, 3.2, 12.5, 28.0), pump=lambda obs: 1 + np.sign(obs[:, 5]).astype(int)
)
CAR = Case(
    "MountainCar-v0", mountain_car.mountain_car, (1.2, 0.07), pump=lambda obs: 1 + np.sign(obs[:, 1]).astype(int)
)
CONTINUOUS_CAR = Case(
    "MountainCarContinuous-v0",
    mountain_car_continuous.mountain_car_continuous,
    (1.2, 0.07),
    pump=lambda obs: np.sign(obs[:, 1:]),
)
PENDULUM = Case("Pendulum-v1", pendulum.pendulum, (10.0, 8.0))
CASES = [CARTPOLE, ACROBOT, CAR, CONTINUOUS_CAR, PENDULUM]


def with_settings(case, **settings):
    return Case(case.id, case.dynamics, case.span, settings, case.pump)


NOISY = with_settings(ACROBOT, torque_noise_max=0.7)
SETTINGS = [  # every argument the scalar environments take, and every attribute Acrobot documents
    with_settings(CARTPOLE, sutton_barto_reward=True),
    with_settings(ACROBOT, book_or_nips="nips"),
    NOISY,
    with_settings(ACROBOT, book_or_nips="nips", torque_noise_max=1.5),
    with_settings(CAR, goal_velocity=0.03),
    with_settings(CONTINUOUS_CAR, goal_velocity=0.03),
    with_settings(PENDULUM, g=9.81),
]


@pytest.fixture(params=["numpy", "compiled"], autouse=True)
def compile_after(request, monkeypatch):
    """Every test of this file runs with NumPy alone, and again with the compiled loop from the first step on."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    monkeypatch.setattr(NativeVectorEnv, "compile_after", 0 if request.param == "compiled" else -1)


compiled_only = pytest.mark.parametrize("compile_after", ["compiled"], indirect=True)
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_lively_case = pytest.mark.parametrize("case", [*CASES, NOISY], ids=str)
each_mode = pytest.mark.parametrize("mode", MODES)


def assert_same_step(ours, theirs):
    for name, a, b in zip(("obs", "reward", "terminated", "truncated"), ours, theirs, strict=False):
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        assert a.tobytes() == b.tobytes(), f"{name}: {a} is not {b}"


def assert_same_final_obs(ours, theirs, ended):
    assert ("final_obs" in ours) == ("final_obs" in theirs)
    if "final_obs" in ours:
        np.testing.assert_array_equal(ours["_final_obs"], ended)
        np.testing.assert_array_equal(ours["_final_obs"], theirs["_final_obs"])
        np.testing.assert_array_equal(ours["final_obs"][ended], np.stack(list(theirs["final_obs"][ended])))
        assert not ours["final_obs"][~ended].any()
        assert ours["final_obs"].dtype == np.float32


def restart_ended(envs, step):
    """Under DISABLED reset by mask what ended; return the observations to go on from."""
    ended = step[2] | step[3]
    if envs.metadata["autoreset_mode"] is DISABLED and ended.any():
        return envs.reset(options={"reset_mask": ended})[0]
    return step[0]


def run(envs, actions):
    """Step through the actions; return the steps."""
    steps = []
    for action in actions:
        steps.append(envs.step(action))
        restart_ended(envs, steps[-1])
    return steps


def assert_same_run(case, mode, limit, steps, seeds):
    """Compare with the scalar environments under random actions; return the numbers of ends and terminations."""
    ours, theirs = case.make(len(seeds), limit, mode), case.scalars(len(seeds), mode, limit)
    obs = ours.reset(seed=seeds)[0]
    np.testing.assert_array_equal(obs, theirs.reset(seed=seeds)[0])
    ends = terminations = 0
    pumped = np.random.default_rng(1).random((steps, len(seeds))) < 0.7
    for action, push in zip(case.actions(steps, len(seeds)), pumped, strict=True):
        if case.pump is not None:
            action[push] = case.pump(obs[push])
        a, b = ours.step(action), theirs.step(action)
        assert_same_step(a, b)
        ended = a[2] | a[3]
        assert_same_final_obs(a[4], b[4], ended)
        ends, terminations = ends + int(ended.sum()), terminations + int(a[2].sum())
        assert (ours._loop is None) == (ours.compile_after < 0 or ours.draws_in_step)
        obs = restart_ended(ours, a)
        assert obs.tobytes() == restart_ended(theirs, b).tobytes()
    return ends, terminations


@each_case
def test_equals_the_scalar_environment_bit_by_bit_over_10000_steps(case):
    ends, terminations = assert_same_run(case, SAME_STEP, None, 10_000, [5, 1_000_000])
    assert ends > 40 * 2  # start states beyond one block were compared
    assert (terminations > 40 * 2) == (case is not PENDULUM)


@each_case
@each_mode
def test_equals_the_scalar_environment_in_every_mode_under_a_time_limit(case, mode):
    ends, _ = assert_same_run(case, mode, 23, 1000, [5, 6])
    assert ends > 40 * 2


@pytest.mark.parametrize("case", SETTINGS, ids=str)
@each_mode
def test_equals_the_scalar_environment_with_every_setting(case, mode):
    ends, _ = assert_same_run(case, mode, 60, 300, [5, 5, 8])
    assert ends >= 4 * 3


@pytest.mark.parametrize(
    "case", [CARTPOLE, ACROBOT, CAR, PENDULUM, *SETTINGS[:2], *SETTINGS[4:5], SETTINGS[6]], ids=str
)
def test_equals_the_scalar_environment_from_equal_states(case):
    assert_same_from_equal_states(case, np.float64, 10_000 if case in CASES else 2000)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", [CONTINUOUS_CAR, SETTINGS[5]], ids=str)
def test_the_continuous_car_keeps_the_dtype_of_its_state(case, dtype):
    assert_same_from_equal_states(case, dtype, 10_000)


def assert_same_from_equal_states(case, dtype, states):
    span = np.array(case.span)[:, None]
    state = np.random.default_rng(1).uniform(-span, span, (len(span), states)).astype(dtype)
    action = case.actions(states)
    after, reward, terminated = case.dynamics(state, action.reshape(states), **case.settings)
    assert after.dtype == dtype and reward.dtype == np.float64
    scalar = case.scalar().unwrapped
    for i in range(states):
        scalar.reset()
        scalar.state = state[:, i]
        _, r, end, _, _ = scalar.step(action[i])
        assert (r, end) == (reward[i], terminated[i])
        got = np.asarray(scalar.state)  # the continuous car rounds it to float32
        assert got.tobytes() == after[:, i].astype(got.dtype).tobytes()
    assert 0.01 * states < terminated.sum() < 0.9 * states or case.id == "Pendulum-v1"


@compiled_only
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("case", [*CASES, *SETTINGS[:2], *SETTINGS[4:]], ids=str)
def test_the_step_of_one_lane_equals_the_batched_dynamics(case, first, monkeypatch):
    monkeypatch.setattr(type(case.make()), "compile_up_to", 10_000)
    steps = []
    for after in (0, -1):
        monkeypatch.setattr(NativeVectorEnv, "compile_after", after)
        envs = case.make(10_000, mode=NEXT_STEP)
        envs.reset(seed=0)
        state = envs.get_state()
        span = np.array(case.span)
        drawn = np.random.default_rng(3).uniform(-span, span, (10_000, len(span)))
        state["state"] = drawn.astype(np.float32) if case.id == CONTINUOUS_CAR.id and not first else drawn
        state["steps"][:] = 0 if first else 7
        envs.set_state(state)
        steps.append((envs.step(case.actions(10_000, seed=4)), envs.get_state()["state"]))
        assert (envs._loop is None) == (after < 0)
    (ours, our_state), (theirs, their_state) = steps
    assert_same_step(ours, theirs)
    assert our_state.tobytes() == their_state.tobytes()


@compiled_only
def test_an_environment_is_compiled_after_many_steps_and_never_where_numpy_is_faster_or_draws(monkeypatch):
    monkeypatch.setattr(NativeVectorEnv, "compile_after", 3)
    for case, lanes, pays in ((CARTPOLE, 128, True), (CARTPOLE, 129, False), (ACROBOT, 200, True), (NOISY, 2, False)):
        envs = case.make(lanes)
        envs.reset(seed=0)
        seen = []
        for action in case.actions(5, lanes):
            envs.step(action)
            seen.append(envs._loop is not None)
        assert seen == [False] * 3 + [pays] * 2
    envs = PENDULUM.make(2)
    envs.reset(seed=[0, 0])
    other = PENDULUM.make(2)
    other.reset(seed=[0, 0])
    for action in PENDULUM.actions(5, 2):  # what is no float32 is calculated in its own dtype
        np.testing.assert_allclose(envs.step(action)[0], other.step(action.astype(np.float64))[0], rtol=1e-5)


@compiled_only
def test_without_numba_numpy_goes_on(monkeypatch):
    compiled.compiled_loop.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)  # importing it raises ImportError
    envs = CAR.make(2)
    envs.reset(seed=0)
    envs.step(np.array([0, 1]))
    assert envs._loop is None
    compiled.compiled_loop.cache_clear()


@pytest.mark.parametrize("case", [*CASES, *SETTINGS[:2]], ids=str)
def test_one_function_serves_numpy_and_torch(case):
    span, action = np.array(case.span)[:, None], case.actions(500).reshape(500)
    state = np.random.default_rng(2).uniform(-span, span, (len(span), 500))
    ours = case.dynamics(state, action, **case.settings)
    theirs = case.dynamics(torch.from_numpy(state), torch.from_numpy(action), **case.settings)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.from_numpy(a).dtype == b.dtype
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-12, atol=1e-9)  # a float32 square may round otherwise


def test_constants_are_those_of_gymnasium():
    scalars = {case.id: case.scalar().unwrapped for case in CASES}
    pole = scalars["CartPole-v1"]
    assert (pole.gravity, pole.masspole, pole.total_mass) == (cartpole.GRAVITY, cartpole.POLE_MASS, cartpole.TOTAL_MASS)
    assert (pole.length, pole.polemass_length) == (cartpole.HALF_LENGTH, cartpole.POLE_MASS_LENGTH)
    assert (pole.force_mag, pole.tau) == (cartpole.FORCE, cartpole.TAU)
    assert (pole.x_threshold, pole.theta_threshold_radians) == (cartpole.X_LIMIT, cartpole.THETA_LIMIT)
    links = scalars["Acrobot-v1"]
    assert (links.dt, links.MAX_VEL_1, links.MAX_VEL_2) == (acrobot.DT, acrobot.MAX_VELOCITY_1, acrobot.MAX_VELOCITY_2)
    assert (links.LINK_LENGTH_1, links.LINK_LENGTH_2, links.LINK_MASS_1, links.LINK_MASS_2, links.LINK_MOI) == (1,) * 5
    assert (links.LINK_COM_POS_1, links.LINK_COM_POS_2, links.AVAIL_TORQUE) == (0.5, 0.5, [-1, 0, 1])
    car, continuous = scalars["MountainCar-v0"], scalars["MountainCarContinuous-v0"]
    for module, scalar in ((mountain_car, car), (mountain_car_continuous, continuous)):
        assert (scalar.min_position, scalar.max_position) == (module.MIN_POSITION, module.MAX_POSITION)
        assert (scalar.goal_position, scalar.max_speed) == (module.GOAL, module.MAX_SPEED)
    assert (car.force, car.gravity) == (mountain_car.FORCE, mountain_car.GRAVITY)
    assert (continuous.power,) == (mountain_car_continuous.POWER,)
    rod = scalars["Pendulum-v1"]
    assert (rod.g, rod.dt, rod.m, rod.l) == (pendulum.GRAVITY, pendulum.DT, 1.0, 1.0)
    assert (rod.max_speed, rod.max_torque) == (pendulum.MAX_SPEED, pendulum.MAX_TORQUE)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_squares_are_rounded_as_those_of_single_numbers(dtype, scale):
    x = (np.random.default_rng(0).normal(size=(2, 20_000)) * scale).astype(dtype)
    expected = np.array([number**2 for number in x.ravel()]).reshape(x.shape)
    assert (x * x != expected).any()  # what the function is there for
    square = scalar_square(x)
    assert square.dtype == dtype
    np.testing.assert_array_equal(square, expected)
    for i in (x * x != expected)[0].nonzero()[0][:3]:
        assert scalar_square(x[0, i : i + 1]) == expected[0, i]  # one lane
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(scalar_square(np.array([0, -np.inf, np.nan], dtype)), [0, np.inf, np.nan])


@each_case
def test_equal_seeds_start_alike_at_every_reset_as_the_scalar_environment(case):
    ours, scalars = case.make(5), [case.scalar() for _ in range(5)]
    seeds = [7, 3, 7, 7, 3]
    obs, _ = ours.reset(seed=seeds)
    expected = np.stack([env.reset(seed=s)[0] for env, s in zip(scalars, seeds, strict=True)])
    for _ in range(80):  # beyond two blocks of start states
        np.testing.assert_array_equal(obs, expected)
        np.testing.assert_array_equal(obs[[0, 1]], obs[[2, 4]])
        assert (obs[0] != obs[1]).any()
        obs, _ = ours.reset()
        expected = np.stack([env.reset()[0] for env in scalars])


def test_an_int_seed_gives_lane_i_seed_plus_i_and_none_goes_on():
    a, b = CartPoleVectorEnv(3), CartPoleVectorEnv(3)
    np.testing.assert_array_equal(a.reset(seed=10)[0], b.reset(seed=[10, 11, 12])[0])
    obs, _ = a.reset(seed=[None, 99, None])
    second, _ = b.reset()
    np.testing.assert_array_equal(obs[[0, 2]], second[[0, 2]])
    np.testing.assert_array_equal(obs[1], CartPoleEnv().reset(seed=99)[0])


@each_case
def test_unseeded_environments_differ(case):
    starts = [case.make(2).reset()[0] for _ in range(2)]
    assert len(np.unique(np.concatenate(starts), axis=0)) == 4


@each_case
def test_reset_bounds_hold_for_one_reset_and_keep_the_stream(case):
    low, high = ("x_init", "y_init") if case is PENDULUM else ("low", "high")
    ours, scalar = case.make(2), case.scalar()
    ours.reset(seed=[4, 4])
    scalar.reset(seed=4)
    for options in ({}, {low: -0.7, high: 0.1} if case is not PENDULUM else {low: 0.7, high: 0.1}, {}, {high: 0.3}, {}):
        obs, _ = ours.reset(options=options)
        np.testing.assert_array_equal(obs, np.stack([scalar.reset(options=options)[0]] * 2))
    obs, _ = ours.reset(seed=[8, 8], options={low: 0.01, high: 0.02})
    np.testing.assert_array_equal(obs[1], case.scalar().reset(seed=8, options={low: 0.01, high: 0.02})[0])


def test_reset_mask_leaves_the_other_lanes_and_the_options_alone():
    envs, options = CartPoleVectorEnv(3), {"reset_mask": np.array([False, True, False])}
    envs.reset(seed=0)
    before = envs.step(np.ones(3, int))[0]
    after, _ = envs.reset(seed=[1, 2, 3], options=options)
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    np.testing.assert_array_equal(after[1], CartPoleEnv().reset(seed=2)[0])
    assert list(options) == ["reset_mask"]


@each_lively_case
@each_mode
def test_idle_lanes_are_not_stepped_and_the_others_are_as_ever(case, mode):
    """Lane by lane, a masked run is the unmasked run of that lane with the idle steps cut out."""
    lanes, rng = 5, np.random.default_rng(3)
    ours = case.make(lanes, 40, mode)
    obs, _ = ours.reset(seed=list(range(lanes)))
    alone = [case.make(1, 40, mode) for _ in range(lanes)]
    for i, env in enumerate(alone):
        env.reset(seed=[i])
    for action in case.actions(200, lanes):
        mask = rng.random(lanes) < rng.choice([0.1, 0.5, 0.95])
        if mode is DISABLED:
            done = ours._pending.copy()
            if done.any() and rng.random() < 0.3:
                obs, _ = ours.reset(options={"reset_mask": done})
                for i in done.nonzero()[0]:
                    alone[i].reset()
            mask &= ~ours._pending
        action[~mask] = 77  # an idle lane's action is not looked at
        step = ours.step(action, mask)
        np.testing.assert_array_equal(step[0][~mask], obs[~mask])
        assert not step[1][~mask].any() and not step[2][~mask].any() and not step[3][~mask].any()
        obs = step[0]
        for i in mask.nonzero()[0]:
            single = alone[i].step(action[i : i + 1])
            assert_same_step([x[i : i + 1] for x in step[:4]], single[:4])
            if "final_obs" in single[4]:
                np.testing.assert_array_equal(step[4]["final_obs"][i], single[4]["final_obs"][0])
    assert ours.get_state()["steps"].tolist() == [env.get_state()["steps"][0] for env in alone]


@each_case
def test_a_mask_of_no_lane_changes_nothing(case):
    envs = case.make(2, mode=DISABLED)
    start, _ = envs.reset(seed=0)
    obs, reward, terminated, truncated, info = envs.step(case.actions(2), np.zeros(2, bool))
    np.testing.assert_array_equal(obs, start)
    assert not (reward.any() or terminated.any() or truncated.any() or info)


def test_disabled_refuses_to_step_a_lane_that_has_ended():
    envs = CartPoleVectorEnv(2, 3, DISABLED)
    envs.reset(seed=0)
    for _ in range(3):
        truncated = envs.step(np.array([0, 1]))[3]
    assert truncated.all()
    with pytest.raises(RuntimeError, match="lane 1 has ended: reset it .* or mask it out"):
        envs.step(np.array([0, 1]), np.array([False, True]))
    envs.reset(options={"reset_mask": np.array([True, False])})
    envs.step(np.array([0, 1]), np.array([True, False]))


def test_both_flags_may_be_true_at_once():
    scalar = gymnasium.make("CartPole-v1")
    scalar.reset(seed=3)
    length = 1
    while not scalar.step(1)[2]:
        length += 1
    envs = CartPoleVectorEnv(1, length, DISABLED)
    envs.reset(seed=[3])
    for _ in range(length):
        _, _, terminated, truncated, _ = envs.step(np.ones(1, int))
    assert terminated.all() and truncated.all()


@each_lively_case
@each_mode
def test_a_restored_state_goes_on_with_equal_bits(case, mode):
    actions = case.actions(120, 4, seed=5)
    first = case.make(4, 30, mode)
    first.reset(seed=[1, 1, 2, 3])
    saved_at = 60 if mode is SAME_STEP else 50  # at the start of an episode, and in the middle of one
    last = run(first, actions[:saved_at])[-1][0]
    saved = first.get_state()
    kept = {name: value.copy() for name, value in saved.items()}
    expected = run(first, actions[saved_at:])
    second = case.make(4, 30, mode)
    obs = second.set_state({name: torch.from_numpy(value) for name, value in saved.items()})  # as a checkpoint has it
    np.testing.assert_array_equal(obs, last)
    for a, b in zip(run(second, actions[saved_at:]), expected, strict=True):
        assert_same_step(a, b)
    for name, value in kept.items():
        assert len(value) == 4
        np.testing.assert_array_equal(value, saved[name])  # what was saved is no view of what goes on


@each_lively_case
def test_reading_the_state_changes_nothing(case):
    plain, read = (case.make(3, 20, SAME_STEP) for _ in range(2))
    plain.reset(seed=[1, 1, 5]), read.reset(seed=[1, 1, 5])
    for action in case.actions(100, 3):
        read.get_state()
        assert_same_step(read.step(action), plain.step(action))


@each_case
def test_rows_of_a_state_make_a_group_from_one_mid_episode_state(case):
    envs = case.make(4, 12, DISABLED)
    envs.reset(seed=0)
    actions = np.repeat(case.actions(12, 1), 4, axis=1)
    for action in actions[:5]:
        envs.step(action)
    state = envs.get_state()
    obs = envs.set_state({name: value[[2, 2, 2, 2]] for name, value in state.items()})
    assert (obs == obs[0]).all()
    for t, action in enumerate(actions[5:], start=6):
        obs, _, _, truncated, _ = envs.step(action)
        assert (obs == obs[0]).all()
        assert truncated.all() == (t == 12)  # the time limit counts on from the restored step


@each_lively_case
@each_mode
def test_forked_lanes_go_on_as_their_sources(case, mode):
    """A fork is the rows of a state put elsewhere: the lanes 3 and 0 into 1 and 3, at once."""
    actions = case.actions(130, 4, seed=5)
    forked, restored = case.make(4, 30, mode), case.make(4, 30, mode)
    for envs in (forked, restored):
        envs.reset(seed=[1, 1, 2, 3])
        run(envs, actions[:50])
    rows = [0, 3, 2, 0]
    expected = restored.set_state({name: value[rows] for name, value in restored.get_state().items()})
    np.testing.assert_array_equal(forked.fork(np.array([3, 0]), np.array([1, 3])), expected)
    for action in actions[50:]:
        action[3] = action[0]
        (step,), (other,) = run(forked, [action]), run(restored, [action])
        assert_same_step(step, other)
        np.testing.assert_array_equal(step[0][0], step[0][3])  # with equal actions, through every reset
        assert (step[0][0] != step[0][1]).any()


def test_a_fork_copies_start_states_beyond_a_block_and_refuses_what_names_no_lane():
    envs = CartPoleVectorEnv(3)
    with pytest.raises(RuntimeError, match="call reset"):
        envs.fork([0], [1])
    envs.reset(seed=[4, 5, 5])
    first, second = CartPoleEnv(), CartPoleEnv()
    a, b = first.reset(seed=4)[0], second.reset(seed=5)[0]
    obs = envs.fork([0, 2], [2, 0])
    for _ in range(70):
        np.testing.assert_array_equal(obs, np.stack([b, b, a]))
        a, b, obs = first.reset()[0], second.reset()[0], envs.reset()[0]
    for source, target in (([0], [3]), ([0], [-1]), ([0, 1], [2]), ([0, 1], [2, 2]), ([0.5], [1])):
        with pytest.raises(ValueError, match="source|target"):
            envs.fork(source, target)


@each_case
def test_returned_arrays_stay_as_they_were(case):
    for mode in MODES:
        envs = case.make(3, 10, mode)
        kept = [envs.reset(seed=0)[0]]
        for action in case.actions(9, 3):
            kept += envs.step(action)[:4]
        copies = [x.copy() for x in kept]
        run(envs, case.actions(1, 3))
        for x, copy in zip(kept, copies, strict=True):
            np.testing.assert_array_equal(x, copy)
        before = envs.get_state()["state"]
        kept[-4][:] = 9.0  # and writing to them reaches no state
        np.testing.assert_array_equal(envs.get_state()["state"], before)


@each_case
def test_observations_and_actions_lie_in_the_spaces(case):
    envs = case.make(7)
    obs, _ = envs.reset(seed=0)
    assert envs.observation_space.contains(obs) and obs.flags.c_contiguous
    assert envs.single_observation_space == case.scalar().observation_space
    obs = envs.step(envs.action_space.sample())[0]
    assert envs.observation_space.contains(obs) and obs.flags.c_contiguous
    for dtype in (np.int32, np.uint8):
        envs.step(case.actions(7).astype(dtype))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ([0, 2], "action 2 is out of range: CartPole-v1 takes 0 to 1"),
        ([-1, 0], "action -1 is out of range"),
        ([0.0, 1.0], "actions are float64, integers from 0 to 1"),
        ([0, 1, 0], "shape"),
        ([[0], [1]], "shape"),
    ],
)
@pytest.mark.parametrize("mask", [None, [True, True]])
def test_a_wrong_action_is_one_clear_sentence(action, message, mask):
    envs = CartPoleVectorEnv(2)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        envs.step(np.array(action), None if mask is None else np.array(mask))


def test_other_mistakes_are_clear_sentences():
    envs = CartPoleVectorEnv(2)
    with pytest.raises(RuntimeError, match="call reset"):
        envs.step(np.zeros(2, int))
    with pytest.raises(RuntimeError, match="first reset"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(ValueError, match="seed has 3 entries, one for each of 2 lanes"):
        envs.reset(seed=[1, 2, 3])
    with pytest.raises(ValueError, match="seed -1 is negative"):
        envs.reset(seed=[1, -1])
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="mask has dtype int64"):
        envs.step(np.zeros(2, int), np.array([0, 1]))
    with pytest.raises(ValueError, match="at least one lane"):
        envs.reset(options={"reset_mask": np.zeros(2, bool)})
    with pytest.raises(ValueError, match="of 2 lanes, this environment has 3"):
        CartPoleVectorEnv(3).set_state(envs.get_state())
    with pytest.raises(RuntimeError, match="render_mode='rgb_array'"):
        envs.render()
    for wrong in ({"num_envs": 0}, {"max_episode_steps": 0}, {"render_mode": "human"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CartPoleVectorEnv(**wrong)
    for wrong in ({"book_or_nips": "paper"}, {"torque_noise_max": -1.0}, {"torque_noise_max": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* must be"):
            AcrobotVectorEnv(**wrong)


@each_case
def test_render_draws_the_chosen_lane_as_gymnasium_does(case):
    pytest.importorskip("pygame")
    envs, scalar = case.make(2, render_mode="rgb_array"), case.scalar(render_mode="rgb_array")
    envs.reset(seed=[1, 4])
    scalar.reset(seed=4)
    for action in [None, *case.actions(8, 2)]:
        if action is not None:
            envs.step(action)
            scalar.step(action[1])
        np.testing.assert_array_equal(envs.render(lane=1)[0], scalar.render())
    (first,), (second,) = envs.render(), envs.render(lane=1)
    assert first.shape[2] == 3 and first.dtype == np.uint8
    assert (first != second).any()
    envs.close()


@each_case
def test_gymnasium_makes_it_by_name(case):
    envs = gymnasium.make_vec(f"rlkit/{case.id}", num_envs=64, **case.settings)
    assert type(envs) is type(case.make())
    assert (envs.num_envs, envs.max_episode_steps) == (64, gymnasium.spec(case.id).max_episode_steps)
    assert envs.metadata["autoreset_mode"] is NEXT_STEP
    assert type(gymnasium.make(f"rlkit/{case.id}").unwrapped) is type(case.scalar().unwrapped)


@pytest.mark.parametrize("first", ["import rlkit, gymnasium", "import gymnasium, rlkit", "import gymnasium"])
def test_importing_both_registers_them_in_either_order(first):
    make = "envs = gymnasium.make_vec('rlkit:rlkit/Acrobot-v1', num_envs=64); print(type(envs).__name__)"
    command = [sys.executable, "-c", f"{first}; {make}"]
    root = Path(__file__).parents[1]
    assert subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout == "AcrobotVectorEnv\n"


def test_importing_rlkit_alone_does_not_load_torch():
    listing = "import sys, rlkit; print({'torch', 'hydra', 'tensorboard', 'rich'} & set(sys.modules))"
    command = [sys.executable, "-c", listing]
    root = Path(__file__).parents[1]
    assert subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout == "set()\n"


@each_case
def test_gymnasiums_vector_wrappers_accept_it(case):
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(case.make(2, 5, SAME_STEP))
    envs.reset(seed=0)
    rewards = 0.0
    for action in case.actions(5, 2):
        _, reward, _, _, info = envs.step(action)
        rewards = rewards + reward
    np.testing.assert_allclose(info["episode"]["r"], rewards)


def test_other_draws_share_the_stream_with_start_states():
    """Dynamics that draw from the stream, as torque noise does, see what the scalar environment would."""
    streams, lanes = LaneStreams(3, 4, -0.05, 0.05), np.arange(3)
    streams.seed([0, 1, 2], [6, 6, 7])
    oracles = [seeding.np_random(seed)[0] for seed in (6, 6, 7)]
    for size in (1, 4, 4, 1, 1, 4, 2, 4, 4, 4, 1):
        bound = 0.05 if size == 4 else 1.5
        expected = [rng.uniform(-bound, bound, size) for rng in oracles]
        drawn = streams.starts(lanes) if size == 4 else streams.uniform(lanes, -bound, bound, size)
        np.testing.assert_array_equal(drawn, np.stack(expected))
