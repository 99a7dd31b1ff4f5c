"""Stacked policies against separate torch networks, their start, their size and their copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from rlkit.buffer import Batch
from rlkit.distributions import Categorical, DiagonalGaussian
from rlkit.mlp import CACHED_ROWS
from rlkit.normalize import Normalizer
from rlkit.optimizer import Adam
from rlkit.policy import Policy, StackedMLP


@dataclass
class Actions:
    kind: str
    sizes: tuple[int, ...] = ()
    size: int = 0


TWO, BOX = Actions("discrete", (2,)), Actions("continuous", (), 3)
TORCH = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}


def make(actions: Actions = TWO, seeds: tuple[int, ...] = (5, 6, 7), **options: Any) -> Policy:
    return Policy(4, actions, seeds, **{"hidden": (8, 8), **options})


def shaken(policy: Policy) -> Policy:
    """The policy with weights away from their start, so that a swapped or missing bias shows."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=rng))
    return policy


def observations(members: int = 3, rows: int = 6) -> torch.Tensor:
    return torch.randn(members, rows, 4, generator=torch.Generator().manual_seed(1))


def separate(stacked: StackedMLP, m: int, activation: str, output: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in zip(stacked.weights, stacked.biases, strict=True):
        linear = nn.Linear(*weight.shape[1:])
        linear.load_state_dict({"weight": weight[m].T, "bias": bias[m, 0]})
        layers += [linear, TORCH[activation]()]
    return nn.Sequential(*(layers[:-1] if output else layers))


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
def test_members_are_separate_networks(activation: str) -> None:
    policy = shaken(make(critic_hidden=(16,), activation=activation))
    obs = observations()
    dist, value = policy.distribution(obs), policy.value(obs)
    assert value.shape == (3, 6)
    for m in range(3):
        logits = separate(policy.actor, m, activation)(obs[m])
        torch.testing.assert_close(dist.params["logits"][m], logits.log_softmax(-1))
        critic = separate(policy.critic, m, activation)  # type: ignore[arg-type]
        torch.testing.assert_close(value[m], critic(obs[m])[:, 0])


def test_shared_trunk_is_shared() -> None:
    policy = shaken(make(critic_hidden=(99,), shared_trunk=True))
    obs = observations()
    dist, value = policy.distribution(obs), policy.value(obs)
    for m in range(3):
        features = separate(policy.trunk, m, "tanh", output=False)(obs[m])  # type: ignore[arg-type]
        logits = separate(policy.actor, m, "tanh")(features)
        torch.testing.assert_close(dist.params["logits"][m], logits.log_softmax(-1))
        torch.testing.assert_close(value[m], separate(policy.critic, m, "tanh")(features)[:, 0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("actions", "options", "parameters"),
    [
        # actor 4 -> 8 -> 8 -> 2: 4*8+8 + 8*8+8 + 8*2+2 = 40 + 72 + 18 = 130, and nothing else: no critic
        (TWO, {}, 130),
        (TWO, {"shared_trunk": True}, 130),
        # critic 4 -> 16 -> 1: 4*16+16 + 16+1 = 97
        (TWO, {"critic_hidden": (16,)}, 130 + 97),
        (TWO, {"critic_hidden": ()}, 130 + 4 + 1),
        # a shared trunk leaves the critic one layer 8 -> 1: 9
        (TWO, {"critic_hidden": (16,), "shared_trunk": True}, 130 + 9),
        # heads of 2 and 3 actions: 40 + 72 + 8*5+5
        (Actions("discrete", (2, 3)), {}, 112 + 45),
        # three means and three deviations, free or as outputs: 112 + 27 + 3 and 112 + 8*6+6
        (BOX, {}, 112 + 27 + 3),
        (BOX, {"log_std": "state"}, 112 + 54),
        (TWO, {"hidden": ()}, 4 * 2 + 2),
    ],
)
def test_number_of_parameters(actions: Actions, options: dict[str, Any], parameters: int) -> None:
    policy = make(actions, **options)
    assert sum(p.numel() for p in policy.parameters()) == 3 * parameters
    assert all(p.shape[0] == 3 for p in policy.parameters())
    assert (policy.critic is not None) == ("critic_hidden" in options)


def test_no_critic_no_value() -> None:
    policy = make()
    with pytest.raises(ValueError, match="no critic"):
        policy.value(observations())
    batch = Batch({"obs": observations(), "action": torch.zeros(3, 6, 1).long(), "weight": torch.ones(3, 6)})
    assert policy.evaluate(batch).value is None


# --- the start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_orthogonal_start(shared_trunk: bool) -> None:
    policy = make(hidden=(8, 6), critic_hidden=(8, 6), shared_trunk=shared_trunk)
    bodies = {"trunk": None, "actor": 0.01, "critic": 1.0}
    seen = 0
    for name, output_gain in bodies.items():
        network = getattr(policy, name)
        for i, weight in enumerate([] if network is None else network.weights):
            output = output_gain is not None and i == len(network.weights) - 1
            gain = output_gain if output else 2**0.5
            w = weight if weight.shape[1] <= weight.shape[2] else weight.mT  # the shorter side has orthogonal vectors
            expected = gain**2 * torch.eye(w.shape[1]).expand(3, -1, -1)
            torch.testing.assert_close(w @ w.mT, expected, atol=1e-5 * gain**2, rtol=0)
            seen += 1
        assert network is None or not any(bias.any() for bias in network.biases)
    assert seen == (4 if shared_trunk else 6)


@pytest.mark.parametrize("actions", [TWO, BOX])
@pytest.mark.parametrize("options", [{}, {"critic_hidden": (8,)}, {"critic_hidden": (), "shared_trunk": True}])
def test_weights_of_a_member_do_not_depend_on_the_others(actions: Actions, options: dict[str, Any]) -> None:
    together = make(actions, **options)
    for m, seed in enumerate((5, 6, 7)):
        alone = make(actions, seeds=(seed,), **options)
        for a, b in zip(together.parameters(), alone.parameters(), strict=True):
            assert torch.equal(a[m], b[0])
    assert not torch.equal(together.actor.weights[0][0], together.actor.weights[0][1])


# --- continuous actions -------------------------------------------------------------------------------------


def test_free_log_std() -> None:
    dist = make(BOX, log_std_init=-0.7).distribution(observations())
    assert isinstance(dist, DiagonalGaussian)
    assert dist.params["mean"].shape == (3, 6, 3)
    assert (dist.params["log_std"] == -0.7).all()


def test_state_log_std() -> None:
    policy = make(BOX, log_std_init=-0.7, log_std="state")
    params = policy.distribution(observations()).params
    assert params["mean"].shape == params["log_std"].shape == (3, 6, 3)
    torch.testing.assert_close(params["log_std"], torch.full((3, 6, 3), -0.7), atol=0.1, rtol=0)  # output gain 0.01
    assert (params["mean"].abs() < 0.1).all()
    params = shaken(policy).distribution(observations()).params
    assert (params["log_std"].std(1) > 0.01).all()
    for m in range(3):
        out = separate(policy.actor, m, "tanh")(observations()[m])
        torch.testing.assert_close(params["mean"][m], out[:, :3])
        torch.testing.assert_close(params["log_std"][m], out[:, 3:])


@pytest.mark.parametrize(("output", "log_std"), [(50.0, 2.0), (-50.0, -20.0)])
def test_state_log_std_is_bounded(output: float, log_std: float) -> None:
    policy = make(BOX, log_std_init=output, log_std="state")
    assert (policy.distribution(observations()).params["log_std"] == log_std).all()


@pytest.mark.parametrize("squash", [False, True])
def test_squash_reaches_the_distribution(squash: bool) -> None:
    dist = make(BOX, squash=squash).distribution(observations())
    assert isinstance(dist, DiagonalGaussian) and dist.squash == squash
    assert dist.with_params(dist.params).squash == squash


@pytest.mark.parametrize(("actions", "noise"), [(TWO, "gumbel"), (BOX, "normal")])
def test_noise_kind(actions: Actions, noise: str) -> None:
    assert make(actions).noise_kind == noise


# --- evaluation and copies ----------------------------------------------------------------------------------


def test_evaluate_agrees_with_its_parts() -> None:
    policy = shaken(make(Actions("discrete", (2, 3)), critic_hidden=(8,), normalizer=Normalizer(3, 4)))
    obs, action = observations(), torch.ones(3, 6, 2, dtype=torch.int64)
    out = policy.evaluate(Batch({"obs": obs, "action": action, "weight": torch.ones(3, 6)}))
    assert isinstance(out.dist, Categorical) and out.value is not None
    assert torch.equal(out.log_prob, policy.distribution(obs).log_prob(action))
    assert torch.equal(out.value, policy.value(obs))


def test_observations_are_normalised_by_the_statistics_of_their_member() -> None:
    normalizer = Normalizer(3, 4)
    policy, plain = make(critic_hidden=(8,), normalizer=normalizer), make(critic_hidden=(8,))
    normalizer.mean[1], normalizer.var[1] = 2.0, 0.25
    obs = observations()
    value, expected = policy.value(obs), plain.value(torch.stack([obs[0], (obs[1] - 2) / 0.5, obs[2]]))
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("views", [False, True], ids=["plain", "after Adam"])
def test_frozen_copy_is_independent(views: bool) -> None:
    policy = shaken(make(BOX, critic_hidden=(8,), normalizer=Normalizer(3, 4)))
    adam = Adam(policy)
    reference = (
        policy.frozen_copy() if views else make(BOX, critic_hidden=(8,), normalizer=Normalizer(3, 4)).frozen_copy()
    )
    reference.load_state_dict(policy.state_dict())
    obs = observations()
    before = {name: x.detach().clone() for name, x in reference.distribution(obs).params.items()}
    assert all(torch.equal(x, before[name]) for name, x in policy.distribution(obs).params.items())

    adam.step([torch.ones_like(p) for p in adam.params], torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool))
    assert policy.normalizer is not None
    policy.normalizer.update(obs[None] + 3, torch.ones(1, 3, 6, dtype=torch.bool))
    after = reference.distribution(obs).params
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert all(not torch.equal(x, after[name]) for name, x in policy.distribution(obs).params.items())
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in policy.parameters())
    reference.load_state_dict(policy.state_dict())  # a refresh: the copy's own weights are what it uses
    assert torch.equal(reference.value(obs), policy.value(obs))


