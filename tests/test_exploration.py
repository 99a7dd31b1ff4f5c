"""Exploration: offsets that last, stored so that the ratio stays exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import small_learner, train

from rlkit.buffer import Batch, Rollout, flatten
from rlkit.exploration import CorrelatedExploration, LinearExploration
from rlkit.loop import Learner
from rlkit.schedules import Constant

KINDS = ("linear", "correlated")
ENVS = ("CartPole", "Pendulum")  # logits, mean
PENDULUM = ("algo.max_episode_steps=20",)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_algo = pytest.mark.parametrize("algo", ("ppo", "grpo"))


def explorer(algo: str, kind: str, *overrides: str) -> Learner:
    return small_learner(algo, f"exploration.name={kind}", *overrides)


def rollout_of(learner: Learner, iteration: int = 0) -> Rollout:
    return learner.collector.collect(learner.policy, iteration, learner.running)


def batch_of(learner: Learner) -> Batch:
    return flatten(learner.estimate(rollout_of(learner)))


@every_algo
@every_kind
@pytest.mark.parametrize("env", ENVS)
def test_the_stored_log_probability_is_that_of_the_offset_policy(algo, kind, env):
    learner = explorer(algo, kind, f"env={env}", "members=2")
    batch = batch_of(learner)
    assert (batch.offset != 0).any()
    obs, offset = batch.obs, batch.offset
    out = learner.policy.actor(obs)  # a network of its own layers, without normaliser
    reference: torch.distributions.Distribution
    if env == "CartPole":
        reference = torch.distributions.Categorical(logits=out + offset)
        expected = reference.log_prob(batch.action.squeeze(-1))
    else:
        reference = torch.distributions.Normal(out + offset, learner.policy.log_std.exp())
        expected = reference.log_prob(batch.action).sum(-1)
    real = batch.real
    torch.testing.assert_close(batch.log_prob[real], expected[real])
    torch.testing.assert_close(learner.policy.evaluate(batch).log_prob[real], batch.log_prob[real])


@every_kind
def test_actions_are_drawn_from_the_offset_policy(kind):
    """An offset far above the network's logits decides the action."""
    learner = explorer("ppo", kind, "exploration.scale=1e7", "algo.num_steps=64")
    rollout = rollout_of(learner)
    assert torch.equal(rollout.action.squeeze(-1), rollout.offset.argmax(-1))


@every_kind
def test_without_offset_the_ratio_would_be_wrong(kind):
    learner = explorer("ppo", kind)
    batch = batch_of(learner)
    bare = Batch({name: x for name, x in batch.columns.items() if name != "offset"}, batch.count)
    assert (learner.policy.evaluate(bare).log_prob - batch.log_prob).abs().max() > 0.1


def fit(obs: torch.Tensor, offset: torch.Tensor) -> tuple[np.ndarray, float]:
    """The matrix W with offset = obs W of one episode [T, D], [T, A], and the largest residual."""
    weight, *_ = np.linalg.lstsq(obs.double().numpy(), offset.double().numpy(), rcond=None)
    return weight, float(np.abs(obs.double().numpy() @ weight - offset.double().numpy()).max())


def test_linear_keeps_one_function_through_an_episode_and_draws_another_for_each():
    rollout = rollout_of(explorer("grpo", "linear", "members=2"))
    found = []
    for m in range(2):
        for n in range(6):
            rows = rollout.valid[:, m, n]
            weight, residual = fit(rollout.obs[rows, m, n], rollout.offset[rows, m, n])
            assert residual < 1e-4
            found.append(weight)
    distances = [np.abs(a - b).max() for i, a in enumerate(found) for b in found[:i]]
    assert min(distances) > 0.1  # of the same group too


