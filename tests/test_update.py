"""Minibatches, the reduction of losses, the KL stop and the numbers reported of an update."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlkit.buffer import Batch
from rlkit.distributions import Categorical
from rlkit.gradient import Differentiated, reduce
from rlkit.link import Chain, Link
from rlkit.optimizer import Adam, StepResult
from rlkit.policy import Out, Policy
from rlkit.schedules import Constant
from rlkit.stabilizers.entropy import Entropy
from rlkit.stabilizers.surrogate import Surrogate
from rlkit.stabilizers.value import Value
from rlkit.streams import Purpose, Streams
from rlkit.update import Minibatch, UpdateRecord, kl_by_epoch, mean_kl, minibatches, statistics, update


@dataclass
class Actions:
    kind: str
    sizes: tuple[int, ...] = ()
    size: int = 0


# entropies log 2 and .25 log 4 + .75 log 4/3 = 0.5623351; KL(HALF || QUARTER) = .5 log 2 + .5 log 2/3 = 0.1438410
HALF, QUARTER = [0.5, 0.5], [0.25, 0.75]
KINDS = {"discrete": Actions("discrete", (3,)), "continuous": Actions("continuous", (), 2)}


def orders(*seeds: int) -> list[np.random.Generator]:
    return Streams(seeds).open(Purpose.ORDER, 0)


# --- minibatches --------------------------------------------------------------------------------------------


def numbered(*counts: int) -> Batch:
    """A batch whose rows carry their own number, from 1; padding carries 0."""
    height = max(counts)
    row = torch.arange(1, height + 1).expand(len(counts), -1)
    real = row <= torch.tensor(counts)[:, None]
    columns = {"obs": (row * real)[..., None].float(), "weight": (row / 10) * real}
    return Batch(columns, torch.tensor(counts), padded=not bool(real.all()))


def rows_of(mini: Batch, m: int) -> list[int]:
    """Numbers of the rows that count, in order; each must have kept its own weight."""
    counted = mini.weight[m] > 0
    rows = mini.obs[m, counted, 0]
    torch.testing.assert_close(mini.weight[m, counted], rows / 10)
    return rows.int().tolist()


COUNTS = [(12, 12), (13, 13), (12, 7, 4), (13, 12), (10, 0), (9, 2)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_every_row_once_an_epoch_in_parts_of_equal_size(counts: tuple[int, ...], num_minibatches: int) -> None:
    batch = numbered(*counts)
    parts = list(minibatches(batch, 3, num_minibatches, orders(*range(len(counts)))))
    assert [epoch for epoch, _ in parts] == sorted(list(range(3)) * num_minibatches)
    for m, count in enumerate(counts):
        for epoch in range(3):
            rows = [rows_of(mini, m) for e, mini in parts if e == epoch]
            assert sorted(sum(rows, [])) == list(range(1, count + 1))
            sizes = [len(part) for part in rows]
            assert max(sizes) - min(sizes) <= 1
    assert all(mini.padded or (mini.weight > 0).all() for _, mini in parts)
    assert torch.equal(batch.weight, numbered(*counts).weight)  # the batch itself is left alone


def test_each_epoch_has_an_order_of_its_own() -> None:
    epochs = [
        sum((rows_of(mini, 0) for e, mini in minibatches(numbered(20), 3, 4, orders(0)) if e == k), [])
        for k in range(3)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 3 and epochs[0] != sorted(epochs[0])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_a_member_gets_the_same_minibatches_alone(counts: tuple[int, ...], num_minibatches: int) -> None:
    together = list(minibatches(numbered(*counts), 2, num_minibatches, orders(*range(len(counts)))))
    for m, count in enumerate(counts):
        if count == 0:
            continue
        alone = list(minibatches(numbered(count), 2, num_minibatches, orders(m)))
        for (_, one), (_, other) in zip(together, alone, strict=True):
            assert rows_of(one, m) == rows_of(other, 0)


# --- reduction ----------------------------------------------------------------------------------------------


def test_reduce_by_hand() -> None:
    weight = torch.tensor([[1.0, 1.0, 2.0], [0.5, 1.5, 0.0]])
    terms = {
        "one": torch.tensor([[1.0, 2.0, 3.0], [4.0, 2.0, 99.0]]),
        "two": torch.tensor([[0.0, 1.0, 0.5], [2.0, 0.0, 99.0]]),
        "penalty": torch.tensor([10.0, 20.0]),
    }
    # (1 + 3 + 2*3.5) / 3 + 10 = 13.6667;  (.5*6 + 1.5*2) / 2 + 20 = 23: two rows have a weight
    loss = reduce(terms, Batch({"weight": weight}, torch.tensor([3, 2])))
    torch.testing.assert_close(loss, torch.tensor([11 / 3 + 10, 23.0]))
    full = Batch({"weight": weight[:1]}, torch.tensor([3]), padded=False)
    torch.testing.assert_close(reduce({k: x[:1] for k, x in terms.items()}, full), loss[:1])


def test_reduce_weighs_each_term_by_its_column() -> None:
    batch = Batch({"weight": torch.tensor([[1.0, 3.0]]), "other": torch.tensor([[0.5, 0.0]])}, torch.tensor([2]), False)
    terms = {"one": torch.tensor([[1.0, 2.0]]), "two": torch.tensor([[4.0, 99.0]]), "penalty": torch.tensor([10.0])}
    # (1*1 + 3*2) / 2 + (.5*4) / 1 + 10: only one row has a weight in the other column
    loss = reduce(terms, batch, lambda term: "other" if term == "two" else "weight")
    assert loss.tolist() == [15.5]


def test_reduce_of_a_member_without_rows_and_of_penalties_alone() -> None:
    batch = Batch({"weight": torch.zeros(1, 2)}, torch.tensor([0]))
    assert reduce({"one": torch.ones(1, 2)}, batch).tolist() == [0.0]
    assert reduce({"penalty": torch.tensor([2.0])}, batch).tolist() == [2.0]


def test_minibatch_losses_average_to_that_of_the_batch() -> None:
    batch = numbered(12, 8)
    term = {"loss": batch.obs[..., 0] ** 2}
    parts = [reduce({"loss": mini.obs[..., 0] ** 2}, mini) for _, mini in minibatches(batch, 1, 4, orders(0, 1))]
    torch.testing.assert_close(torch.stack(parts).mean(0), reduce(term, batch))


# --- update -------------------------------------------------------------------------------------------------


def problem(kind: str, counts: tuple[int, ...], seeds: tuple[int, ...]) -> tuple[Policy, Batch]:
    """A policy and a batch that it collected itself; what a member has depends on its own seed and count only."""
    policy = Policy(4, KINDS[kind], seeds, hidden=(8,), critic_hidden=(8,))
    height, size = max(counts), policy.action_size
    draws: list[list[Tensor]] = []
    for seed, count in zip(seeds, counts, strict=True):
        rng = torch.Generator().manual_seed(seed)
        member = [torch.randn(count, width, generator=rng) for width in (4, size, 3)]
        draws.append([torch.cat([x, torch.zeros(height - count, x.shape[1])]) for x in member])
    obs, noise, rest = (torch.stack(x) for x in zip(*draws, strict=True))
    weight = (torch.arange(height) < torch.tensor(counts)[:, None]).float()
    with torch.no_grad():
        dist = policy.distribution(obs)
        action = dist.sample(noise)
        columns = {"obs": obs, "action": action, "log_prob": dist.log_prob(action), "value": policy.value(obs)}
    columns |= {f"old_{name}": x.clone() for name, x in dist.params.items()}
    columns |= {"advantage": rest[..., 0], "ret": rest[..., 1], "weight": weight}
    columns = {name: x.detach() for name, x in columns.items()}
    return policy, Batch(columns, torch.tensor(counts), padded=bool((weight == 0).any()))


def ppo(members: int) -> Chain:
    return Chain(
        surrogate=Surrogate(Constant(0.2, members), normalize_advantage=True),
        value=Value(0.5),
        entropy=Entropy(Constant(0.01, members)),
    )


def run(policy: Policy, batch: Batch, seeds: tuple[int, ...], **options: Any) -> UpdateRecord:
    members = batch.members
    settings = {
        "learning_rate": torch.full((members,), 0.01),
        "active": torch.ones(members, dtype=torch.bool),
        "num_epochs": 3,
        "num_minibatches": 2,
        "rngs": orders(*seeds),
    }
    return update(policy, Adam(policy), options.pop("chain", ppo(members)), batch, **{**settings, **options})


def weights(policy: Policy) -> Tensor:
    return torch.cat([p.detach().reshape(p.shape[0], -1) for p in policy.parameters()], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_first_minibatch_has_ratio_one_and_no_kl(kind: str) -> None:
    policy, batch = problem(kind, (20, 13), (1, 2))
    first = run(policy, batch, (1, 2), learning_rate=torch.zeros(2)).minibatches[0]
    ratio = (first.out.log_prob - first.batch.log_prob).exp()[first.batch.weight > 0]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    torch.testing.assert_close(mean_kl(first.batch, first.out), torch.zeros(2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_minibatches", [1, 3])
def test_a_member_learns_the_same_among_others(kind: str, num_minibatches: int) -> None:
    seeds, counts = (1, 2, 3), (20, 13, 7)
    policy, batch = problem(kind, counts, seeds)
    run(policy, batch, seeds, num_minibatches=num_minibatches)
    for m in range(3):
        alone, own = problem(kind, counts[m : m + 1], seeds[m : m + 1])
        start = weights(alone).clone()
        run(alone, own, seeds[m : m + 1], num_minibatches=num_minibatches)
        torch.testing.assert_close(weights(policy)[m], weights(alone)[0], atol=1e-5, rtol=1e-4)
        assert (weights(alone) - start).abs().max() > 0.01


def test_members_that_are_not_active_keep_their_weights() -> None:
    policy, batch = problem("discrete", (10, 10), (1, 2))
    before = weights(policy).clone()
    record = run(policy, batch, (1, 2), active=torch.tensor([False, True]))
    assert torch.equal(weights(policy)[0], before[0]) and not torch.equal(weights(policy)[1], before[1])
    steps = statistics(record, batch, torch.full((2,), 0.2), torch.full((2,), 0.2))[0]["update/steps"]
    assert steps.tolist() == [0, 6]


def test_a_member_with_a_non_finite_loss_stays_and_the_others_do_not_notice() -> None:
    policy, batch = problem("continuous", (10, 10), (1, 2))
    plain = copy.deepcopy(policy)
    run(plain, batch, (1, 2))
    before = weights(policy).clone()
    advantage = batch.advantage.clone()
    advantage[0, 3] = torch.nan
    record = run(policy, batch.with_columns(advantage=advantage), (1, 2), num_minibatches=1, num_epochs=2)
    assert torch.equal(weights(policy)[0], before[0])
    scalars, _ = statistics(record, batch, torch.full((2,), 0.2), torch.full((2,), 0.2))
    assert scalars["update/nonfinite"].tolist() == [2, 0] and scalars["update/steps"].tolist() == [0, 2]
    clean, batch = problem("continuous", (10, 10), (1, 2))
    run(clean, batch, (1, 2), num_minibatches=1, num_epochs=2)
    assert torch.equal(weights(policy)[1], weights(clean)[1])


class Watch(Link):
    """Notes entropy and KL at the time when a loss is computed."""

    def __init__(self) -> None:
        self.entropy: list[Tensor] = []
        self.kl: list[Tensor] = []

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        self.entropy.append(out.dist.entropy().detach().clone())
        self.kl.append(mean_kl(batch, out).detach().clone())
        return {"loss": -out.log_prob}


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_of_a_step_is_not_changed_by_later_steps(kind: str) -> None:
    policy, batch = problem(kind, (20,), (1,))
    watch = Watch()
    record = run(policy, batch, (1,), chain=Chain(watch=watch), num_minibatches=1)
    assert watch.kl[0].item() == pytest.approx(0.0, abs=1e-6) and watch.kl[2].item() > 1e-4
    for mini, entropy in zip(record.minibatches, watch.entropy, strict=True):
        torch.testing.assert_close(mini.out.dist.entropy(), entropy)
    torch.testing.assert_close(torch.stack(kl_by_epoch(record)), torch.stack(watch.kl))


def test_a_link_may_name_the_column_that_weighs_it() -> None:
    class Cloning(Link):
        weight = "cloning_weight"

        def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
            return {"loss": -out.log_prob}

    policy, batch = problem("discrete", (10,), (1,))
    before = weights(policy).clone()
    run(policy, batch.with_columns(cloning_weight=torch.zeros(1, 10)), (1,), chain=Chain(cloning=Cloning()))
    assert torch.equal(weights(policy), before)


@pytest.mark.parametrize("counts", [(7,), (9, 4)])
def test_padding_weighs_nothing_in_any_weight_column(counts: tuple[int, ...]) -> None:
    class Cloning(Link):
        def __init__(self, column: str) -> None:
            self.weight = column

        def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
            return {"loss": -out.log_prob}

    seeds, learned = tuple(range(len(counts))), []
    for column in ("weight", "cloning_weight"):
        policy, batch = problem("discrete", counts, seeds)
        batch = batch.with_columns(cloning_weight=batch.weight.clone())
        run(policy, batch, seeds, chain=Chain(cloning=Cloning(column)), num_minibatches=4)
        learned.append(weights(policy))
    torch.testing.assert_close(*learned)


# --- KL stop ------------------------------------------------------------------------------------------------


def test_kl_stop_comes_before_the_step_and_counts_truly() -> None:
    seeds, rates = (1, 2, 3), torch.tensor([0.05, 0.05, 0.0])  # the third member never moves, so its KL stays zero
    policy, batch = problem("discrete", (12, 12, 12), seeds)
    once, free = copy.deepcopy(policy), copy.deepcopy(policy)
    record = run(policy, batch, seeds, learning_rate=rates, target_kl=1e-6)
    assert [mini.active.tolist() for mini in record.minibatches] == [[True] * 3] + [[False, False, True]] * 5
    steps = statistics(record, batch, torch.full((3,), 0.2), torch.full((3,), 0.2))[0]["update/steps"]
    assert steps.tolist() == [1, 1, 6]
    first = run(once, batch, seeds, learning_rate=rates, num_minibatches=2, num_epochs=1, target_kl=1e-6)
    assert first.minibatches[0].active.all() and not first.minibatches[1].active[:2].any()
    assert torch.equal(weights(policy)[:2], weights(once)[:2])
    run(free, batch, seeds, learning_rate=rates)
    assert not torch.isclose(weights(policy)[:2], weights(free)[:2]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_kl_stop_of_one_member_leaves_the_others_alone(kind: str) -> None:
    seeds, rates = (1, 2), torch.tensor([0.5, 1e-3])
    policy, batch = problem(kind, (12, 12), seeds)
    free = copy.deepcopy(policy)
    record = run(policy, batch, seeds, learning_rate=rates, target_kl=0.01)
    run(free, batch, seeds, learning_rate=rates)
    assert [bool(mini.active[0]) for mini in record.minibatches] == [True] + [False] * 5
    assert torch.equal(weights(policy)[1], weights(free)[1])


def two_actions(probs: list[float], rows: Tensor) -> tuple[Policy, Batch]:
    """A policy of constant probabilities and a batch collected with those in `rows`, [M, B, 2]."""
    members, height, _ = rows.shape
    policy = Policy(1, Actions("discrete", (2,)), range(members), hidden=())
    with torch.no_grad():
        policy.actor.weights[0].zero_()
        policy.actor.biases[0].copy_(torch.tensor(probs).log())
    columns = {
        "obs": torch.zeros(members, height, 1),
        "action": torch.zeros(members, height, 1, dtype=torch.int64),
        "log_prob": rows[..., 0].log(),
        "old_logits": rows.log(),
        "advantage": torch.ones(members, height),
        "weight": torch.ones(members, height),
    }
    return policy, Batch(columns, torch.full((members,), height))


GRADIENT = Chain(surrogate=Surrogate(Constant(float("inf"), 1)))


@pytest.mark.parametrize(("factor", "steps"), [(0.999, 0), (1.001, 1)])
def test_kl_stop_at_one_and_a_half_times_the_target(factor: float, steps: int) -> None:
    policy, batch = two_actions(QUARTER, torch.full((1, 4, 2), 0.5))  # it has moved already: KL is 0.1438410
    before = weights(policy).clone()
    once = {"num_epochs": 1, "num_minibatches": 1, "target_kl": factor * 0.1438410 / 1.5}
    record = run(policy, batch, (0,), chain=GRADIENT, **once)
    assert len(record.minibatches) == steps
    assert torch.equal(weights(policy), before) == (steps == 0)
    scalars, _ = statistics(record, batch, torch.ones(1), torch.ones(1))
    assert scalars["update/steps"].tolist() == [steps]


def test_a_stopped_member_does_not_go_on_where_its_kl_is_small() -> None:
    rows = torch.full((2, 8, 2), 0.5)
    rows[0, 0] = torch.tensor([0.01, 0.99])  # one row of member 0 is far from the policy, the others are on it
    policy, batch = two_actions(HALF, rows)
    options = {"num_epochs": 2, "num_minibatches": 8, "target_kl": 0.1, "learning_rate": torch.zeros(2)}
    record = run(policy, batch, (0, 1), chain=GRADIENT, **options)
    near = [bool(mean_kl(mini.batch, mini.out)[0] < 0.15) for mini in record.minibatches]
    assert near.count(False) == 2 and near[0] and near[-1]
    first = near.index(False)
    assert [mini.active.tolist() for mini in record.minibatches] == [[step < first, True] for step in range(16)]


def test_kl_stop_wakes_no_member_that_is_not_active() -> None:
    policy, batch = problem("discrete", (12, 12), (1, 2))
    before = weights(policy).clone()
    record = run(policy, batch, (1, 2), active=torch.tensor([False, True]), target_kl=1e3)
    assert torch.equal(weights(policy)[0], before[0])
    assert not any(mini.active[0] for mini in record.minibatches)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_is_never_negative(kind: str) -> None:
    policy, batch = problem(kind, (20, 13), (1, 2))
    record = run(policy, batch, (1, 2), num_epochs=10, learning_rate=torch.tensor([1e-5, 1e-2]))
    estimates = torch.stack([mean_kl(mini.batch, mini.out) for mini in record.minibatches] + kl_by_epoch(record))
    assert (estimates >= 0).all() and estimates[-1, 1] > 1e-3


# --- statistics ---------------------------------------------------------------------------------------------


def mini(
    epoch: int,
    p: list[list[float]],
    weight: list[list[float]],
    active: list[bool],
    loss: list[list[float]],
    norms: tuple[list[float], list[float]] = ([1.0, 1.0], [0.5, 0.5]),
    finite: tuple[bool, bool] = (True, True),
) -> Minibatch:
    """Two members with three rows of actions 0, 1, 1; member m's probabilities are p[m], before the update HALF."""
    probs = torch.tensor(p)[:, None].expand(2, 3, 2)
    action = torch.tensor([[0, 1, 1]] * 2)[..., None]
    dist = Categorical(probs.log(), (2,))
    half = torch.full((2, 3, 2), 0.5).log()
    columns = {"log_prob": half[..., 0], "old_logits": half, "ref_logits": half, "weight": torch.tensor(weight)}
    on, ok = torch.tensor(active), torch.tensor(finite)
    before, after = (torch.tensor(norm) for norm in norms)
    step = StepResult(before, after / before, on & ok, ok)
    terms = {"surrogate/loss": torch.tensor(loss), "l2/loss": torch.tensor([0.5, 0.7])}
    out = Out(dist, dist.log_prob(action), None)
    found = Differentiated(torch.zeros(2, 0), lambda: out, terms, lambda out: {})
    return Minibatch(epoch, Batch(columns, torch.tensor([2, 3])), found, on, step)