def test_loading_keeps_the_link_to_the_optimiser() -> None:
    policy = make()
    adam = Adam(policy)
    policy.load_state_dict(shaken(make()).state_dict())
    before = policy.distribution(observations()).params["logits"]
    adam.step([torch.ones_like(p) for p in adam.params], torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool))
    assert not torch.equal(policy.distribution(observations()).params["logits"], before)


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_acting_in_numpy_is_the_same_distribution(activation: str, shared_trunk: bool) -> None:
    policy = make(activation=activation, shared_trunk=shared_trunk, critic_hidden=(8,))
    obs = 10 * observations()
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(3.0)  # seen through the same memory
    logits = policy.acting()(obs.numpy()).logits  # type: ignore[attr-defined]
    torch.testing.assert_close(
        Categorical(torch.from_numpy(logits), policy.sizes).log_p, policy.distribution(obs).log_p
    )  # type: ignore[attr-defined]


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_many_rows_evaluated_piece_by_piece_are_what_autograd_evaluates_at_once(
    members: int, shared_trunk: bool
) -> None:
    policy = shaken(make(seeds=tuple(range(members)), critic_hidden=(8,), shared_trunk=shared_trunk))
    obs = observations(members, 2 * CACHED_ROWS + 7)
    whole = policy.distribution(obs).params["logits"], policy.value(obs)
    with torch.no_grad():
        pieces = policy.distribution(obs).params["logits"], policy.value(obs)
    assert pieces[1].shape == (members, 2 * CACHED_ROWS + 7)
    torch.testing.assert_close(pieces, tuple(x.detach() for x in whole))
