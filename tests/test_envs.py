"""Any Gymnasium environment through Sync and Async: masks, resets, errors of workers, odd spaces."""

import multiprocessing
import os
import signal
import time

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.vector import AutoresetMode

import rlkit.envs
from rlkit.envs import EnvironmentFailure
from rlkit.envs.cartpole import CartPoleVectorEnv
from rlkit.envs.gym import MaskedAsyncVectorEnv, MaskedSyncVectorEnv
from rlkit.envs.spaces import ActionSpec

BACKENDS = ("sync", "async")
SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED


class Counting(gymnasium.Env):
    """Observes (number of resets, steps in the episode, steps in all); ends as told after `length` steps."""

    observation_space = Box(0, 1000, (3,), np.float32)
    action_space = Discrete(2)

    def __init__(self, length=3, ends="terminated", render_mode=None):
        self.length, self.ends, self.resets, self.step_calls = length, ends, 0, 0

    def observe(self):
        return np.array([self.resets, self.time, self.step_calls], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets, self.time = self.resets + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.time, self.step_calls = self.time + 1, self.step_calls + 1
        end = self.time == self.length
        return self.observe(), 1.0, end and self.ends != "truncated", end and self.ends != "terminated", {}


class TwoWords(Exception):
    """Cannot be unpickled: its constructor wants two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class Failing(Counting):
    """Fails at its second step, in the way that its action chooses."""

    action_space = Discrete(4)

    def step(self, action):
        if self.time == 1:
            if action == 0:
                raise KeyError("the original words")
            if action == 1:
                raise TwoWords("original", "words")
            if action == 3:
                raise ConnectionError("the simulator hung up")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class MadeHereOnly(Counting):
    """Its constructor fails in any process but the given one."""

    def __init__(self, process):
        super().__init__()
        if os.getpid() != process:
            raise OSError("no licence in a worker")


class Observing(gymnasium.Env):
    """Observes samples of a given space."""

    action_space = Discrete(2)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, True, False, {}


@pytest.fixture(autouse=True)
def _registered():
    for cls in (Counting, Failing, MadeHereOnly, Observing):
        gymnasium.register(f"rlkit_tests/{cls.__name__}-v0", entry_point=cls)
    yield
    deadline = time.monotonic() + 5
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not multiprocessing.active_children()  # no test leaves a worker behind


@pytest.fixture
def made():
    """`make` whose environments are closed when the test ends."""
    kept = []

    def make(*args, **kwargs):
        kept.append(rlkit.envs.make(*args, **kwargs))
        return kept[-1]

    yield make
    for envs in kept:
        envs.close()


def counting(made, backend, mode, **kwargs):
    return made("rlkit_tests/Counting-v0", 2, backend=backend, autoreset_mode=mode, **kwargs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_phantom_step_under_same_step(made, backend):
    """Case 1: three-step episodes of two copies; every row is a transition, none the reset's."""
    envs = counting(made, backend, SAME_STEP)
    envs.reset(seed=[0, 1])
    for t in range(1, 10):
        obs, reward, terminated, truncated, info = envs.step(np.zeros(2, int))
        end = t % 3 == 0
        assert reward.tolist() == [1.0, 1.0]
        assert terminated.tolist() == [end, end] and not truncated.any()
        expected = [1 + t // 3, t % 3, t]  # an executed step for every row
        assert obs.tolist() == [expected, expected]
        if end:
            assert info["final_obs"].tolist() == [[t // 3, 3, t]] * 2
            assert info["final_obs"].dtype == np.float32
        else:
            assert "final_obs" not in info


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_phantom_row_of_next_step_is_not_executed(made, backend):
    envs = counting(made, backend, NEXT_STEP)
    envs.reset(seed=[0, 1])
    rewards = [envs.step(np.zeros(2, int)) for _ in range(8)]
    assert [row[1][0] for row in rewards] == [1, 1, 1, 0, 1, 1, 1, 0]
    assert rewards[-1][0][0].tolist() == [3, 0, 6]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("ends", "flags"), [("terminated", (True, False)), ("truncated", (False, True)), ("both", (True, True))]
)
def test_truncation_is_not_termination_and_final_obs_is_the_last(made, backend, ends, flags):
    """Case 2, the environment's part: the flags pass unchanged, final_obs is the state after the last step."""
    envs = counting(made, backend, SAME_STEP, length=5, ends=ends)
    envs.reset(seed=[0, 1])
    for _ in range(5):
        obs, _, terminated, truncated, info = envs.step(np.zeros(2, int))
    assert (terminated.all(), truncated.all()) == flags
    assert (terminated.any(), truncated.any()) == flags
    assert info["_final_obs"].all() and info["final_obs"].tolist() == [[1, 5, 5]] * 2
    assert obs.tolist() == [[2, 0, 5]] * 2  # nothing of it in the next episode


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_time_limit_is_given_to_each_copy(made, backend):
    envs = counting(made, backend, SAME_STEP, length=100, max_episode_steps=2)
    envs.reset(seed=[0, 1])
    envs.step(np.zeros(2, int))
    _, _, terminated, truncated, _ = envs.step(np.zeros(2, int))
    assert truncated.all() and not terminated.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [SAME_STEP, NEXT_STEP, DISABLED])
def test_idle_lanes_are_not_stepped(made, backend, mode):
    envs = counting(made, backend, mode, length=4)
    before, _ = envs.reset(seed=[0, 1])
    calls = np.zeros(2, int)
    for mask in ([True, False], [False, False], [True, True], [False, True], [True, False]):
        mask = np.array(mask)
        obs, reward, terminated, truncated, _ = envs.step(np.zeros(2, int), mask)
        calls += mask
        assert obs[:, 2].tolist() == calls.tolist() == list(envs.get_attr("step_calls"))
        np.testing.assert_array_equal(obs[~mask], before[~mask])
        assert reward.tolist() == mask.tolist()
        assert not (terminated | truncated).any()
        before = obs


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reset_due_waits_while_its_lane_is_idle(made, backend):
    envs = counting(made, backend, NEXT_STEP, length=1)
    envs.reset(seed=[0, 1])
    envs.step(np.zeros(2, int))
    obs, reward, _, _, _ = envs.step(np.zeros(2, int), np.array([True, False]))
    assert obs.tolist() == [[2, 0, 1], [1, 1, 1]] and not reward.any()
    obs, reward, _, _, _ = envs.step(np.zeros(2, int), np.array([False, True]))
    assert obs.tolist() == [[2, 0, 1], [2, 0, 1]] and not reward.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ended_lane_waits_for_its_reset_under_disabled(made, backend):
    envs = counting(made, backend, DISABLED, length=2)
    envs.reset(seed=[0, 1])
    envs.step(np.zeros(2, int))
    envs.step(np.zeros(2, int), np.array([True, False]))
    with pytest.raises(RuntimeError, match="lane 0 has ended: reset it .* or mask it out"):
        envs.step(np.zeros(2, int))
    envs.step(np.zeros(2, int), np.array([False, True]))
    options = {"reset_mask": np.array([True, False])}
    obs, _ = envs.reset(options=options)
    assert obs.tolist() == [[2, 0, 2], [1, 2, 2]] and list(options) == ["reset_mask"]
    obs = envs.step(np.zeros(2, int), np.array([True, False]))[0]
    assert obs.tolist() == [[2, 1, 3], [1, 2, 2]]
    with pytest.raises(RuntimeError, match="lane 1 has ended"):
        envs.step(np.zeros(2, int))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_backends_give_cartpole_the_same_bits(made, backend):
    seeds = np.array([5, 5, 9])  # any integers, not only Python's
    native = made("CartPole-v1", 3, backend="native")
    other = made("CartPole-v1", 3, backend=backend)
    assert isinstance(native, CartPoleVectorEnv) and native.metadata["autoreset_mode"] is SAME_STEP
    np.testing.assert_array_equal(native.reset(seed=seeds)[0], other.reset(seed=seeds)[0])
    rng = np.random.default_rng(0)
    ends = 0
    for _ in range(150):
        action, mask = rng.integers(0, 2, 3), rng.random(3) < 0.8
        a, b = native.step(action, mask), other.step(action, mask)
        for x, y in zip(a[:4], b[:4], strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.dtype == y.dtype
        assert a[4].keys() == b[4].keys() - {"final_info", "_final_info"}
        for name in a[4]:
            np.testing.assert_array_equal(a[4][name], b[4][name])
            ends += 1
    assert ends > 10


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (0, "KeyError: 'the original words'"),
        (1, "TwoWords: original words"),
        (3, "ConnectionError: the simulator hung up"),
    ],
)
def test_a_worker_that_raises_surfaces_the_original_error(action, words):
    envs = rlkit.envs.make("rlkit_tests/Failing-v0", 3, backend="async")
    envs.reset(seed=0)
    envs.step(np.zeros(3, int))
    envs.step(np.full(3, action), np.zeros(3, bool))
    processes = list(envs.processes)
    with pytest.raises(EnvironmentFailure, match=rf"^environment 1 of member 0 raised {words} in step 2") as caught:
        envs.step(np.full(3, action), np.array([False, True, True]))
    assert caught.value.trace.splitlines()[-1].endswith(words)
    assert f'{__file__}", line' in caught.value.trace
    assert envs.closed and not any(process.is_alive() for process in processes)


@pytest.mark.parametrize("seconds", [0, 0.5], ids=["at once", "late"])
def test_a_worker_that_cannot_make_its_environment_surfaces_the_error(monkeypatch, seconds):
    """Also where the main process is slow to ask it for the first time."""
    ask = MaskedAsyncVectorEnv._check_spaces
    monkeypatch.setattr(MaskedAsyncVectorEnv, "_check_spaces", lambda self: (time.sleep(seconds), ask(self)))
    with pytest.raises(EnvironmentFailure, match="cannot be made: it raised OSError: no licence") as caught:
        rlkit.envs.make("rlkit_tests/MadeHereOnly-v0", 2, backend="async", process=os.getpid())
    assert f'{__file__}", line' in caught.value.trace


def test_a_worker_that_dies_is_named_and_the_others_end():
    envs = rlkit.envs.make("rlkit_tests/Failing-v0", 3, backend="async")
    envs.reset(seed=0)
    envs.step(np.zeros(3, int))
    processes = list(envs.processes)
    with pytest.raises(RuntimeError, match="environment 1 of member 0 lost its worker process, which ended with"):
        envs.step(np.full(3, 2), np.array([False, True, False]))
    assert envs.closed and not any(process.is_alive() for process in processes)


def test_workers_leave_ctrl_c_to_the_main_process(made):
    envs = counting(made, "async", SAME_STEP)
    envs.reset(seed=0)
    for process in envs.processes:
        os.kill(process.pid, signal.SIGINT)
    assert envs.step(np.zeros(2, int))[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("id", "size"), [("FrozenLake-v1", 16), ("Taxi-v4", 500), ("Blackjack-v1", 32 + 11 + 2), ("CliffWalking-v1", 48)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_discrete_and_tuple_observations_become_one_hot(made, backend, id, size):
    """Case 5."""
    envs = made(id, 2, backend=backend)
    obs, _ = envs.reset(seed=[0, 1])
    assert envs.single_observation_space.shape == (size,)
    hot = 3 if id == "Blackjack-v1" else 1
    for _ in range(60):
        assert obs.dtype == np.float32 and obs.shape == (2, size)
        assert set(np.unique(obs)) == {0.0, 1.0} and obs.sum(1).tolist() == [hot, hot]
        obs, _, terminated, truncated, info = envs.step(envs.action_space.sample())
        ended = terminated | truncated
        if ended.any():
            assert info["final_obs"].dtype == np.float32
            assert info["final_obs"].sum(1).tolist() == (hot * ended).tolist()


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (Box(-1, 1, (3,), np.float64), 3),
        (Box(0, 255, (4,), np.uint8), 4),
        (Box(-np.inf, np.inf, (), np.float64), 1),
        (Box(0, 1, (2, 3), np.float32), 6),
        (Dict(a=Box(-1, 1, (2,), np.float64), b=Box(0, 255, (3,), np.uint8), c=Discrete(4)), 9),
        (Tuple((MultiDiscrete([2, 3]), MultiBinary(3), Box(-1, 1, (1,), np.float32))), 9),
    ],
)
def test_every_observation_leaves_as_a_float32_vector(made, space, size):
    """Case 6."""
    envs = made("rlkit_tests/Observing-v0", 2, backend="sync", space=space)
    obs, _ = envs.reset(seed=[0, 0])
    assert obs.dtype == np.float32 and obs.shape == (2, size)
    assert envs.observation_space.dtype == np.float32 and envs.observation_space.contains(obs)
    np.testing.assert_array_equal(obs[0], obs[1])
    oracle = Observing(space).reset(seed=0)[0]
    np.testing.assert_array_equal(obs[0], gymnasium.spaces.flatten(space, oracle).astype(np.float32))
    obs, _, _, _, info = envs.step(np.zeros(2, int))
    assert obs.dtype == info["final_obs"].dtype == np.float32
    assert obs.shape == info["final_obs"].shape == (2, size)


@pytest.mark.parametrize("inside", [False, True])
def test_images_are_refused_unless_flattened_on_request(made, inside):
    image = Box(0, 255, (4, 5, 3), np.uint8)
    space, size = (Dict(image=image, speed=Box(0, 1, (1,))), 61) if inside else (image, 60)
    with pytest.raises(ValueError, match=r"Observing-v0 observes images .* env.flatten_images=true"):
        made("rlkit_tests/Observing-v0", 2, backend="sync", space=space)
    envs = made("rlkit_tests/Observing-v0", 2, backend="sync", space=space, flatten_images=True)
    obs, _ = envs.reset(seed=[0, 1])
    assert obs.shape == (2, size) and obs.dtype == np.float32 and obs.max() > 200


@pytest.mark.parametrize("space", [Graph(Box(0, 1, (2,)), None), gymnasium.spaces.Sequence(Discrete(2))])
def test_an_observation_without_a_fixed_size_is_refused(made, space):
    with pytest.raises(ValueError, match="has no fixed size"):
        made("rlkit_tests/Observing-v0", 2, backend="sync", space=space)


@pytest.mark.parametrize(
    ("space", "raw", "expected"),
    [
        (Box(0, 5, (1,)), [[-1], [2], [7]], [[0], [2], [5]]),
        (Box(-0.4, 0.4, (2,), np.float64), [[-1, 0.1], [0.3, 9]], [[-0.4, 0.1], [0.3, 0.4]]),
        (
            Box(np.array([0, -np.inf], np.float32), np.array([np.inf, 1], np.float32)),
            [[-2, -9], [9, 2]],
            [[0, -9], [9, 1]],
        ),
        (Box(-np.inf, np.inf, (1,)), [[-1e6], [3]], [[-1e6], [3]]),
        (Box(-1, 1, (2, 3)), [[0, 1, 2, -3, 0.5, -0.5]], [[[0, 1, 1], [-1, 0.5, -0.5]]]),
    ],
)
def test_box_actions_are_clipped_into_the_bounds(space, raw, expected):
    """Case 3: what the environment sees."""
    spec = ActionSpec.of(space)
    raw = np.array(raw, np.float32)
    legal = spec.legal(raw)
    np.testing.assert_allclose(legal, expected, rtol=1e-7)
    assert legal.dtype == space.dtype and all(space.contains(row) for row in legal)
    assert (spec.kind, spec.sizes, spec.size) == ("continuous", (), raw.shape[1])
    assert spec.low.shape == spec.high.shape == (spec.size,) and spec.low.dtype == np.float32
    raw[:] = 0
    assert legal.any()  # the buffer's raw action and the environment's are two arrays


def test_squashed_box_actions_fill_the_bounds():
    spec = ActionSpec.of(Box(np.array([0, -2], np.float32), np.array([5, 4], np.float32)))
    legal = spec.legal(np.array([[0, 0], [-50, 50], [np.arctanh(0.5), np.arctanh(-0.5)]], np.float32), squash=True)
    np.testing.assert_allclose(legal, [[2.5, 1], [0, 4], [3.75, -0.5]], rtol=1e-6)
    half_open = ActionSpec.of(Box(0, np.inf, (1,)))
    with pytest.raises(ValueError, match="policy.squash=true needs finite action bounds"):
        half_open.legal(np.zeros((1, 1)), squash=True)
    with pytest.raises(ValueError, match="policy.squash=true needs finite action bounds"):
        half_open.check_squash()


@pytest.mark.parametrize(
    ("space", "sizes", "raw", "expected"),
    [
        (Discrete(3, start=-1), (3,), [[0], [1], [2]], [-1, 0, 1]),
        (Discrete(2), (2,), [[1], [0]], [1, 0]),
        (MultiDiscrete([2, 3]), (2, 3), [[1, 2], [0, 0]], [[1, 2], [0, 0]]),
        (MultiDiscrete([2, 3], start=[-1, 4]), (2, 3), [[1, 2], [0, 0]], [[0, 6], [-1, 4]]),
        (MultiBinary(3), (2, 2, 2), [[0, 1, 1]], [[0, 1, 1]]),
        (MultiBinary((2, 2)), (2, 2, 2, 2), [[0, 1, 1, 0]], [[[0, 1], [1, 0]]]),
    ],
)
def test_discrete_actions_arrive_as_the_environment_counts_them(space, sizes, raw, expected):
    """Case 4: one head for each dimension, what the environment receives."""
    spec = ActionSpec.of(space)
    assert (spec.kind, spec.sizes, spec.size) == ("discrete", sizes, len(sizes))
    legal = spec.legal(np.array(raw))
    assert legal.tolist() == expected
    assert all(space.contains(row) for row in legal)


BOUNDED = [Box(-2.0, 2.0, (1,)), Box(np.array([[0.0], [-2.0]]), np.array([[5.0], [4.0]]), dtype=np.float64)]
INVERTED = [
    *[(space, False) for space in (Discrete(3, start=-1), Discrete(2), MultiBinary((2, 2)))],
    *[(space, False) for space in (MultiDiscrete([2, 3], start=[-1, 4]), Box(-np.inf, np.inf, (2,)), Box(0.0, np.inf))],
    *[(space, squash) for space in BOUNDED for squash in (False, True)],
]


@pytest.mark.parametrize(("space", "squash"), INVERTED, ids=str)
def test_raw_actions_are_found_again_from_legal_ones(space, squash):
    spec = ActionSpec.of(space)
    space.seed(0)
    actions = np.array([space.sample() for _ in range(50)])
    if isinstance(space, Box) and space.is_bounded():
        actions = np.concatenate([actions, space.low[None], space.high[None]])  # the ends too
    raw = spec.raw(actions, squash)
    assert (raw.shape, raw.dtype) == ((len(actions), spec.size), np.int64 if spec.kind == "discrete" else np.float32)
    assert np.isfinite(raw).all()
    if spec.kind == "discrete":
        assert (raw >= 0).all() and (raw < spec.sizes).all()
        assert np.array_equal(spec.legal(raw), actions)
    else:
        np.testing.assert_allclose(spec.legal(raw, squash), actions, rtol=1e-6, atol=1e-5 if squash else 1e-7)


def test_raw_actions_at_hand_numbers():
    assert ActionSpec.of(Discrete(3, start=-1)).raw(np.array([-1, 0, 1])).tolist() == [[0], [1], [2]]
    assert ActionSpec.of(Discrete(3)).raw(np.array([[2.0], [0.0]])).tolist() == [[2], [0]]  # whole numbers as floats
    spec = ActionSpec.of(Box(np.array([0, -2], np.float32), np.array([5, 4], np.float32)))
    np.testing.assert_allclose(spec.raw(np.array([[2.5, 4.0]]), squash=True), [[0.0, 7.2543]], rtol=1e-4)
    np.testing.assert_allclose(spec.raw(np.array([[3.75, -0.5]]), squash=True), [[0.549306, -0.549306]], rtol=1e-5)
    assert spec.raw(np.array([[3.75, -0.5]])).tolist() == [[3.75, -0.5]]


@pytest.mark.parametrize(
    ("space", "action", "words"),
    [
        (Discrete(2), [0, 2], r"the action of row 1 is \[2\], which is outside of Discrete\(2\)"),
        (Discrete(2, start=1), [0], r"row 0 is \[0\]"),
        (Discrete(2), [0.5], r"row 0 is \[0.5\]"),
        (Discrete(2), [np.nan], r"row 0 is \[nan\]"),
        (MultiDiscrete([2, 3]), [[1, 2], [1, 3]], r"row 1 is \[1, 3\]"),
        (Box(-1.0, 1.0, (2,)), [[0, 1], [0, 1.01]], r"row 1 is \[0.0, 1.01\], which is outside of Box"),
        (Box(-1.0, 1.0, (1,)), [[np.nan]], r"row 0 is \[nan\]"),
        (Box(-np.inf, np.inf, (1,)), [[np.inf]], r"row 0 is \[inf\]"),
        (Box(-1.0, 1.0, (2,)), [[0.0], [0.0]], r"of shape \(2, 1\) and type float64; an action of .* is 2 numbers"),
        (Discrete(2), 1, r"of shape \(\) and type int64"),
        (Discrete(2), ["left"], "type <U4"),
    ],
)
def test_actions_outside_of_the_space_have_no_raw_ones(space, action, words):
    with pytest.raises(ValueError, match=words):
        ActionSpec.of(space).raw(np.array(action))


@pytest.mark.parametrize("space", [Text(5), Tuple((Discrete(2),)), Box(0, 255, (2,), np.uint8)])
def test_other_action_spaces_are_refused_in_one_sentence(space):
    with pytest.raises(ValueError, match="is none of Box"):
        ActionSpec.of(space)


def test_wrong_names_are_one_clear_sentence(monkeypatch, tmp_path):
    make = rlkit.envs.make
    with pytest.raises(ValueError, match=r"env.id=CartPol-v1 is not .*nearest are CartPole-v1"):
        make("CartPol-v1", 2)
    with pytest.raises(ValueError, match=r"no native backend \(only .*CartPole-v1.*\); use backend=sync"):
        make("FrozenLake-v1", 2)
    with pytest.raises(ValueError, match="backend='fast' must be one of native, sync, async"):
        make("CartPole-v1", 2, backend="fast")
    with pytest.raises(ValueError, match="num_envs=0"):
        make("CartPole-v1", 0)
    with pytest.raises(ValueError, match="the module no_such_module cannot be imported"):
        make("no_such_module:MyEnv-v0", 2, backend="sync")


def test_an_id_with_a_module_imports_it_first(made, monkeypatch, tmp_path):
    (tmp_path / "corridor_env.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Corridor-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv', "
        "max_episode_steps=7, reward_threshold=6.5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    envs = made("corridor_env:Corridor-v0", 2, backend="sync")
    spec = rlkit.envs.spec_of("corridor_env:Corridor-v0")
    assert envs.reset(seed=[0, 1])[0].shape == (2, 4)
    assert (spec.id, spec.max_episode_steps, spec.reward_threshold) == ("Corridor-v0", 7, 6.5)


def test_constructor_arguments_reach_the_environment(made):
    for backend in ("native", *BACKENDS):
        envs = made("CartPole-v1", 2, backend=backend, sutton_barto_reward=True)
        envs.reset(seed=0)
        assert envs.step(np.zeros(2, int))[1].tolist() == [0.0, 0.0]
    assert isinstance(made("CartPole-v1", 1, backend="sync"), MaskedSyncVectorEnv)
    assert isinstance(made("CartPole-v1", 1, backend="async"), MaskedAsyncVectorEnv)
