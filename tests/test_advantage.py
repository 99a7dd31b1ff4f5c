"""Advantages and row weights on numbers worked out by hand, and against Stable-Baselines3 where it is installed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from conftest import small_learner, train, weights
from torch import Tensor

from rlkit.advantage import (
    CRITIC,
    ESTIMATORS,
    GROUPS,
    Estimator,
    binned,
    degenerate_share,
    find_estimator,
    gae,
    grouped_gae,
    leave_one_out,
    mixed,
    n_step,
    outcome,
    return_to_go,
    returns_to_go,
)
from rlkit.aggregation import AGGREGATIONS
from rlkit.buffer import Rollout
from rlkit.build import ConfigError, build_learner, to_config
from rlkit.conf.schema import AlgoConfig
from rlkit.group_relative import first_visits, scaled, state_bins, summarise_groups, time_bins
from rlkit.train import compose


def that_can_use(what: str) -> dict[str, Estimator]:
    return {name: estimator for name, estimator in sorted(ESTIMATORS.items()) if what in estimator.needs}


GROUP_RELATIVE = {
    **that_can_use(GROUPS),
    **{f"{name} by state": ESTIMATORS[name].given(by="state", resolution=1.0) for name in ("binned", "grouped_gae")},
}
CRITIC_BASED = that_can_use(CRITIC)


def column(*numbers: float) -> Tensor:
    """One environment of one member over time, [T, 1, 1]."""
    return torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)


def at(time: int, *steps: int) -> Tensor:
    """Flags [T, 1, 1] that are true at the given steps."""
    return torch.tensor([t in steps for t in range(time)]).view(-1, 1, 1)


def episodes(rewards: list[list[list[float]]], group: list[list[int]]) -> Rollout:
    """A rollout of one terminated episode for each (member, environment): rewards[m][n] is as long as the episode."""
    time = max(len(lane) for member in rewards for lane in member)
    shape = (max(time, 1), len(rewards), len(rewards[0]))
    reward, valid, terminated = torch.zeros(shape), torch.zeros(shape).bool(), torch.zeros(shape).bool()
    for m, member in enumerate(rewards):
        for n, lane in enumerate(member):
            reward[: len(lane), m, n] = torch.tensor(lane)
            valid[: len(lane), m, n] = True
            terminated[len(lane) - 1, m, n] = bool(lane)
    nothing = torch.zeros(*shape, 1)
    return Rollout(
        obs=nothing,
        final_obs=nothing,
        action=nothing.long(),
        log_prob=nothing[..., 0],
        old={"logits": nothing},
        reward=reward,
        terminated=terminated,
        truncated=torch.zeros(shape).bool(),
        valid=valid,
        group=torch.tensor(group),
    )


# --- gae ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        # gamma = lambda = 0.5; V = 0.5, 1, 1.5; V(final) = 4 at t = 1 and 2 at the window's end
        # delta = 1+.5*1-.5 = 1,  2+.5*1.5-1 = 1.75,  3+.5*2-1.5 = 2.5
        # A2 = 2.5,  A1 = 1.75+.25*2.5 = 2.375,  A0 = 1+.25*2.375 = 1.59375
        ([], [], [1.59375, 2.375, 2.5]),
        # delta1 = 2-1 = 1,  A0 = 1+.25*1 = 1.25
        ([1], [], [1.25, 1.0, 2.5]),
        # delta1 = 2+.5*4-1 = 3,  A0 = 1+.25*3 = 1.75
        ([], [1], [1.75, 3.0, 2.5]),
        ([1], [1], [1.25, 1.0, 2.5]),
        # the window's last row ends an episode: delta2 = 3-1.5 = 1.5,  A1 = 1.75+.25*1.5 = 2.125,  A0 = 1.53125
        ([2], [], [1.53125, 2.125, 1.5]),
    ],
)
def test_gae_by_hand(terminated: list[int], truncated: list[int], expected: list[float]) -> None:
    final_value = column(0, 4, 2)
    flags = at(3, *terminated), at(3, *truncated)
    advantage = gae(column(1, 2, 3), column(0.5, 1, 1.5), final_value, *flags, 0.5, 0.5)
    assert advantage.flatten().tolist() == expected


@pytest.mark.parametrize("gae_lambda", [0.0, 0.8, 1.0])
@pytest.mark.parametrize(
    ("terminated", "truncated", "target"),
    [([], [4], 10.0), ([4], [], 1.0), ([4], [4], 1.0)],  # 1 + 0.9 * 10 = 10, and 1 without a bootstrap
)
def test_last_target_of_an_episode(
    terminated: list[int], truncated: list[int], target: float, gae_lambda: float
) -> None:
    value = column(*[10.0] * 8)  # the critic says 10 everywhere; the episode ends with its fifth step
    advantage = gae(torch.ones(8, 1, 1), value, value, at(8, *terminated), at(8, *truncated), 0.9, gae_lambda)
    assert (advantage + value)[4].item() == pytest.approx(target, abs=1e-5)


def test_truncation_reads_the_value_of_the_final_observation() -> None:
    value, final_value = column(10, 10, 99, 10), column(0, 20, 0, 10)
    advantage = gae(torch.ones(4, 1, 1), value, final_value, at(4), at(4, 1), 0.9, 0.95)
    assert (advantage + value)[1].item() == pytest.approx(1 + 0.9 * 20)  # not 0.9 * 99, the next episode's first state


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_nothing_leaks_into_the_episode_before(kind: str) -> None:
    rng = torch.Generator().manual_seed(0)
    reward, value, final_value = (torch.randn(9, 1, 1, generator=rng) for _ in range(3))
    flags = {"terminated": at(9), "truncated": at(9), kind: at(9, 4)}
    before = gae(reward, value, final_value, **flags, gamma=0.99, gae_lambda=0.95)
    reward[5:], value[5:], final_value[5:] = 1e3, -1e3, 1e4
    after = gae(reward, value, final_value, **flags, gamma=0.99, gae_lambda=0.95)
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5:], after[5:])


def test_no_phantom_row_between_episodes() -> None:
    # episodes of three steps in two copies, the second one step ahead; V = 0, gamma = lambda = 1: A counts steps left
    terminated = torch.tensor([[t % 3 == 2, t % 3 == 1] for t in range(8)])[:, None]
    nothing = torch.zeros(8, 1, 2)
    advantage = gae(torch.ones(8, 1, 2), nothing, nothing, terminated, terminated & False, 1.0, 1.0)
    assert advantage[:, 0, 0].tolist() == [3, 2, 1, 3, 2, 1, 2, 1]
    assert advantage[:, 0, 1].tolist() == [2, 1, 3, 2, 1, 3, 2, 1]


@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
def test_gae_is_the_sum_it_is_defined_as(gae_lambda: float) -> None:
    """A_t = sum_k (gamma lambda)^k delta_{t+k} to the episode's end; with lambda 1, the discounted return minus V."""
    rng = np.random.default_rng(1)
    time, gamma = 30, 0.9
    reward, value, final_value = rng.normal(size=(3, time))
    terminated, truncated = rng.random((2, time)) < 0.15
    expected, returns = np.zeros(time), np.zeros(time)
    for start in range(time):
        for k, t in enumerate(range(start, time)):
            last = terminated[t] or truncated[t] or t == time - 1
            bootstrap = 0.0 if terminated[t] else (final_value[t] if last else value[t + 1])
            expected[start] += (gamma * gae_lambda) ** k * (reward[t] + gamma * bootstrap - value[t])
            returns[start] += gamma**k * (reward[t] + (gamma * bootstrap if last else 0.0))
            if last:
                break
    inputs = (torch.from_numpy(x).view(-1, 1, 1) for x in (reward, value, final_value, terminated, truncated))
    advantage = gae(*inputs, gamma, gae_lambda).flatten().numpy()
    np.testing.assert_allclose(advantage, expected, atol=1e-12)
    if gae_lambda == 1.0:
        np.testing.assert_allclose(advantage, returns - value, atol=1e-12)


