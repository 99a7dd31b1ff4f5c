"""Collection through the whole pipeline: environments registered here, stepped by the backends, down to advantages."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from conftest import demonstrations, every_stabilizer, small_learner, train, weights
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from rlkit.buffer import flatten, valid_rows
from rlkit.collect import NonFiniteError
from rlkit.loop import Learner


class Probe(gymnasium.Env[np.ndarray, Any]):
    """Observes [start, steps of this episode, steps ever], and does what its arguments say.

    Args:
        length: steps of an episode; 0: it ends where the action is 1.
        ends: "terminated" or "truncated" or "both".
        action_space: checked against every action.
        field: what is not finite, "reward" or "obs", at step `step` of the copy numbered `copy`.
    """

    made: ClassVar[int] = 0  # copies made in this process
    calls: ClassVar[dict[int, int]] = {}  # copy -> steps executed

    def __init__(self, length=3, ends="terminated", action_space=None, field="", step=0, copy=0, render_mode=None):
        self.action_space = action_space or Discrete(2)
        self.observation_space = Box(-np.inf, np.inf, (3,), np.float32)
        self.render_mode = render_mode
        self.length, self.ends, self.fault = length, ends, (field, step, copy)
        self.number, self.start, self.steps, self.total = Probe.made, 0.0, 0, 0
        Probe.made += 1
        Probe.calls[self.number] = 0

    def observe(self, value: float = 0.0) -> np.ndarray:
        return np.array([self.start + value, self.steps, self.total], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.steps = self.np_random.uniform(), 0
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.steps += 1
        self.total += 1
        Probe.calls[self.number] += 1
        bad = {self.fault[0]: np.nan} if (self.total, self.number) == self.fault[1:] else {}
        over = self.steps == self.length if self.length else bool(action == 1)
        ended = (over and self.ends != "truncated", over and self.ends != "terminated")
        return self.observe(bad.get("obs", 0.0)), 1.0 + self.steps + bad.get("reward", 0.0), *ended, {}


@pytest.fixture(autouse=True)
def registered():
    """Register the environments for one test."""
    gymnasium.register("Probe-v0", Probe, max_episode_steps=20)
    gymnasium.register("ShortCartPole-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=5)
    Probe.made = 0
    Probe.calls = {}


@pytest.fixture
def learner_of():
    """Build learners on `Probe` whose environments end with the test."""
    made = []

    def build(algo: str, *overrides: str, backend: str = "sync", **kwargs: Any) -> Learner:
        arguments = [f"+env.kwargs.{name}={value}" for name, value in kwargs.items()]
        where = ["env=gym", "env.id=Probe-v0", f"env.backend={backend}", "algo.normalize_advantage=false"]
        learner = small_learner(algo, *where, *arguments, *overrides)
        made.append(learner)
        return learner

    yield build
    for learner in made:
        learner.collector.close()


def collect(learner: Learner):
    rollout = learner.collector.collect(learner.policy, learner.iteration, learner.running)
    learner.iteration += 1
    return rollout


both_backends = pytest.mark.parametrize("backend", ["sync", "async"])


# --- case 1: no phantom step ---------------------------------------------------------------------------------------


@both_backends
def test_every_row_is_a_step_that_was_executed(learner_of, backend):
    learner = learner_of("ppo", "num_envs=2", "algo.num_steps=7", "algo.num_minibatches=1", backend=backend)
    for window in range(3):
        rollout = collect(learner)
        ever = 7 * window + torch.arange(7.0)[:, None, None].expand(7, 1, 2)
        assert rollout.valid.all()
        assert torch.equal(rollout.obs[..., 2], ever)  # each step once, none between an end and the next start
        assert torch.equal(rollout.obs[..., 1], ever % 3)
        assert torch.equal(rollout.reward, 2 + ever % 3)
        assert torch.equal(rollout.terminated, ever % 3 == 2)
        assert torch.equal(rollout.final_obs[..., 1] == 3, rollout.terminated)
    assert learner.env_steps.tolist() == [42]
    if backend == "sync":
        assert sum(Probe.calls.values()) == 42


@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
@torch.no_grad()
def test_advantages_equal_a_loop_over_single_environments(learner_of, ends):
    learner = learner_of("ppo", "num_envs=2", "algo.num_steps=7", "algo.gamma=0.9", "algo.gae_lambda=0.8", ends=ends)
    collect(learner)  # so that the window begins within an episode
    rollout = learner.estimate(collect(learner))
    for n in range(2):
        value = [float(learner.policy.value(rollout.obs[t : t + 1, 0, n][None])) for t in range(7)]
        advantage, running = [0.0] * 7, 0.0
        for t in reversed(range(7)):
            over = int(rollout.obs[t, 0, n, 1]) == 2
            start, steps, ever = rollout.obs[t, 0, n].tolist()
            after = float(learner.policy.value(torch.tensor([[[start, steps + 1, ever + 1]]])))
            bootstrap = 0.0 if over and ends != "truncated" else after
            delta = (2 + steps) + 0.9 * bootstrap - value[t]
            running = delta + (0.0 if over else 0.9 * 0.8 * running)
            advantage[t] = running
        torch.testing.assert_close(rollout.advantage[:, 0, n], torch.tensor(advantage), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rollout.ret[:, 0, n], torch.tensor(advantage) + torch.tensor(value))


def test_the_normaliser_sees_each_row_once(learner_of):
    learner = learner_of("ppo", "num_envs=2", "algo.num_steps=7", "env.normalize_observation=true")
    rows = []
    original = learner.collector.collect

    def spy(*arguments):
        rows.append(original(*arguments))
        return rows[-1]

    learner.collector.collect = spy
    train(learner, 3)
    seen = torch.cat([rollout.obs.reshape(-1, 3) for rollout in rows]).double()
    assert learner.policy.normalizer.count.tolist() == [42.0]
    torch.testing.assert_close(learner.policy.normalizer.mean[0], seen.mean(0))
    torch.testing.assert_close(learner.policy.normalizer.var[0], seen.var(0, correction=0))


# --- case 2: truncation is not termination -------------------------------------------------------------------------


def fixed_critic(learner: Learner, value: float) -> None:
    with torch.no_grad():
        for parameter in learner.policy.critic.parameters():
            parameter.zero_()
        learner.policy.critic.biases[-1].fill_(value)


@pytest.mark.parametrize(("ends", "target"), [("truncated", 10.0), ("terminated", 1.0), ("both", 1.0)])
def test_the_last_target_of_an_episode(learner_of, ends, target):
    """Reward 1 at the end (here 6, of which 5 are taken off), gamma 0.9, a critic that says 10 everywhere."""
    learner = learner_of("ppo", "num_envs=2", "algo.num_steps=8", "algo.gamma=0.9", length=5, ends=ends)
    fixed_critic(learner, 10.0)
    rollout = collect(learner)
    rollout = learner.estimate(rollout.replace(reward=torch.ones_like(rollout.reward)))
    assert rollout.ended[4].all()
    torch.testing.assert_close(rollout.ret[4], torch.full((1, 2), target))
    zero_lambda = learner.estimator(rollout, 0.9, 0.0)[1]
    torch.testing.assert_close(zero_lambda[5:], torch.full((3, 1, 2), 10.0))  # nothing of it in the next episode


def test_a_truncated_episode_bootstraps_from_its_last_observation():
    learner = small_learner("ppo", "env=gym", "env.id=ShortCartPole-v0", "num_envs=2", "algo.num_steps=12")
    seeds = learner.streams.integers(1, 0, 2).flatten().tolist()
    rollout = learner.estimate(collect(learner))
    learner.collector.close()
    for n in range(2):
        env = gymnasium.make("ShortCartPole-v0")
        obs, _ = env.reset(seed=seeds[n])
        for t in range(12):
            np.testing.assert_array_equal(rollout.obs[t, 0, n], obs)
            obs, _, terminated, truncated, _ = env.step(int(rollout.action[t, 0, n, 0]))
            assert (terminated, truncated) == (bool(rollout.terminated[t, 0, n]), bool(rollout.truncated[t, 0, n]))
            if truncated or t == 11:
                np.testing.assert_array_equal(rollout.final_obs[t, 0, n], obs)
                value = learner.policy.value(torch.from_numpy(obs)[None, None])[0, 0]
                torch.testing.assert_close(rollout.final_value[t, 0, n], value)
            if truncated:
                obs, _ = env.reset()
    assert rollout.truncated.sum() == 4
    assert not rollout.terminated.any()


# --- case 3: actions -----------------------------------------------------------------------------------------------

SPACES = {
    "Box[0,5]": Box(0, 5, (1,)),
    "Box[-0.4,0.4]": Box(-0.4, 0.4, (2,)),
    "one side infinite": Box(np.array([0, -np.inf], np.float32), np.array([np.inf, 1], np.float32)),
    "all infinite": Box(-np.inf, np.inf, (2,)),
    "shape (2,3)": Box(-1, 1, (2, 3)),
    "float64": Box(-1, 1, (2,), np.float64),
}
DISCRETE = {"start -1": Discrete(3, start=-1), "several": MultiDiscrete([2, 3]), "bits": MultiBinary(3)}


def with_space(monkeypatch, learner_of, space, *overrides: str) -> Learner:
    original = Probe.__init__
    monkeypatch.setattr(Probe, "__init__", lambda self, **kwargs: original(self, action_space=space, **kwargs))
    return learner_of("ppo", "algo.num_minibatches=1", "algo.num_epochs=1", *overrides)


@pytest.mark.parametrize("std", ["free", "state"])
@pytest.mark.parametrize(
    ("name", "squash"),
    [(name, False) for name in SPACES] + [(name, True) for name, space in SPACES.items() if space.is_bounded()],
)
def test_the_environment_gets_legal_actions_and_the_buffer_raw_ones(monkeypatch, learner_of, name, std, squash):
    space = SPACES[name]
    learner = with_space(
        monkeypatch, learner_of, space, f"policy.log_std={std}", f"policy.squash={squash}", "policy.log_std_init=1"
    )
    rollout = collect(learner)  # Probe checks every action it gets
    size = int(np.prod(space.shape))
    assert rollout.action.shape[-1] == size
    assert rollout.action.abs().max() > 2  # far outside of the bounds
    normal = torch.distributions.Normal(rollout.old["mean"], rollout.old["log_std"].exp())
    log_prob = normal.log_prob(rollout.action).sum(-1)
    if squash:
        log_prob = log_prob - (1 - rollout.action.double().tanh() ** 2).log().sum(-1).float()
    torch.testing.assert_close(rollout.log_prob, log_prob, rtol=1e-4, atol=1e-3)
    assert_ratio_one(learner, rollout)


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_actions_arrive_as_the_environment_counts_them(monkeypatch, learner_of, name):
    space = DISCRETE[name]
    learner = with_space(monkeypatch, learner_of, space)
    rollout = collect(learner)
    sizes = learner.policy.sizes
    assert rollout.action.shape[-1] == len(sizes)
    parts = rollout.old["logits"].split(sizes, -1)
    heads = [torch.distributions.Categorical(logits=part) for part in parts]
    log_prob = sum(head.log_prob(rollout.action[..., i]) for i, head in enumerate(heads))
    torch.testing.assert_close(rollout.log_prob, log_prob)
    assert_ratio_one(learner, rollout)


def assert_ratio_one(learner: Learner, rollout) -> None:
    batch = flatten(learner.estimate(rollout))
    ratio = (learner.policy.evaluate(batch).log_prob - batch.log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-6)
    learner.iterate()
    for name in ("ratio/mean", "ratio/min", "ratio/max"):  # one epoch of one minibatch: the first is the only one
        assert learner.metrics[name].item() == pytest.approx(1, abs=1e-5)


# --- groups and whole episodes -------------------------------------------------------------------------------------

GROUPS = ("members=2", "num_envs=6", "algo.group_size=3")


@pytest.mark.parametrize("where", ["native", "sync", "async"])
def test_a_group_shares_its_first_observation_and_no_other_has_it(where):
    learner = small_learner("grpo", *GROUPS, f"env.backend={where}")
    seen = []
    for _ in range(2):
        rollout = collect(learner)
        first = rollout.obs[0].view(4, 3, -1)  # [groups of all members, G, D]
        assert torch.equal(first, first[:, :1].expand_as(first))
        assert rollout.group.view(4, 3).tolist() == [[0] * 3, [1] * 3, [0] * 3, [1] * 3]
        seen.append(first[:, 0])
    learner.collector.close()
    assert len(torch.cat(seen).unique(dim=0)) == 8


@both_backends
def test_episodes_are_whole_and_idle_lanes_are_not_stepped(learner_of, backend):
    learner = learner_of("grpo", *GROUPS, "algo.max_episode_steps=4", backend=backend, length=0)
    executed = torch.zeros(2, 6)
    for _ in range(3):
        rollout = collect(learner)
        length = rollout.valid.sum(0)
        assert torch.equal(rollout.obs[0, ..., 2], executed)  # not a step since the last episode
        for m, n in np.ndindex(2, 6):
            steps = int(length[m, n])
            assert rollout.valid[:steps, m, n].all()
            assert not rollout.valid[steps:, m, n].any()
            assert rollout.ended[:, m, n].nonzero().tolist() == [[steps - 1]]
            actions = rollout.action[:steps, m, n, 0].tolist()
            assert actions == [0] * (steps - 1) + [1] or (actions == [0] * 4 and rollout.truncated[3, m, n])
            assert rollout.final_obs[steps - 1, m, n, 1] == steps
            assert rollout.obs[steps:, m, n].eq(0).all()
            assert rollout.reward[steps:, m, n].eq(0).all()
        executed += length
        assert len(rollout.valid) == length.max()
        assert learner.collector.finished[1][2] == (sum(2 + t for t in range(int(length[1, 2]))), length[1, 2])
    assert len(executed.unique()) > 1  # else no lane was ever idle
    assert learner.env_steps.tolist() == executed.sum(1).tolist()
    if backend == "sync":
        assert [Probe.calls[i] for i in range(12)] == executed.flatten().tolist()


@both_backends
@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_members_that_have_stopped_are_not_stepped(learner_of, algo, backend):
    learner = learner_of(algo, *(GROUPS if algo == "grpo" else ("members=2", "num_envs=3")), backend=backend)
    learner.iterate()
    steps = learner.env_steps.clone()
    learner.frozen[0] = True
    rollout = collect(learner)
    assert not rollout.valid[:, 0].any()
    assert rollout.valid[:, 1].all()
    assert learner.env_steps[0] == steps[0]
    assert learner.env_steps[1] > steps[1]
    learner.frozen[0] = False
    last = collect(learner).obs[0, :, :, 2]
    assert last[0].unique().tolist() == [int(steps[0]) // last.shape[1]]


def test_padding_reaches_no_loss(learner_of):
    """Members of unlike numbers of rows: the shorter one's batch is padded with weight zero."""
    learner = learner_of("grpo", *GROUPS, "algo.max_episode_steps=6", length=0)
    rollout = learner.estimate(collect(learner))
    batch = flatten(rollout)
    rows, count = valid_rows(rollout.valid)
    assert batch.count.tolist() == count.tolist() == rollout.valid.sum((0, 2)).tolist()
    assert count[0] != count[1]
    real = torch.arange(rows.shape[1]) < count[:, None]
    assert batch.weight[~real].eq(0).all()
    assert batch.weight[real].eq(1).all()


