"""Replay and hybrid policies: V-trace, truncated weights, the store, the draw, and what old rows never touch."""

from __future__ import annotations

import csv
import weakref

import numpy as np
import pytest
import torch
from conftest import small_learner, train, weights
from scipy.stats import chisquare
from test_team import small_config

import rlkit
from rlkit.advantage import gae, n_step
from rlkit.buffer import Batch, Rollout
from rlkit.build import ConfigError, build_learner
from rlkit.envs import EnvironmentFailure
from rlkit.faults import Fault
from rlkit.group_relative import outcome
from rlkit.keepers.keeper import Keeper, copied, put
from rlkit.off_policy import present, v_trace
from rlkit.stabilizers.replay import Replay
from rlkit.store import Store
from rlkit.streams import Streams
from rlkit.team import Team
from rlkit.update import UpdateRows, minibatches

ALGOS = ("ppo", "grpo")
REPLAY = "stabilizer=[replay]"


# --- V-trace ---------------------------------------------------------------------------------------------------


def test_v_trace_gives_the_numbers_worked_out_by_hand():
    delta, carry, ratio = (torch.tensor(x)[:, None, None] for x in ([1.0, 2, 4], [0.5, 0.5, 0.5], [2.0, 0.5, 1]))
    # x2 = 4, x1 = .5 2 + .5 .5 4 = 2, x0 = 2 + .5 1 2; A2 = 4, A1 = 2 + .5 4, A0 = 1 + .5 2
    assert v_trace(delta, carry, ratio).flatten().tolist() == [2.0, 4.0, 4.0]
    assert v_trace(delta, carry, ratio, n=1).flatten().tolist() == [1.0, 2.0, 4.0]
    # after two residuals x1 = .5 2 and x2 = 4: A0 = 1 + .5 1
    assert v_trace(delta, carry, ratio, n=2).flatten().tolist() == [1.5, 4.0, 4.0]


