"""Loss terms on numbers worked out by hand, and whole PPO gradients against independent implementations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from rlkit.buffer import Batch
from rlkit.distributions import Categorical
from rlkit.gradient import reduce
from rlkit.link import Chain
from rlkit.losses import clipped_surrogate, exact_kl, kl_estimate, value_loss
from rlkit.policy import Policy, StackedMLP
from rlkit.schedules import Constant
from rlkit.stabilizers.entropy import Entropy
from rlkit.stabilizers.surrogate import Surrogate, standardized
from rlkit.stabilizers.value import Value

INF = 1e9


@dataclass
class Actions:
    kind: str
    sizes: tuple[int, ...] = ()
    size: int = 0


# --- surrogate ----------------------------------------------------------------------------------------------

SIDES = [
    # ratio, A, low, high, loss, gradient with respect to log ratio (-r A where it is not clipped)
    (1.5, 2.0, 0.2, 0.2, -2.4, 0.0),  # min(3, 1.2*2)
    (1.5, 2.0, 0.2, 0.3, -2.6, 0.0),  # min(3, 1.3*2)
    (0.5, 2.0, 0.2, 0.3, -1.0, -1.0),  # min(1, .8*2)
    (1.5, -2.0, 0.2, 0.3, 3.0, 3.0),  # min(-3, -2.6)
    (0.5, -2.0, 0.2, 0.3, 1.6, 0.0),  # min(-1, -1.6)
    (1.25, 2.0, 0.2, 0.3, -2.5, -2.5),  # between the two bounds: the upper one is clip_high
    (1.0, 2.0, 0.2, 0.2, -2.0, -2.0),
    (1.5, 2.0, INF, INF, -3.0, -3.0),  # the plain policy gradient
    (0.1, -2.0, INF, INF, 0.2, 0.2),
]


@pytest.mark.parametrize(("ratio", "advantage", "low", "high", "loss", "gradient"), SIDES)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_clipped_surrogate_by_hand(
    ratio: float, advantage: float, low: float, high: float, loss: float, gradient: float, as_tensor: bool
) -> None:
    log_ratio = torch.tensor([[math.log(ratio)]], requires_grad=True)
    bounds = (torch.tensor([[low]]), torch.tensor([[high]])) if as_tensor else (low, high)
    result = clipped_surrogate(log_ratio, torch.tensor([[advantage]]), *bounds)
    assert result.item() == pytest.approx(loss, abs=1e-6)
    assert torch.autograd.grad(result.sum(), log_ratio)[0].item() == pytest.approx(gradient, abs=1e-6)


def test_every_member_has_its_own_clip() -> None:
    log_ratio, clip = torch.full((2, 3), math.log(1.5)), torch.tensor([[0.1], [0.4]])
    loss = clipped_surrogate(log_ratio, torch.ones(2, 3), clip, clip)
    torch.testing.assert_close(loss, torch.tensor([[-1.1] * 3, [-1.4] * 3]))


def test_a_bound_on_the_ratio_holds_where_the_advantage_is_negative() -> None:
    """-min(r, 3) A for A < 0, by hand; positive advantages and lower ratios do not see it."""
    log_ratio = torch.tensor([[5.0, 5.0, 2.0, 0.5]]).log()
    advantage = torch.tensor([[-2.0, 2.0, -2.0, -2.0]])
    loss = clipped_surrogate(log_ratio, advantage, 0.2, 0.2, 3.0)
    torch.testing.assert_close(loss, torch.tensor([[6.0, -2.4, 4.0, 1.6]]))  # the last is clipped from below at 0.8


@pytest.mark.parametrize(("clip_high", "expected"), [(None, -2.4), (0.3, -2.6), (INF, -3.0)])
def test_surrogate_link(clip_high: float | None, expected: float) -> None:
    link = Surrogate(Constant(0.2, 1), clip_high)
    batch = batch_of(1, 1, log_prob=torch.zeros(1, 1), advantage=torch.full((1, 1), 2.0))
    policy = Policy(1, Actions("discrete", (2,)), [0])
    out = policy.evaluate(batch)
    out.log_prob = torch.full((1, 1), math.log(1.5))
    assert link.losses(out, batch, policy)["loss"].item() == pytest.approx(expected, abs=1e-6)


def test_standardized_by_hand() -> None:
    # rows 1 2 3: mean 2, deviation (ddof 1) 1; rows 0 4: mean 2, deviation sqrt 8; rows without a weight do not count,
    # and how much a weight is does not matter
    x = torch.tensor([[1.0, 2.0, 3.0, 1e6], [0.0, 4.0, -1e6, 1e6]])
    weight = torch.tensor([[1.0, 0.1, 5.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    result = standardized(batch_of(2, 4, advantage=x, weight=weight))
    torch.testing.assert_close(result[0, :3], torch.tensor([-1.0, 0.0, 1.0]))
    torch.testing.assert_close(result[1, :2], torch.tensor([-(0.5**0.5), 0.5**0.5]))


def test_standardized_is_the_same_with_and_without_masks() -> None:
    batch = batch_of(2, 5, advantage=torch.randn(2, 5, generator=torch.Generator().manual_seed(0)))
    full = Batch(batch.columns, batch.count, padded=False)
    torch.testing.assert_close(standardized(full), standardized(batch))


@pytest.mark.parametrize(
    ("weight", "padded"),
    [([1.0, 0.0], True), ([0.0, 0.0], True), ([1.0, 1.0], True), ([1.0, 1.0], False), ([1.0], True), ([1.0], False)],
)
def test_standardized_is_zero_on_no_one_or_equal_rows(weight: list[float], padded: bool) -> None:
    rows = len(weight)
    batch = batch_of(1, rows, advantage=torch.full((1, rows), 3.0), weight=torch.tensor([weight]))
    batch.padded = padded
    assert (standardized(batch) * batch.weight == 0).all()


# --- value --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "ret", "old", "clip", "loss", "gradient"),
    [
        (3.0, 1.0, 0.0, None, 2.0, 2.0),  # (3-1)^2 / 2, V - ret
        (3.0, 1.0, 0.0, 0.5, 2.0, 2.0),  # V kept at .5: max(4, .25) / 2
        (3.0, 4.0, 0.0, 0.5, 6.125, 0.0),  # max(1, 3.5^2 = 12.25) / 2, and the kept value does not move
        (-3.0, -4.0, 0.0, 0.5, 6.125, 0.0),
        (0.25, 1.0, 0.0, 0.5, 0.28125, -0.75),  # inside: .75^2 / 2
    ],
)
def test_value_loss_by_hand(
    value: float, ret: float, old: float, clip: float | None, loss: float, gradient: float
) -> None:
    v = torch.tensor([[value]], requires_grad=True)
    result = value_loss(v, torch.tensor([[ret]]), torch.tensor([[old]]), clip)
    assert result.item() == pytest.approx(loss)
    assert torch.autograd.grad(result.sum(), v)[0].item() == pytest.approx(gradient)


def test_clipped_value_loss_needs_the_old_value() -> None:
    with pytest.raises(ValueError, match="at collection"):
        value_loss(torch.ones(1, 1), torch.ones(1, 1), None, 0.5)


# --- KL estimators ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "twice", "half"),  # at pi_ref / pi = 2 and 1/2; log 2 = 0.6931472
    [
        ("k1", -0.6931472, 0.6931472),
        ("k2", 0.2402265, 0.2402265),  # 0.6931472^2 / 2
        ("k3", 0.3068528, 0.1931472),  # 2 - 1 - 0.6931472,  .5 - 1 + 0.6931472
    ],
)
def test_kl_estimates_by_hand(kind: str, twice: float, half: float) -> None:
    result = kl_estimate(torch.tensor([[math.log(2), -math.log(2), 0.0]]), kind)
    torch.testing.assert_close(result, torch.tensor([[twice, half, 0.0]]), atol=1e-6, rtol=0)


def test_kl_estimate_refuses_other_kinds() -> None:
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1, 1), "k4")


def policy_and_reference() -> tuple[Tensor, Tensor]:
    """Log-probabilities [5] of a categorical policy (with gradient to `logits`) and of its reference."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=rng, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(5, generator=rng, dtype=torch.float64).log_softmax(0)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of two vectors of logits, by torch."""
    make = torch.distributions.Categorical
    return torch.distributions.kl_divergence(make(logits=p), make(logits=q))


