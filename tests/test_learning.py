"""Both algorithms solve CartPole with the tuned settings that come by themselves."""

from __future__ import annotations

import pytest

import rlkit
from rlkit.keepers import checkpoint

SOLVED = 475.0  # Gymnasium's threshold for CartPole-v1


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "total_steps"), [("ppo", 60_000), ("grpo", 100_000)])
def test_cartpole_is_solved_by_every_member(algo, total_steps, tmp_path):
    run = rlkit.run(folder=tmp_path / "run", env="CartPole", algo=algo, members=4, seed=100, total_steps=total_steps)
    assert run.summary["status"] == ["finished"] * 4
    assert min(run.eval_return) >= SOLVED, run.summary
    assert all(isinstance(steps, int) for steps in run.summary["solved_at_steps"])
    names = checkpoint.load(run.folder / "checkpoint.pt")["learner"]["policy"]
    assert any(name.startswith("critic") for name in names) is (algo == "ppo")


def test_grpo_has_no_critic_parameters():
    from conftest import small_learner

    grpo, ppo = small_learner("grpo", "members=3"), small_learner("ppo", "members=3")
    actor = 4 * 8 + 8 + 8 * 8 + 8 + 8 * 2 + 2
    assert sum(p.numel() for p in grpo.policy.parameters()) == 3 * actor
    assert sum(p.numel() for p in ppo.policy.parameters()) == 3 * (2 * actor - 9)  # its critic has one output, not two
    assert grpo.optimizer.flat.shape == (3, actor)
    assert not [name for name in grpo.state_dict()["policy"] if "critic" in name]
    with pytest.raises(ValueError, match="no critic"):
        grpo.policy.value(grpo.policy.actor.weights[0])
