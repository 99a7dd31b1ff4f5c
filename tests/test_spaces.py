"""Any observation and action space: two updates of each, legal actions, exact ratios, and agents that act there."""

import json
import math

import gymnasium
import numpy as np
import pytest
import torch
from conftest import weights
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from omegaconf import OmegaConf

import rlkit
from rlkit.buffer import flatten
from rlkit.conf.schema import ConfigError
from rlkit.keepers import checkpoint
from rlkit.train import compose, main, prepare

PLAIN = Box(-1.0, 1.0, (3,))
INF = np.inf


class Spaced(gymnasium.Env):
    """Observes samples of a space, refuses what is not in its action space, and ends by its time limit."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        if not self.action_space.contains(np.asarray(action) if isinstance(self.action_space, Box) else action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        return self.observation_space.sample(), float(self.np_random.normal()), False, False, {}


def bounds(*pairs, dtype=np.float32):
    low, high = np.array(pairs, dtype).T
    return Box(low, high, dtype=dtype)


# name -> observation space, action space, overrides
TABLE = {
    "Box[0,5]": (PLAIN, Box(0, 5, (1,)), []),
    "Box[-0.4,0.4]": (PLAIN, Box(-0.4, 0.4, (2,)), []),
    "squashed": (PLAIN, Box(-0.4, 5, (2,)), ["policy.squash=true"]),
    "one side infinite": (PLAIN, bounds((0, INF), (-INF, 1)), []),
    "all infinite": (PLAIN, Box(-INF, INF, (2,)), ["policy.log_std=state"]),
    "mixed bounds": (PLAIN, bounds((-1, 1), (0, 100), (-INF, INF), (2, 2.5)), []),
    "shape (2,3)": (PLAIN, Box(-1, 1, (2, 3)), []),
    "shape (2,3) squashed": (PLAIN, Box(0, 2, (2, 3)), ["policy.squash=true", "policy.log_std=state"]),
    "shape ()": (PLAIN, Box(-1, 1, ()), []),
    "float64": (PLAIN, Box(-0.1, 0.1, (2,), np.float64), []),
    "float64 beyond float32": (PLAIN, Box(-1e300, 1e300, (2,), np.float64), []),
    "float16": (PLAIN, Box(-1, 1, (2,), np.float16), []),
    "Box async": (PLAIN, Box(0, 5, (2, 1)), ["env.backend=async"]),
    "Discrete(2)": (PLAIN, Discrete(2), []),
    "Discrete from -1": (PLAIN, Discrete(3, start=-1), []),
    "Discrete(1)": (PLAIN, Discrete(1), ["algo.entropy_coef=0.01"]),
    "MultiDiscrete": (PLAIN, MultiDiscrete([2, 3]), ["algo.entropy_coef=0.01"]),
    "MultiDiscrete from 5": (PLAIN, MultiDiscrete([2, 3], start=[5, -1]), []),
    "MultiDiscrete of rank 2": (PLAIN, MultiDiscrete([[2, 3], [1, 4]]), []),
    "MultiBinary": (PLAIN, MultiBinary(3), []),
    "MultiBinary async": (PLAIN, MultiBinary([2, 2]), ["env.backend=async"]),
    "sees float64 without bounds": (Box(-INF, INF, (4,), np.float64), Discrete(2), ["env.normalize_observation=true"]),
    "sees bytes": (Box(0, 255, (5,), np.uint8), Discrete(2), ["env.normalize_observation=true"]),
    "sees integers of rank 2": (Box(-9, 9, (2, 3), np.int32), Discrete(2), []),
    "sees a number": (Box(-1, 1, (), np.float64), Discrete(2), []),
    "sees Discrete from 7": (Discrete(5, start=7), Discrete(2), []),
    "sees MultiDiscrete": (MultiDiscrete([2, 3], start=[1, 1]), Discrete(2), []),
    "sees MultiBinary": (MultiBinary([2, 3]), Discrete(2), []),
    "sees an image, flattened": (Box(0, 255, (4, 5, 3), np.uint8), Discrete(2), ["env.flatten_images=true"]),
    "sees a Tuple": (Tuple((Discrete(4), Box(-1, 1, (2,)), MultiBinary(2))), Discrete(2), ["env.backend=async"]),
    "sees a nested Dict": (
        Dict(a=Box(-1, 1, (2,), np.float64), b=Dict(c=Box(0, 255, (3,), np.uint8), d=Tuple((Discrete(3),)))),
        Box(-1, 1, (1,)),
        [],
    ),
}
SMALL = {
    "ppo": ["algo=ppo", "num_envs=2", "algo.num_steps=8"],
    "grpo": ["algo=grpo", "num_envs=4", "algo.group_size=2"],
}
REST = ["algo.num_epochs=1", "algo.num_minibatches=1", "policy.hidden=[8]", "total_steps=1000"]


@pytest.fixture
def registered():
    """Register `Spaced` with two spaces and return the overrides that choose it."""

    def register(observation_space, action_space):
        kwargs = {"observation_space": observation_space, "action_space": action_space}
        gymnasium.register("rlkit_tests/Spaced-v0", Spaced, max_episode_steps=5, kwargs=kwargs)
        return ["env=gym", "env.id=rlkit_tests/Spaced-v0"]

    return register


def legal(action, space):
    return space.contains(np.asarray(action) if isinstance(space, Box) else action)


def expected_log_prob(rollout, policy):
    """By torch.distributions, from the stored parameters and raw actions."""
    if policy.discrete:
        parts = rollout.old["logits"].split(policy.sizes, -1)
        heads = (torch.distributions.Categorical(logits=part) for part in parts)
        return sum(head.log_prob(rollout.action[..., i]) for i, head in enumerate(heads))
    raw = torch.distributions.Normal(rollout.old["mean"], rollout.old["log_std"].exp()).log_prob(rollout.action)
    if policy.squash:
        raw = raw - (1 - rollout.action.double().tanh() ** 2).log().float()
    return raw.sum(-1)


def test_the_table_has_thirty_spaces():
    assert len(TABLE) >= 30


@pytest.mark.parametrize("algo", SMALL)
@pytest.mark.parametrize("name", TABLE)
def test_every_space_trains_and_acts(registered, tmp_path, name, algo):
    observed, acted, overrides = TABLE[name]
    config, _ = compose([*registered(observed, acted), *SMALL[algo], *REST, *overrides])
    prepared = prepare(config)
    learner = prepared.learner
    try:
        rollout = learner.collector.collect(learner.policy, 0, learner.running)  # the environment checks its actions
        assert rollout.valid.sum() >= 8
        real = rollout.valid
        expected = expected_log_prob(rollout, learner.policy)
        torch.testing.assert_close(rollout.log_prob[real], expected[real], rtol=1e-4, atol=1e-4)
        batch = flatten(learner.estimate(rollout))
        ratio = (learner.policy.evaluate(batch).log_prob - batch.log_prob).exp()[batch.real]
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-6)
        for _ in range(2):
            learner.iterate()
            for bound in ("ratio/min", "ratio/max"):  # one epoch of one minibatch: it is the first
                assert learner.metrics[bound].item() == pytest.approx(1, abs=1e-5)
        assert (learner.optimizer.t == 2).all()
        assert weights(learner).isfinite().all()
        assert prepared.evaluator(learner.policy, 3).isfinite().all()
        assert prepared.evaluator(learner.policy, 3, stochastic=True).isfinite().all()
    finally:
        prepared.close()
    assert_an_agent_acts(learner, config, tmp_path)


def assert_an_agent_acts(learner, config, folder):
    """On observations as the environment gives them, one by one and flattened in a batch."""
    (folder / ".hydra").mkdir()
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    about = {"env": config.env.id, "algo": config.algo.name}
    checkpoint.save(folder / "checkpoint.pt", {"about": about, "learner": learner.state_dict()})
    agent = rlkit.load(folder, member=0)
    env = gymnasium.make("rlkit_tests/Spaced-v0")
    obs, _ = env.reset(seed=3)
    for deterministic in (True, False, False):
        action = agent.act(obs, deterministic)
        assert legal(action, env.action_space), action
        obs, *_ = env.step(action)
    batch = np.zeros((4, learner.obs_size), np.float32)
    actions = agent.act(batch)
    assert len(actions) == 4
    assert all(legal(action, env.action_space) for action in actions)


def test_what_an_agent_sees_is_what_its_policy_was_trained_on(registered, tmp_path):
    """Of a Dict in the environment's own dtypes: the parts end to end, cast once."""
    space = Dict(a=Box(-1, 1, (2,), np.float64), b=Discrete(3, start=1), c=Box(0, 255, (2,), np.uint8))
    config, _ = compose([*registered(space, Box(-1, 1, (2,))), *SMALL["ppo"], *REST])
    prepared = prepare(config)
    prepared.learner.iterate()
    prepared.close()
    assert_an_agent_acts(prepared.learner, config, tmp_path)
    agent = rlkit.load(tmp_path, member=0)
    given = {"a": np.array([0.5, -0.25]), "b": 3, "c": np.array([7, 200], np.uint8)}
    np.testing.assert_array_equal(agent.act(given), agent.act(np.array([0.5, -0.25, 0, 0, 1, 7, 200], np.float32)))
    with pytest.raises(ValueError, match="obs has shape"):
        agent.act(given | {"b": 0})  # not in the space