def steps(time: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random steps [T, 2, 3] in double precision, with ends of both kinds."""
    g = torch.Generator().manual_seed(seed)
    reward, value, final_value = torch.randn(3, time, 2, 3, generator=g, dtype=torch.float64)
    kind = torch.rand(time, 2, 3, generator=g)
    terminated, truncated = kind < 0.15, (kind > 0.15) & (kind < 0.3)
    assert terminated.any() and truncated.any()
    final_value = torch.where(terminated, 0.0, final_value)
    return {
        "reward": reward,
        "value": value,
        "final_value": final_value,
        "terminated": terminated,
        "truncated": truncated,
    }


def v_trace_of_the_paper(column: dict[str, list], pi_over_mu: list, gamma: float, lam: float, rho_max: float):
    """Equation 1 of Espeholt et al. (2018) as the sum of products it is, for one environment; returns v_s - V(s)."""
    time = len(pi_over_mu)

    def after(t):  # V(x_{t+1})
        if column["terminated"][t]:
            return 0.0
        return column["final_value"][t] if column["truncated"][t] or t + 1 == time else column["value"][t + 1]

    corrections = []
    for s in range(time):
        total, product = 0.0, 1.0
        for t in range(s, time):
            rho = min(rho_max, pi_over_mu[t])
            total += product * rho * (column["reward"][t] + gamma * after(t) - column["value"][t])
            if column["terminated"][t] or column["truncated"][t]:
                break
            product *= gamma * lam * min(1.0, pi_over_mu[t])
        corrections.append(total)
    advantages = []
    for t in range(time):  # r + gamma ((1 - lambda) V(x') + lambda v') - V(x)
        ends = column["terminated"][t] or column["truncated"][t] or t + 1 == time
        later = 0.0 if ends else lam * corrections[t + 1]
        advantages.append(column["reward"][t] + gamma * (after(t) + later) - column["value"][t])
    return corrections, advantages


@pytest.mark.parametrize("rho_max", [1.0, 1.7])
@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_gae_with_ratios_is_v_trace_as_a_plain_loop(lam, rho_max):
    data = steps()
    pi_over_mu = torch.rand(9, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2.5
    found = gae(**data, gamma=0.9, gae_lambda=lam, ratio=pi_over_mu.clamp(max=rho_max))
    for m in range(2):
        for n in range(3):
            column = {name: x[:, m, n].tolist() for name, x in data.items()}
            corrections, advantages = v_trace_of_the_paper(column, pi_over_mu[:, m, n].tolist(), 0.9, lam, rho_max)
            np.testing.assert_allclose(found[:, m, n], advantages, rtol=1e-12)
            if rho_max == 1.0:  # the row's weight times A is the whole correction of V-trace
                np.testing.assert_allclose(pi_over_mu[:, m, n].clamp(max=1.0) * found[:, m, n], corrections, rtol=1e-12)


def test_with_ratios_of_one_v_trace_is_plain_gae_to_the_last_bit():
    data = {name: x.float() if x.is_floating_point() else x for name, x in steps(200).items()}
    for lam in (0.0, 0.95, 1.0):
        plain = gae(**data, gamma=0.99, gae_lambda=lam)
        assert torch.equal(gae(**data, gamma=0.99, gae_lambda=lam, ratio=torch.ones(200, 2, 3)), plain)


def test_with_ratios_of_one_the_n_step_correction_is_the_n_step_return_up_to_the_order_of_its_sum():
    data = steps()
    for n in (1, 2, 5, 20):
        corrected = n_step(**data, gamma=0.9, n=n, ratio=torch.ones(9, 2, 3, dtype=torch.float64))
        torch.testing.assert_close(corrected, n_step(**data, gamma=0.9, n=n), rtol=1e-12, atol=1e-12)


def test_n_steps_beyond_the_window_are_v_trace_with_lambda_one():
    data, ratio = steps(), torch.rand(9, 2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2
    torch.testing.assert_close(
        n_step(**data, gamma=0.9, n=50, ratio=ratio), gae(**data, gamma=0.9, gae_lambda=1.0, ratio=ratio)
    )


def test_the_critic_regresses_to_the_value_of_the_learner_not_of_the_behaviour():
    """One state, episodes of one step: mu (1/2, 1/2), pi (4/5, 1/5), rewards 1 and 0; the value of pi is 4/5."""
    reward, ratio = torch.tensor([1.0, 0.0])[None, None], torch.tensor([1.6, 0.4])[None, None]
    ends, none = torch.ones(1, 1, 2, dtype=torch.bool), torch.zeros(1, 1, 2)
    value = torch.full((1, 1, 2), 0.3)
    advantage = gae(reward, value, none, ends, ~ends, gamma=0.9, gae_lambda=0.95, ratio=ratio)
    target = value + advantage
    assert float((ratio * target).sum() / ratio.sum()) == pytest.approx(0.8)  # least squares, weighed by the ratio


# --- rows of the present policy ---------------------------------------------------------------------------------


def moved(learner, size: float = 0.5):
    """Move the weights of a learner's policy away from those that collected."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in learner.policy.actor.weights:
            p += size * torch.randn(p.shape, generator=g)


@pytest.mark.parametrize("overrides", [(), ("exploration.name=correlated",)])
@pytest.mark.parametrize("rho_max", [1.0, 1.5])
def test_stale_columns_become_those_of_the_present_policy_with_a_truncated_weight(rho_max, overrides):
    learner = small_learner("ppo", "members=2", *overrides)
    rollout = learner.collector.collect(learner.policy, 0, learner.running)
    moved(learner)
    stale = torch.tensor([[True, False, False, True], [False, True, False, False]])
    given = torch.full_like(rollout.reward, 0.5)
    found = present(rollout.replace(stale=stale, importance=given), learner.policy, rho_max)
    assert (found.ratio[:, stale] < rho_max).any() and (found.ratio[:, stale] == rho_max).any()
    for m, n in [(m, n) for m in range(2) for n in range(4)]:
        if not stale[m, n]:
            assert torch.equal(found.log_prob[:, m, n], rollout.log_prob[:, m, n])
            assert torch.equal(found.old["logits"][:, m, n], rollout.old["logits"][:, m, n])
            assert (found.ratio[:, m, n] == 1).all() and (found.importance[:, m, n] == 0.5).all()
            continue
        obs = rollout.obs[:, :, n].movedim(0, 1)
        logits = learner.policy.actor(learner.policy.features(obs))[m].detach()
        if rollout.offset is not None:
            logits = logits + rollout.offset[:, m, n]
        pi, mu = (torch.distributions.Categorical(logits=x) for x in (logits, rollout.old["logits"][:, m, n]))
        action = rollout.action[:, m, n, 0]
        ratio = (pi.probs / mu.probs).gather(1, action[:, None])[:, 0].clamp(max=rho_max)
        torch.testing.assert_close(found.log_prob[:, m, n], pi.log_prob(action))
        torch.testing.assert_close(found.old["logits"][:, m, n].exp(), pi.probs)
        torch.testing.assert_close(found.ratio[:, m, n], ratio)
        torch.testing.assert_close(found.importance[:, m, n], 0.5 * ratio)


def test_a_rollout_without_stale_columns_is_not_touched():
    learner = small_learner("ppo")
    rollout = learner.collector.collect(learner.policy, 0, learner.running)
    assert present(rollout, learner.policy, 1.0) is rollout


@pytest.mark.parametrize("aggregation", ["row", "episode"])
def test_a_row_weighs_its_aggregation_times_its_importance(aggregation):
    learner = small_learner("grpo", f"algo.aggregation={aggregation}", REPLAY)
    train(learner, 1)
    moved(learner)
    rollout = learner.estimate(learner.chain.rollout(learner.collect(learner.running)))
    assert (rollout.importance < 1).any()
    alone = learner.settings.aggregation(rollout, 30)
    torch.testing.assert_close(rollout.weight, alone * rollout.importance)


# --- the store --------------------------------------------------------------------------------------------------


def items(*numbers: list[int], time: int = 2) -> dict[str, torch.Tensor]:
    """Items [M, K, T, 1] that carry a number."""
    x = torch.tensor(numbers, dtype=torch.float32)[:, :, None, None].expand(-1, -1, time, -1)
    return {"reward": x, "valid": torch.ones_like(x, dtype=torch.bool)}


def held(store: Store) -> list[list[int]]:
    """The numbers each member's store holds, the oldest first."""
    order = (store.next[:, None] - store.count[:, None] + torch.arange(store.capacity)) % store.capacity
    reward = store.take(order)["reward"][:, :, 0, 0].int()
    return [row[: int(n)].tolist() for row, n in zip(reward, store.count, strict=True)]


def test_the_oldest_items_leave_first_each_member_for_itself():
    store, all_of = Store(2, 3), torch.tensor([True, True])
    slots = store.add(items([1, 2], [10, 20]), all_of)
    assert held(store) == [[1, 2], [10, 20]] and slots.tolist() == [[0, 1], [0, 1]]
    store.add(items([3, 4], [30, 40]), torch.tensor([True, False]))
    assert held(store) == [[2, 3, 4], [10, 20]]
    store.add(items([5], [50]), all_of)
    assert held(store) == [[3, 4, 5], [10, 20, 50]]
    store.add(items([6, 7, 8, 9], [60, 70, 80, 90]), all_of)
    assert held(store) == [[7, 8, 9], [70, 80, 90]]


def test_items_of_different_lengths_keep_their_rows_and_end_in_zeros():
    store, one = Store(1, 3), torch.tensor([True])
    store.add(items([1], time=2), one)
    store.add(items([2], time=5), one)
    store.add(items([3], time=1), one)
    found = store.take(torch.tensor([[0, 1, 2]]))
    assert found["valid"][0, :, :, 0].sum(1).tolist() == [2, 5, 1]
    assert found["reward"][0, :, :, 0].sum(1).tolist() == [2, 10, 3]


def test_a_stores_state_is_one_tensor_for_each_member_as_long_as_it_needs_and_can_be_written_back_alone():
    store = Store(2, 4)
    store.add(items([1], [10], time=2), torch.tensor([True, True]))
    before = store.state_dict()
    store.add(items([2], [20], time=5), torch.tensor([False, True]))
    after = store.state_dict()
    assert [tuple(x.shape) for x in after["fields"]["reward"]] == [(1, 2, 1), (2, 5, 1)]
    put(after, before, torch.tensor([False, True]))  # what a keeper does to roll member 1 back
    restored = Store(2, 4)
    restored.load_state_dict(after)
    assert held(restored) == [[1], [10]]
    store.load_state_dict(store.state_dict())
    assert held(store) == [[1], [10, 20]]
    store.add(items([3], [30]), torch.tensor([True, True]))
    assert held(store) == [[1, 3], [10, 20, 30]] and len(before["fields"]["reward"][0]) == 1


def test_half_precision_takes_the_memory_that_its_types_say_and_leaves_probabilities_alone():
    """A row of CartPole: obs 4, final_obs 4, action 1, log_prob 1, old_logits 2, reward 1, three flags of a byte."""
    learners = [
        train(small_learner("ppo", REPLAY, "stabilizer.replay.capacity=4", f"stabilizer.replay.precision={p}"), 1)
        for p in ("full", "half")
    ]
    full, half = (learner.chain.links["replay"].store for learner in learners)
    rows = 4 * 8
    assert full.nbytes == rows * (16 + 16 + 8 + 4 + 8 + 4 + 3)
    assert half.nbytes == rows * (8 + 8 + 2 + 4 + 8 + 4 + 3)
    slots = torch.arange(4)[None]
    exact, rounded = full.take(slots), half.take(slots)
    for name in ("action", "log_prob", "old_logits", "reward", "terminated", "truncated", "valid"):
        assert torch.equal(exact[name], rounded[name]) and exact[name].dtype == rounded[name].dtype
    assert not torch.equal(exact["obs"], rounded["obs"])
    torch.testing.assert_close(exact["obs"], rounded["obs"], rtol=2**-11, atol=1e-7)


def test_half_precision_leaves_continuous_actions_alone():
    learner = train(small_learner("ppo", "env=Pendulum", REPLAY, "stabilizer.replay.precision=half"), 1)
    fields = learner.chain.links["replay"].store.fields
    assert fields["action"].dtype == torch.float32 and fields["obs"].dtype == torch.float16


def test_half_precision_refuses_what_it_cannot_hold():
    store = Store(2, 2, half=True)
    large = torch.tensor([1.0, 7e4])[:, None, None, None, None]
    with pytest.raises(Fault, match="the obs of member 1 is beyond 65504, .* must be full") as caught:
        store.add({"obs": large}, torch.tensor([True, True]))
    assert not isinstance(caught.value, EnvironmentFailure)  # the environment did nothing wrong


# --- the draw ---------------------------------------------------------------------------------------------------


def stored(priority: list[float], **arguments) -> Replay:
    """A replay link of one member whose store holds items of these priorities."""
    link = Replay(Streams([0]), num_envs=4, capacity=len(priority) + 2, **arguments)
    link.store.add(items(list(range(len(priority)))), torch.tensor([True]))
    link.priority[0, : len(priority)] = torch.tensor(priority, dtype=torch.float64)
    return link


def draws(link: Replay, number: int, iterations: int) -> np.ndarray:
    found = []
    for link.iteration in range(iterations):
        slots, _, real = link._choose(number, torch.tensor([True]))
        assert real.all()
        found.append(slots[0].numpy())
    return np.stack(found)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"sampling": "priority", "alpha": 1.0}, [0.1, 0.2, 0.3, 0.4]),
        ({"sampling": "priority", "alpha": 2.0}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"sampling": "uniform", "alpha": 2.0}, [0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_items_are_drawn_as_often_as_their_priority_says(arguments, expected):
    link = stored([1.0, 2.0, 3.0, 4.0], **arguments)
    np.testing.assert_allclose(link.probabilities(0), expected)
    counts = np.bincount(draws(link, 1, 4000)[:, 0], minlength=4)
    assert chisquare(counts, 4000 * np.array(expected)).pvalue > 0.01
    assert chisquare(counts, 4000 * np.array([0.4, 0.3, 0.2, 0.1])).pvalue < 1e-6  # the test can tell


def test_several_draws_take_one_from_each_part_of_the_total():
    link = stored([1.0, 2.0, 3.0, 4.0], sampling="priority", alpha=1.0)
    found = draws(link, 2, 2000)  # cumulated: .1 .3 .6 1; halves: {0, 1, 2} and {2, 3}
    assert set(found[:, 0]) == {0, 1, 2} and set(found[:, 1]) == {2, 3}
    counts = np.bincount(found.flatten(), minlength=4) / 2000
    np.testing.assert_allclose(counts, [0.2, 0.4, 0.6, 0.8], atol=0.04)


def test_weights_correct_for_the_priorities_over_their_maximum():
    link = stored([1.0, 2.0, 1.0], sampling="priority", alpha=1.0, beta=1.0)
    slots, weight, _ = link._choose(3, torch.tensor([True]))
    by_slot = dict(zip(slots[0].tolist(), weight[0].tolist(), strict=True))
    # P = 1/4, 1/2, 1/4; (3 P)^-1 = 4/3, 2/3, 4/3
    assert by_slot == pytest.approx({0: 1.0, 1: 0.5, 2: 1.0})
    link.beta = 0.5
    assert float(link._choose(3, torch.tensor([True]))[1].min()) == pytest.approx(0.5**0.5)
    uniform = stored([1.0, 2.0, 1.0], beta=1.0)
    assert (uniform._choose(3, torch.tensor([True]))[1] == 1).all()


def test_no_more_is_drawn_than_is_stored_and_nothing_for_a_member_that_does_not_play():
    link = stored([1.0, 1.0])
    assert link._choose(5, torch.tensor([True]))[2].tolist() == [[True, True, False, False, False]]
    assert not link._choose(5, torch.tensor([False]))[2].any()


def test_a_fraction_of_an_item_is_met_in_the_mean():
    """Two groups an iteration and a quarter of them: one every other iteration."""
    learner = small_learner("grpo", REPLAY, "stabilizer.replay.fraction=0.25")
    shares = []
    for _ in range(7):
        learner.iterate()
        shares.append(float(learner.metrics["replay/share"]) > 0)
    assert shares == [False, True, False, True, False, True, False]


# --- the link ---------------------------------------------------------------------------------------------------


def spied(learner):
    """The rollouts that a learner collects, and those that leave the chain, as it iterates."""
    fresh, mixed = [], []
    collect, rollout = learner.collector.collect, learner.chain.rollout

    def collected(*args):
        fresh.append(collect(*args))
        return fresh[-1]

    def chained(x):
        mixed.append(rollout(x))
        return mixed[-1]

    learner.collector.collect, learner.chain.rollout = collected, chained
    return fresh, mixed


def same_rows(a: Rollout, n: int, b: Rollout, k: int, m: int) -> bool:
    """Whether column n of rollout a holds what column k of rollout b does, for member m."""
    rows, others = a.valid[:, m, n], b.valid[:, m, k]
    if rows.sum() != others.sum():
        return False
    ours, theirs = a.tensors(), b.tensors()
    names = set(theirs) - {"group"}
    return all(torch.equal(ours[name][rows, m, n], theirs[name][others, m, k]) for name in names)


@pytest.mark.parametrize("overrides", [(), ("exploration.name=linear", "env.normalize_observation=true")])
def test_segments_come_back_as_they_were_collected(overrides):
    learner = small_learner("ppo", "members=2", REPLAY, *overrides)
    fresh, mixed = spied(learner)
    train(learner, 4)
    assert [x.valid.shape[2] for x in mixed] == [4, 6, 6, 6]
    assert mixed[3].stale.tolist() == [[False] * 4 + [True] * 2] * 2
    for i in range(1, 4):
        for m in range(2):
            for n in (4, 5):
                past = [(j, k) for j in range(i) for k in range(4) if same_rows(mixed[i], n, fresh[j], k, m)]
                assert len(past) == 1


def test_whole_groups_come_back_under_new_ids():
    learner = small_learner("grpo", "members=2", REPLAY, "algo.max_episode_steps=200")
    fresh, mixed = spied(learner)
    train(learner, 5)
    lengths = [len(x.valid) for x in mixed]
    assert any(len(a.valid) < b for a, b in zip(fresh, lengths, strict=True))  # an old episode was longer
    for i in range(1, 5):
        assert mixed[i].group.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 2
        for m in range(2):
            past = [
                (j, k)
                for j in range(i)
                for k in (0, 3)
                if all(same_rows(mixed[i], 6 + g, fresh[j], k + g, m) for g in range(3))
            ]
            assert len(past) == 1


def test_the_first_iteration_which_has_nothing_to_replay_is_the_plain_one_to_the_last_bit():
    for algo in ALGOS:
        plain, replay = train(small_learner(algo), 1), train(small_learner(algo, REPLAY), 1)
        assert torch.equal(weights(replay), weights(plain))


def test_old_groups_decide_nothing_for_the_advantages_of_fresh_ones():
    for name in ("return_to_go", "outcome", "binned"):
        overrides = ["+algo.advantage_args={by: state, resolution: 1.0}"] if name == "binned" else []
        learner = train(small_learner("grpo", f"algo.advantage={name}", *overrides, REPLAY), 2)
        fresh = learner.collect(learner.running)
        alone = learner.estimator(fresh, 0.99, 0.95)[0]
        both = learner.estimate(learner.chain.rollout(fresh))
        torch.testing.assert_close(both.advantage[: len(alone), :, :6], alone)
        old = both.lanes(slice(6, None))
        assert old.advantage.abs().sum() > 0
        if name == "outcome":
            to_go = torch.zeros(1, 3)
            for t in reversed(range(len(old.reward))):
                to_go = old.reward[t] + 0.99 * to_go * ~old.ended[t]
            torch.testing.assert_close(old.advantage[0], outcome(to_go, old.group))


@pytest.mark.parametrize("algo", ALGOS)
def test_old_rows_reach_no_running_statistics_and_no_count(algo):
    learner = small_learner(
        algo,
        "members=2",
        REPLAY,
        "env.normalize_observation=true",
        "env.normalize_reward=true",
        "exploration.name=linear",
    )
    fresh, _ = spied(learner)
    train(learner, 4)
    steps = learner.env_steps.double()
    assert steps.tolist() == [sum(float(x.valid[:, m].sum()) for x in fresh) for m in range(2)]
    assert torch.equal(learner.policy.normalizer.count, steps)
    assert torch.equal(learner.collector.exploration.statistics.count, steps)
    assert torch.equal(learner.chain.links["reward_scale"].statistics.count, steps)
    for m in range(2):
        seen = torch.cat([x.obs[:, m][x.valid[:, m]] for x in fresh]).double()
        torch.testing.assert_close(learner.policy.normalizer.mean[m], seen.mean(0))
    if algo == "grpo":
        assert [len(recent) for recent in learner.recent] == [24, 24]


def test_degenerate_groups_are_counted_among_fresh_ones():
    learner = train(small_learner("grpo", REPLAY), 2)

    def teaches_when_fresh(rollout, gamma, gae_lambda):
        old = rollout.stale[None] * torch.ones_like(rollout.reward)
        return (1 - old) * rollout.valid, rollout.reward

    learner.estimator = teaches_when_fresh
    learner.iterate()
    assert float(learner.metrics["replay/share"]) > 0
    assert float(learner.metrics["group/degenerate"]) == 0.0


def batch_of(link: Replay, advantage: list[float], lane: list[int], importance: list[float]) -> Batch:
    columns = {"advantage": advantage, "lane": lane, "importance": importance, "weight": [1.0] * len(lane)}
    batch = Batch({name: torch.tensor([x]) for name, x in columns.items()}, torch.tensor([len(lane)]))
    return link.batch(batch)


def test_the_effective_sample_size_is_the_one_worked_out_by_hand():
    link = stored([1.0])
    link.first = 2
    batch_of(link, [0.0] * 5, [0, 1, 2, 2, 3], [1.0, 1.0, 1.0, 1.0, 0.5])
    numbers = link.report()
    assert float(numbers["ess"]) == pytest.approx(2.5**2 / 2.25 / 3)
    assert float(numbers["share"]) == pytest.approx(3 / 5)
    assert float(numbers["stored"]) == 1
    batch_of(link, [0.0] * 2, [0, 1], [1.0, 1.0])
    assert link.report()["ess"].isnan() and float(link.report()["share"]) == 0


def test_an_items_priority_is_the_mean_absolute_advantage_of_its_rows():
    link = stored([7.0, 7.0, 7.0])
    link.width = 2
    link.lane[0, :3] = torch.tensor([0, -1, 4])  # the first is lanes 0 and 1, the last lanes 4 and 5
    batch_of(link, [1.0, -3.0, 5.0, 8.0, -2.0], [0, 0, 1, 2, 5], [1.0] * 5)
    assert link.priority[0, :3].tolist() == pytest.approx([3.0, 7.0, 2.0], rel=1e-5)


def test_priorities_follow_the_advantages_of_fresh_and_of_replayed_segments():
    learner = small_learner("ppo", "stabilizer.replay.capacity=12", REPLAY, "stabilizer.replay.sampling=priority")
    link = learner.chain.links["replay"]
    found = []
    estimate = learner.estimate
    learner.estimate = lambda rollout: (found.append(estimate(rollout)), found[-1])[1]
    train(learner, 3)
    by_lane = found[-1].advantage[:, 0].abs().mean(0)
    fresh, old = link.lane[0] >= 0, link.lane[0] >= 4
    assert int(fresh.sum() - old.sum()) == 4 and int(old.sum()) == 2
    torch.testing.assert_close(link.priority[0, fresh].float(), by_lane[link.lane[0, fresh]], rtol=1e-4, atol=1e-5)


def test_a_frozen_member_stores_nothing_and_replays_nothing():
    learner = train(small_learner("ppo", "members=2", REPLAY), 1)
    learner.freeze(1)
    _, mixed = spied(learner)
    train(learner, 1)
    assert learner.chain.links["replay"].store.count.tolist() == [8, 4]
    assert mixed[0].valid.any(0).tolist() == [[True] * 6, [False] * 6]
    assert not mixed[0].reward[:, 1].any() and not mixed[0].obs[:, 1, 4:].any()


def test_the_store_begins_with_scaled_rewards_and_rows_are_added_last():
    learner = small_learner("ppo", "stabilizer=[replay,ref_kl]", "env.normalize_reward=true")
    assert list(learner.chain.links) == ["reward_scale", "surrogate", "value", "entropy", "ref_kl", "replay"]
    train(learner, 1)
    reward = learner.chain.links["replay"].store.fields["reward"]
    assert reward[:, :4].any() and not (reward[:, :4] == 1).any()  # CartPole's own reward is 1


@pytest.mark.parametrize("algo", ALGOS)
def test_the_state_of_a_team_is_that_of_one_learner(algo):
    """The members' stores differ in length, in GRPO; those of two processes are put side by side all the same."""
    overrides = ("members=3", REPLAY, "stabilizer.replay.capacity=3", "algo.sync_every=2")
    team = Team(small_config(algo, *overrides), 2)
    try:
        for _ in range(3):
            team.iterate()
        state = team.state_dict()
    finally:
        team.close()
    one = train(build_learner(small_config(algo, *overrides)), 3)
    restored = build_learner(small_config(algo, *overrides))
    restored.load_state_dict(state)
    expected, found = (x.chain.links["replay"].store.fields for x in (one, restored))
    assert set(found) == set(expected)
    rows = expected["valid"]  # others hold actions of lanes that stood still
    for name in expected:
        torch.testing.assert_close(found[name][rows], expected[name][rows], rtol=1e-3, atol=1e-4)
    train(restored, 1)


def test_its_numbers_are_logged(tmp_path):
    settings = {"algo.num_steps": 16, "num_envs": 4, "algo.num_minibatches": 2, "policy.hidden": [8]}
    rlkit.run(
        env="CartPole",
        algo="ppo",
        tuned="none",
        folder=tmp_path / "run",
        total_steps=320,
        members=2,
        processes=1,
        stabilizer=["replay"],
        **settings,
        **{"log.every": 64, "eval.every": 0},
    )
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    stored = [float(row["value"]) for row in rows if row["name"] == "replay/stored"]
    assert stored == [4, 8, 12, 16, 20]
    ess = [row["value"] for row in rows if row["name"] == "replay/ess"]
    assert ess[0] == "" and all(0 < float(x) <= 1 for x in ess[1:])
    share = [float(row["member_00"]) for row in rows if row["name"] == "replay/share"]
    assert share == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([REPLAY, "stabilizer.replay.fraction=1.0"], "stabilizer.replay.fraction is 1.0; it must be >= 0 and < 1"),
        ([REPLAY, "stabilizer.replay.capacity=0"], "stabilizer.replay.capacity is 0; it must be >= 1"),
        ([REPLAY, "stabilizer.replay.sampling=rank"], "stabilizer.replay.sampling is rank; it must be one of uniform"),
        ([REPLAY, "stabilizer.replay.precision=low"], "stabilizer.replay.precision is low; it must be one of full"),
        (["algo.rho_max=0.5"], "algo.rho_max is 0.5; it must be >= 1"),
        (["algo.sync_every=0"], "algo.sync_every is 0; it must be >= 1"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_sentence(overrides, message):
    with pytest.raises(ConfigError, match=message):
        small_learner("ppo", *overrides)


# --- hybrid policies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ALGOS)
def test_a_copy_collects_until_it_is_synchronised(algo):
    learner = small_learner(algo, "algo.sync_every=2", "env.normalize_observation=true")
    fresh, mixed = spied(learner)
    train(learner, 1)
    assert fresh[0].stale is None and mixed[0].stale is None
    collecting = weights_of(learner.collecting)
    assert not torch.equal(collecting, weights(learner))
    train(learner, 1)
    assert torch.equal(weights_of(learner.collecting), collecting)
    assert float(learner.collecting.normalizer.count) == 0 < float(learner.policy.normalizer.count)
    assert mixed[1].stale.all()
    rows = fresh[1]
    for n in range(learner.collector.num_envs):
        real = rows.valid[:, 0, n]
        dist = learner.collecting.distribution(rows.obs[:, :, n].movedim(0, 1)[:, real])
        torch.testing.assert_close(rows.log_prob[real, 0, n], dist.log_prob(rows.action[real, :, n].movedim(0, 1))[0])
    before = weights(learner)
    train(learner, 1)
    assert torch.equal(weights_of(learner.collecting), before)  # synchronised as the third iteration began
    assert mixed[2].stale is None


def weights_of(policy) -> torch.Tensor:
    return torch.cat([p.detach().reshape(p.shape[0], -1) for p in policy.parameters()], 1)


@pytest.mark.parametrize("algo", ALGOS)
def test_the_second_iteration_begins_at_ratio_one_with_the_weight_of_two_policies(algo):
    overrides = ["algo.sync_every=2", "algo.learning_rate=0.05", "algo.normalize_advantage=false"]
    learner = train(small_learner(algo, *overrides), 1)
    behaviour, pi_k = learner.collecting, learner.policy.frozen_copy()
    records, batches = [], []
    update = learner.update

    def recorded(batch, running):
        batches.append(batch)
        records.append(update(batch, running))
        return records[-1]

    learner.update = recorded
    train(learner, 1)
    record, batch = records[0], batches[0]
    first = record.minibatches[0]
    torch.testing.assert_close(first.out.log_prob, first.batch.log_prob, rtol=1e-4, atol=1e-5)  # r = 1
    assert UpdateRows.of(record).log_ratio.abs().max() > 0.01  # and then it moves
    ratio = (pi_k.evaluate(batch).log_prob - behaviour.evaluate(batch).log_prob).exp()
    assert (ratio > 1.05).any() and (ratio < 0.95).any()
    torch.testing.assert_close(batch.importance, ratio.clamp(max=1.0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(batch.weight, batch.importance)
    # its loss is -rho A, the surrogate at ratio 1
    loss = learner.chain.links["surrogate"].losses(pi_k.evaluate(batch), batch, pi_k)["loss"]
    torch.testing.assert_close(loss * batch.weight, -batch.importance * batch.advantage, rtol=1e-4, atol=1e-4)


def test_without_a_copy_nothing_is_kept():
    learner = small_learner("ppo")
    assert learner.collecting is None and "collecting" not in learner.state_dict()


def test_a_member_that_a_keeper_moves_collects_with_what_it_was_moved_to():
    class Back(Keeper):
        def judge(self, state, returns, metrics, ended):
            put(state, self.kept, torch.tensor([False, True]))
            return torch.tensor([False, True]), [(1, "went back")]

    learner = train(small_learner("ppo", "members=2", "algo.sync_every=4"), 1)
    learner.keepers["back"] = keeper = Back()
    keeper.kept = copied(learner.state_dict())
    del keeper.kept["keepers"]
    train(learner, 2)
    held = weights_of(learner.collecting)
    assert learner.judge(torch.zeros(2)) == [(1, "went back")]
    assert torch.equal(weights(learner)[1], keeper_weights(keeper.kept, learner)[1])
    assert torch.equal(weights_of(learner.collecting)[1], weights(learner)[1])
    assert torch.equal(weights_of(learner.collecting)[0], held[0])


def keeper_weights(state, learner) -> torch.Tensor:
    names = [name for name, _ in learner.policy.named_parameters()]
    return torch.cat([state["policy"][name].reshape(learner.members, -1) for name in names], 1)


# --- memory of minibatches --------------------------------------------------------------------------------------


def test_of_the_minibatches_of_an_update_one_epochs_rows_are_alive_in_the_columns_that_are_read():
    """The rows of an epoch are gathered once, minibatches are views of them, and the next epoch's take their place."""
    columns = {"obs": torch.randn(1, 64, 3), "reward": torch.randn(1, 64), "weight": torch.ones(1, 64)}
    batch = Batch(columns, torch.tensor([64]), padded=False)
    alive: list[weakref.ref] = []
    mini = None
    for epoch, mini in minibatches(batch, 5, 8, [np.random.default_rng(0)]):
        rows = mini.columns.whole  # type: ignore[attr-defined]
        if len(alive) == epoch:
            alive.append(weakref.ref(rows))
        assert mini.obs.untyped_storage().data_ptr() == rows["obs"].untyped_storage().data_ptr()
        assert set(rows.taken) == {"obs"}  # nobody reads the rest
        del rows
        assert [ref() is not None for ref in alive] == [False] * epoch + [True]
    assert len(alive) == 5