# --- case 11: degenerate groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", ["outcome", "outcome_no_std", "leave_one_out", "return_to_go"])
def test_groups_of_equal_returns_teach_nothing_and_are_counted(learner_of, advantage):
    learner = learner_of("grpo", *GROUPS, f"algo.advantage={advantage}", length=3)
    before = weights(learner).clone()
    train(learner, 2)
    assert learner.metrics["group/degenerate"].tolist() == [1.0, 1.0]
    assert learner.metrics["advantage/std"].tolist() == [0.0, 0.0]
    assert torch.equal(weights(learner), before)


def test_groups_of_unlike_returns_are_not_degenerate(learner_of):
    learner = learner_of("grpo", "num_envs=40", "algo.group_size=20", length=0)
    train(learner, 1)
    assert learner.metrics["group/degenerate"].tolist() == [0.0]
    assert learner.metrics["advantage/std"][0] > 0.1


# --- case 7: what is not finite ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
@pytest.mark.parametrize("field", ["reward", "obs"])
def test_a_reward_or_observation_that_is_not_finite_stops_the_run(learner_of, algo, field):
    """Copy 4 of 2 members x 3 environments is environment 1 of member 1."""
    groups = ["algo.group_size=3"] if algo == "grpo" else []
    learner = learner_of(algo, "members=2", "num_envs=3", *groups, field=field, step=2, copy=4)
    before = weights(learner).clone()
    with pytest.raises(NonFiniteError) as error:
        train(learner, 3)
    words = str(error.value)
    assert "environment 1 of member 1" in words
    assert ("a non-finite reward in step 2" if field == "reward" else "a non-finite observation") in words
    assert torch.equal(weights(learner), before)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
