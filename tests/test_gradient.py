"""The gradient by hand against autograd through the whole policy, for every kind of policy, link and batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor

from rlkit import gradient as module
from rlkit.buffer import Batch
from rlkit.envs.spaces import ActionSpec
from rlkit.gradient import Gradient, reduce
from rlkit.link import Chain, Link
from rlkit.losses import clipped_surrogate, clipped_surrogate_gradient, value_loss, value_loss_gradient
from rlkit.mlp import ACTIVATIONS, StackedMLP
from rlkit.normalize import Normalizer
from rlkit.optimizer import Adam
from rlkit.phases.warm_up import Likelihood
from rlkit.policy import Policy
from rlkit.schedules import Constant
from rlkit.stabilizers.cloning import Cloning
from rlkit.stabilizers.entropy import Entropy
from rlkit.stabilizers.old_kl import OldKL
from rlkit.stabilizers.ref_kl import RefKL
from rlkit.stabilizers.surrogate import Surrogate
from rlkit.stabilizers.value import Value
from rlkit.stabilizers.value_l2 import ValueL2
from rlkit.streams import Streams

MEMBERS, ROWS, OBS = 3, 17, 5
libraries = pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])


@pytest.fixture(autouse=True, params=[2048, 15], ids=["whole", "pieces"])
def cached_rows(request, monkeypatch):
    """Five rows of each member at a time, or all."""
    monkeypatch.setattr(module, "CACHED_ROWS", request.param)
    monkeypatch.setattr(module, "SHORTEST_PIECE", 5)


SPACES = {"discrete": Discrete(4), "several heads": MultiDiscrete([2, 3]), "continuous": Box(-1.0, 1.0, (2,))}


def some_policy(space: str, **settings: object) -> Policy:
    normalizer = Normalizer(MEMBERS, OBS)
    rng = torch.Generator().manual_seed(5)
    normalizer.update(3.0 * torch.randn(4, MEMBERS, 6, OBS, generator=rng) + 1.0, torch.ones(4, MEMBERS, 6).bool())
    policy = Policy(OBS, ActionSpec.of(SPACES[space]), range(MEMBERS), hidden=(8, 6), normalizer=normalizer, **settings)  # type: ignore[arg-type]
    with torch.no_grad():
        for p in policy.parameters():  # the usual start has a nearly uniform policy and no bias
            p += 0.3 * torch.randn(p.shape, generator=rng)
    return policy


def some_batch(policy: Policy, padded: bool, offset: bool) -> Batch:
    rng = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(MEMBERS, ROWS, *shape, generator=rng)

    with torch.no_grad():
        obs = 2.0 * normal(OBS)
        dist = policy.distribution(obs)
        if policy.discrete:
            uniform = torch.rand(MEMBERS, ROWS, policy.action_size, generator=rng)
            action = dist.sample(-(-uniform.log()).log())
        else:
            action = dist.sample(normal(policy.action_size))
        columns = {
            "obs": obs,
            "action": action,
            "log_prob": dist.log_prob(action) + 0.3 * normal(),
            "advantage": 2.0 * normal() + 0.5,
            "ret": normal(),
            "value": normal(),
            "weight": torch.ones(MEMBERS, ROWS),
            **{f"old_{name}": x for name, x in dist.params.items()},
        }
    if offset:
        columns["offset"] = normal(policy.action_size)
    count = torch.full((MEMBERS,), ROWS)
    if padded:
        columns["weight"] = 0.5 + torch.rand(MEMBERS, ROWS, generator=rng)
        count = torch.tensor([ROWS, 9, 1])
        return Batch(columns, count).masked(torch.arange(ROWS) < count[:, None])
    return Batch(columns, count, padded=False, uniform=True)


def by_autograd(policy: Policy, chain: Chain, batch: Batch) -> dict[str, Tensor]:
    out = policy.evaluate(batch)
    loss = reduce(chain.losses(out, batch, policy), batch, chain.column)
    named = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss.sum(), [p for _, p in named], materialize_grads=True)
    return {name: g for (name, _), g in zip(named, grads, strict=True)}


def by_hand(policy: Policy, chain: Chain, batch: Batch) -> tuple[dict[str, Tensor], module.Differentiated]:
    optimizer = Adam(policy)
    gradient = Gradient(policy, chain, optimizer)
    batch = gradient.prepared(batch)
    gradient(batch)
    found = gradient(batch)  # the second uses the memory of the first
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    return {name: gradient.places[p] for name, p in zip(names, optimizer.params, strict=True)}, found


def same(policy: Policy, chain: Chain, batch: Batch) -> None:
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        hand, found = by_hand(policy, chain, Batch(dict(batch.columns), batch.count, batch.padded, batch.uniform))
    auto = by_autograd(policy, chain, batch)
    assert list(hand) == list(auto)
    for name in auto:
        torch.testing.assert_close(hand[name], auto[name], rtol=2e-4, atol=2e-6, msg=lambda m, name=name: name + m)
    out = policy.evaluate(batch)
    torch.testing.assert_close(found.out.log_prob, out.log_prob)
    torch.testing.assert_close(found.out.dist.entropy(), out.dist.entropy())
    terms = chain.losses(out, batch, policy)
    hand_terms = {**found.closed(), **found.terms}
    assert set(hand_terms) == set(terms)
    for name, term in terms.items():
        torch.testing.assert_close(hand_terms[name], term, rtol=1e-4, atol=1e-5)
        assert not hand_terms[name].requires_grad


def recipe(critic: bool, **options: object) -> Chain:
    links: dict[str, Link] = {"surrogate": Surrogate(Constant(0.2, MEMBERS), normalize_advantage=True)}
    if critic:
        links["value"] = Value(0.7, clip=0.3)
    return Chain(**links, entropy=Entropy(Constant(0.05, MEMBERS)))


@libraries
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("padded", "offset"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("critic", [False, True])
def test_the_recipes(monkeypatch, xp, space, padded, offset, critic):
    monkeypatch.setattr(module, "array_library", lambda device: xp)
    policy = some_policy(space, critic_hidden=(7,) if critic else None)
    same(policy, recipe(critic), some_batch(policy, padded, offset))


@libraries
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shared_trunk", [False, True])
@pytest.mark.parametrize("log_std", ["free", "state"])
@pytest.mark.parametrize("squash", [False, True])
def test_policies(monkeypatch, xp, activation, shared_trunk, log_std, squash):
    monkeypatch.setattr(module, "array_library", lambda device: xp)
    policy = some_policy(
        "continuous",
        critic_hidden=(6,),
        activation=activation,
        shared_trunk=shared_trunk,
        log_std=log_std,
        log_std_init=-1.0,
        squash=squash,
    )
    same(policy, recipe(True), some_batch(policy, True, True))


@libraries
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shared_trunk", [False, True])
@pytest.mark.parametrize(("layer_norm", "dropout"), [(True, 0.0), (False, 0.4), (True, 0.4)])
def test_layer_norm_and_dropped_units(monkeypatch, xp, activation, shared_trunk, layer_norm, dropout):
    monkeypatch.setattr(module, "array_library", lambda device: xp)
    policy = some_policy(
        "discrete",
        critic_hidden=(6,),
        activation=activation,
        shared_trunk=shared_trunk,
        layer_norm=layer_norm,
        dropout=dropout,
    )
    with policy.thinned(Streams(range(MEMBERS)), 0):
        same(policy, recipe(True), some_batch(policy, True, True))


@libraries
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_a_critic_of_standardised_returns_with_and_without_a_closed_form(monkeypatch, xp, clip, shared_trunk):
    monkeypatch.setattr(module, "array_library", lambda device: xp)
    policy = some_policy("discrete", critic_hidden=(6,), shared_trunk=shared_trunk, value_normalization="running")
    assert policy.value_scale is not None
    rng = torch.Generator().manual_seed(3)
    policy.value_scale.update(4 * torch.randn(5, MEMBERS, 2, generator=rng) - 7, torch.ones(5, MEMBERS, 2).bool())
    batch = some_batch(policy, True, False)
    links = {**recipe(False).links, "value": Value(0.7, clip)}
    same(policy, Chain(**links), batch)
    same(policy, Chain(**links, again=ByAutograd(0.7, clip), first=Penalty()), batch)


class ByAutograd(Value):
    """The value loss without its closed form."""

    def gradients(self, out, batch):
        return None


@libraries
@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside autograd"])
def test_a_penalty_on_weights_in_closed_form(monkeypatch, xp, others):
    monkeypatch.setattr(module, "array_library", lambda device: xp)
    policy = some_policy("discrete", critic_hidden=(7,))
    links = {"value_l2": ValueL2(policy, 0.3), **recipe(True).links}
    same(policy, Chain(**links, **({"penalty": Penalty()} if others else {})), some_batch(policy, True, False))
    policy.critic.weights[0].requires_grad_(False)
    same(policy, Chain(**links), some_batch(policy, True, False))


@libraries
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("squash", [False, True])
def test_the_likelihood_of_the_warm_up(monkeypatch, xp, space, squash):
    monkeypatch.setattr(module, "array_library", lambda device: xp)
    policy = some_policy(space, critic_hidden=(7,), squash=squash)
    same(policy, Chain(cloning=Likelihood()), some_batch(policy, False, False))


@libraries
@pytest.mark.parametrize("space", SPACES)
def test_demonstrations_beside_a_recipe(monkeypatch, tmp_path, xp, space):
    monkeypatch.setattr(module, "array_library", lambda device: xp)
    SPACES[space].seed(1)
    action = np.array([SPACES[space].sample() for _ in range(40)])
    np.savez(tmp_path / "steps.npz", obs=np.random.default_rng(1).normal(size=(40, OBS)), action=action)
    policy = some_policy(space, critic_hidden=(7,))
    spec = ActionSpec.of(SPACES[space])
    link = Cloning(policy, Streams(range(MEMBERS)), spec, str(tmp_path / "steps.npz"), coef=0.7, batch_size=9)
    chain = Chain(**recipe(True).links, cloning=link)
    same(policy, chain, chain.batch(some_batch(policy, True, True)))


class Penalty(Link):
    """A penalty on weights, and a loss through the policy at other observations: neither is seen at the outputs."""

    def losses(self, out, batch, policy):
        elsewhere = policy.distribution(batch.obs * 0.5).entropy()
        return {"weights": sum((p**2).flatten(1).sum(1) for p in policy.parameters()), "elsewhere": 0.1 * elsewhere}


class Weighed(Link):
    """A loss with a weight column of its own."""

    weight = "cloning_weight"

    def losses(self, out, batch, policy):
        return {"cloning": -out.log_prob}


@libraries
@pytest.mark.parametrize("space", SPACES)
def test_links_without_a_closed_form_beside_those_with_one(monkeypatch, xp, space):
    monkeypatch.setattr(module, "array_library", lambda device: xp)
    policy = some_policy(space, critic_hidden=(7,))
    batch = some_batch(policy, True, False)
    batch = batch.with_columns(cloning_weight=torch.rand(MEMBERS, ROWS))
    links = recipe(True).links
    nested = Chain(entropy=links["entropy"])
    chain = Chain(first=Penalty(), **links, kl=RefKL(policy, 0.3), cloning=Weighed(), nested=nested)
    same(policy, chain, chain.batch(batch))


@libraries
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("log_std", ["free", "state"])
@pytest.mark.parametrize(("padded", "offset"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", ["exact", "k1", "k2", "k3"])
def test_penalties_on_kl(monkeypatch, xp, space, log_std, padded, offset, kind):
    monkeypatch.setattr(module, "array_library", lambda device: xp)
    policy = some_policy(space, log_std=log_std)
    link = RefKL(policy, 0.3, kind)
    with torch.no_grad():
        for p in link.reference.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
    chain = Chain(**recipe(False).links, ref_kl=link, old_kl=OldKL(MEMBERS, 0.7))
    batch = chain.batch(some_batch(policy, padded, offset))
    assert link.losses(policy.evaluate(batch), batch, policy)["loss"].abs().max() > 1e-3
    same(policy, chain, batch)
    same(policy, Chain(penalty=Penalty(), **chain.links), batch)  # beside autograd


@pytest.mark.parametrize("chain", [Chain(), Chain(nothing=Link()), Chain(entropy=Entropy(Constant(0.1, MEMBERS)))])
def test_chains_that_do_not_know_the_action_or_nothing_at_all(chain):
    policy = some_policy("discrete", critic_hidden=(7,))
    batch = some_batch(policy, False, False)
    if chain.losses(policy.evaluate(batch), batch, policy):
        same(policy, chain, batch)
    else:
        assert not by_hand(policy, chain, batch)[1].flat.any()


def test_a_parameter_that_is_not_learned_has_no_gradient():
    policy = some_policy("continuous", critic_hidden=(7,))
    policy.actor.weights[1].requires_grad_(False)
    assert policy.log_std is not None
    policy.log_std.requires_grad_(False)
    same(policy, recipe(True), some_batch(policy, True, False))


@pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize(("clip", "bound"), [(None, None), (0.2, 2.5)])
def test_derivatives_of_losses_at_hand_numbers_and_against_autograd(xp, clip, bound):
    log_ratio = torch.tensor([[-1.0, -0.1, 0.0, 0.1, 1.0]] * 2, requires_grad=True)
    advantage = torch.tensor([[2.0] * 5, [-2.0] * 5])
    (auto,) = torch.autograd.grad(clipped_surrogate(log_ratio, advantage, 0.2, 0.3, bound).sum(), log_ratio)
    args = [x.detach().numpy() if xp is np else x.detach() for x in (log_ratio, advantage)]
    hand = torch.as_tensor(clipped_surrogate_gradient(xp, *args, 0.2, 0.3, bound))
    torch.testing.assert_close(hand, auto)
    # e^1 > 1.3 binds above for a good action, e^-1 < 0.8 below for a bad one
    expected = [[-0.735759, -1.809675, -2.0, -2.210342, 0.0], [0.0, 1.809675, 2.0, 2.210342, 5.436564]]
    if bound is not None:  # e^1 > 2.5
        expected[1][4] = 0.0
    torch.testing.assert_close(hand, torch.tensor(expected), rtol=1e-5, atol=1e-5)

    value = torch.tensor([[0.0, 0.1, 0.5, -0.5, 1.0]], requires_grad=True)
    ret, old = torch.tensor([[1.0, -1.0, 1.0, 1.0, 0.9]]), torch.zeros(1, 5)
    (auto,) = torch.autograd.grad(value_loss(value, ret, old, clip).sum(), value)
    arrays = [x.detach().numpy() if xp is np else x.detach() for x in (value, ret, old)]
    torch.testing.assert_close(torch.as_tensor(value_loss_gradient(*arrays, clip)), auto)
    # kept at 0.2: an error of 0.8 beats 0.5, and no longer depends on the value; -1.5 beats 1.2; 0.7 beats 0.1
    expected = [[-1.0, 1.1, -0.5, -1.5, 0.1]] if clip is None else [[-1.0, 1.1, 0.0, -1.5, 0.0]]
    torch.testing.assert_close(auto, torch.tensor(expected))


def test_what_is_not_a_number_stays_one():
    nan = np.full((1, 1), np.nan, np.float32)
    one = np.ones((1, 1), np.float32)
    assert np.isnan(clipped_surrogate_gradient(np, one, nan, 0.2, 0.2)).all()
    assert np.isnan(clipped_surrogate_gradient(np, nan, one, 0.2, 0.2)).all()
    assert np.isnan(value_loss_gradient(one, nan, one, 0.1)).all()


@pytest.mark.parametrize("gain", [None, 1.0])
def test_the_forward_pass_by_hand_gives_the_same_numbers(gain):
    mlp = StackedMLP([OBS, 8, 4], "silu", gain, [torch.Generator().manual_seed(m) for m in range(MEMBERS)])
    x = torch.randn(MEMBERS, ROWS, OBS)
    y = torch.from_numpy(mlp.by_hand(np).forward(x.numpy()))
    torch.testing.assert_close(y if gain is None else y.mT, mlp(x).detach())


@pytest.mark.parametrize("bad", [torch.tensor(1.0), torch.ones(2), 3.0], ids=["scalar", "of other members", "number"])
def test_a_loss_of_another_shape_is_named(bad):
    class Wrong(Link):
        def losses(self, out, batch, policy):
            return {"loss": bad}

    policy = some_policy("discrete")
    with pytest.raises(ValueError, match=r"the loss wrong/loss is .*\[M, B\] = \[3, 17\].* or \[M\] = \[3\]"):
        by_hand(policy, Chain(wrong=Wrong()), some_batch(policy, False, False))