def test_gae_against_stable_baselines3() -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    from gymnasium import spaces

    time, envs, gamma, gae_lambda = 40, 3, 0.97, 0.9
    rng = np.random.default_rng(2)
    reward, value, final_value = rng.normal(size=(3, time, envs)).astype(np.float32)
    terminated, truncated = rng.random((2, time, envs)) < 0.1
    ended = terminated | truncated
    theirs = buffers.RolloutBuffer(
        time, spaces.Box(-1, 1, (1,)), spaces.Discrete(2), "cpu", gae_lambda=gae_lambda, gamma=gamma, n_envs=envs
    )
    starts = np.ones(envs)
    for t in range(time):  # it bootstraps a truncated episode through the reward
        bootstrapped = reward[t] + gamma * final_value[t] * (truncated[t] & ~terminated[t])
        row = np.zeros((envs, 1)), np.zeros((envs, 1)), bootstrapped, starts
        theirs.add(*row, torch.from_numpy(value[t]), torch.zeros(envs))
        starts = ended[t].astype(np.float32)
    theirs.compute_returns_and_advantage(torch.from_numpy(final_value[-1]), ended[-1])
    inputs = (torch.from_numpy(x)[:, None] for x in (reward, value, final_value, terminated, truncated))
    ours = gae(*inputs, gamma, gae_lambda)[:, 0].numpy()
    np.testing.assert_allclose(ours, theirs.advantages, atol=1e-5)
    np.testing.assert_allclose(ours + value, theirs.returns, atol=1e-5)


# --- n_step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "terminated", "truncated", "expected"),
    [
        # gamma 0.5; r = 1 2 3; V = 0.5, 1, 1.5; V(final) = 4 at t = 1 and 2 at the window's end
        # n = 1, the residuals: 1+.5*1-.5 = 1,  2+.5*1.5-1 = 1.75,  3+.5*2-1.5 = 2.5
        (1, [], [], [1.0, 1.75, 2.5]),
        # n = 2: 1+.5*2+.25*1.5-.5 = 1.875;  the window ends after 2+.5*3+.25*2-1 = 3;  and after 3+.5*2-1.5 = 2.5
        (2, [], [], [1.875, 3.0, 2.5]),
        # n = 3: 1+.5*2+.25*3+.125*2-.5 = 2.5; no more steps are left for a larger n
        (3, [], [], [2.5, 3.0, 2.5]),
        (100, [], [], [2.5, 3.0, 2.5]),
        # truncated at t = 1: 1+.5*2+.25*4-.5 = 2.5,  2+.5*4-1 = 3; the value of the next episode never enters
        (2, [], [1], [2.5, 3.0, 2.5]),
        (100, [], [1], [2.5, 3.0, 2.5]),
        # terminated at t = 1: 1+.5*2-.5 = 1.5,  2-1 = 1
        (2, [1], [], [1.5, 1.0, 2.5]),
        (100, [1], [1], [1.5, 1.0, 2.5]),
        # terminated in the last row: 2+.5*3-1 = 2.5,  3-1.5 = 1.5
        (2, [2], [], [1.875, 2.5, 1.5]),
    ],
)
def test_n_step_by_hand(n: int, terminated: list[int], truncated: list[int], expected: list[float]) -> None:
    flags = at(3, *terminated), at(3, *truncated)
    advantage = n_step(column(1, 2, 3), column(0.5, 1, 1.5), column(0, 4, 2), *flags, 0.5, n)
    assert advantage.flatten().tolist() == expected