@pytest.mark.parametrize(("kind", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_expectation_of_the_estimators(kind: str, unbiased: bool) -> None:
    logits, ref = policy_and_reference()
    log_p = logits.log_softmax(0).detach()
    error = (log_p.exp() * kl_estimate(ref - log_p, kind)).sum() - kl(log_p, ref)
    assert (abs(error.item()) < 1e-12) == unbiased
    assert kind == "k1" or (kl_estimate(ref - log_p, kind) >= 0).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_gradient_of_the_estimators_as_losses(kind: str) -> None:
    """Expected over actions of pi itself: k1 nothing, k2 that of KL(pi || ref), k3 that of KL(ref || pi)."""
    logits, ref = policy_and_reference()
    log_p = logits.log_softmax(0)
    loss = (
        log_p.exp().detach() * kl_estimate(ref - log_p, kind)
    ).sum()  # the action's probability is not differentiated
    gradient = torch.autograd.grad(loss, logits)[0]
    target = {"k1": 0.0 * logits.sum(), "k2": kl(logits, ref), "k3": kl(ref, logits)}[kind]
    expected = torch.autograd.grad(target, logits)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)
    assert kind != "k3" or not torch.allclose(expected, torch.autograd.grad(kl(logits, ref), logits)[0], atol=1e-2)


def test_estimates_over_samples_of_gaussians() -> None:
    rng = torch.Generator().manual_seed(3)
    p, q = torch.distributions.Normal(0.3, 0.8), torch.distributions.Normal(0.0, 1.0)
    x = 0.3 + 0.8 * torch.randn(1, 200_000, generator=rng)
    exact = torch.distributions.kl_divergence(p, q).item()
    for kind in ("k1", "k3"):
        estimate = kl_estimate(q.log_prob(x) - p.log_prob(x), kind)
        assert abs(estimate.mean().item() - exact) < 4 * estimate.std().item() / 200_000**0.5


def test_exact_kl_is_never_negative() -> None:
    logits = torch.randn(1, 10_000, 4, generator=torch.Generator().manual_seed(0)) * 5
    old, new = Categorical(logits, (4,)), Categorical(logits + 1e-7, (4,))
    assert (old.kl(new) < 0).any()  # rounding
    assert (exact_kl(old, new) >= 0).all()


# --- whole gradients ----------------------------------------------------------------------------------------

CLIP, ENTROPY_COEF, VALUE_COEF = 0.2, 0.03, 0.7


def batch_of(members: int, rows: int, obs_size: int = 1, **columns: Tensor) -> Batch:
    given = {
        "obs": torch.zeros(members, rows, obs_size),
        "action": torch.zeros(members, rows, 1, dtype=torch.int64),
        "weight": torch.ones(members, rows),
        **columns,
    }
    return Batch(given, torch.full((members,), rows))


def ppo_chain(members: int, clip_value: float | None, normalize: bool) -> Chain:
    return Chain(
        surrogate=Surrogate(Constant(CLIP, members), None, normalize),
        value=Value(VALUE_COEF, clip_value),
        entropy=Entropy(Constant(ENTROPY_COEF, members)),
    )


def separate(stacked: StackedMLP, m: int) -> nn.Sequential:
    """Member m of a stacked network of tanh layers, as torch.nn.Linear layers with copies of its weights."""
    layers: list[nn.Module] = []
    for weight, bias in zip(stacked.weights, stacked.biases, strict=True):
        linear = nn.Linear(*weight.shape[1:])
        linear.load_state_dict({"weight": weight[m].T, "bias": bias[m, 0]})
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def gradients(policy: Policy, chain: Chain, batch: Batch) -> dict[str, Tensor]:
    names, params = zip(*policy.named_parameters(), strict=True)
    loss = reduce(chain.losses(policy.evaluate(batch), batch, policy), batch)
    return dict(zip(names, torch.autograd.grad(loss.sum(), params), strict=True))


def assert_same_gradients(ours: dict[str, Tensor], m: int, name: str, theirs: nn.Sequential) -> None:
    linears = [layer for layer in theirs if isinstance(layer, nn.Linear)]
    for i, linear in enumerate(linears):
        assert linear.weight.grad is not None and linear.bias.grad is not None
        for kind, grad in (("weights", linear.weight.grad.T), ("biases", linear.bias.grad[None])):
            torch.testing.assert_close(ours[f"{name}.{kind}.{i}"][m], grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["discrete", "heads", "continuous"])
@pytest.mark.parametrize(("clip_value", "normalize"), [(None, True), (0.3, False)])
def test_ppo_gradient_against_separate_networks(kind: str, clip_value: float | None, normalize: bool) -> None:
    """Equation 9 of the PPO paper written out once more, for each member with its own torch.nn.Linear layers."""
    members, rows, obs_size = 3, 40, 5
    rng = torch.Generator().manual_seed(4)
    sizes = {"discrete": (3,), "heads": (2, 3), "continuous": ()}[kind]
    actions = Actions("continuous", (), 2) if kind == "continuous" else Actions("discrete", sizes)
    policy = Policy(obs_size, actions, [7, 8, 9], hidden=(8, 6), critic_hidden=(7,), log_std_init=-0.3)
    with torch.no_grad():  # away from the small output layer and zero biases of the start
        for param in policy.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=rng))
    if kind == "continuous":
        action = torch.randn(members, rows, 2, generator=rng)
    else:
        action = torch.stack([torch.randint(0, n, (members, rows), generator=rng) for n in sizes], -1)
    batch = batch_of(members, rows, obs=torch.randn(members, rows, obs_size, generator=rng), action=action)
    near = policy.evaluate(batch)
    assert near.value is not None
    weight = torch.rand(members, rows, generator=rng) + 0.5
    weight[1, 30:] = 0.0  # a member with fewer rows
    batch = batch.with_columns(
        log_prob=near.log_prob.detach() + 0.3 * torch.randn(members, rows, generator=rng),
        advantage=3 * torch.randn(members, rows, generator=rng) + 1,
        ret=torch.randn(members, rows, generator=rng),
        value=near.value.detach() + 0.5 * torch.randn(members, rows, generator=rng),
        weight=weight,
    )
    ours = gradients(policy, ppo_chain(members, clip_value, normalize), batch)

    for m in range(members):
        row = {name: x[m, :30] if m == 1 else x[m] for name, x in batch.items()}
        actor, critic = separate(policy.actor, m), separate(policy.critic, m)  # type: ignore[arg-type]
        head = actor(row["obs"])
        log_std = None if policy.log_std is None else policy.log_std[m].detach().clone().requires_grad_()
        if log_std is not None:
            normal = torch.distributions.Normal(head, log_std.exp())
            log_prob, entropy = normal.log_prob(row["action"]).sum(1), normal.entropy().sum(1)
        else:
            heads = [torch.distributions.Categorical(logits=part) for part in head.split(sizes, 1)]
            log_prob = sum(d.log_prob(a) for d, a in zip(heads, row["action"].unbind(1), strict=True))
            entropy = sum(d.entropy() for d in heads)
        advantage = row["advantage"]
        if normalize:
            advantage = (advantage - advantage.mean()) / advantage.std()
        ratio = torch.exp(log_prob - row["log_prob"])
        gain = torch.where(advantage >= 0, ratio.clamp(max=1 + CLIP) * advantage, ratio.clamp(min=1 - CLIP) * advantage)
        value = critic(row["obs"])[:, 0]
        squared = (value - row["ret"]) ** 2
        if clip_value is not None:
            old = row["value"]
            squared = torch.max(squared, (old + (value - old).clamp(-clip_value, clip_value) - row["ret"]) ** 2)
        loss = -gain + VALUE_COEF * squared / 2 - ENTROPY_COEF * entropy
        (loss * row["weight"]).mean().backward()
        assert_same_gradients(ours, m, "actor", actor)
        assert_same_gradients(ours, m, "critic", critic)
        if log_std is not None:
            torch.testing.assert_close(ours["log_std"][m], log_std.grad, atol=1e-6, rtol=1e-4)