WEIGHT = [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]  # member 0 has two rows
RECORD = UpdateRecord(
    [
        mini(0, [HALF, HALF], WEIGHT, [True, True], [[1, 2, 100], [1, 1, 4]], ([2.0, 4.0], [0.5, 0.5])),
        mini(1, [QUARTER, QUARTER], WEIGHT, [True, False], [[3, 4, 100], [9, 9, 9]], ([4.0, 9.0], [0.25, 9.0])),
    ]
)
WHOLE = Batch(
    {
        "advantage": torch.tensor([[1.0, 3.0, 99.0], [1.0, 1.0, 4.0]]),
        "ret": torch.tensor([[2.0, 6.0, 99.0], [0.0, 3.0, 6.0]]),
        "value": torch.tensor([[1.0, 7.0, -99.0], [0.0, 3.0, 6.0]]),
        "weight": torch.tensor(WEIGHT),
    },
    torch.tensor([2, 3]),
)
NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("update/steps", [2, 1]),
        ("update/nonfinite", [0, 0]),
        ("advantage/mean", [2, 2]),
        ("advantage/std", [1, 2**0.5]),  # (1 + 1 + 4) / 3 = 2
        ("value/error", [1, 0]),  # errors 1 -1
        ("value/explained_variance", [0.75, 1]),  # 1 - 1/4: errors 1 -1, returns 2 6
        ("ratio/mean", [1, 1]),  # member 0: 1 1 .5 1.5, member 1 stopped after 1 1 1
        ("ratio/std", [0.125**0.5, 0]),  # (0 + 0 + .25 + .25) / 4
        ("ratio/min", [0.5, 1]),
        ("ratio/max", [1.5, 1]),
        ("ratio/clipped", [0.25, 0]),  # .5 < 1 - .2, but 1.5 < 1 + .6
        ("entropy/mean", [0.6277411, 0.6931472]),  # (0.6931472 + 0.5623351) / 2
        ("kl/epoch_0", [0, 0]),
        ("kl/epoch_1", [0.1438410, NAN]),
        ("kl/ref", [0.1308120, NAN]),  # KL(QUARTER || HALF) = .25 log .5 + .75 log 1.5
        ("loss/surrogate", [2.5, 2]),
        ("loss/l2", [0.5, 0.7]),
        ("grad_norm/before", [3, 4]),
        ("grad_norm/after", [0.375, 0.5]),
    ],
)
def test_statistics_by_hand(name: str, expected: list[float]) -> None:
    scalars, _ = statistics(RECORD, WHOLE, torch.full((2,), 0.2), torch.full((2,), 0.6))
    torch.testing.assert_close(
        scalars[name], torch.tensor(expected, dtype=torch.float32), atol=2e-6, rtol=0, equal_nan=True
    )