def random_steps(time: int, seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    names = ("reward", "value", "final_value")
    steps = {name: torch.from_numpy(rng.normal(size=(time, 2, 3))) for name in names}
    return steps | {name: torch.from_numpy(rng.random((time, 2, 3)) < 0.15) for name in ("terminated", "truncated")}


@pytest.mark.parametrize("n", [1, 2, 5, 29, 30, 1000])
def test_n_step_is_the_sum_of_n_residuals(n: int) -> None:
    """sum_{k<n} gamma^k delta_{t+k} to the episode's end telescopes to the n-step return minus V."""
    steps, gamma = random_steps(30, seed=n), 0.9
    delta = gae(**steps, gamma=gamma, gae_lambda=0.0)
    ended = steps["terminated"] | steps["truncated"]
    expected = torch.zeros_like(delta)
    for t in range(30):
        inside = torch.ones_like(ended[0])
        for k in range(min(n, 30 - t)):
            expected[t] += gamma**k * delta[t + k] * inside
            inside = inside & ~ended[t + k]
    torch.testing.assert_close(n_step(**steps, gamma=gamma, n=n), expected, atol=1e-12, rtol=0)
    if n >= 30:
        torch.testing.assert_close(gae(**steps, gamma=gamma, gae_lambda=1.0), expected, atol=1e-12, rtol=0)


# --- a rollout with a critic --------------------------------------------------------------------------------


def with_critic(rollout: Rollout, value: Tensor, final_value: Tensor) -> Rollout:
    return rollout.replace(value=value, final_value=final_value)


def windows(seed: int, time: int = 12, members: int = 2, envs: int = 3) -> Rollout:
    """A rollout of windows of a random critic."""
    steps = random_steps(time, seed)
    nothing = torch.zeros(time, members, envs, 1)
    rollout = episodes([[[0.0] * time] * envs] * members, [[0] * envs] * members)
    steps = {name: x.float() if x.is_floating_point() else x for name, x in steps.items()}
    return rollout.replace(**steps, obs=nothing)


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        # as above; lambda 0.25, so 3/4 (G - V) + 1/4 delta, G - V = 2.5 3 2.5 and delta = 1 1.75 2.5
        ([], [], [2.125, 2.6875, 2.5]),
        ([], [1], [2.125, 3.0, 2.5]),  # G - V = 2.5 3, delta = 1 3
        ([1], [], [1.375, 1.0, 2.5]),  # G - V = 1.5 1, delta = 1 1
    ],
)
def test_mixed_by_hand_with_a_critic(terminated: list[int], truncated: list[int], expected: list[float]) -> None:
    rollout = episodes([[[1, 2, 3]]], [[0]]).replace(terminated=at(3, *terminated), truncated=at(3, *truncated))
    rollout = with_critic(rollout, column(0.5, 1, 1.5), column(0, 4, 2))
    advantage, ret = ESTIMATORS["mixed"](rollout, 0.5, 0.25)
    assert advantage.flatten().tolist() == expected
    assert ret.flatten().tolist() == [expected[0] + 0.5, expected[1] + 1, expected[2] + 1.5]  # what V should have been
    assert ESTIMATORS["mixed"](rollout.replace(group=None), 0.5, 0.25)[0].flatten().tolist() == expected


@pytest.mark.parametrize("name", CRITIC_BASED)
def test_the_target_of_the_critic_is_the_advantage_above_its_value(name: str) -> None:
    rollout = windows(seed=3)
    advantage, ret = CRITIC_BASED[name](rollout, 0.9, 0.8)
    assert rollout.value is not None
    torch.testing.assert_close(ret, advantage + rollout.value)


def test_n_is_an_argument_of_n_step() -> None:
    rollout = windows(seed=4)
    one, many = (ESTIMATORS["n_step"].given(n=n)(rollout, 0.9, 0.5)[0] for n in (1, 100))
    torch.testing.assert_close(one, ESTIMATORS["gae"](rollout, 0.9, 0.0)[0])
    torch.testing.assert_close(many, ESTIMATORS["gae"](rollout, 0.9, 1.0)[0])
    assert not torch.allclose(one, many)
    five = ESTIMATORS["n_step"].given(n=5)(rollout, 0.9, 0.5)
    assert torch.equal(five[0], ESTIMATORS["n_step"](rollout, 0.9, 0.0)[0])


@pytest.mark.parametrize("name", CRITIC_BASED)
def test_members_with_a_critic_do_not_see_each_other(name: str) -> None:
    rollout = windows(seed=5)
    together = CRITIC_BASED[name](rollout, 0.9, 0.7)
    rollout.valid[:, 1] = False  # a frozen member has no steps and no end of an episode
    for flag in ("reward", "terminated", "truncated"):
        getattr(rollout, flag)[:, 1] = 0
    frozen = CRITIC_BASED[name](rollout, 0.9, 0.7)
    for a, b in zip(together, frozen, strict=True):
        assert torch.equal(a[:, 0], b[:, 0])
        assert b.isfinite().all()
    assert not frozen[0][:, 1].any()


@pytest.mark.parametrize("name", sorted(set(CRITIC_BASED) - set(GROUP_RELATIVE)))
def test_critic_based_estimators_refuse_a_rollout_without_values(name: str) -> None:
    with pytest.raises(ValueError, match="critic"):
        CRITIC_BASED[name](episodes([[[1.0]]], [[0]]), 0.9, 1.0)


# --- group-relative -----------------------------------------------------------------------------------------

RETURNS, GROUP = torch.tensor([[0.0, 2.0, 4.0, 1.0, 3.0]]), torch.tensor([[0, 0, 0, 1, 1]])


def test_returns_to_go_by_hand() -> None:
    # gamma 0.5: 4;  2 + .5*4 = 4;  1 + .5*4 = 3  |  the second episode is shorter: 2;  2 + .5*2 = 3
    rollout = episodes([[[1, 2, 4], [2, 2]]], [[0, 0]])
    to_go = returns_to_go(rollout.reward, rollout.valid, rollout.ended, 0.5)
    assert to_go[:, 0].T.tolist() == [[3, 4, 4], [3, 2, 0]]


