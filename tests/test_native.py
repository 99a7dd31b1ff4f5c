"""The native environments against Gymnasium's scalar ones: equal bits in every mode, masks, state, errors."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import rlkit.envs
from rlkit.envs.cartpole import CartPoleVectorEnv, cartpole
from rlkit.envs.streams import LaneStreams

MODES = list(AutoresetMode)


def reference(lanes, mode, limit=None):
    """Gymnasium's own scalar environments, stepped one by one."""
    make = lambda: gymnasium.make("CartPole-v1", max_episode_steps=limit)  # noqa: E731
    return SyncVectorEnv([make] * lanes, autoreset_mode=mode)


def random_actions(steps, lanes, seed=0):
    return np.random.default_rng(seed).integers(0, 2, (steps, lanes))


def assert_same_step(ours, theirs):
    for name, a, b in zip(("obs", "reward", "terminated", "truncated"), ours, theirs, strict=False):
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        np.testing.assert_array_equal(a, b, err_msg=name)


def run(envs, actions):
    """Step through the actions, resetting by mask what ended under DISABLED; return the steps."""
    steps = []
    for action in actions:
        steps.append(envs.step(action))
        ended = steps[-1][2] | steps[-1][3]
        if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
            obs, _ = envs.reset(options={"reset_mask": ended})
            steps.append((obs, np.zeros(len(ended)), ended, ended, {}))
    return steps


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [None, 23])
def test_equals_the_scalar_environment_bit_by_bit_over_10000_steps(mode, limit):
    lanes, seeds = 3, [5, 5, 1_000_000]
    ours, theirs = CartPoleVectorEnv(lanes, limit, mode), reference(lanes, mode, limit)
    np.testing.assert_array_equal(ours.reset(seed=seeds)[0], theirs.reset(seed=seeds)[0])
    ends, final = 0, 0
    actions = random_actions(10_000, lanes)
    for a, b in zip(run(ours, actions), run(theirs, actions), strict=True):
        assert_same_step(a, b)
        ends += int((a[2] | a[3]).sum())
        assert ("final_obs" in a[4]) == ("final_obs" in b[4])
        if "final_obs" in a[4]:
            final += 1
            ended = a[2] | a[3]
            np.testing.assert_array_equal(a[4]["_final_obs"], ended)
            np.testing.assert_array_equal(a[4]["_final_obs"], b[4]["_final_obs"])
            np.testing.assert_array_equal(a[4]["final_obs"][ended], np.stack(list(b[4]["final_obs"][ended])))
            assert not a[4]["final_obs"][~ended].any()
            assert a[4]["final_obs"].dtype == np.float32
    assert ends > 300 * lanes  # many episodes of each lane: start states beyond one block were compared
    assert (final > 0) == (mode is AutoresetMode.SAME_STEP)


def test_equals_the_scalar_environment_from_equal_states():
    rng = np.random.default_rng(1)
    state = rng.uniform(-1, 1, (4, 10_000)) * np.array([3.0, 5.0, 0.3, 5.0])[:, None]
    action = rng.integers(0, 2, 10_000)
    after, reward, terminated = cartpole(state, action)
    scalar = CartPoleEnv()
    for i in range(10_000):
        scalar.reset()
        scalar.state = state[:, i]
        _, r, end, _, _ = scalar.step(action[i])
        assert (r, end) == (reward[i], terminated[i])
        np.testing.assert_array_equal(scalar.state, after[:, i])
    assert 1000 < terminated.sum() < 9000


def test_one_function_serves_numpy_and_torch():
    rng = np.random.default_rng(2)
    state, action = rng.normal(size=(4, 500)), rng.integers(0, 2, 500)
    for sutton_barto in (False, True):
        ours = cartpole(state, action, sutton_barto)
        theirs = cartpole(torch.from_numpy(state), torch.from_numpy(action), sutton_barto)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.from_numpy(a).dtype == b.dtype
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-13)


def test_sutton_barto_reward_is_zero_and_minus_one_at_the_fall():
    ours = CartPoleVectorEnv(2, autoreset_mode="SameStep", sutton_barto_reward=True)
    scalar = gymnasium.make("CartPole-v1", sutton_barto_reward=True)
    ours.reset(seed=[3, 3])
    scalar.reset(seed=3)
    rewards = []
    for _ in range(12):
        expected = scalar.step(1)
        _, reward, terminated, _, _ = ours.step(np.ones(2, int))
        assert reward.tolist() == [expected[1]] * 2 and terminated.tolist() == [expected[2]] * 2
        rewards.append(expected[1])
        if expected[2]:
            break
    assert rewards[-1] == -1.0 and set(rewards[:-1]) == {0.0}


