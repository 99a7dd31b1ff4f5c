"""The penalty on the critic's weights."""

from __future__ import annotations

import pytest
import torch
from conftest import small_learner, train, weights
from test_policy import make
from test_update import problem

from rlkit.build import ConfigError
from rlkit.gradient import Gradient
from rlkit.link import Chain
from rlkit.optimizer import Adam
from rlkit.stabilizers.value_l2 import ValueL2

ON = ("stabilizer=[value_l2]", "stabilizer.value_l2.coef=0.5")


def test_the_loss_by_hand_counts_weights_and_not_biases():
    policy = make(seeds=(0, 1), hidden=(), critic_hidden=(2,))
    assert policy.critic is not None
    with torch.no_grad():
        for p in policy.parameters():
            p.fill_(100.0)
        policy.critic.weights[0].copy_(torch.tensor([1.0, 3.0]).view(2, 1, 1))  # 4 x 2 of them
        policy.critic.weights[1].copy_(torch.tensor([2.0, 0.0]).view(2, 1, 1))  # 2 x 1
    loss = ValueL2(policy, 0.1).losses(None, None, policy)["loss"]  # type: ignore[arg-type]
    torch.testing.assert_close(loss, torch.tensor([0.05 * (8 * 1 + 2 * 4), 0.05 * (8 * 9)]))


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_the_closed_form_is_the_derivative(shared_trunk):
    policy = make(hidden=(6,), critic_hidden=(5, 4), shared_trunk=shared_trunk)
    link = ValueL2(policy, 0.3)
    params = dict(policy.named_parameters())
    loss = link.losses(None, None, policy)["loss"].sum()  # type: ignore[arg-type]
    auto = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
    closed = link.parameter_gradients(policy)
    for (name, p), grad in zip(params.items(), auto, strict=True):
        assert grad.any() == (name.startswith("critic.weights"))
        torch.testing.assert_close(closed.get(p, torch.zeros_like(p)), grad)


def test_minibatches_stay_on_the_closed_form(monkeypatch):
    def fail(*args: object) -> None:
        raise AssertionError("autograd was used")

    learner = small_learner("ppo", *ON)
    monkeypatch.setattr(Gradient, "_by_autograd", fail)
    learner.iterate()
    assert "value_l2" in learner.chain.links
    assert learner.metrics["loss/value_l2"] > 0


def test_it_shrinks_the_critic_and_leaves_the_actor_as_it_was():
    plain = small_learner("ppo", "algo.value_coef=0", "algo.max_grad_norm=null")
    kept = small_learner("ppo", "algo.value_coef=0", "algo.max_grad_norm=null", *ON)
    train(plain, 1), train(kept, 1)  # in a second one advantages would differ
    actor = sum(p.numel() for p in plain.policy.actor.parameters())
    assert torch.equal(weights(kept)[:, :actor], weights(plain)[:, :actor])
    norms = [sum(float((w.detach() ** 2).sum()) for w in learner.policy.critic.weights) for learner in (plain, kept)]
    assert norms[1] < norms[0]


def test_the_loss_that_is_logged_is_that_of_the_weights_before_each_step():
    policy, batch = problem("discrete", (6, 6), (0, 1))
    optimizer = Adam(policy)
    link = ValueL2(policy, 0.3)
    gradient = Gradient(policy, Chain(value_l2=link), optimizer)
    before = link.losses(None, batch, policy)["loss"].detach()  # type: ignore[arg-type]
    found = gradient(batch)
    optimizer.step([found.flat], torch.full((2,), 0.1), torch.ones(2, dtype=torch.bool))
    torch.testing.assert_close({**found.closed(), **found.terms}["value_l2/loss"], before)
    assert not torch.allclose(link.losses(None, batch, policy)["loss"], before)  # type: ignore[arg-type]


def test_without_a_critic_it_is_refused_in_one_sentence():
    with pytest.raises(ConfigError) as error:
        small_learner("grpo", "stabilizer=[value_l2]")
    assert (
        str(error.value)
        == "stabilizer.value_l2: there is no critic whose weights it could keep small; it needs algo=ppo"
    )
