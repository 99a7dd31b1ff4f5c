"""Keepers: rollback, early stop and the best checkpoint, member by member, on hand-made returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small_learner, weights

import rlkit
from rlkit.conf.schema import ConfigError
from rlkit.keepers.checkpoint import load
from rlkit.keepers.keeper import copied, put
from rlkit.loop import Learner
from rlkit.team import Team

ROLLBACK = ("stabilizer=[rollback,ref_kl]", "stabilizer.rollback.patience=2")


def judged(learner: Learner, *returns: list[float]) -> list[list[tuple[int, str]]]:
    """Make an iteration before each evaluation; return the events of each."""
    events = []
    for each in returns:
        learner.iterate()
        events.append(learner.judge(torch.tensor(each)))
    return events


def test_a_member_that_falls_twice_gets_back_its_best_state_and_the_other_goes_on():
    learner = small_learner("ppo", "members=2", *ROLLBACK)
    judged(learner, [10.0, 10.0], [50.0, 50.0])
    best, moments = weights(learner).clone(), learner.optimizer.m.clone()
    assert judged(learner, [40.0, 60.0]) == [[]]
    learner.iterate()
    now = weights(learner).clone()
    [(member, text)] = learner.judge(torch.tensor([30.0, 70.0]))
    assert member == 0
    assert text.startswith("rolled back from 30.0 to its best state, of 50.0 (1 of 3); its learning rate is 0.5 times")
    assert torch.equal(weights(learner)[0], best[0])
    assert torch.equal(learner.optimizer.m[0], moments[0])
    assert torch.equal(weights(learner)[1], now[1])
    assert not torch.equal(now[1], best[1])
    reference = learner.chain.links["ref_kl"].reference
    assert torch.equal(reference.actor.weights[0][0], learner.policy.actor.weights[0][0])  # refreshed
    assert not torch.equal(reference.actor.weights[0][1], learner.policy.actor.weights[0][1])
    learner.iterate()
    rate = learner.schedules["learning_rate"].value
    torch.testing.assert_close(rate, torch.tensor([1.5e-4, 3e-4]))
    assert learner.env_steps.tolist() == [5 * 32] * 2  # what was done is not undone


@pytest.mark.parametrize(
    ("returns", "overrides", "rolled"),
    [
        ([10.0, 50.0, 45.0, 40.0], (), True),  # 10 of the 40 gained
        ([10.0, 50.0, 49.0, 48.0], (), False),  # 2 of the 40 gained: less than a tenth
        ([10.0, 50.0, 30.0, 35.0], (), False),  # one fall, then a rise
        ([10.0, 50.0, 40.0, 30.0], ("stabilizer.rollback.kl=1e9",), False),  # the policy does not move that fast
        ([10.0, 50.0, 40.0, 30.0], ("stabilizer.rollback.most=0",), False),
        ([10.0, 50.0, 40.0, 30.0], ("stabilizer.rollback.patience=3",), False),
    ],
)
def test_when_a_rollback_is_called_for(returns, overrides, rolled):
    learner = small_learner("ppo", *ROLLBACK, *overrides)
    events = judged(learner, *([r] for r in returns))
    assert [bool(each) for each in events] == [False, False, False, rolled]


def test_rollbacks_are_counted_and_end():
    learner = small_learner("ppo", *ROLLBACK, "stabilizer.rollback.most=2", "stabilizer.rollback.factor=0.1")
    events = judged(learner, *([r] for r in [0.0, 9.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 0.4, 0.3]))
    assert [bool(each) for each in events].count(True) == 2
    torch.testing.assert_close(learner.schedules["learning_rate"].scale, torch.tensor([0.01]))


@pytest.mark.parametrize(
    ("end_drop", "back"),  # 49 of 50 is 1 of the 40 that were gained: 0.025
    [("0", [True, False, True]), ("0.02", [True, False, True]), ("0.03", [False, False, True]), ("null", [False] * 3)],
)
def test_a_member_that_ends_below_its_best_can_get_it_back_without_a_second_fall(end_drop, back):
    overrides = ("members=3", "total_steps=96", f"stabilizer.rollback.end_drop={end_drop}")  # 3 iterations
    learner = small_learner("ppo", *ROLLBACK, *overrides)
    judged(learner, [10.0, 10.0, 10.0], [50.0, 50.0, 50.0])
    best = weights(learner).clone()
    learner.iterate()
    last = weights(learner).clone()
    events = learner.judge(torch.tensor([49.0, 51.0, float("nan")]))
    assert [member for member, _ in events] == [m for m in range(3) if back[m]]
    assert torch.equal(weights(learner), torch.where(torch.tensor(back)[:, None], best, last))
    assert learner.schedules["learning_rate"].scale.tolist() == [1.0, 1.0, 1.0]  # it learns no more
    assert learner.judge(torch.tensor([50.0, 51.0, 50.0])) == []  # others may go on: it is told of once


def test_a_return_that_is_not_a_number_is_never_the_best():
    learner = small_learner("ppo", *ROLLBACK)
    judged(learner, [10.0], [20.0])
    best = weights(learner).clone()
    judged(learner, [float("nan")], [12.0])
    assert not torch.equal(weights(learner), best)  # a fall from nan is not one
    judged(learner, [11.0], [10.5])
    assert torch.equal(weights(learner), best)


def test_early_stop_freezes_the_member_that_gained_nothing_and_restores_its_best():
    learner = small_learner("grpo", "members=2", "stabilizer=[early_stop]", "stabilizer.early_stop.patience=2")
    judged(learner, [10.0, 10.0])
    best = weights(learner).clone()
    events = judged(learner, [10.0, 20.0], [9.0, 30.0])
    assert events == [[], [(0, "stopped early: none of its last 2 evaluations was above 10.0")]]
    assert learner.frozen.tolist() == [True, False]
    assert torch.equal(weights(learner)[0], best[0])
    judged(learner, [9.0, 40.0])
    assert torch.equal(weights(learner)[0], best[0])
    assert not torch.equal(weights(learner)[1], best[1])


def test_early_stop_can_leave_the_last_weights_and_ask_for_a_gain():
    overrides = ("stabilizer=[early_stop]", "stabilizer.early_stop.patience=2", "stabilizer.early_stop.min_gain=5.0")
    learner = small_learner("grpo", *overrides, "stabilizer.early_stop.restore=false")
    judged(learner, [10.0])
    first = weights(learner).clone()
    events = judged(learner, [14.0], [15.0])
    assert events == [[], [(0, "stopped early: none of its last 2 evaluations was more than 5 above 10.0")]]
    assert learner.frozen.tolist() == [True]
    assert not torch.equal(weights(learner), first)


def test_early_stop_after_one_evaluation_says_so():
    learner = small_learner("grpo", "stabilizer=[early_stop]", "stabilizer.early_stop.patience=1")
    assert judged(learner, [10.0], [9.0]) == [[], [(0, "stopped early: its last evaluation was not above 10.0")]]


@pytest.mark.parametrize("name", ["rollback", "early_stop"])
def test_a_keeper_goes_on_where_it_was_saved(tmp_path, name):
    overrides = ("members=2", f"stabilizer=[{name}]", f"stabilizer.{name}.patience=2")
    whole = small_learner("ppo", *overrides)
    judged(whole, [10.0, 10.0], [50.0, 50.0], [40.0, 60.0])
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    resumed = small_learner("ppo", *overrides)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    later = ([30.0, 50.0], [20.0, 40.0], [10.0, 30.0])
    assert judged(resumed, *later) == judged(whole, *later)
    assert torch.equal(weights(resumed), weights(whole))


def test_a_team_judges_as_one_learner_does():
    """Members 4 to 7 live in another process, and the event of member 6 has its number."""
    from rlkit.build import build_learner, to_config
    from rlkit.train import compose

    overrides = ["algo=ppo", "tuned=none", "members=8", "processes=2", "num_envs=4", "algo.num_steps=8", *ROLLBACK]
    config = to_config(compose(overrides)[0])
    returns = np.full((4, 8), [[10.0], [50.0], [55.0], [60.0]])
    returns[2:, 6] = 40.0, 30.0
    team, alone = Team(config, 2), build_learner(config)
    try:
        assert team.begin() == []
        for each in returns:
            team.iterate()
            alone.iterate()
            told = team.judge(torch.from_numpy(each))
            assert told == alone.judge(torch.from_numpy(each))
        assert [member for member, _ in told] == [6]
        best = team.state_dict()["keepers"]["checkpoint.best"]["returns"]
        assert best.tolist() == [60.0] * 6 + [50.0, 60.0]
    finally:
        team.close()
        alone.close()


def test_the_best_checkpoint_holds_what_was_evaluated_best(tmp_path):
    settings = {"env": "CartPole", "algo": "ppo", "total_steps": 8192, "eval.every": 2048, "eval.episodes": 3}
    run = rlkit.run(folder=tmp_path / "run", members=2, **settings)
    best = load(run.folder / "best.pt")["learner"]["policy"]
    agent = rlkit.load(run.folder, member=0, checkpoint="best")
    assert torch.equal(agent.policy.actor.weights[0], best["actor.weights.0"])
    with pytest.raises(ValueError, match="checkpoint is 'first'; it must be one of last, best"):
        rlkit.load(run.folder, checkpoint="first")
    without = rlkit.run(folder=tmp_path / "without", **settings, **{"checkpoint.best": False})
    assert not (without.folder / "best.pt").exists()


def test_only_the_rows_of_some_members_are_put():
    target = {"x": torch.zeros(3, 2), "grown": torch.zeros(3, 5), "names": ["a", "b", "c"]}
    source = {"x": torch.ones(3, 2), "grown": torch.ones(3, 4), "names": ["A", "B", "C"]}
    keep = copied(target)
    put(target, source, torch.tensor([False, True, False]))
    assert target["x"].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert target["names"] == ["a", "B", "c"]
    assert torch.equal(target["grown"], keep["grown"])  # of another shape by now
    assert keep["x"].sum() == 0


def test_a_keeper_without_evaluations_is_refused():
    with pytest.raises(ConfigError, match="eval.every is 0; with stabilizer=rollback, .* it must be >= 1"):
        small_learner("ppo", "stabilizer=[rollback]", "eval.every=0")