REFUSED = [
    (Text(5), Discrete(2), "has no fixed size"),
    (Dict(a=PLAIN, b=Text(5)), Discrete(2), "has no fixed size"),
    (Graph(Box(0, 1, (2,)), None), Discrete(2), "has no fixed size"),
    (Sequence(Discrete(2)), Discrete(2), "has no fixed size"),
    (Box(0, 255, (4, 5, 3), np.uint8), Discrete(2), "env.flatten_images=true feeds their pixels"),
    (Dict(a=PLAIN, b=Box(0, 255, (4, 5, 3), np.uint8)), Discrete(2), "env.flatten_images=true feeds their pixels"),
    (Box(0, 1, (0,)), Discrete(2), "holds no number"),
    (PLAIN, Text(5), "is none of Box"),
    (PLAIN, Tuple((Discrete(2),)), "is none of Box"),
    (PLAIN, Dict(a=Discrete(2)), "is none of Box"),
    (PLAIN, Box(0, 255, (2,), np.uint8), "is none of Box"),
    (PLAIN, Box(0, 1, (0,)), "holds no action"),
]


@pytest.mark.parametrize(("observed", "acted", "words"), REFUSED, ids=str)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_other_spaces_are_refused_in_one_sentence(registered, observed, acted, words, backend):
    overrides = [*registered(observed, acted), *SMALL["ppo"], *REST, f"env.backend={backend}"]
    with pytest.raises(ConfigError) as error:
        prepare(compose(overrides)[0])
    [sentence] = str(error.value).split("\n")
    assert words in sentence


