"""Groups by the returns of a pilot run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small_learner, train, weights

from rlkit.pilot import Pilots

PILOT = ("algo.groups=pilot", "env=Pendulum", "algo.max_episode_steps=10", "num_envs=8", "algo.group_size=4")


def pilots(*overrides: str):
    learner = small_learner("grpo", *PILOT, *overrides)
    assert isinstance(learner.collector, Pilots)
    return learner


def test_start_states_are_sorted_by_what_the_untrained_policy_gets_from_them():
    learner = pilots()
    collector = learner.collector
    played = []
    original = collector.play

    def play(act, obs, alive):
        steps = original(act, obs, alive)
        played.append((obs.copy(), steps["reward"].sum(0)))
        return steps

    collector.play = play
    rollout = collector.collect(learner.policy, 0, learner.running)
    obs, returns = (np.concatenate(x) for x in zip(*played[:8], strict=True))  # 8 rounds of 8 lanes, then the rollout
    assert len(played) == 9
    order = np.argsort(returns, kind="stable")
    middle = returns[order][31:33].mean()
    of_start = {tuple(o): r for o, r in zip(obs, returns, strict=True)}
    starts = [of_start[tuple(o)] for o in rollout.obs[0, 0].numpy()]
    assert all(r < middle for r in starts[:4])  # the first group's starts are the lower half
    assert all(r > middle for r in starts[4:])
    assert len(set(starts)) > 2  # not one start state for each group


def test_the_pilot_run_is_charged_once():
    learner = train(pilots(), 1)
    assert learner.env_steps.tolist() == [10 * (8 * 8 + 8)]
    train(learner, 1)
    assert learner.env_steps.tolist() == [10 * (8 * 8 + 2 * 8)]


def test_members_and_resumption_do_not_change_a_pilot(tmp_path):
    together = train(pilots("members=2"), 2)
    torch.save(together.state_dict(), tmp_path / "state.pt")
    resumed = pilots("members=2")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(together, 1)
    train(resumed, 1)
    assert torch.equal(weights(resumed), weights(together))
    alone = train(pilots("seed=1"), 3)
    torch.testing.assert_close(weights(together)[1], weights(alone)[0], rtol=1e-4, atol=1e-5)
    assert together.env_steps[1] == alone.env_steps[0]


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_any_environment_has_a_pilot(backend):
    learner = train(pilots(f"env.backend={backend}"), 1)
    assert weights(learner).isfinite().all()
    learner.close()