def test_linear_draws_anew_where_an_episode_begins_within_a_window():
    learner = explorer("ppo", "linear", "algo.num_steps=120", "num_envs=1", "exploration.scale=1")
    rollout = rollout_of(learner)
    ends = [0, *(rollout.ended[:, 0, 0].nonzero().flatten() + 1).tolist()]
    pieces = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False) if b - a >= 6]
    assert len(pieces) >= 2
    weights = []
    for piece in pieces:
        weight, residual = fit(rollout.obs[piece, 0, 0], rollout.offset[piece, 0, 0])
        assert residual < 1e-4
        weights.append(weight)
    assert np.abs(weights[0] - weights[1]).max() > 0.1


def test_linear_goes_on_from_window_to_window():
    learner = explorer("ppo", "linear", "algo.num_steps=4", "num_envs=16")
    first, second = rollout_of(learner, 0), rollout_of(learner, 1)
    # statistics moved between the two windows: compare the functions, not the offsets
    going = ~first.ended[:, 0].any(0)
    assert going.any()
    mean, var = learner.collector.exploration.statistics.mean, learner.collector.exploration.statistics.var
    assert not torch.equal(mean, torch.zeros_like(mean))
    for n in going.nonzero().flatten().tolist():
        weight = learner.collector.exploration.weight[0, n]
        if not second.ended[:, 0, n].any():
            scale = float(learner.schedules["exploration"].value[0]) / math.sqrt(4)
            expected = first.obs[:, 0, n].numpy() @ weight * scale
            np.testing.assert_allclose(first.offset[:, 0, n].numpy(), expected, rtol=1e-4, atol=1e-5)
    assert (var > 0).all()


def generators(members: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in range(members)]


def test_linear_offsets_have_the_standard_deviation_scale():
    explore = LinearExploration(Constant(3.0, 2), 2, 4000, 6, 2)
    explore.begin(generators(2))
    explore.restart(np.ones(8000, bool))
    obs = torch.randn(2, 4000, 6, generator=torch.Generator().manual_seed(0))
    assert explore.offset(obs).std().item() == pytest.approx(3.0, rel=0.03)


@pytest.mark.parametrize("time_constant", [2.0, 10.0])
def test_correlated_offsets_are_a_stationary_process_of_the_given_time_constant(time_constant):
    explore = CorrelatedExploration(Constant(2.0, 1), 1, 2000, 1, 1, time_constant)
    explore.begin(generators(1))
    z = torch.stack([explore.offset(torch.zeros(1, 2000, 1)) for _ in range(30)])[:, 0, :, 0] / 2.0  # [T, N]
    assert z.std(1).numpy() == pytest.approx(np.ones(30), abs=0.06)
    for lag in (1, 5, 10):
        correlation = float((z[lag:] * z[:-lag]).mean())
        assert correlation == pytest.approx(math.exp(-lag / time_constant), abs=0.03)


def test_correlated_noise_forgets_the_episode_before():
    explore = CorrelatedExploration(Constant(1.0, 1), 1, 4000, 1, 1, time_constant=1e6)
    explore.begin(generators(1))
    obs = torch.zeros(1, 4000, 1)
    before = explore.offset(obs)
    half = np.arange(4000) < 2000
    explore.restart(half)
    after = explore.offset(obs)
    same = np.corrcoef(before[0, 2000:, 0], after[0, 2000:, 0])[0, 1]
    new = np.corrcoef(before[0, :2000, 0], after[0, :2000, 0])[0, 1]
    assert same > 0.999 and abs(new) < 0.1


@every_kind
def test_the_scale_falls_to_zero_over_the_run_and_is_logged(kind):
    learner = explorer("ppo", kind, "total_steps=320", "exploration.scale=2")
    seen = []
    while learner.running.any():
        train(learner, 1)
        seen.append(float(learner.metrics["schedule/exploration"][0]))
    expected = [2.0 * (1 - 32 * k / 320) for k in range(10)]
    assert seen == pytest.approx(expected)


@every_kind
def test_a_scale_of_zero_collects_the_same_actions(kind):
    silent, plain = explorer("ppo", kind, "exploration.scale=0"), small_learner("ppo")
    assert torch.equal(rollout_of(silent).action, rollout_of(plain).action)