def test_outcome_by_hand() -> None:
    # group 0: mean 2, deviations -2 0 2, std (ddof 1) sqrt((4+4)/2) = 2, 2 / (2 + 1e-4) = 0.9999500
    # group 1: mean 2, deviations -1 1,   std sqrt((1+1)/1) = 1.4142136,    1 / (1.4142136 + 1e-4) = 0.7070568
    expected = torch.tensor([[-0.9999500, 0.0, 0.9999500, -0.7070568, 0.7070568]])
    torch.testing.assert_close(outcome(RETURNS, GROUP), expected, atol=2e-7, rtol=0)


def test_outcome_no_std_by_hand() -> None:
    assert outcome(RETURNS, GROUP, scale=False).tolist() == [[-2, 0, 2, -1, 1]]


def test_leave_one_out_by_hand() -> None:
    # means of the others: (2+4)/2 = 3, (0+4)/2 = 2, (0+2)/2 = 1  |  3, 1
    assert leave_one_out(RETURNS, GROUP).tolist() == [[-3, 0, 3, -2, 2]]


def test_return_to_go_by_hand() -> None:
    # to go 3 4 4 | 3 2: t=0 equal, t=1 mean 3 (+1, -1), t=2 alone; std over 5 rows sqrt((1+1)/5) = 0.6324555
    rollout = episodes([[[1, 2, 4], [2, 2]]], [[0, 0]])
    advantage, ret = ESTIMATORS["return_to_go"](rollout, 0.5, 1.0)
    expected = torch.tensor([[0.0, 1.5811388, 0.0], [0.0, -1.5811388, 0.0]])  # 1 / 0.6324555
    torch.testing.assert_close(advantage[:, 0].T, expected)
    assert ret[:, 0].T.tolist() == [[3, 4, 4], [3, 2, 0]]


def test_return_to_go_compares_only_members_alive_at_the_step() -> None:
    to_go = torch.tensor([[[1.0, 3.0, 8.0]], [[2.0, 6.0, 0.0]], [[7.0, 0.0, 0.0]]])  # t = 2: one member is left
    valid = to_go > 0
    advantage = return_to_go(to_go, torch.zeros(1, 3, dtype=torch.int64), valid)
    centred = torch.tensor([[[-3.0, -1.0, 4.0]], [[-2.0, 2.0, 0.0]], [[0.0, 0.0, 0.0]]])  # t=0 mean 4, t=1 mean 4
    torch.testing.assert_close(advantage, centred / (34 / 6) ** 0.5)  # 9+1+16+4+4 = 34 over six rows


@pytest.mark.parametrize(
    ("gae_lambda", "expected"),
    [
        # gamma 0.5, to go 3 4 4 | 3 2; the group's mean is 3 at t = 0 and 1, 4 at t = 2, where the first is alone
        # delta = 1+.5*3-3 = -.5,  2+.5*4-3 = 1,  4-4 = 0  |  2+.5*3-3 = .5,  2-3 = -1 (nothing follows its end)
        (0.0, [[-0.5, 1.0, 0.0], [0.5, -1.0, 0.0]]),
        (0.5, [[-0.25, 1.0, 0.0], [0.25, -1.0, 0.0]]),  # -.5+.25*1 | .5-.25*1
        (1.0, [[0.0, 1.0, 0.0], [0.0, -1.0, 0.0]]),  # to go minus the mean: 3-3, 4-3, 4-4 | 3-3, 2-3
    ],
)
def test_grouped_gae_by_hand(gae_lambda: float, expected: list[list[float]]) -> None:
    advantage, ret = ESTIMATORS["grouped_gae"](episodes([[[1, 2, 4], [2, 2]]], [[0, 0]]), 0.5, gae_lambda)
    assert advantage[:, 0].T.tolist() == expected
    assert ret[:, 0].T.tolist() == [[3, 4, 4], [3, 2, 0]]


def test_grouped_gae_reads_each_episode_in_its_own_group() -> None:
    # gamma 1: to go 4 3 | 2, mean 3, then alone: delta = 1+3-3, 0 | 2-3;  to go 8 | 4: 2 | -2
    rollout = episodes([[[1, 3], [8], [2], [4]]], [[1, 0, 1, 0]])
    advantage, _ = ESTIMATORS["grouped_gae"](rollout, 1.0, 0.0)
    assert advantage[:, 0].T.tolist() == [[1, 0], [2, 0], [-1, 0], [-2, 0]]


@pytest.mark.parametrize("seed", range(5))
def test_grouped_gae_with_lambda_1_is_the_return_to_go_above_the_groups_mean(seed: int) -> None:
    rollout = random_rollout(seed)
    to_go = returns_to_go(rollout.reward, rollout.valid, rollout.ended, 0.9)
    assert rollout.group is not None
    mean = summarise_groups(to_go, rollout.group, rollout.valid).mean
    advantage, _ = ESTIMATORS["grouped_gae"](rollout, 0.9, 1.0)
    torch.testing.assert_close(advantage, (to_go - mean) * rollout.valid, atol=1e-6, rtol=1e-5)
    assert advantage.any()