@pytest.mark.parametrize("field", ["reward", "obs"])
def test_what_is_not_finite_stops_the_run_with_every_stabiliser_on(learner_of, algo, field, tmp_path):
    demonstrated = np.random.default_rng(0).integers(0, 2, 50)
    np.savez(tmp_path / "steps.npz", obs=np.ones((50, 3)), action=demonstrated)
    groups = ["algo.group_size=3"] if algo == "grpo" else []
    every = every_stabilizer(algo, f"{tmp_path}/steps.npz")
    step = 30  # in the third iteration or later: replay, a late copy and a rollback are at work
    learner = learner_of(algo, "members=2", "num_envs=3", *groups, *every, length=6, field=field, step=step, copy=4)
    for _ in range(20):
        before = weights(learner).clone()
        try:
            train(learner, 1)
        except NonFiniteError as error:
            assert "environment 1 of member 1" in str(error)
            assert field in str(error)
            break
    else:
        pytest.fail("the run went on")
    assert learner.iteration >= 3
    assert before.isfinite().all()
    assert torch.equal(weights(learner), before)


# --- case 13: KL stop ----------------------------------------------------------------------------------------------


def test_a_tiny_kl_target_stops_each_update_after_its_first_step():
    learner = small_learner("ppo", "members=2", "algo.target_kl=1e-6", "algo.learning_rate=0.05")
    for iteration in range(1, 4):
        learner.iterate()
        assert learner.metrics["update/steps"].tolist() == [1.0, 1.0]  # the first minibatch is the old policy's own
        assert learner.optimizer.t.tolist() == [iteration, iteration]
        assert (learner.metrics["kl/old"] >= 0).all()


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_tiny_kl_target_stops_an_update_with_every_stabiliser_on(algo):
    """Late copies and replayed rows have ratios of the present policy, so the first step is always allowed."""
    every = every_stabilizer(algo, demonstrations())
    learner = small_learner(algo, "members=2", *every, "algo.target_kl=1e-7", "algo.learning_rate=0.05")
    learner.begin()
    warmed = learner.optimizer.t.clone()
    for iteration in range(1, 6):
        learner.iterate()
        assert learner.metrics["update/steps"].tolist() == [1.0, 1.0]
        assert (learner.optimizer.t - warmed).tolist() == [iteration, iteration]
        assert (learner.metrics["kl/old"] >= 0).all()