def test_histograms_hold_the_rows_that_were_trained_on() -> None:
    _, histograms = statistics(RECORD, WHOLE, torch.full((2,), 0.2), torch.full((2,), 0.6))
    assert histograms["advantage"].tolist() == [1, 3, 1, 1, 4]
    torch.testing.assert_close(histograms["ratio"].sort()[0], torch.tensor([0.5, 1, 1, 1, 1, 1, 1.5]))
    torch.testing.assert_close(histograms["kl"], torch.full((2,), 0.1438410))
    torch.testing.assert_close(histograms["kl_ref"], torch.full((2,), 0.1308120))
    assert histograms["grad_norm_before"].tolist() == [2, 4, 4]


def test_non_finite_steps_are_counted_and_leave_the_norms() -> None:
    bad = mini(0, [HALF, HALF], WEIGHT, [True, True], WEIGHT, ([NAN, 1.0], [NAN, 0.5]), (False, True))
    scalars, histograms = statistics(UpdateRecord([bad, *RECORD.minibatches]), WHOLE, torch.ones(2), torch.ones(2))
    assert scalars["update/nonfinite"].tolist() == [1, 0]
    assert scalars["update/steps"].tolist() == [2, 2]
    assert scalars["grad_norm/before"].tolist() == [3, 2.5]
    assert histograms["grad_norm_before"].isfinite().all()


def test_kl_of_an_epoch_is_the_mean_over_its_rows() -> None:
    more, one = [[1.0, 1.0, 0.0], [0.5, 0.5, 1.0]], [[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]]
    record = UpdateRecord(
        [
            mini(0, [HALF, HALF], more, [True, True], more),
            mini(0, [QUARTER, QUARTER], one, [True, True], one),
            mini(1, [QUARTER, HALF], one, [True, False], one),
        ]
    )
    # 1 row of 3, and weight 2 of 4
    kl = kl_by_epoch(record)
    expected = torch.tensor([[0.1438410 / 3, 0.1438410 / 2], [0.1438410, NAN]])
    torch.testing.assert_close(torch.stack(kl), expected, equal_nan=True)


def test_statistics_of_an_update_without_a_step() -> None:
    scalars, histograms = statistics(UpdateRecord(), WHOLE, torch.ones(2), torch.ones(2))
    assert scalars["update/steps"].tolist() == [0, 0]
    assert scalars["advantage/mean"].tolist() == [2, 2] and set(histograms) == {"advantage"}
    assert kl_by_epoch(UpdateRecord()) == []