def test_equal_seeds_start_alike_at_every_reset_as_the_scalar_environment():
    ours = CartPoleVectorEnv(5)
    scalars = [CartPoleEnv() for _ in range(5)]
    seeds = [7, 3, 7, 7, 3]
    obs, _ = ours.reset(seed=seeds)
    expected = np.stack([env.reset(seed=s)[0] for env, s in zip(scalars, seeds, strict=True)])
    for _ in range(80):  # beyond two blocks of start states
        np.testing.assert_array_equal(obs, expected)
        np.testing.assert_array_equal(obs[[0, 1]], obs[[2, 4]])
        assert (obs[0] != obs[1]).all()
        obs, _ = ours.reset()
        expected = np.stack([env.reset()[0] for env in scalars])


def test_an_int_seed_gives_lane_i_seed_plus_i_and_none_goes_on():
    a, b = CartPoleVectorEnv(3), CartPoleVectorEnv(3)
    np.testing.assert_array_equal(a.reset(seed=10)[0], b.reset(seed=[10, 11, 12])[0])
    obs, _ = a.reset(seed=[None, 99, None])
    second, _ = b.reset()
    np.testing.assert_array_equal(obs[[0, 2]], second[[0, 2]])
    np.testing.assert_array_equal(obs[1], CartPoleEnv().reset(seed=99)[0])


def test_unseeded_environments_differ():
    starts = [CartPoleVectorEnv(2).reset()[0] for _ in range(2)]
    assert len(np.unique(np.concatenate(starts), axis=0)) == 4


def test_reset_bounds_hold_for_one_reset_and_keep_the_stream():
    ours, scalar = CartPoleVectorEnv(2), CartPoleEnv()
    ours.reset(seed=[4, 4])
    scalar.reset(seed=4)
    for options in ({}, {"low": -0.2, "high": 0.1}, {}, {"high": 0.3}, {}):
        obs, _ = ours.reset(options=options)
        np.testing.assert_array_equal(obs, np.stack([scalar.reset(options=options)[0]] * 2))
    obs, _ = ours.reset(seed=[8, 8], options={"low": -0.01, "high": 0.0})
    np.testing.assert_array_equal(obs[1], CartPoleEnv().reset(seed=8, options={"low": -0.01, "high": 0.0})[0])