@pytest.mark.parametrize("gae_lambda", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_grouped_gae_sums_to_zero_over_the_members_alive(seed: int, gae_lambda: float) -> None:
    rollout = random_rollout(seed)
    advantage, _ = ESTIMATORS["grouped_gae"](rollout, 0.9, gae_lambda)
    assert rollout.group is not None
    total = summarise_groups(advantage, rollout.group, rollout.valid).total
    torch.testing.assert_close(total, torch.zeros_like(total), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("gae_lambda", "expected"),
    [
        # gamma 1; returns-to-go 3, 2 in environment 0 and 4, 3, 1 in environment 1; places 0, 1 and 1, 0, 0
        # V(0) = (3 + 3 + 1) / 3 = 7/3, V(1) = (2 + 4) / 2 = 3
        # targets: 1 + 3 = 4, 2 | 1 + 7/3 = 10/3, 2 + 7/3 = 13/3, 1; their means: place 0 28/9, place 1 8/3;
        # environment 1 is alone at t = 2, where its delta of -19/9 counts for the rows before it
        (0.0, [[8 / 9, -2 / 3], [2 / 3, 11 / 9, 0]]),
        (1.0, [[2 / 9, -2 / 3], [-2 / 9, -8 / 9, 0]]),
    ],
)
def test_grouped_gae_by_state_by_hand(gae_lambda: float, expected: list[list[float]]) -> None:
    rollout = episodes([[[1, 2], [1, 2, 1]]], [[0, 0]])
    rollout.obs[:, 0, :, 0] = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    advantage, _ = ESTIMATORS["grouped_gae"].given(by="state", resolution=1.0)(rollout, 1.0, gae_lambda)
    for n, lane in enumerate(expected):
        torch.testing.assert_close(advantage[: len(lane), 0, n], torch.tensor(lane))


def test_grouped_gae_tells_equal_returns_by_different_paths_apart_below_lambda_1() -> None:
    # gamma 1: to go 1 0 | 1 1, means 1 and .5; delta_0 = 1+.5-1 | 0+.5-1
    rollout = episodes([[[1, 0], [0, 1]]], [[0, 0]])
    assert ESTIMATORS["grouped_gae"](rollout, 1.0, 0.0)[0][0].tolist() == [[0.5, -0.5]]
    assert ESTIMATORS["grouped_gae"](rollout, 1.0, 1.0)[0][0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("gae_lambda", "expected"),
    [
        # G - b = 0 1 0 | 0 -1 and delta = -.5 1 0 | .5 -1, as above
        (0.0, [[0.0, 1.0, 0.0], [0.0, -1.0, 0.0]]),
        (0.25, [[-0.125, 1.0, 0.0], [0.125, -1.0, 0.0]]),
        (1.0, [[-0.5, 1.0, 0.0], [0.5, -1.0, 0.0]]),
    ],
)
def test_mixed_by_hand_in_groups(gae_lambda: float, expected: list[list[float]]) -> None:
    advantage, ret = ESTIMATORS["mixed"](episodes([[[1, 2, 4], [2, 2]]], [[0, 0]]), 0.5, gae_lambda)
    assert advantage[:, 0].T.tolist() == expected
    assert ret[:, 0].T.tolist() == [[3, 4, 4], [3, 2, 0]]


def test_mixed_weighs_its_two_parts() -> None:
    whole, residual = torch.tensor([4.0, -2.0]), torch.tensor([8.0, 2.0])
    assert mixed(whole, residual, 0.25).tolist() == [5.0, -1.0]  # .75*4+.25*8, .75*-2+.25*2


# --- binned -------------------------------------------------------------------------------------------------


def test_binned_by_time_by_hand() -> None:
    # gamma 0.5, to go 3 4 4 | 3 2 as above; another group 8 | 4, with mean 6
    rollout = episodes([[[1, 2, 4], [8], [2, 2], [4]]], [[0, 1, 0, 1]])
    advantage, ret = ESTIMATORS["binned"](rollout, 0.5, 1.0)
    assert advantage[:, 0].T.tolist() == [[0, 1, 0], [2, 0, 0], [0, -1, 0], [-2, 0, 0]]
    assert ret[:, 0].T.tolist() == [[3, 4, 4], [8, 0, 0], [3, 2, 0], [4, 0, 0]]


@pytest.mark.parametrize("seed", range(3))
def test_binned_by_time_is_return_to_go_without_its_scale(seed: int) -> None:
    rollout = random_rollout(seed)
    advantage, _ = ESTIMATORS["binned"].given(by="time")(rollout, 0.9, 1.0)
    std = ((advantage**2).sum((0, 2)) / rollout.valid.sum((0, 2))).sqrt()[:, None]
    torch.testing.assert_close(advantage / std, ESTIMATORS["return_to_go"](rollout, 0.9, 1.0)[0])


def four_walks() -> Rollout:
    """Four episodes over places on a line, in two groups; the first comes back to where it began."""
    rollout = episodes([[[1, 1, 2], [0, 2, 1], [6], [0, 4]]], [[0, 0, 1, 1]])
    for n, places in enumerate(([0, 1, 0], [0, 1, 2], [0], [0.4, 5])):
        rollout.obs[: len(places), 0, n, 0] = torch.tensor(places, dtype=torch.float32)
    return rollout


def test_binned_by_state_by_hand() -> None:
    # gamma 1: to go 4 3 2 | 3 3 1 | 6 | 4 4; at resolution 1 the first visits to place 0 have 4 3 6 4, mean 4.25
    # (the return to it, 2, counts not in the mean but against it); to place 1 they are equal; 2 and 5 saw one walk
    advantage, ret = ESTIMATORS["binned"].given(by="state", resolution=1.0)(four_walks(), 1.0, 1.0)
    expected = [[-0.25, 0.0, -2.25], [-1.25, 0.0, 0.0], [1.75, 0.0, 0.0], [-0.25, 0.0, 0.0]]
    assert advantage[:, 0].T.tolist() == expected
    assert ret[:, 0].T.tolist() == [[4, 3, 2], [3, 3, 1], [6, 0, 0], [4, 4, 0]]


def test_a_walk_alone_in_a_place_is_not_compared_with_itself() -> None:
    # gamma 1: to go 6 5 3 | 3 2 1, of which 6 and 3 are in one place; the first stays in place 7, where no other comes
    rollout = episodes([[[1, 2, 3], [1, 1, 1]]], [[0, 0]])
    rollout.obs[:, 0, :, 0] = torch.tensor([[0, 0], [7, 3], [7, 4]])
    advantage, _ = ESTIMATORS["binned"].given(by="state", resolution=1.0)(rollout, 1.0, 1.0)
    assert advantage[:, 0].T.tolist() == [[1.5, 0, 0], [-1.5, 0, 0]]


def test_a_finer_resolution_parts_states() -> None:
    # at resolution 0.5 the place 0.4 is no longer 0: first visits 4 3 6, mean 13/3
    advantage, _ = ESTIMATORS["binned"].given(by="state", resolution=0.5)(four_walks(), 1.0, 1.0)
    torch.testing.assert_close(advantage[0, 0], torch.tensor([4 - 13 / 3, 3 - 13 / 3, 6 - 13 / 3, 0]))


def test_state_bins_round_every_number_of_an_observation() -> None:
    obs = torch.tensor([[0.04, 0.0], [-0.04, 0.0], [0.06, 0.0], [0.14, 0.0], [0.0, 0.06], [0.0, -0.06]])
    bins = state_bins(obs.view(6, 1, 1, 2), 0.1).flatten().tolist()
    assert bins[0] == bins[1]
    assert bins[2] == bins[3]
    assert len({bins[0], bins[2], bins[4], bins[5]}) == 4
    assert min(bins) == 0


def test_a_scaled_state_is_measured_in_deviations_of_the_members_own_rows() -> None:
    obs = torch.zeros(2, 2, 2, 1)
    obs[:, 0, :, 0] = torch.tensor([[1.0, 3.0], [1.0, 3.0]])  # deviation 1
    obs[:, 1, :, 0] = torch.tensor([[10.0, 30.0], [30.0, 999.0]])  # of the three valid rows: sqrt(800 / 9)
    valid = torch.ones(2, 2, 2, dtype=torch.bool)
    valid[1, 1, 1] = False
    result = scaled(obs, valid)
    assert result[:, 0, :, 0].tolist() == [[1, 3], [1, 3]]
    torch.testing.assert_close(result[0, 1, :, 0], torch.tensor([10.0, 30.0]) * 3 / 800**0.5)
    assert scaled(torch.full((1, 1, 2, 1), 2.0), valid[:1, :1]).isfinite().all()  # a number that never changes


def test_first_visits_by_hand() -> None:
    # three columns of one member, then the same columns of another: a visit is a column's, not a member's
    bins = torch.tensor([[0, 2, 1], [1, 2, 1], [0, 0, 0], [1, 2, 1]])[:, None].expand(-1, 2, -1)
    valid = torch.ones_like(bins, dtype=torch.bool)
    valid[0, 1, 2] = False  # what is not valid is no visit: the next one is the first
    expected = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]]).bool()
    other = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [0, 0, 0]]).bool()
    assert first_visits(bins, valid).tolist() == torch.stack([expected, other], 1).tolist()


