"""Log-probability, entropy, KL and samples against torch.distributions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution, kl_divergence

from rlkit.distributions import Categorical, DiagonalGaussian

HEADS = [(2,), (5,), (2, 3), (3, 1, 4)]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def theirs(logits: Tensor, sizes: tuple[int, ...]) -> list[TorchCategorical]:
    return [TorchCategorical(logits=head) for head in logits.split(sizes, -1)]


# --- categorical --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", HEADS)
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_categorical_against_torch(sizes: tuple[int, ...], scale: float) -> None:
    p, q = (normal(3, 7, sum(sizes), seed=seed, scale=scale) for seed in (0, 1))
    ours, other = Categorical(p, sizes), Categorical(q, sizes)
    action = torch.stack([d.sample() for d in theirs(p, sizes)], -1)
    assert action.shape == (3, 7, len(sizes))
    log_prob = sum(d.log_prob(a) for d, a in zip(theirs(p, sizes), action.unbind(-1), strict=True))
    entropy = sum(d.entropy() for d in theirs(p, sizes))
    kl = sum(kl_divergence(a, b) for a, b in zip(theirs(p, sizes), theirs(q, sizes), strict=True))
    torch.testing.assert_close(ours.log_prob(action), log_prob)
    torch.testing.assert_close(ours.entropy(), entropy)
    torch.testing.assert_close(ours.kl(other), kl)
    assert ours.kl(ours).abs().max() == 0


def test_categorical_by_hand() -> None:
    p = Categorical(torch.tensor([[0.5, 0.5, 0.25, 0.75]]).log(), (2, 2))
    q = Categorical(torch.tensor([[0.25, 0.75, 0.25, 0.75]]).log(), (2, 2))
    assert p.log_prob(torch.tensor([[0, 1]])).item() == pytest.approx(-0.9808293)  # log(.5 * .75)
    assert p.entropy().item() == pytest.approx(1.2554823)  # log 2 + (.25 log 4 + .75 log 4/3) = .6931472 + .5623351
    assert p.kl(q).item() == pytest.approx(0.1438410)  # .5 log 2 + .5 log 2/3


@pytest.mark.parametrize("sizes", HEADS)
def test_categorical_samples_follow_the_probabilities(sizes: tuple[int, ...]) -> None:
    rows, rng = 40_000, torch.Generator().manual_seed(1)
    logits = normal(sum(sizes), seed=2).expand(rows, -1)
    gumbel = -torch.empty(rows, sum(sizes), dtype=torch.float64).exponential_(generator=rng).log()
    action = Categorical(logits, sizes).sample(gumbel)
    assert action.shape == (rows, len(sizes)) and action.dtype == torch.int64
    for i, head in enumerate(theirs(logits[0], sizes)):
        frequency = torch.bincount(action[:, i], minlength=sizes[i]) / rows
        bound = 4 * (head.probs * (1 - head.probs) / rows).sqrt()
        assert ((frequency - head.probs).abs() <= bound + 1e-12).all()


def test_heads_are_sampled_independently() -> None:
    rows, rng = 40_000, torch.Generator().manual_seed(4)
    gumbel = -torch.empty(rows, 4).exponential_(generator=rng).log()
    action = Categorical(torch.zeros(rows, 4), (2, 2)).sample(gumbel)
    both = (action.prod(-1)).float().mean().item()
    assert abs(both - 0.25) < 4 * (0.25 * 0.75 / rows) ** 0.5


def test_categorical_mode_and_zero_noise() -> None:
    dist = Categorical(torch.tensor([[0.1, 2.0, -1.0, 5.0, 4.0]]), (3, 2))
    assert dist.mode().tolist() == [[1, 0]]
    assert dist.sample(torch.zeros(1, 5)).tolist() == [[1, 0]]


# --- gaussian -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 1, 2), (3, 7, 2)], ids=["free", "state"])
@pytest.mark.parametrize("scale", [0.1, 2.0])
def test_gaussian_against_torch(shape: tuple[int, ...], scale: float) -> None:
    mean, other_mean = normal(3, 7, 2, seed=0), normal(3, 7, 2, seed=1)
    log_std, other_log_std = normal(*shape, seed=2, scale=scale), normal(*shape, seed=3, scale=scale)
    ours, other = DiagonalGaussian(mean, log_std), DiagonalGaussian(other_mean, other_log_std)
    oracle = Independent(Normal(mean, log_std.exp().expand_as(mean)), 1)
    other_oracle = Independent(Normal(other_mean, other_log_std.exp().expand_as(mean)), 1)
    action = oracle.sample()
    torch.testing.assert_close(ours.log_prob(action), oracle.log_prob(action))
    torch.testing.assert_close(ours.entropy(), oracle.entropy())
    torch.testing.assert_close(ours.kl(other), kl_divergence(oracle, other_oracle))
    assert ours.log_prob(action).shape == ours.entropy().shape == ours.kl(other).shape == (3, 7)
    assert ours.kl(ours).abs().max() == 0
    assert torch.equal(ours.mode(), mean)


def test_gaussian_by_hand() -> None:
    # standard deviations 1 and 2: KL(N(0,1) || N(1,2)) = log 2 + (1 + 1)/8 - 1/2 = 0.4431472
    p = DiagonalGaussian(torch.zeros(1, 1), torch.zeros(1, 1))
    q = DiagonalGaussian(torch.ones(1, 1), torch.full((1, 1), 0.6931472))
    assert p.kl(q).item() == pytest.approx(0.4431472)
    assert p.log_prob(torch.tensor([[2.0]])).item() == pytest.approx(-2.9189385)  # -2 - log(2 pi)/2
    assert q.entropy().item() == pytest.approx(2.1120857)  # log 2 + (1 + log(2 pi))/2


def test_kl_of_nearly_equal_gaussians_keeps_its_digits() -> None:
    base = torch.zeros(1, 1)
    kl = DiagonalGaussian(base, base).kl(DiagonalGaussian(base, base + 1e-3))
    assert kl.item() == pytest.approx(9.9933e-7, rel=1e-3)  # d^2 - 2/3 d^3 with d = 1e-3, in float32


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_squashed_log_prob_against_torch(scale: float) -> None:
    mean, log_std = normal(4, 9, 2, scale=scale), normal(4, 1, 2, seed=1, scale=0.3)
    raw = DiagonalGaussian(mean, log_std, squash=True).sample(normal(4, 9, 2, seed=2))  # before tanh
    base = Independent(Normal(mean, log_std.exp().expand_as(mean)), 1)
    oracle = TransformedDistribution(base, [TanhTransform(cache_size=1)])
    expected = base.log_prob(raw) - TanhTransform().log_abs_det_jacobian(raw, raw.tanh()).sum(-1)
    ours = DiagonalGaussian(mean, log_std, squash=True).log_prob(raw)
    torch.testing.assert_close(ours, expected)
    inside = raw.abs().amax(-1) < 5  # further out the inverse of tanh has lost its digits
    torch.testing.assert_close(ours[inside], oracle.log_prob(raw.tanh())[inside], rtol=1e-6, atol=1e-6)


def test_squashed_density_integrates_to_one() -> None:
    action = torch.linspace(-1, 1, 200_001, dtype=torch.float64)[1:-1]  # the action taken; density per unit of it
    dist = DiagonalGaussian(torch.tensor([0.4]), torch.tensor([-0.5]), squash=True)
    density = dist.log_prob(action.atanh()[:, None]).exp()
    assert torch.trapezoid(density, action).item() == pytest.approx(1.0, abs=1e-4)


def test_squashed_log_prob_is_finite_far_out() -> None:
    dist = DiagonalGaussian(torch.zeros(1, 1), torch.zeros(1, 1), squash=True)
    raw = torch.tensor([[-30.0], [30.0]])
    # -u^2/2 - log(2 pi)/2 - (2 log 2 - 2 |u|) = -450 - .9189385 - 1.3862944 + 60
    torch.testing.assert_close(dist.log_prob(raw), torch.full((2,), -392.3052329))


def test_squash_leaves_kl_and_documents_the_entropy_before_it() -> None:
    args = normal(2, 3, 2), normal(2, 1, 2, seed=1)
    plain, squashed = DiagonalGaussian(*args), DiagonalGaussian(*args, squash=True)
    other = DiagonalGaussian(args[0] + 1, args[1], squash=True)
    assert torch.equal(squashed.kl(other), plain.kl(other))
    assert torch.equal(squashed.entropy(), plain.entropy())


def test_gaussian_samples() -> None:
    rows = 40_000
    mean, log_std = torch.tensor([1.0, -2.0]).double().expand(rows, -1), torch.tensor([[0.5, -1.0]]).double()
    sample = DiagonalGaussian(mean, log_std).sample(normal(rows, 2, seed=5))
    std = log_std[0].exp()
    assert ((sample.mean(0) - mean[0]).abs() < 4 * std / rows**0.5).all()
    assert ((sample.std(0) / std - 1).abs() < 4 / (2 * rows) ** 0.5).all()


# --- both ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dist",
    [
        Categorical(normal(2, 6, 3), (3,)),
        Categorical(normal(2, 6, 5), (2, 3)),
        DiagonalGaussian(normal(2, 6, 2), normal(2, 1, 2, seed=1)),
        DiagonalGaussian(normal(2, 6, 2), normal(2, 6, 2, seed=1), squash=True),
    ],
    ids=["one head", "two heads", "free", "squashed"],
)
def test_params_make_the_same_distribution_again(dist: Categorical | DiagonalGaussian) -> None:
    assert all(x.shape[:2] == (2, 6) for x in dist.params.values())  # a column of a batch
    again = dist.with_params({name: x.clone() for name, x in dist.params.items()})
    action = dist.sample(torch.zeros_like(next(iter(dist.params.values()))) + 0.1)
    torch.testing.assert_close(again.log_prob(action), dist.log_prob(action))
    torch.testing.assert_close(again.entropy(), dist.entropy())
    assert torch.equal(again.mode(), dist.mode())
    assert dist.kl(again).abs().max() < 1e-12


def test_kl_between_kinds_is_refused() -> None:
    categorical, gaussian = Categorical(torch.zeros(1, 2), (2,)), DiagonalGaussian(torch.zeros(1, 2), torch.zeros(1, 2))
    for one, two in ((categorical, gaussian), (gaussian, categorical)):
        with pytest.raises(TypeError, match="not defined"):
            one.kl(two)
