"""Running statistics against NumPy on all data at once, and reward scaling by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from rlkit.buffer import Rollout
from rlkit.normalize import Normalizer, RewardScale


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_statistics_are_those_of_all_rows_together(offset: float) -> None:
    rng = torch.Generator().manual_seed(0)
    normalizer, seen = Normalizer(3, 2), [[], [], []]
    for iteration in range(6):
        x = torch.randn(iteration + 2, 3, 4, 2, generator=rng) * torch.tensor([1.0, 30.0]) + offset
        valid = torch.rand(iteration + 2, 3, 4, generator=rng) < 0.6
        if iteration >= 3:
            valid[:, 1] = False  # this member is frozen
            before = [x[1].clone() for x in (normalizer.mean, normalizer.var, normalizer.count)]
        normalizer.update(x, valid)
        if iteration >= 3:
            after = [x[1] for x in (normalizer.mean, normalizer.var, normalizer.count)]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        for m in range(3):
            seen[m].append(x[:, m][valid[:, m]].double().numpy())
    for m in range(3):
        data = np.concatenate(seen[m])
        assert normalizer.count[m] == len(data)
        np.testing.assert_allclose(normalizer.mean[m], data.mean(0), rtol=1e-12)
        np.testing.assert_allclose(normalizer.var[m], data.var(0), rtol=1e-9)


def test_invalid_rows_do_not_enter() -> None:
    normalizer = Normalizer(1, 1)
    x = torch.tensor([1.0, 3.0, 1e9]).view(3, 1, 1, 1)
    normalizer.update(x, torch.tensor([True, True, False]).view(3, 1, 1))
    assert (normalizer.mean.item(), normalizer.var.item(), normalizer.count.item()) == (2.0, 1.0, 2.0)


def test_a_member_that_has_seen_nothing_stays_the_identity() -> None:
    normalizer = Normalizer(2, 1)
    x, valid = torch.full((3, 2, 1, 1), 5.0), torch.ones(3, 2, 1).bool()
    valid[:, 1] = False
    normalizer.update(x, valid)
    assert (normalizer.mean[1].item(), normalizer.var[1].item(), normalizer.count[1].item()) == (0.0, 1.0, 0.0)


def test_forward_by_hand() -> None:
    normalizer = Normalizer(2, 1)
    x = torch.tensor([[[5.0], [-3.0]], [[5.0], [-3.0]]])
    torch.testing.assert_close(normalizer(x), x)  # before the first update: the identity
    normalizer.update(torch.tensor([0.0, 4.0]).view(2, 1, 1, 1).expand(2, 2, 1, 1), torch.ones(2, 2, 1).bool())
    normalizer.mean[1], normalizer.var[1] = 1.0, 4.0
    # (5 - 2) / 2, (-3 - 2) / 2 and (5 - 1) / 2, (-3 - 1) / 2
    torch.testing.assert_close(normalizer(x), torch.tensor([[[1.5], [-2.5]], [[2.0], [-2.0]]]))
    assert normalizer(1e6 * x).abs().max() == 10.0
    assert normalizer(x).dtype == torch.float32


def test_a_constant_observation_becomes_zero() -> None:
    normalizer = Normalizer(1, 1)
    x = torch.full((7, 1, 3, 1), 0.1)
    for _ in range(3):
        normalizer.update(x, torch.ones(7, 1, 3).bool())
    assert (normalizer(x[0]) == 0).all()


def test_forward_changes_no_statistics_and_state_round_trips() -> None:
    one, two = Normalizer(2, 3), Normalizer(2, 3)
    x = torch.randn(5, 2, 4, 3, generator=torch.Generator().manual_seed(1))
    one.update(x, torch.ones(5, 2, 4).bool())
    state = copy.deepcopy(one.state_dict())
    one(x[0])
    assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())
    assert all(value.shape[0] == 2 for value in state.values())
    two.load_state_dict(state)
    assert torch.equal(one(x[0]), two(x[0]))


# --- rewards ------------------------------------------------------------------------------------------------


def rollout(rewards: list[float], ends: list[bool], valid: list[bool] | None = None) -> Rollout:
    reward = torch.tensor(rewards).view(-1, 1, 1)
    flags = torch.tensor(ends).view(-1, 1, 1)
    nothing = torch.zeros(*reward.shape, 1)
    real = torch.ones_like(flags) if valid is None else torch.tensor(valid).view(-1, 1, 1)
    return Rollout(nothing, nothing, nothing, reward, {}, reward, flags, flags & False, real)


def scaled(link: RewardScale, *args: list) -> Tensor:  # type: ignore[type-arg]
    return link.rollout(rollout(*args)).reward.flatten()


def test_reward_scale_by_hand() -> None:
    link = RewardScale(1, gamma=0.5)
    # returns 2; .5*2 + 2 = 3 (the end); 2: mean 7/3, variance (1/9 + 4/9 + 1/9) / 3 = 2/9: the first rollout's own
    # scale
    torch.testing.assert_close(scaled(link, [2.0, 2.0, 2.0], [False, True, False]), torch.full((3,), 2.0 * 4.5**0.5))
    assert link.statistics.mean.item() == pytest.approx(7 / 3) and link.statistics.var.item() == pytest.approx(2 / 9)
    # 1 / sqrt(2/9) = 2.1213203; the episode goes on from 2: returns .5*2 + 1 = 2, .5*2 + 3 = 4
    torch.testing.assert_close(scaled(link, [1.0, 3.0], [False, True]), torch.tensor([2.1213203, 6.3639610]))
    # all returns: 2 3 2 2 4, mean 2.6, variance (3 * .36 + .16 + 1.96) / 5 = 0.64
    assert link.statistics.var.item() == pytest.approx(0.64)
    assert scaled(link, [-0.4], [True]).item() == pytest.approx(-0.5)  # -.4 / .8: the mean is not subtracted
    assert scaled(link, [1e3], [True]).item() == 10.0


def test_reward_scale_leaves_out_invalid_rows() -> None:
    link = RewardScale(1, gamma=0.5)
    scaled(link, [2.0, 4.0, 0.0, 0.0], [False, True, False, False], [True, True, False, False])
    # returns 2 and .5*2 + 4 = 5: mean 3.5, variance 2.25
    assert (link.statistics.count.item(), link.statistics.var.item()) == (2.0, 2.25)
    scaled(link, [0.0], [False], [False])
    assert (link.statistics.count.item(), link.statistics.var.item()) == (2.0, 2.25)


def test_reward_scale_state_round_trip() -> None:
    one, two = RewardScale(1, 0.9), RewardScale(1, 0.9)
    two.load_state_dict(copy.deepcopy(one.state_dict()))  # nothing seen yet
    scaled(one, [1.0, 2.0, 4.0], [False, False, False])
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for _ in range(2):
        assert torch.equal(scaled(one, [3.0, -1.0], [False, True]), scaled(two, [3.0, -1.0], [False, True]))
        assert torch.equal(one.statistics.var, two.statistics.var)