def test_reset_mask_leaves_the_other_lanes_and_the_options_alone():
    envs, options = CartPoleVectorEnv(3), {"reset_mask": np.array([False, True, False])}
    envs.reset(seed=0)
    before = envs.step(np.ones(3, int))[0]
    after, _ = envs.reset(seed=[1, 2, 3], options=options)
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    np.testing.assert_array_equal(after[1], CartPoleEnv().reset(seed=2)[0])
    assert list(options) == ["reset_mask"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_idle_lanes_are_not_stepped_and_the_others_are_as_ever(mode, share):
    """Lane by lane, a masked run is the unmasked run of that lane with the idle steps cut out."""
    lanes, rng = 6, np.random.default_rng(3)
    ours = CartPoleVectorEnv(lanes, 40, mode)
    obs, _ = ours.reset(seed=list(range(lanes)))
    alone = [CartPoleVectorEnv(1, 40, mode) for _ in range(lanes)]
    for i, env in enumerate(alone):
        env.reset(seed=[i])
    for _ in range(600):
        mask, action = rng.random(lanes) < share, rng.integers(0, 2, lanes)
        if mode is AutoresetMode.DISABLED:
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
    assert all(env._steps[0] == ours._steps[i] for i, env in enumerate(alone))


def test_a_mask_of_no_lane_changes_nothing():
    envs = CartPoleVectorEnv(2, autoreset_mode="Disabled")
    start, _ = envs.reset(seed=0)
    obs, reward, terminated, truncated, info = envs.step(np.zeros(2, int), np.zeros(2, bool))
    np.testing.assert_array_equal(obs, start)
    assert not (reward.any() or terminated.any() or truncated.any() or info)


def test_disabled_refuses_to_step_a_lane_that_has_ended():
    envs = CartPoleVectorEnv(2, 3, AutoresetMode.DISABLED)
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
    envs = CartPoleVectorEnv(1, length, AutoresetMode.DISABLED)
    envs.reset(seed=[3])
    for _ in range(length):
        _, _, terminated, truncated, _ = envs.step(np.ones(1, int))
    assert terminated.all() and truncated.all()


@pytest.mark.parametrize("mode", MODES)
def test_a_restored_state_goes_on_with_equal_bits(mode):
    actions = random_actions(400, 4, seed=5)
    first = CartPoleVectorEnv(4, 30, mode)
    first.reset(seed=[1, 1, 2, 3])
    run(first, actions[:200])
    saved = first.get_state()
    kept = {name: value.copy() for name, value in saved.items()}
    expected = run(first, actions[200:])
    second = CartPoleVectorEnv(4, 30, mode)
    obs = second.set_state({name: torch.from_numpy(value) for name, value in saved.items()})  # as a checkpoint has it
    np.testing.assert_array_equal(obs, kept["state"].astype(np.float32))
    for a, b in zip(run(second, actions[200:]), expected, strict=True):
        assert_same_step(a, b)
    for name, value in kept.items():
        assert len(value) == 4
        np.testing.assert_array_equal(value, saved[name])  # what was saved is no view of what goes on


def test_reading_the_state_changes_nothing():
    actions = random_actions(300, 3)
    plain, read = (CartPoleVectorEnv(3, 20, "SameStep") for _ in range(2))
    plain.reset(seed=[1, 1, 5]), read.reset(seed=[1, 1, 5])
    for action in actions:
        read.get_state()
        assert_same_step(read.step(action), plain.step(action))


def test_rows_of_a_state_make_a_group_from_one_mid_episode_state():
    envs = CartPoleVectorEnv(4, 12, AutoresetMode.DISABLED)
    envs.reset(seed=0)
    for t in range(5):
        envs.step(np.full(4, t % 2))
    state = envs.get_state()
    obs = envs.set_state({name: value[[2, 2, 2, 2]] for name, value in state.items()})
    assert (obs == obs[0]).all()
    for t in range(7):
        _, _, _, truncated, _ = envs.step(np.full(4, t % 2))
        assert truncated.all() == (t == 6)  # the time limit counts on from the restored step


def test_returned_arrays_stay_as_they_were():
    for mode in MODES:
        envs = CartPoleVectorEnv(3, 10, mode)
        kept = [envs.reset(seed=0)[0]]
        for t in range(9):
            kept += envs.step(np.full(3, t % 2))[:4]
        copies = [x.copy() for x in kept]
        run(envs, random_actions(1, 3))
        for x, copy in zip(kept, copies, strict=True):
            np.testing.assert_array_equal(x, copy)
        before = envs.get_state()["state"]
        kept[-4][:] = 9.0  # and writing to them reaches no state
        np.testing.assert_array_equal(envs.get_state()["state"], before)


def test_observations_and_actions_lie_in_the_spaces():
    envs = CartPoleVectorEnv(7)
    obs, _ = envs.reset(seed=0)
    assert envs.observation_space.contains(obs) and obs.flags.c_contiguous
    assert envs.single_observation_space == CartPoleEnv().observation_space
    obs = envs.step(envs.action_space.sample())[0]
    assert envs.observation_space.contains(obs) and obs.flags.c_contiguous
    for dtype in (np.int32, np.uint8):
        envs.step(np.ones(7, dtype))


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


def test_render_draws_the_chosen_lane_as_gymnasium_does():
    pytest.importorskip("pygame")
    envs = CartPoleVectorEnv(2, render_mode="rgb_array")
    scalar = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    envs.reset(seed=[1, 2], options={"low": -0.3, "high": 0.3})
    scalar.reset(seed=2, options={"low": -0.3, "high": 0.3})
    (first,), (second,) = envs.render(), envs.render(lane=1)
    assert first.shape == (400, 600, 3) and first.dtype == np.uint8
    assert (first != second).any()
    np.testing.assert_array_equal(second, scalar.render())
    envs.close()


def test_gymnasium_makes_it_by_name():
    assert "rlkit/CartPole-v1" in gymnasium.registry and "CartPole-v1" in rlkit.envs.NATIVE
    envs = gymnasium.make_vec("rlkit/CartPole-v1", num_envs=64)
    assert isinstance(envs, CartPoleVectorEnv)
    assert (envs.num_envs, envs.max_episode_steps) == (64, 500)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert isinstance(gymnasium.make("rlkit/CartPole-v1").unwrapped, CartPoleEnv)


def test_gymnasiums_vector_wrappers_accept_it():
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(CartPoleVectorEnv(2, 5, "SameStep"))
    envs.reset(seed=0)
    for _ in range(5):
        info = envs.step(np.array([0, 1]))[4]
    assert info["episode"]["r"].tolist() == [5.0, 5.0]


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


def test_due_lanes_draw_nothing_while_dynamics_draw():
    """Under NEXT_STEP a lane due for its reset is not stepped, so its stream gives only the start state."""

    class Noisy(CartPoleVectorEnv):
        draws_in_step = True

        def transition(self, state, action, lanes):
            self.streams.uniform(lanes, -1.0, 1.0, 1)
            return super().transition(state, action, lanes)

    envs = Noisy(2, 2)
    envs.reset(seed=[4, 5])
    rng = seeding.np_random(5)[0]
    rng.uniform(size=4)
    for _ in range(2):
        envs.step(np.zeros(2, int))
        rng.uniform()
    obs = envs.step(np.zeros(2, int))[0]
    np.testing.assert_array_equal(obs[1], rng.uniform(-0.05, 0.05, 4).astype(np.float32))
