"""A run's books: clocks, statuses, solved steps, interrupts, checkpoints, and what can be loaded afterwards."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_learner, weights

import rlkit
from rlkit.build import ConfigError
from rlkit.keepers import checkpoint
from rlkit.link import Link
from rlkit.loop import Learner
from rlkit.session import Clock, Session


class Book:
    """A logger that remembers what it is told."""

    def __init__(self) -> None:
        self.entries: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        self.messages: list[str] = []

    def log(self, steps, scalars, histograms=None):
        self.entries.append((steps.copy(), scalars))

    def progress(self, steps, scalars):
        pass

    def message(self, text):
        self.messages.append(text)

    def state_dict(self):
        return {}

    def steps_of(self, name: str) -> list[list[int]]:
        return [steps.tolist() for steps, scalars in self.entries if name in scalars]


class Script:
    """An evaluator that gives the returns of a script, one row [M] an evaluation; the last row goes on for ever."""

    def __init__(self, *rows: list[float]) -> None:
        self.rows = list(rows)
        self.calls = 0

    def __call__(self, policy, episodes, stochastic=False):
        row = self.rows[min(self.calls, len(self.rows) - 1)]
        self.calls += 1
        return torch.tensor(row, dtype=torch.float64)[:, None].expand(-1, episodes)

    def close(self):
        pass


def session(learner: Learner, evaluator, folder: Path, **settings) -> Session:
    defaults = {
        "eval_every": 0,
        "eval_episodes": 2,
        "checkpoint_every": 0,
        "log_every": 0,
        "threshold": 475.0,
        "stop_when_solved": False,
    }
    return Session(learner=learner, evaluator=evaluator, logger=Book(), folder=folder, **{**defaults, **settings})


def ppo(*overrides: str, iterations: int = 4) -> Learner:
    """4 environments of 8 steps: an iteration is 32 steps."""
    return small_learner("ppo", f"total_steps={32 * iterations}", *overrides)


# --- clocks --------------------------------------------------------------------------------------------------------


def test_a_clock_is_due_once_for_each_multiple_it_passes():
    clock = Clock(100)
    assert [clock.due(steps) for steps in (0, 99, 100, 101, 199, 350, 399, 400)] == [
        False, False, True, False, False, True, False, True,
    ]  # fmt: skip


def test_a_clock_of_zero_is_never_due():
    assert not any(Clock(0).due(steps) for steps in range(1000))


def test_each_clock_of_a_session_ticks_at_its_own_pace(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Session, "_save", lambda self: saved.append(int(self.learner.env_steps[0])))
    kept = session(ppo(iterations=8), Script([1.0]), tmp_path, log_every=64, eval_every=96, checkpoint_every=128)
    kept.run()
    assert kept.logger.steps_of("loss/surrogate") == [[64], [128], [192], [256]]
    assert kept.logger.steps_of("eval/peak") == [[96], [192], [256]]  # and at the end, for the keepers
    assert saved == [128, 256, 256]


def test_zero_switches_logging_evaluations_and_checkpoints_off_until_the_end(tmp_path):
    kept = session(ppo(), Script([1.0]), tmp_path)
    summary = kept.run()
    assert kept.logger.steps_of("loss/surrogate") == []
    assert kept.logger.steps_of("eval/return") == [[128]]
    assert summary["eval_peak"] == [None]
    assert (tmp_path / "checkpoint.pt").exists()


def test_clocks_go_on_when_the_member_with_most_steps_has_stopped(tmp_path):
    """Members of GRPO make unlike numbers of steps; evaluations must not wait for the others to catch up."""
    learner = small_learner("grpo", "members=2", "total_steps=600")
    learner.env_steps[0] = 580  # member 0 will stop after one rollout
    kept = session(learner, Script([1.0, 1.0]), tmp_path, eval_every=100)
    kept.run()
    seen = [steps[1] for steps in kept.logger.steps_of("eval/peak")]
    assert len(seen) >= 4
    assert max(np.diff([0, *seen])) <= 300


# --- solved --------------------------------------------------------------------------------------------------------


def test_solved_is_the_first_of_two_evaluations_above_the_threshold(tmp_path):
    rows = [[480.0], [400.0], [475.0], [500.0], [100.0], [500.0]]
    kept = session(ppo(iterations=6), Script(*rows), tmp_path, eval_every=32)
    summary = kept.run()
    assert summary["solved_at_steps"] == [96]  # the evaluation at 32 was not held, those at 96 and 128 were
    assert summary["eval_peak"] == [500.0]
    assert summary["status"] == ["finished"]
    assert kept.logger.messages == ["member 0 solved at 96 steps"]


def test_once_above_is_not_solved(tmp_path):
    kept = session(ppo(iterations=3), Script([500.0], [0.0], [500.0], [500.0]), tmp_path, eval_every=32)
    assert kept.run()["solved_at_steps"] == [None]  # the final evaluation does not count


def test_a_policy_that_did_not_learn_in_between_has_not_held_the_threshold(tmp_path):
    learner = ppo("members=2", iterations=6)
    learner.env_steps[0] = 160  # one iteration left
    kept = session(learner, Script([500.0, 0.0]), tmp_path, eval_every=32)
    assert kept.run()["solved_at_steps"] == [None, None]


def test_no_threshold_is_never_solved(tmp_path):
    kept = session(ppo(), Script([1e9]), tmp_path, eval_every=32, threshold=None)
    assert kept.run()["solved_at_steps"] == [None]


def test_a_solved_member_stops_while_the_others_go_on(tmp_path):
    learner = ppo("members=3", iterations=6)
    frozen_at = {}
    script = Script([0.0, 475.0, 500.0], [0.0, 475.0, 0.0], [0.0, 0.0, 0.0])

    class Watching(Script):
        def __call__(self, policy, episodes, stochastic=False):
            frozen_at[self.calls] = weights(learner).clone()
            return super().__call__(policy, episodes, stochastic)

    kept = session(learner, Watching(*script.rows), tmp_path, eval_every=32, stop_when_solved=True)
    summary = kept.run()
    assert summary["status"] == ["finished", "solved", "finished"]
    assert summary["solved_at_steps"] == [None, 32, None]
    assert summary["env_steps"] == [192, 64, 192]
    assert torch.equal(weights(learner)[1], frozen_at[1][1])
    assert not torch.equal(weights(learner)[0], frozen_at[1][0])


def test_the_run_ends_when_all_are_solved(tmp_path):
    kept = session(ppo(iterations=50), Script([475.0]), tmp_path, eval_every=32, stop_when_solved=True)
    summary = kept.run()
    assert summary["status"] == ["solved"]
    assert summary["env_steps"] == [64]


def test_a_member_that_stopped_early_is_not_called_solved_and_the_summary_says_why(tmp_path):
    early = ("stabilizer=[early_stop]", "stabilizer.early_stop.patience=2")
    script = Script([9.0, 9.0, 475.0], [9.0, 10.0, 475.0], [8.0, 11.0, 476.0], [8.0, 12.0, 477.0])
    learner = ppo("members=3", *early, iterations=3)
    kept = session(learner, script, tmp_path, eval_every=32, stop_when_solved=True)
    summary = kept.run()
    assert summary["status"] == ["stopped early", "finished", "solved"]
    assert summary["stopped_early"] == ["none of its last 2 evaluations was above 9.00", None, None]
    assert "member 0 stopped early: none of its last 2 evaluations was above 9.00" in kept.logger.messages
    resumed = session(ppo("members=3", *early, iterations=3), script, tmp_path)
    saved = checkpoint.load(tmp_path / "checkpoint.pt")
    resumed.load_state_dict(saved["session"])
    assert resumed.stopped_early == kept.stopped_early


# --- diverged, interrupted -----------------------------------------------------------------------------------------


class Poison(Link):
    """Gives member 1 a loss, and gradients, that are not numbers."""

    def losses(self, out, batch, policy):
        return {"loss": policy.actor.biases[-1].sum((1, 2)) * torch.tensor([0.0, torch.nan])}


def test_a_member_whose_gradients_are_not_finite_diverges_alone(tmp_path):
    learner = ppo("members=2")
    learner.chain.links["poison"] = Poison()
    before = weights(learner).clone()
    kept = session(learner, Script([1.0, 1.0]), tmp_path)
    summary = kept.run()
    assert summary["status"] == ["finished", "diverged"]
    assert torch.equal(weights(learner)[1], before[1])
    assert not torch.equal(weights(learner)[0], before[0])
    assert [m for m in kept.logger.messages if "diverged" in m] == [
        "member 1 diverged: its gradient was not finite three times in a row"
    ]
    assert torch.isfinite(checkpoint.load(tmp_path / "checkpoint.pt")["learner"]["policy"]["actor.weights.0"]).all()


class CtrlC(Script):
    """Presses Ctrl-C at the evaluations named, as a terminal does."""

    def __init__(self, *at: int) -> None:
        super().__init__([1.0, 1.0])
        self.at = at

    def __call__(self, policy, episodes, stochastic=False):
        if self.calls in self.at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().__call__(policy, episodes, stochastic)


def test_the_first_ctrl_c_ends_the_run_with_checkpoint_and_summary(tmp_path):
    learner = ppo("members=2", iterations=100)
    summary = session(learner, CtrlC(1), tmp_path, eval_every=32).run()
    assert summary["env_steps"] == [64, 64]
    assert summary["status"] == ["interrupted", "interrupted"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    saved = checkpoint.load(tmp_path / "checkpoint.pt")["learner"]
    assert torch.equal(saved["policy"]["actor.weights.0"], learner.policy.state_dict()["actor.weights.0"])


def test_only_members_that_would_have_gone_on_are_interrupted(tmp_path):
    learner = ppo("members=2", iterations=100)
    learner.frozen[0] = True
    kept = session(learner, CtrlC(0), tmp_path, eval_every=32, stop_when_solved=True)
    kept.solved_at[0] = 0
    assert kept.run()["status"] == ["solved", "interrupted"]


def test_ctrl_c_during_the_final_evaluation_loses_nothing(tmp_path):
    assert session(ppo("members=2"), CtrlC(0), tmp_path).run()["status"] == ["finished", "finished"]
    assert (tmp_path / "summary.json").exists()


def test_the_second_ctrl_c_interrupts_at_once_and_the_handler_is_given_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        session(ppo("members=2", iterations=100), CtrlC(1, 2), tmp_path, eval_every=32).run()
    assert signal.getsignal(signal.SIGINT) is before


# --- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_crash_while_saving_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, {"x": torch.ones(2)})

    def die(state, file):
        file.write(b"half a checkpoint")
        raise SystemExit("killed")

    monkeypatch.setattr(checkpoint.torch, "save", die)
    with pytest.raises(SystemExit):
        checkpoint.save(path, {"x": torch.zeros(2)})
    assert torch.equal(checkpoint.load(path)["x"], torch.ones(2))
    monkeypatch.undo()
    checkpoint.save(path, {"x": torch.zeros(2)})  # what the crash left does not disturb
    assert torch.equal(checkpoint.load(path)["x"], torch.zeros(2))
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_hostile_or_damaged_checkpoint_is_refused(tmp_path):
    path, trace = tmp_path / "checkpoint.pt", tmp_path / "trace"
    torch.save({"format": 1, "learner": Hostile(trace)}, path)
    with pytest.raises(ValueError, match="cannot be read|not a checkpoint"):
        checkpoint.load(path)
    assert not trace.exists()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a checkpoint"):
        checkpoint.load(path)
    torch.save({"format": 999}, path)
    with pytest.raises(ValueError, match="format 999"):
        checkpoint.load(path)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        checkpoint.load(tmp_path / "nowhere.pt")


# --- from Python ---------------------------------------------------------------------------------------------------

TINY = {"algo": "ppo", "total_steps": 512, "members": 2, "eval__every": 0, "policy__hidden": [8]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> rlkit.train.Run:
    return rlkit.run(folder=tmp_path_factory.mktemp("runs") / "run", **TINY)


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / "checkpoint.pt")["learner"]["policy"]


def test_run_returns_what_the_folder_holds(trained):
    assert json.loads((trained.folder / "summary.json").read_text()) == trained.summary
    assert trained.eval_return == trained.summary["eval_return"]
    assert len(trained.eval_return) == 2
    assert trained.summary["status"] == ["finished", "finished"]
    assert trained.summary["env_steps"] == [512, 512]


def test_run_without_a_folder_makes_one_under_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    run = rlkit.run(**{**TINY, "members": 1, "total_steps": 256})
    assert run.folder.resolve().parent == tmp_path / "runs" / "CartPole" / "ppo"
    assert (run.folder / ".hydra" / "config.yaml").exists()
    assert capsys.readouterr().out == ""


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(trained, tmp_path):
    again = rlkit.run(folder=tmp_path / "again", **TINY)
    other = rlkit.run(folder=tmp_path / "other", **TINY, seed=1)
    one, two, three = (saved_weights(run.folder) for run in (trained, again, other))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert trained.summary["eval_return"] == again.summary["eval_return"]
    assert not torch.equal(one["actor.weights.0"], three["actor.weights.0"])
    assert not torch.equal(one["actor.weights.0"][0], one["actor.weights.0"][1])
    torch.testing.assert_close(one["actor.weights.0"][1], three["actor.weights.0"][0])  # member m has seed + m


@pytest.mark.parametrize("member", ["best", 0, 1])
def test_a_loaded_member_acts_as_it_was_trained(trained, member):
    agent = rlkit.load(trained.folder, member=member)
    rows = np.random.default_rng(0).normal(size=(50, 4))
    index = int(np.argmax(trained.eval_return)) if member == "best" else member
    state = saved_weights(trained.folder)
    hidden = np.tanh(rows @ state["actor.weights.0"][index].numpy() + state["actor.biases.0"][index].numpy())
    logits = hidden @ state["actor.weights.1"][index].numpy() + state["actor.biases.1"][index].numpy()
    batch = agent.act(rows)
    assert batch.shape == (50,)
    assert batch.tolist() == logits.argmax(1).tolist()
    single = agent.act(rows[3])
    assert np.shape(single) == ()
    assert single == batch[3]
    assert agent.act(rows[3].tolist()) == batch[3]
    assert set(agent.act(rows, deterministic=False).tolist()) == {0, 1}


def test_an_observation_that_is_not_finite_is_one_sentence(trained):
    agent, rows = rlkit.load(trained.folder, member=0), np.zeros((5, 4))
    for bad in (np.nan, -np.inf):
        rows[3, 2] = bad
        for obs, place in ((rows, "3, 2"), (rows[3], "2")):
            wanted = rf"^obs\[{place}\] is {bad}; every number of an observation must be finite$"
            with pytest.raises(ValueError, match=wanted):
                agent.act(obs)


def test_an_agent_says_what_it_is(trained):
    steps = trained.summary["env_steps"][1]
    said = f"Agent(CartPole-v1 ppo, member 1 (seed 1), last checkpoint at {steps:,} steps: obs [4] -> Discrete(2))"
    assert repr(rlkit.load(trained.folder, member=1)) == said


def test_a_loaded_agent_plays_the_environment(trained):
    import gymnasium

    agent, env = rlkit.load(str(trained.folder)), gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    for _ in range(5):
        action = agent.act(obs)
        assert env.action_space.contains(action)
        obs, *_ = env.step(action)


@pytest.mark.parametrize("member", [2, -1, "first", 0.5])
def test_a_member_that_does_not_exist_is_refused(trained, member):
    with pytest.raises(ValueError, match=r"member is .*; it must be best or a number from 0 to 1"):
        rlkit.load(trained.folder, member=member)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no run at"):
        rlkit.load(tmp_path)


def test_a_misspelt_setting_is_refused():
    with pytest.raises(ConfigError, match="did you mean members"):
        rlkit.run(member=3)


def test_an_agent_takes_what_a_discrete_environment_gives(tmp_path):
    settings = {"env": "gym", "env.id": "FrozenLake-v1", "algo": "ppo", "num_envs": 4, "algo.num_steps": 8}
    run = rlkit.run(folder=tmp_path / "run", total_steps=64, **settings, **{"eval.every": 0, "log.every": 0})
    agent = rlkit.load(run.folder)
    assert agent.act(3) == agent.act(np.eye(16)[3])
    assert agent.act(np.eye(16)).tolist() == [agent.act(state) for state in range(16)]
    with pytest.raises(ValueError, match=r"one observation is \[16\]"):
        agent.act(16)
