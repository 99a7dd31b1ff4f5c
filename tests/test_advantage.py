"""Advantages and row weights on numbers worked out by hand, and against Stable-Baselines3 where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rlkit.advantage import (
    AGGREGATIONS,
    CRITIC_BASED,
    ESTIMATORS,
    degenerate_share,
    find_estimator,
    gae,
    leave_one_out,
    outcome,
    return_to_go,
    returns_to_go,
)
from rlkit.buffer import Rollout

GROUP_RELATIVE = sorted(set(ESTIMATORS) - CRITIC_BASED)


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
def test_degenerate_groups_are_exactly_zero(name: str, lane: list[float], size: int) -> None:
    spread = [[1.0, 2.0], [5.0]]  # another group, which is not degenerate
    rollout = episodes([[lane] * size + spread], [[0] * size + [1, 1]])
    advantage, _ = ESTIMATORS[name](rollout, 0.99, 1.0)
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
    return episodes(lanes, [rng.integers(0, 3, envs).tolist() for _ in range(members)])


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
    together = ESTIMATORS[name](rollout, 0.9, 1.0)
    for m in range(3):
        alone = ESTIMATORS[name](lone(rollout, m), 0.9, 1.0)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[:, m : m + 1], b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
@pytest.mark.parametrize("seed", range(5))
def test_no_nan_ever(name: str, seed: int) -> None:
    rollout = random_rollout(seed)
    rollout.valid[:, 1] = rollout.terminated[:, 1] = False  # a frozen member
    rollout.reward[:, 1] = 0.0
    advantage, ret = ESTIMATORS[name](rollout, 0.9, 1.0)
    assert advantage.isfinite().all() and ret.isfinite().all()
    assert not advantage[~rollout.valid].any()
    for aggregation in AGGREGATIONS.values():
        weight = aggregation(rollout, 10)
        assert weight.isfinite().all() and not weight[~rollout.valid].any()


def test_group_relative_estimators_refuse_a_rollout_without_groups() -> None:
    for name in GROUP_RELATIVE:
        with pytest.raises(ValueError, match="groups"):
            ESTIMATORS[name](episodes([[[1.0]]], [[0]]).replace(group=None), 0.9, 1.0)


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


def test_find_estimator() -> None:
    assert {"gae", "outcome", "outcome_no_std", "leave_one_out", "return_to_go"} <= set(ESTIMATORS)
    assert find_estimator("gae") is ESTIMATORS["gae"]
    assert find_estimator("rlkit.advantage:_outcome") is ESTIMATORS["outcome"]
    with pytest.raises(ValueError, match="did you mean return_to_go"):
        find_estimator("return_to_goo")
    with pytest.raises(ValueError, match="cannot be imported"):
        find_estimator("rlkit.advantage:nothing")