@pytest.mark.parametrize("by", ["time", "state"])
def test_a_group_of_equal_rewards_teaches_nothing_wherever_it_was_when(by: str) -> None:
    """All episodes fail alike: a place that one of them saw earlier has a lower return-to-go, which means nothing."""
    rollout = episodes([[[-1.0] * 5] * 3 + [[-1.0] * 2]], [[0, 0, 0, 1]])
    rollout.obs[:, 0, :, 0] = torch.tensor([[0, 0, 0, 0], [1, 0, 1, 2], [0, 1, 2, 2], [2, 2, 0, 0], [1, 0, 1, 0]])
    advantage, _ = ESTIMATORS["binned"].given(by=by, resolution=1.0)(rollout, 0.99, 1.0)
    assert not advantage.any()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("outcome", 0.7070568),  # 1 / (sqrt 2 + 1e-4)
        ("outcome_no_std", 1.0),
        ("leave_one_out", 2.0),
    ],
)
def test_unequal_lengths_are_masked(name: str, expected: float) -> None:
    # gamma 0.5: 1 + .5*(2 + .5*6) = 3.5 over three steps, 1.5 over one; the mean is 2.5
    rollout = episodes([[[1, 2, 6], [1.5]]], [[0, 0]])
    advantage, _ = ESTIMATORS[name](rollout, 0.5, 1.0)
    wanted = torch.tensor([[expected] * 3, [-expected, 0.0, 0.0]])
    torch.testing.assert_close(advantage[:, 0].T, wanted, atol=2e-7, rtol=0)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@pytest.mark.parametrize(
    "lane",
    [[0.1], [0.1, 0.1, 0.1], [0.7, 1e-3], [1e6 + 0.1, 0.3], [-16.273604] * 5, [0.0]],
    ids=["tenth", "three tenths", "mixed", "large", "long", "zero"],
)
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.7])
def test_degenerate_groups_are_exactly_zero(name: str, lane: list[float], size: int, gae_lambda: float) -> None:
    spread = [[1.0, 2.0], [5.0]]  # another group, which is not degenerate
    rollout = episodes([[lane] * size + spread], [[0] * size + [1, 1]])
    advantage, _ = GROUP_RELATIVE[name](rollout, 0.99, gae_lambda)
    assert (advantage[..., :size] == 0).all()
    assert (advantage[0, 0, size:] != 0).all()


def test_the_mean_of_equal_returns_is_not_always_exact() -> None:
    """Why the rule above is needed: subtracting the mean alone would leave noise."""
    tenths = torch.full((7,), 0.1)
    assert (tenths - tenths.sum() / 7).any()


def random_rollout(seed: int, members: int = 3, envs: int = 6) -> Rollout:
    rng = np.random.default_rng(seed)
    lanes = [[rng.normal(size=rng.integers(1, 8)).tolist() for _ in range(envs)] for _ in range(members)]
    lanes[0][1] = lanes[0][0]
    rollout = episodes(lanes, [rng.integers(0, 3, envs).tolist() for _ in range(members)])
    places = torch.from_numpy(rng.integers(-1, 2, rollout.obs.shape))
    return rollout.replace(obs=places.float() * rollout.valid[..., None])