@pytest.mark.parametrize("space", [Box(0, INF, (2,)), Discrete(2), MultiBinary(2)], ids=str)
def test_what_has_no_bounds_is_not_squashed(registered, space):
    with pytest.raises(ConfigError, match=r"policy\.squash"):
        prepare(compose([*registered(PLAIN, space), *SMALL["ppo"], *REST, "policy.squash=true"])[0])


@pytest.mark.parametrize("id", ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1"])
@pytest.mark.parametrize("algo", SMALL)
def test_the_command_trains_on_toy_texts(monkeypatch, capfd, tmp_path, id, algo):
    """Case 5."""
    steps = {"ppo": 16, "grpo": 4}[algo]
    monkeypatch.chdir(tmp_path)
    overrides = ["env=gym", f"env.id={id}", *SMALL[algo], f"total_steps={steps}", "policy.hidden=[8]"]
    if id == "Blackjack-v1" and algo == "grpo":  # it has no time limit
        overrides.append("algo.max_episode_steps=20")
    monkeypatch.setattr("rlkit.session.FINAL_EPISODES", 2)
    monkeypatch.setattr("sys.argv", ["train", *overrides])
    assert main() == 0
    assert capfd.readouterr().err == ""
    [folder] = tmp_path.glob(f"runs/{id}/{algo}/*")
    assert all(map(math.isfinite, json.loads((folder / "summary.json").read_text())["eval_return"]))
    env = gymnasium.make(id)
    action = rlkit.load(folder).act(env.reset(seed=0)[0])
    assert env.action_space.contains(action)