def test_ppo_gradient_against_stable_baselines3() -> None:
    """One `train()` of theirs by gradient descent at rate 1: the change of the weights is minus the gradient."""
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.logger import configure

    rows, rng = 64, torch.Generator().manual_seed(5)
    layers = {"net_arch": {"pi": [8], "vf": [8]}, "optimizer_class": torch.optim.SGD}
    coefs = {"clip_range": CLIP, "ent_coef": ENTROPY_COEF, "vf_coef": VALUE_COEF / 2, "max_grad_norm": 1e9}
    once = {"n_steps": rows, "batch_size": rows, "n_epochs": 1, "learning_rate": 1.0, "device": "cpu", "seed": 0}
    model = sb3.PPO("MlpPolicy", "CartPole-v1", policy_kwargs=layers, **coefs, **once)
    model.set_logger(configure(None, []))
    body, theirs = model.policy.mlp_extractor, model.policy
    networks = {
        "actor": nn.Sequential(body.policy_net[0], nn.Tanh(), theirs.action_net),
        "critic": nn.Sequential(body.value_net[0], nn.Tanh(), theirs.value_net),
    }

    policy = Policy(4, Actions("discrete", (2,)), [0], hidden=(8,), critic_hidden=(8,))
    with torch.no_grad():
        for name, network in networks.items():
            stacked = getattr(policy, name)
            for linear, weight, bias in zip(network[::2], stacked.weights, stacked.biases, strict=True):
                linear.weight.add_(0.2 * torch.randn(linear.weight.shape, generator=rng))
                weight[0], bias[0, 0] = linear.weight.T, linear.bias
    action = torch.randint(0, 2, (1, rows, 1), generator=rng)
    batch = batch_of(1, rows, obs=torch.randn(1, rows, 4, generator=rng), action=action)
    near = policy.evaluate(batch)
    batch = batch.with_columns(
        log_prob=near.log_prob.detach() + 0.3 * torch.randn(1, rows, generator=rng),
        advantage=3 * torch.randn(1, rows, generator=rng) + 1,
        ret=torch.randn(1, rows, generator=rng),
    )
    ours = gradients(policy, ppo_chain(1, None, normalize=True), batch)

    buffer = model.rollout_buffer
    columns = {"observations": "obs", "actions": "action", "log_probs": "log_prob"}
    for target, name in {**columns, "advantages": "advantage", "returns": "ret"}.items():
        getattr(buffer, target)[:] = batch[name][0].numpy().reshape(getattr(buffer, target).shape)
    buffer.full = True
    before = {key: param.detach().clone() for key, param in theirs.named_parameters()}
    model.train()
    for key, param in theirs.named_parameters():
        param.grad = before[key] - param.detach()
    for name, network in networks.items():
        assert_same_gradients(ours, 0, name, network)