def lone(rollout: Rollout, m: int) -> Rollout:
    """Member m of a rollout as a rollout of one member."""
    assert rollout.group is not None
    return Rollout(
        *(getattr(rollout, f)[:, m : m + 1] for f in ("obs", "final_obs", "action", "log_prob")),
        {},
        *(getattr(rollout, f)[:, m : m + 1] for f in ("reward", "terminated", "truncated", "valid")),
        rollout.group[m : m + 1],
    )


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@pytest.mark.parametrize("seed", range(5))
def test_members_do_not_see_each_other(name: str, seed: int) -> None:
    rollout = random_rollout(seed)
    together = GROUP_RELATIVE[name](rollout, 0.9, 0.8)
    for m in range(3):
        alone = GROUP_RELATIVE[name](lone(rollout, m), 0.9, 0.8)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[:, m : m + 1], b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@pytest.mark.parametrize("seed", range(5))
def test_no_nan_ever(name: str, seed: int) -> None:
    rollout = random_rollout(seed)
    rollout.valid[:, 1] = rollout.terminated[:, 1] = False  # a frozen member
    rollout.reward[:, 1] = 0.0
    advantage, ret = GROUP_RELATIVE[name](rollout, 0.9, 0.8)
    assert advantage.isfinite().all() and ret.isfinite().all()
    assert advantage.any()
    assert not advantage[~rollout.valid].any()
    for aggregation in AGGREGATIONS.values():
        weight = aggregation(rollout, 10)
        assert weight.isfinite().all() and not weight[~rollout.valid].any()


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_what_lies_in_rows_that_are_not_valid_changes_nothing(name: str) -> None:
    rollout = random_rollout(6)
    before = GROUP_RELATIVE[name](rollout, 0.9, 0.8)
    rubbish = torch.full_like(rollout.reward, 1e3).masked_fill(rollout.valid, 0.0)
    spoilt = rollout.replace(reward=rollout.reward + rubbish, obs=rollout.obs + rubbish[..., None])
    for a, b in zip(before, GROUP_RELATIVE[name](spoilt, 0.9, 0.8), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name", ["return_to_go", "grouped_gae", "grouped_gae by state", "binned", "binned by state", "mixed"]
)
def test_a_member_alone_in_its_group_at_a_step_has_no_advantage_there(name: str) -> None:
    rollout = random_rollout(7)
    assert rollout.group is not None
    alone = summarise_groups(rollout.reward, rollout.group, rollout.valid).count == 1
    advantage, _ = GROUP_RELATIVE[name](rollout, 0.9, 0.8)
    assert (alone & rollout.valid).sum() > 10
    assert not advantage[alone].any()


def test_pure_functions_are_what_the_names_stand_for() -> None:
    rollout = random_rollout(8)
    to_go = returns_to_go(rollout.reward, rollout.valid, rollout.ended, 0.9)
    assert rollout.group is not None
    group, valid, ended = rollout.group, rollout.valid, rollout.ended
    by_gae = grouped_gae(rollout.reward, to_go, group, valid, ended, 0.9, 0.8)
    assert torch.equal(by_gae, ESTIMATORS["grouped_gae"](rollout, 0.9, 0.8)[0])
    by_time = binned(to_go, time_bins(group, len(to_go)), group, valid)
    assert torch.equal(by_time, ESTIMATORS["binned"](rollout, 0.9, 0.8)[0])


def test_group_relative_estimators_refuse_a_rollout_without_groups() -> None:
    for name in GROUP_RELATIVE:
        with pytest.raises(ValueError, match="groups"):
            GROUP_RELATIVE[name](episodes([[[1.0]]], [[0]]).replace(group=None), 0.9, 1.0)


# --- share of degenerate groups -----------------------------------------------------------------------------


def test_degenerate_share_by_hand() -> None:
    rollout = episodes(
        [[[1, 1], [1, 1], [1, 1], [2, 1]], [[3], [3], [4], [4]], [[1], [2], [3], [4]]], [[0, 0, 1, 1]] * 3
    )
    rollout = rollout.replace(advantage=ESTIMATORS["outcome"](rollout, 1.0, 1.0)[0])
    assert degenerate_share(rollout).tolist() == [0.5, 1.0, 0.0]


def test_degenerate_share_counts_groups_of_zero_advantage() -> None:
    # both episodes sum to 1, but discounted by 0.5 they return 1 and 0.25: the group does teach something
    rollout = episodes([[[1.0], [0.0, 0.0, 1.0]]], [[0, 0]])
    advantage, _ = ESTIMATORS["outcome"](rollout, 0.5, 1.0)
    assert advantage.any()
    assert degenerate_share(rollout.replace(advantage=advantage)).tolist() == [0.0]


# --- aggregation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("row", 1.0, 1.0),
        ("episode", 0.75, 1.5),  # 6 rows / (2 episodes * length 4 or 2)
        ("constant", 0.3, 0.3),  # 6 rows / (2 episodes * horizon 10)
    ],
)
def test_weights_of_whole_episodes(name: str, first: float, second: float) -> None:
    weight = AGGREGATIONS[name](episodes([[[1] * 4, [1] * 2]], [[0, 0]]), 10)
    expected = torch.tensor([[first] * 4, [second] * 2 + [0.0, 0.0]])
    torch.testing.assert_close(weight[:, 0].T, expected)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("row", [1, 1, 1, 1], [1, 1, 1, 1]),
        ("episode", [2, 2 / 3, 2 / 3, 2 / 3], [1, 1, 1, 1]),  # 8 rows / (4 episodes * length)
        ("constant", [0.4] * 4, [0.4] * 4),  # 8 rows / (4 episodes * horizon 5)
    ],
)
def test_weights_of_a_window_that_cuts_episodes(name: str, first: list[float], second: list[float]) -> None:
    rollout = episodes([[[1] * 4, [1] * 4]], [[0, 0]])
    rollout.terminated.zero_()
    rollout.terminated[0, 0, 0] = True  # one step, then three that the window cuts
    rollout.truncated[1, 0, 1] = True  # two steps, then two that the window cuts
    weight = AGGREGATIONS[name](rollout, 5)
    torch.testing.assert_close(weight[:, 0].T, torch.tensor([first, second], dtype=torch.float32))


