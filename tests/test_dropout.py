"""Dropout: one mask for each member and iteration, in every path alike, and none outside of an iteration."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from conftest import small_learner, train, weights
from test_policy import BOX, TWO, make, observations, shaken

from rlkit.distributions import Categorical, Distribution
from rlkit.policy import Policy
from rlkit.streams import Purpose, Streams

STREAMS = Streams([3, 4, 5])


def parameter(dist: Distribution) -> torch.Tensor:
    return torch.as_tensor(dist.logits if isinstance(dist, Categorical) else dist.mean)  # type: ignore[attr-defined]


def pruned(policy: Policy, masks: tuple[torch.Tensor, ...]) -> Policy:
    """A whole network that is the same function: what reads a unit is multiplied by the unit's mask."""
    other = copy.deepcopy(policy)
    other.actor.masks = ()
    if other.trunk is not None:
        other.trunk.masks = ()
    actor, critic = other.actor, other.critic
    behind = list(actor.weights[1:]) if other.trunk is None else [*other.trunk.weights[1:], actor.weights[0]]
    with torch.no_grad():
        for weight, mask in zip(behind, masks, strict=True):
            weight *= mask.mT
        if other.trunk is not None and critic is not None:
            critic.weights[0].mul_(masks[-1].mT)
    return other


@pytest.mark.parametrize("actions", [TWO, BOX], ids=["discrete", "continuous"])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("shared_trunk", [False, True])
@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
def test_every_path_is_that_of_a_network_without_the_dropped_units(actions, layer_norm, shared_trunk, activation):
    policy = shaken(
        make(
            actions,
            critic_hidden=(7,),
            shared_trunk=shared_trunk,
            activation=activation,
            layer_norm=layer_norm,
            dropout=0.4,
        )
    )
    obs = observations()
    whole = parameter(policy.distribution(obs)).detach()
    with policy.thinned(STREAMS, 0):
        masks = (policy.trunk or policy.actor).masks
        expected = pruned(policy, masks)
        paths = [parameter(policy.distribution(obs)).detach()]
        with torch.no_grad():
            paths += [parameter(policy.distribution(obs)), parameter(policy.acting()(obs.numpy()))]
        for found in paths:
            torch.testing.assert_close(found, parameter(expected.distribution(obs)).detach())
        torch.testing.assert_close(policy.value(obs), expected.value(obs))
    assert not torch.allclose(paths[0], whole)
    assert torch.equal(parameter(policy.distribution(obs)), whole)


def test_a_share_p_of_units_is_dropped_and_the_rest_scaled_by_hand():
    policy = make(hidden=(4000,), dropout=0.2)
    with policy.thinned(STREAMS, 0):
        (mask,) = policy.actor.masks
    assert mask.shape == (3, 1, 4000)
    assert set(mask.unique().tolist()) == {0.0, 1.25}  # 1 / (1 - 0.2): a unit's mean stays
    dropped = (mask == 0).float().mean((1, 2))
    assert ((dropped - 0.2).abs() < 4 * (0.2 * 0.8 / 4000) ** 0.5).all()


def test_a_mask_belongs_to_a_member_and_an_iteration():
    def masks(streams: Streams, iteration: int) -> torch.Tensor:
        policy = make(seeds=streams.seeds, dropout=0.5)
        with policy.thinned(streams, iteration):
            assert len(policy.actor.masks) == 2
            return torch.cat(policy.actor.masks, 2)

    first = masks(STREAMS, 0)
    assert torch.equal(first, masks(STREAMS, 0))
    assert not torch.equal(first, masks(STREAMS, 1))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0, 0, :8], first[0, 0, 8:])  # of its two layers
    assert torch.equal(first[1], masks(Streams([4]), 0)[0])


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_the_first_ratios_are_one(algo, shared_trunk):
    one = ("algo.num_epochs=1", "algo.num_minibatches=1", f"policy.shared_trunk={shared_trunk}")
    learner = small_learner(algo, "members=2", "policy.dropout=0.5", *one)
    old = []
    original = learner.update
    learner.update = lambda batch, running: old.append(batch) or original(batch, running)
    for _ in range(2):
        learner.iterate()
        torch.testing.assert_close(learner.metrics["ratio/min"], torch.ones(2), rtol=0, atol=2e-6)
        torch.testing.assert_close(learner.metrics["ratio/max"], torch.ones(2), rtol=0, atol=2e-6)
    before = small_learner(algo, "members=2", "policy.dropout=0.5", *one)
    log_prob = before.policy.evaluate(old[0]).log_prob  # the whole network's, of the actions of the thinned one
    assert (log_prob - old[0].log_prob).abs().max() > 1e-4


def test_units_that_are_dropped_do_not_learn_in_the_first_iteration():
    learner = small_learner("grpo", "policy.dropout=0.5")
    before = [x.clone() for x in learner.policy.actor.weights]
    masks = []
    original = learner.update
    learner.update = lambda batch, running: masks.extend(learner.policy.actor.masks) or original(batch, running)
    learner.iterate()
    for i, mask in enumerate(masks):
        moved = (learner.policy.actor.weights[i] != before[i]).any(1)  # [M, units]
        assert not moved[mask[:, 0] == 0].any()
        assert moved.any()


def test_outside_of_an_iteration_the_network_is_whole_also_after_an_error():
    learner = small_learner("ppo", "policy.dropout=0.5")
    seen = []
    original = learner.chain.observe
    learner.chain.observe = lambda *args: seen.append(learner.policy.actor.masks) or original(*args)
    learner.iterate()
    assert len(seen[0]) == 2  # until the end of the iteration
    assert learner.policy.actor.masks == ()

    def fail(*args: object) -> None:
        assert learner.policy.actor.masks
        raise RuntimeError("on purpose")

    learner.collector.collect = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        learner.iterate()
    assert learner.policy.actor.masks == ()


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_a_frozen_copy_is_whole_also_if_it_was_taken_of_a_thinned_policy(shared_trunk):
    policy = shaken(make(critic_hidden=(8,), shared_trunk=shared_trunk, dropout=0.5))
    obs = observations()
    whole = parameter(policy.distribution(obs)).detach()
    with policy.thinned(STREAMS, 0):
        copied = policy.frozen_copy()
        assert torch.equal(parameter(copied.distribution(obs)), whole)
        assert not torch.allclose(parameter(policy.distribution(obs)), whole)


def test_without_dropout_nothing_is_drawn(monkeypatch):
    opened = []
    original = Streams.open
    monkeypatch.setattr(
        Streams, "open", lambda self, purpose, index: opened.append(purpose) or original(self, purpose, index)
    )
    train(small_learner("ppo", "policy.dropout=0.0"), 1)
    assert Purpose.DROPOUT not in opened
    assert opened
    train(small_learner("ppo", "policy.dropout=0.1"), 1)
    assert opened.count(Purpose.DROPOUT) == 1


def test_a_learner_with_dropout_resumes_from_its_iteration_alone():
    whole = train(small_learner("ppo", "policy.dropout=0.3"), 2)
    assert not [name for name in whole.policy.state_dict() if "mask" in name]
    resumed = small_learner("ppo", "policy.dropout=0.3")
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    np.testing.assert_array_equal(weights(train(resumed, 1)), weights(train(whole, 1)))
