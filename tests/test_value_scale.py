"""Standardised value targets: statistics, units, what popart preserves, and the loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small_learner, train
from test_policy import make, observations, shaken
from torch import Tensor

from rlkit.buffer import Rollout
from rlkit.gradient import Evaluated
from rlkit.normalize import LOWEST_STD, VALUE_RATE, ValueScale
from rlkit.optimizer import Adam
from rlkit.policy import Out
from rlkit.stabilizers.value import Value


def targets(*values: float, members: int = 1) -> tuple[Tensor, Tensor]:
    """Value targets of a rollout of one environment for each member, all of them valid."""
    ret = torch.tensor(values).view(-1, 1, 1).expand(-1, members, 1).clone()
    return ret, torch.ones_like(ret, dtype=torch.bool)


def test_two_rollouts_by_hand():
    scale = ValueScale(1)
    assert (scale.mean.item(), scale.std.item()) == (0, 1)
    scale.update(*targets(1.0, 3.0))
    assert (scale.mean.item(), scale.std.item()) == (2, 1)  # the first has the whole weight
    scale.update(*targets(6.0, 6.0))
    # weights 0.09 and 0.1 of a total of 0.19: (0.09 * 2 + 0.1 * 6) / 0.19, (0.09 * 1 + 0.09 * 0.1 / 0.19 * 16) / 0.19
    assert scale.mean.item() == pytest.approx(4.105263, abs=1e-6)
    assert scale.var.item() == pytest.approx(4.462604, abs=1e-6)


def test_statistics_are_moments_with_weights_that_fall_exponentially():
    rng = np.random.default_rng(0)
    rollouts = [rng.normal(m, 3.0, size=n) for m, n in ((0, 4), (50, 9), (-20, 2), (7, 30))]
    scale = ValueScale(1, rate=0.3)
    for rows in rollouts:
        scale.update(*targets(*rows))
    every = np.concatenate(rollouts)
    weight = np.concatenate([np.full(len(r), 0.7 ** (3 - k) / len(r)) for k, r in enumerate(rollouts)])
    assert scale.mean.item() == pytest.approx(np.average(every, weights=weight), rel=1e-5)
    assert scale.var.item() == pytest.approx(float(np.cov(every, aweights=weight, ddof=0)), rel=1e-5)


def test_only_real_rows_count_and_a_member_without_any_or_with_a_broken_one_keeps_its_own():
    scale = ValueScale(4)
    ret, valid = targets(1.0, 3.0, members=4)
    scale.update(ret, valid)
    ret = torch.tensor([[4.0, 9.0], [4.0, torch.nan], [torch.nan, 5.0], [torch.inf, 5.0]]).T[..., None]
    valid = torch.tensor([[True, True], [True, False], [True, True], [True, True]]).T[..., None]
    before = [x.clone() for x in scale.buffers()]
    a, b = scale.update(ret, valid)
    alone = ValueScale(1)
    alone.update(*targets(1.0, 3.0))
    alone.update(*targets(4.0))
    torch.testing.assert_close(scale.mean[1:2], alone.mean)  # the row that is not real was not seen
    torch.testing.assert_close(scale.var[1:2], alone.var)
    assert not torch.allclose(scale.mean[0], scale.mean[1])
    for x, old in zip(scale.buffers(), before, strict=True):
        assert torch.equal(x[2:], old[2:])
    assert torch.equal(a[2:], torch.ones(2).double())
    assert torch.equal(b[2:], torch.zeros(2).double())
    still = scale.mean.clone()
    scale.update(ret, torch.zeros_like(valid))
    assert torch.equal(scale.mean, still)


def test_equal_targets_do_not_divide_by_zero():
    scale = ValueScale(1)
    a, b = scale.update(*targets(5.0, 5.0))
    assert scale.std.item() == LOWEST_STD
    assert (a.item(), b.item()) == pytest.approx((1 / LOWEST_STD, -5 / LOWEST_STD))


def rollout(ret: Tensor, obs: Tensor) -> Rollout:
    nothing = torch.zeros_like(ret)
    flag = nothing.bool()
    return Rollout(
        obs=obs,
        final_obs=obs,
        action=nothing[..., None],
        log_prob=nothing,
        old={},
        reward=nothing,
        terminated=flag,
        truncated=flag,
        valid=~flag,
        ret=ret,
    )


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_popart_keeps_values_where_running_statistics_alone_do_not(shared_trunk):
    obs = observations()  # [M, B, D]
    for kind, keeps in (("popart", True), ("running", False)):
        policy = shaken(make(critic_hidden=(8,), shared_trunk=shared_trunk, value_normalization=kind))
        adam = Adam(policy)
        for ret in (100 * torch.randn(5, 3, 2) - 300, 7 * torch.randn(5, 3, 2) + 20):
            value, raw = policy.value(obs).detach(), policy.critic(policy.features(obs)).detach()
            policy.update_statistics(rollout(ret, torch.zeros(5, 3, 2, 4)))
            assert policy.value_scale is not None
            new_raw = policy.critic(policy.features(obs)).detach()
            assert torch.equal(new_raw, raw) != keeps
            new = policy.value(obs).detach()
            assert torch.allclose(new, value, rtol=1e-4, atol=1e-3) == keeps
            units = new_raw[..., 0].double() * policy.value_scale.std[:, None] + policy.value_scale.mean[:, None]
            torch.testing.assert_close(new.double(), units, rtol=1e-5, atol=1e-4)
        before = policy.value(obs).detach()
        adam.step([torch.ones_like(p) for p in adam.params], torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool))
        assert not torch.allclose(policy.value(obs), before)  # the optimiser still holds the weights that are used
        assert torch.equal(adam.flat, torch.cat([p.detach().reshape(3, -1) for p in adam.params], 1))


def test_statistics_are_frozen_in_a_rollout_and_its_update_and_values_are_in_units_of_return():
    learner = train(small_learner("ppo", "members=2", "policy.value_normalization=popart"), 2)
    scale = learner.policy.value_scale
    assert scale is not None
    seen = []
    original = learner.chain.observe

    def observe(batch, metrics, policy):
        seen.append((scale.mean.clone(), scale.std.clone(), batch))
        original(batch, metrics, policy)

    learner.chain.observe = observe
    before = scale.mean.clone(), scale.std.clone()
    policy = learner.policy.frozen_copy()
    learner.iterate()
    mean, std, batch = seen[0]
    assert torch.equal(mean, before[0])
    assert torch.equal(std, before[1])
    assert not torch.equal(scale.mean, mean)
    torch.testing.assert_close(batch.value, policy.value(batch.obs))
    error = ((batch.ret - batch.value) ** 2).mean(1)
    torch.testing.assert_close(learner.metrics["value/error"], error)
    torch.testing.assert_close(scale.weight, torch.full((2,), 1 - (1 - VALUE_RATE) ** 3).double())


@pytest.mark.parametrize(("clip", "error", "slope"), [(None, 2.0, 1.0), (1.5, 2.0, 1.0), (0.25, 3.0, 0.0)])
def test_the_loss_is_in_units_of_the_deviation_by_hand(clip, error, slope):
    """V 5, return 1, deviation 2: an error of 2. V was 7.5: it moved by 1.25, and kept within 0.25 it is off by 3."""
    value, ret, old, std = (torch.tensor([[x]]) for x in (5.0, 1.0, 7.5, 2.0))
    link = Value(0.35, clip)
    batch = type("Batch", (), {"ret": ret, "value": old})
    out = Out(None, ret, value.requires_grad_(), std)  # type: ignore[arg-type]
    found = link.losses(out, batch, None)["loss"]  # type: ignore[arg-type]
    (auto,) = torch.autograd.grad(found.sum(), value)
    closed = link.gradients(Evaluated(torch, ret, value.detach(), std), batch)["value"]  # type: ignore[arg-type]
    assert found.item() == pytest.approx(0.35 * error**2 / 2)
    assert auto.item() == pytest.approx(0.35 * slope)
    torch.testing.assert_close(closed, auto)


def test_without_a_critic_there_are_no_values_to_scale():
    with pytest.raises(ValueError, match="value_normalization is popart; without a critic it must be none"):
        make(value_normalization="popart")


def test_without_it_the_state_holds_nothing_more():
    assert not [name for name in make(critic_hidden=(8,)).state_dict() if "value_scale" in name]
    state = make(critic_hidden=(8,), value_normalization="running").state_dict()
    assert {name for name in state if "value_scale" in name} == {f"value_scale.{x}" for x in ("mean", "var", "weight")}