# --- by name ------------------------------------------------------------------------------------------------


def test_the_help_names_every_estimator() -> None:
    said = AlgoConfig.__dataclass_fields__["advantage"].metadata["doc"]
    assert set(ESTIMATORS) <= set(re.findall(r"\w+", said))


def test_find_estimator() -> None:
    names = "gae n_step mixed outcome outcome_no_std leave_one_out return_to_go grouped_gae binned vine"
    assert set(names.split()) <= set(ESTIMATORS)
    assert find_estimator("gae") is ESTIMATORS["gae"]
    assert find_estimator("rlkit.advantage:_outcome") is ESTIMATORS["outcome"]
    with pytest.raises(ValueError, match="did you mean return_to_go"):
        find_estimator("return_to_goo")
    with pytest.raises(ValueError, match="cannot be imported"):
        find_estimator("rlkit.advantage:nothing")
    with pytest.raises(ValueError, match="is not a function"):
        find_estimator("rlkit.advantage:CRITIC")


def twice_the_return(rollout: Rollout, gamma: float, gae_lambda: float, factor: float = 2.0) -> tuple[Tensor, Tensor]:
    to_go = returns_to_go(rollout.reward, rollout.valid, rollout.ended, gamma)
    return factor * to_go, to_go


def test_a_function_of_ones_own_takes_arguments_and_serves_both_algorithms() -> None:
    own = find_estimator(f"{__name__}:twice_the_return")
    assert own.needs == {CRITIC, GROUPS}
    rollout = episodes([[[1, 2]]], [[0]])
    assert own(rollout, 1.0, 1.0)[0].flatten().tolist() == [6, 4]
    assert own.given(factor=3.0)(rollout, 1.0, 1.0)[0].flatten().tolist() == [9, 6]
    assert own.arguments == {}
    config = ["tuned=none", f"algo.advantage={__name__}:twice_the_return", "+algo.advantage_args.factor=3"]
    for algo in ("ppo", "grpo"):
        assert to_config(compose([f"algo={algo}", *config])[0]).algo.advantage_args == {"factor": 3}


def test_arguments_of_the_tuned_estimator_do_not_hinder_another() -> None:
    tuned, _ = compose(["env=Pendulum", "algo=grpo"])
    assert to_config(tuned).algo.advantage_args == {"by": "scaled_state", "resolution": 0.3}
    other, _ = compose(["env=Pendulum", "algo=grpo", "algo.advantage=outcome", "total_steps=6400", "num_envs=32"])
    learner = build_learner(to_config(other))
    assert learner.estimator.arguments == {}
    learner.collector.close()
    own, _ = compose(["env=Pendulum", "algo=grpo", "algo.advantage=outcome", "algo.advantage_args.by=state"])
    with pytest.raises(ConfigError, match="outcome has no argument by"):
        to_config(own)


CHOICES = [("ppo", [f"algo.advantage={name}"]) for name in CRITIC_BASED]
CHOICES += [("grpo", [f"algo.advantage={name}"]) for name in that_can_use(GROUPS) if name != "vine"]
CHOICES += [("grpo", ["algo.advantage=vine", "algo.groups=vine"])]
CHOICES += [("ppo", ["algo.advantage=n_step", "+algo.advantage_args.n=2"])]
CHOICES += [
    ("grpo", [f"algo.advantage={name}", "+algo.advantage_args={by: state, resolution: 0.2}"])
    for name in ("binned", "grouped_gae")
]


@pytest.mark.parametrize(("algo", "overrides"), CHOICES, ids=str)
def test_every_choice_learns_something_of_its_own(algo: str, overrides: list[str]) -> None:
    before = weights(small_learner(algo, "members=2"))
    learner = train(small_learner(algo, "members=2", *overrides), 2)
    assert weights(learner).isfinite().all()
    assert not torch.equal(weights(learner), before)
    others = [rest for other, rest in CHOICES if other == algo and rest != overrides]
    plain = train(small_learner(algo, "members=2", *others[0]), 2)
    assert not torch.equal(weights(learner), weights(plain))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["algo=grpo", "algo.advantage=n_step"], "algo.advantage is n_step, which needs a critic; with algo=grpo it "),
        (["algo=ppo", "algo.advantage=binned"], "algo.advantage is binned, which needs groups of whole episodes; "),
        (
            ["algo=ppo", "algo.advantage=n_step", "+algo.advantage_args.m=3"],
            "algo.advantage_args.m is 3, but n_step has no argument m; it takes n",
        ),
        (
            ["algo=grpo", "+algo.advantage_args.n=3"],
            "algo.advantage_args.n is 3, but return_to_go has no argument n; it takes none",
        ),
        (
            ["algo=ppo", "algo.advantage=n_step", "+algo.advantage_args.n=0"],
            "algo.advantage_args.n is 0; it must be >= 1",
        ),
        (
            ["algo=ppo", "algo.advantage=n_step", "+algo.advantage_args.n=2.5"],
            "algo.advantage_args.n is 2.5; it must be of type int",
        ),
        (
            ["algo=grpo", "algo.advantage=binned", "+algo.advantage_args.by=place"],
            "algo.advantage_args.by is place; it must be one of time, state",
        ),
        (
            ["algo=grpo", "algo.advantage=binned", "+algo.advantage_args.resolution=0"],
            "algo.advantage_args.resolution is 0; it must be > 0",
        ),
        (
            ["algo=grpo", "algo.advantage=binned", "+algo.advantage_args.resolution=nan"],
            "algo.advantage_args.resolution is nan; it must be a finite number > 0",
        ),
        (["algo=ppo", "algo.advantage_args.n=3"], "algo.advantage_args.n is not set yet; write +algo.advantage_args.n"),
    ],
)
def test_what_an_estimator_cannot_take_is_one_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        to_config(compose(overrides)[0])
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250
